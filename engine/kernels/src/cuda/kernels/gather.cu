// Gathering elements by ids, adding elements by ids, and row maxima. CPU counterparts: ops/gather.rs, ops/max.rs.
#include "rows.cuh"

struct GatherArguments {
    const void* x;
    const u32* ids;
    void* y;
    // Number of elements of y.
    u64 elements;
    // Along the dimension: the extent that ids refer to, the number of ids, and the elements between consecutive
    // indices.
    u64 extent;
    u64 count;
    u64 inner;
};

__device__ __forceinline__ f32 not_a_number() { return __uint_as_float(0x7fc00000u); }

// y[outer, i, inner] = x[outer, ids[outer, i, inner], inner]; NaN if the id is out of range.
template <typename T>
__device__ void gather_along(const GatherArguments& to) {
    const u64 i = global_thread();
    if (i >= to.elements) return;
    const u64 outer = i / (to.count * to.inner), id = to.ids[i];
    const T* x = (const T*)to.x + (outer * to.extent + id) * to.inner + i % to.inner;
    store((T*)to.y + i, id < to.extent ? load(x) : not_a_number());
}
KERNELS(gather_along, GatherArguments)

// y[outer, j, inner] = the sum of x[outer, i, inner] over all i whose id is j, in order. An id out of range makes place
// 0 NaN.
template <typename T>
__device__ void scatter_add(const GatherArguments& to) {
    const u64 place = global_thread();
    if (place >= to.elements) return;
    const u64 outer = place / (to.extent * to.inner), own = place / to.inner % to.extent;
    const u64 start = outer * to.count * to.inner + place % to.inner;
    f32 sum = 0.0f;
    for (u64 i = 0; i < to.count; ++i) {
        const u64 id = to.ids[start + i * to.inner];
        if (id == own) sum += load((const T*)to.x + start + i * to.inner);
        if (id >= to.extent && own == 0) sum = not_a_number();
    }
    store((T*)to.y + place, sum);
}
KERNELS(scatter_add, GatherArguments)

struct RowMaxArguments {
    const void* x;
    void* values;
    u32* ids;
    u64 width;
};

// The maximum of a row and its index, the first one if several are equal. A block has one row.
template <typename T>
__device__ void row_max(const RowMaxArguments& to) {
    const T* x = (const T*)to.x + blockIdx.x * to.width;
    f32 own = minus_infinity();
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) own = fmaxf(own, load(x + i));
    const f32 max = max_block(own, (f32*)shared_memory);
    // The smallest index is the maximum of the negated indices, which are exact in f32 below 2^24.
    f32 first = minus_infinity();
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        if (load(x + i) == max) first = fmaxf(first, -f32(i));
    }
    first = max_block(first, (f32*)shared_memory);
    if (threadIdx.x == 0) {
        store((T*)to.values + blockIdx.x, max);
        to.ids[blockIdx.x] = first == minus_infinity() ? 0 : u32(-first);
    }
}
KERNELS(row_max, RowMaxArguments)
