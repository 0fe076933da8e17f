// Copies between strides and between types. Twins: ops/contiguous.rs, ops/cat.rs, ops/narrow.rs, ops/cast.rs.
#include "strides.cuh"

struct CopyArguments {
    const void* x;
    void* y;
    u64 count;
    // Over the same extents.
    Strides at_x;
    Strides at_y;
};

template <typename From, typename To>
__device__ __forceinline__ void convert(const CopyArguments& to) {
    const u64 i = global_thread();
    if (i >= to.count) return;
    store((To*)to.y + to.at_y.at(i), load((const From*)to.x + to.at_x.at(i)));
}

// Bits are copied, NaN's too.
template <typename T>
__device__ void copy(const CopyArguments& to) {
    const u64 i = global_thread();
    if (i >= to.count) return;
    ((T*)to.y)[to.at_y.at(i)] = ((const T*)to.x)[to.at_x.at(i)];
}
KERNELS(copy, CopyArguments)

KERNEL(to_f32_bf16, CopyArguments) { convert<bf16, f32>(arguments); }
KERNEL(to_bf16_f32, CopyArguments) { convert<f32, bf16>(arguments); }

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
