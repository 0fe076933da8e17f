// Products of bf16 tiles on tensor cores, with sums in f32: mma.sync.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16").
//
// Of a 16 × 8 result, lane l holds row l/4, columns 2(l%4) and the next, then the same of row l/4 + 8.
#pragma once
#include "reduce.cuh"

#ifndef ON_HOST
// d += a·b.
__device__ __forceinline__ void multiply_add(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 × 8 matrices. Lane l names row l%8 of matrix l/8, 16 bytes of shared memory, and gets elements 2(l%4) and the next of
// each matrix's row l/4.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* row) {
    const u32 address = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// The same of the matrices transposed.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const bf16* row) {
    const u32 address = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
#endif

// Two neighbours, the first in the low half.
__device__ __forceinline__ u32 pair_at(const bf16* at) { return *reinterpret_cast<const u32*>(at); }

__device__ __forceinline__ u32 pair_of(f32 low, f32 high) {
    return u32(round_to_bf16(low).bits) | u32(round_to_bf16(high).bits) << 16;
}

// Rows of SIZE elements in shared memory, 16 bytes further apart than they are long, so that what a warp reads at once lies in
// different banks.
template <u32 SIZE>
struct HalfTile {
    static constexpr u32 PITCH = SIZE + 8;
    bf16* rows;

    __device__ __forceinline__ bf16* operator[](u32 row) const { return rows + row * PITCH; }

    // Loads `count` rows of `size` elements; what lies behind a row, and rows from `end` on, are zeros.
    __device__ __forceinline__ void load_rows(const bf16* from, u64 stride, u64 first, u64 end, u32 count, u32 size) const {
        constexpr u32 PACK = Pack<bf16>::SIZE;
        const bool is_packed = is_aligned(from) && stride % PACK == 0;
        for (u32 i = threadIdx.x; i < count * (SIZE / PACK); i += blockDim.x) {
            const u32 row = i / (SIZE / PACK), column = i % (SIZE / PACK) * PACK;
            const bf16* at = from + (first + row) * stride + column;
            Pack<bf16> pack = {};
            if (first + row < end && column + PACK <= size && is_packed) {
                pack = *reinterpret_cast<const Pack<bf16>*>(at);
            } else if (first + row < end) {
                for (u32 c = 0; c < PACK; ++c) {
                    if (column + c < size) pack.at[c] = at[c];
                }
            }
            *reinterpret_cast<Pack<bf16>*>((*this)[row] + column) = pack;
        }
    }
};

// Sixteen rows of a, from `first` on, times all 8·TILES rows of b: each with each.
template <u32 SIZE, u32 TILES>
__device__ __forceinline__ void multiply_rows(f32 (&products)[TILES][4], HalfTile<SIZE> a, u32 first, HalfTile<SIZE> b) {
    const u32 group = lane_of() / 4, pair = lane_of() % 4 * 2;
#pragma unroll
    for (u32 n = 0; n < TILES; ++n) {
        for (u32 e = 0; e < 4; ++e) products[n][e] = 0.0f;
    }
#pragma unroll
    for (u32 k = 0; k < SIZE; k += 16) {
        const bf16 *top = a[first + group] + k + pair, *bottom = a[first + group + 8] + k + pair;
        const u32 of_a[4] = {pair_at(top), pair_at(bottom), pair_at(top + 8), pair_at(bottom + 8)};
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) {
            const bf16* of_b = b[n * 8 + group] + k + pair;
            multiply_add(products[n], of_a, pair_at(of_b), pair_at(of_b + 8));
        }
    }
}

// Adds to each of sixteen rows the 8·TILES rows of b, weighted.
template <u32 SIZE, u32 TILES>
__device__ __forceinline__ void add_rows(f32 (&sums)[SIZE / 8][4], const f32 (&weights)[TILES][4], HalfTile<SIZE> b) {
    const u32 lane = lane_of();
#pragma unroll
    for (u32 k = 0; k < TILES; k += 2) {
        // A result's fragments are a factor's, once rounded.
        const u32 of_a[4] = {pair_of(weights[k][0], weights[k][1]), pair_of(weights[k][2], weights[k][3]),
                             pair_of(weights[k + 1][0], weights[k + 1][1]), pair_of(weights[k + 1][2], weights[k + 1][3])};
#pragma unroll
        for (u32 n = 0; n < SIZE / 8; n += 2) {
            u32 of_b[4];
            load_transposed(of_b, b[k * 8 + lane % 16] + n * 8 + lane / 16 * 8);
            multiply_add(sums[n], of_a, of_b[0], of_b[1]);
            multiply_add(sums[n + 1], of_a, of_b[2], of_b[3]);
        }
    }
}
