// Sums and maxima over warps and blocks. The order of operations depends on the shape only.
#pragma once
#include "base.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ f32 minus_infinity() { return __uint_as_float(0xff800000u); }

struct Sum {
    __device__ __forceinline__ static f32 of(f32 a, f32 b) { return a + b; }
};

// Returns the other operand if one operand is NaN, like the CPU's implementation.
struct Max {
    __device__ __forceinline__ static f32 of(f32 a, f32 b) { return fmaxf(a, b); }
};

// Reduces x over `lanes` neighboring lanes, a power of two. All lanes get the same bits, because both lanes of a pair
// combine the same two values.
template <typename Fold>
__device__ __forceinline__ f32 fold_lanes(f32 x, u32 lanes) {
    for (u32 distance = lanes / 2; distance > 0; distance /= 2) x = Fold::of(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

// Number of floats in shared memory that a reduction over a block needs.
constexpr u32 MAX_WARPS = 32;

// Reduces x over a block, whose size must be a multiple of 32. All threads get the same bits. `scratch` must have room
// for MAX_WARPS floats.
template <typename Fold>
__device__ __forceinline__ f32 fold_block(f32 x, f32* scratch) {
    x = fold_lanes<Fold>(x, 32);
    __syncthreads(); // Other threads may still read the values of the previous reduction.
    if (lane_of() == 0) scratch[warp_of()] = x;
    __syncthreads();
    f32 all = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / 32; ++warp) all = Fold::of(all, scratch[warp]);
    return all;
}

__device__ __forceinline__ f32 sum_block(f32 x, f32* scratch) { return fold_block<Sum>(x, scratch); }
__device__ __forceinline__ f32 max_block(f32 x, f32* scratch) { return fold_block<Max>(x, scratch); }

// Sums each element of x over groups of `warps` neighboring warps. The order of additions is that of sum_block. All warps
// of the block must call this together, because it contains two barriers if `warps` is above 1. `scratch` must have room
// for COUNT times MAX_WARPS floats.
template <u32 COUNT>
__device__ __forceinline__ void sum_warps(f32 (&x)[COUNT], u32 warps, f32* scratch) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) x[i] = fold_lanes<Sum>(x[i], 32);
    if (warps == 1) return;
    __syncthreads(); // Other threads may still read the values of the previous sums.
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (lane_of() == 0) scratch[warp_of() * COUNT + i] = x[i];
    }
    __syncthreads();
    const f32* own = scratch + warp_of() / warps * warps * COUNT;
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) x[i] = own[i];
#pragma unroll 1
    for (u32 warp = 1; warp < warps; ++warp) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) x[i] += own[warp * COUNT + i];
    }
}
