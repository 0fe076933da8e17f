// Copies between strides and between types. Twins: ops/contiguous.rs, ops/cat.rs, ops/narrow.rs, ops/cast.rs.
#include "strides.cuh"

struct CopyArguments {
    const void* x;
    void* y;
    u64 count;
    // Over the same extents.
    Strides at_x;
    Strides at_y;
    // Whether y is added to, by kernels that convert.
    u32 accumulate;
};

template <typename From, typename To>
__device__ __forceinline__ void convert(const CopyArguments& to) {
    const u64 i = global_thread();
    if (i >= to.count) return;
    To* y = (To*)to.y + to.at_y.at(i);
    const f32 x = load((const From*)to.x + to.at_x.at(i));
    store(y, to.accumulate ? load(y) + x : x);
}

// Bits are copied, NaN's too.
template <typename T>
__device__ void copy(const CopyArguments& to) {
    const u64 i = global_thread();
    if (i >= to.count) return;
    ((T*)to.y)[to.at_y.at(i)] = ((const T*)to.x)[to.at_x.at(i)];
}
KERNELS(copy, CopyArguments)
KERNEL(copy_u8, CopyArguments) { copy<u8>(arguments); }
KERNEL(copy_u32, CopyArguments) { copy<u32>(arguments); }

// From one type to another, or added to what is there.
KERNEL(to_f32_f32, CopyArguments) { convert<f32, f32>(arguments); }
KERNEL(to_bf16_bf16, CopyArguments) { convert<bf16, bf16>(arguments); }
KERNEL(to_f32_bf16, CopyArguments) { convert<bf16, f32>(arguments); }
KERNEL(to_bf16_f32, CopyArguments) { convert<f32, bf16>(arguments); }
KERNEL(to_f32_u8, CopyArguments) { convert<u8, f32>(arguments); }
KERNEL(to_f32_u32, CopyArguments) { convert<u32, f32>(arguments); }
KERNEL(to_bf16_u8, CopyArguments) { convert<u8, bf16>(arguments); }
KERNEL(to_bf16_u32, CopyArguments) { convert<u32, bf16>(arguments); }

struct FillArguments {
    void* y;
    u64 count;
    f32 number;
};

template <typename T>
__device__ void fill(const FillArguments& to) {
    const u64 i = global_thread();
    if (i < to.count) store((T*)to.y + i, to.number);
}
KERNELS(fill, FillArguments)
