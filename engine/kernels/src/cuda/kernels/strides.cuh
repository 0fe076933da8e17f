// The offset of an element in a tensor with strides.
#pragma once
#include "base.cuh"

constexpr u32 MAX_RANK = 6;

// Extents and strides in elements. Adjacent dimensions are merged if they can be iterated as one.
struct Strides {
    u64 dims[MAX_RANK];
    u64 strides[MAX_RANK];
    u32 rank;
    // True if indices fit 32 bits, for which divisions are several times as fast.
    u32 is_small;

    // Returns the offset of the element with index `index` in row-major order.
    __device__ __forceinline__ u64 at(u64 index) const { return is_small ? walk(u32(index)) : walk(index); }

    template <typename Index>
    __device__ __forceinline__ u64 walk(Index index) const {
        u64 distance = 0;
        for (u32 back = 0; back < rank; ++back) {
            const u32 dim = rank - 1 - back;
            const Index extent = Index(dims[dim]);
            distance += index % extent * strides[dim];
            index /= extent;
        }
        return distance;
    }

    __device__ __forceinline__ bool is_dense() const { return rank == 0 || (rank == 1 && strides[0] == 1); }
};
