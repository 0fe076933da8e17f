// Copies between strides and between types. CPU counterparts: ops/contiguous.rs, ops/cat.rs, ops/narrow.rs,
// ops/cast.rs.
#include "rows.cuh"
#include "strides.cuh"

struct CopyArguments {
    const void* x;
    void* y;
    // Number of elements or, if `are_packs` is set, of packs. The elements of a pack are contiguous in both tensors.
    u64 count;
    // Strides of x and of y, with the same extents. They are in units of packs if `are_packs` is set.
    Strides at_x;
    Strides at_y;
    u32 are_packs;
    // True if the kernel adds to y. Only kernels that convert can add.
    u32 accumulate;
};

// Returns the number of elements per pack: as many elements of the smaller type as fill 16 bytes, or 8 elements of u8.
template <typename From, typename To>
constexpr u32 pack_of() {
    const u32 size = sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To);
    return size == 1 ? 8 : 16 / size;
}

template <u32 N, typename From, typename To>
__device__ __forceinline__ void convert_some(const CopyArguments& to, u64 i) {
    To* y = (To*)to.y + N * to.at_y.at(i);
    f32 x[N], before[N] = {};
    load_neighbours(x, (const From*)to.x + N * to.at_x.at(i));
    if (to.accumulate) load_neighbours(before, y);
    for (u32 j = 0; j < N; ++j) x[j] = to.accumulate ? before[j] + x[j] : x[j];
    store_neighbours(y, x);
}

template <typename From, typename To>
__device__ __forceinline__ void convert(const CopyArguments& to) {
    const u64 i = global_thread();
    if (i >= to.count) return;
    if (to.are_packs) convert_some<pack_of<From, To>(), From, To>(to, i);
    else convert_some<1, From, To>(to, i);
}

// Copies elements bit by bit, so that NaNs keep their payload.
template <typename T>
__device__ void copy(const CopyArguments& to) {
    using Packed = Neighbours<T, pack_of<T, T>()>;
    const u64 i = global_thread();
    if (i >= to.count) return;
    if (to.are_packs) ((Packed*)to.y)[to.at_y.at(i)] = ((const Packed*)to.x)[to.at_x.at(i)];
    else ((T*)to.y)[to.at_y.at(i)] = ((const T*)to.x)[to.at_x.at(i)];
}
KERNELS(copy, CopyArguments)
KERNEL(copy_u8, CopyArguments) { copy<u8>(arguments); }
KERNEL(copy_u32, CopyArguments) { copy<u32>(arguments); }

// Kernels that convert from one type to another, or add to y.
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

// Each thread fills 16 bytes.
template <typename T>
__device__ void fill(const FillArguments& to) {
    constexpr u32 PACK = Pack<T>::SIZE;
    T* const y = (T*)to.y;
    const u64 first = global_thread() * PACK;
    f32 numbers[PACK];
    for (f32& number : numbers) number = to.number;
    if (first + PACK <= to.count && is_aligned(to.y)) return store_neighbours(y + first, numbers);
    for (u64 i = first; i < smaller(first + PACK, to.count); ++i) store(y + i, to.number);
}
KERNELS(fill, FillArguments)
