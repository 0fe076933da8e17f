// Sums and maxima over warps and blocks, in an order that only the shape decides.
#pragma once
#include "base.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ f32 minus_infinity() { return __uint_as_float(0xff800000u); }

struct Sum {
    __device__ __forceinline__ static f32 of(f32 a, f32 b) { return a + b; }
};

// Of a NaN and a number, the number: as the CPU's.
struct Max {
    __device__ __forceinline__ static f32 of(f32 a, f32 b) { return fmaxf(a, b); }
};

// Folds x over `lanes` neighbouring lanes (a power of two); all of them get the same bits, as both of a pair fold the same two.
template <typename Fold>
__device__ __forceinline__ f32 fold_lanes(f32 x, u32 lanes) {
    for (u32 distance = lanes / 2; distance > 0; distance /= 2) x = Fold::of(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

// Floats of shared memory that a fold over a block needs.
constexpr u32 MAX_WARPS = 32;

// Folds x over a block of whole warps; all threads get the same bits. `scratch` holds MAX_WARPS floats.
template <typename Fold>
__device__ __forceinline__ f32 fold_block(f32 x, f32* scratch) {
    x = fold_lanes<Fold>(x, 32);
    __syncthreads(); // Someone may still read what the last fold left.
    if (lane_of() == 0) scratch[warp_of()] = x;
    __syncthreads();
    f32 all = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / 32; ++warp) all = Fold::of(all, scratch[warp]);
    return all;
}

__device__ __forceinline__ f32 sum_block(f32 x, f32* scratch) { return fold_block<Sum>(x, scratch); }
__device__ __forceinline__ f32 max_block(f32 x, f32* scratch) { return fold_block<Max>(x, scratch); }

// Sums each number over neighbouring `warps` warps of a block, of which all have as many: in the order of sum_block, all with the same
// two barriers, or with none if a warp is by itself. `scratch` holds MAX_WARPS floats for each.
template <u32 COUNT>
__device__ __forceinline__ void sum_warps(f32 (&x)[COUNT], u32 warps, f32* scratch) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) x[i] = fold_lanes<Sum>(x[i], 32);
    if (warps == 1) return;
    __syncthreads(); // Someone may still read what the last sums left.
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
