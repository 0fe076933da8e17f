// Gathers elements by ids, adds elements at ids, and computes row maxima. CPU counterparts: ops/gather.rs,
// ops/max.rs.
#include "rows.cuh"

struct GatherArguments {
    const void* x;
    const u32* ids;
    void* y;
    // Number of elements of y.
    u64 elements;
    // Along the gathered dimension: its extent in x, the number of ids, and the distance between consecutive indices
    // in elements.
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

// y[outer, j, inner] = the sum of x[outer, i, inner] over all i whose id is j, in order of i. If an id is out of
// range, the element at index 0 becomes NaN.
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

// Computes the maximum of each row, and its index, which is the first one if several elements are equal. Each block
// handles one row.
template <typename T>
__device__ void row_max(const RowMaxArguments& to) {
    const T* x = (const T*)to.x + blockIdx.x * to.width;
    f32 own = minus_infinity();
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) own = fmaxf(own, load(x + i));
    const f32 max = max_block(own, (f32*)shared_memory);
    // The smallest index is found as the maximum of the negated indices. They are exact in f32, because they are
    // below 2^24.
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
