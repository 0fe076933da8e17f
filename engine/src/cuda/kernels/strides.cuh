// Where an element lies in a tensor with strides.
#pragma once
#include "base.cuh"

constexpr u32 MAX_RANK = 6;

// Extents, and distances in elements; dimensions that can be walked as one have been merged.
struct Strides {
    u64 dims[MAX_RANK];
    u64 strides[MAX_RANK];
    u64 rank;

    // Distance from the first element to number `index` in row-major order.
    __device__ __forceinline__ u64 at(u64 index) const {
        u64 distance = 0;
        for (u32 back = 0; back < rank; ++back) {
            const u32 dim = u32(rank) - 1 - back;
            distance += index % dims[dim] * strides[dim];
            index /= dims[dim];
        }
        return distance;
    }

    __device__ __forceinline__ bool is_dense() const { return rank == 0 || (rank == 1 && strides[0] == 1); }
};
