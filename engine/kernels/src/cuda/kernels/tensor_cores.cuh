// Products of bf16 tiles on tensor cores, with sums in f32: mma.sync.m16n8k16 (PTX ISA, "Matrix fragments for
// mma.m16n8k16").
//
// A result is a tile of 16 × 8 elements. Lane l holds columns 2(l%4) and 2(l%4) + 1 of row l/4, followed by the same
// columns of row l/4 + 8.
#pragma once
#include "copy_async.cuh"
#include "reduce.cuh"

#ifndef ON_HOST
// Computes d += a·b.
__device__ __forceinline__ void multiply_add(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 × 8 matrices from shared memory. Lane l passes the address of row l%8 of matrix l/8, which has 16 bytes.
// It receives elements 2(l%4) and 2(l%4) + 1 of row l/4 of each matrix.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* row) {
    const u32 address = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Like load_matrices, but transposes each matrix.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const bf16* row) {
    const u32 address = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
#endif

// A tile with rows of SIZE elements in shared memory. Rows are padded by 16 bytes, so that the elements that a warp reads
// at once are in different banks.
template <u32 SIZE>
struct HalfTile {
    static constexpr u32 PITCH = SIZE + 8;
    bf16* rows;

    __device__ __forceinline__ bf16* operator[](u32 row) const { return rows + row * PITCH; }

    // Starts to load ROWS rows, with all THREADS of the block. Only `count` rows of `size` elements exist in memory. The
    // rest of the tile is filled with zeros.
    template <u32 ROWS, u32 THREADS>
    __device__ __forceinline__ void start(const bf16* from, u64 stride, u32 count, u32 size) const {
        constexpr u32 PACK = Pack<bf16>::SIZE, ACROSS = SIZE / PACK;
        if (!is_aligned(from) || stride % PACK != 0) {
            load<ROWS>(*this, from, stride, count, size);
            return;
        }
        static_assert(ROWS * ACROSS % THREADS == 0, "every thread has as many packs");
#pragma unroll
        for (u32 first = 0; first < ROWS * ACROSS; first += THREADS) {
            const u32 i = first + threadIdx.x, row = i / ACROSS, column = i % ACROSS * PACK;
            const bool is_there = row < count && column < size;
            const u32 elements = is_there ? u32(smaller(size - column, PACK)) : 0;
            copy_async((*this)[row] + column, is_there ? from + row * stride + column : from, elements * u32(sizeof(bf16)));
        }
    }

    // Like `start`, but loads elements one by one, for rows that do not start at an aligned address.
    template <u32 ROWS>
    __device__ __forceinline__ static void load(HalfTile to, const bf16* from, u64 stride, u32 count, u32 size) {
        for (u32 i = threadIdx.x; i < ROWS * SIZE; i += blockDim.x) {
            const u32 row = i / SIZE, column = i % SIZE;
            to[row][column] = row < count && column < size ? from[row * stride + column] : bf16{0};
        }
    }

    // Loads fragments of a left operand: rows `row` to `row` + 15, columns `column` to `column` + 15.
    __device__ __forceinline__ void load_left(u32 (&to)[4], u32 row, u32 column) const {
        load_matrices(to, (*this)[row + lane_of() % 16] + column + lane_of() / 16 * 8);
    }

    // Loads fragments of two right operands. The tile stores them transposed: one operand is rows `row` to `row` + 7,
    // and the other is the next eight rows.
    __device__ __forceinline__ void load_right_of_rows(u32 (&to)[4], u32 row, u32 column) const {
        load_matrices(to, (*this)[row + lane_of() % 8 + lane_of() / 16 * 8] + column + lane_of() / 8 % 2 * 8);
    }

    // Loads fragments of two right operands, which the tile does not store transposed: columns `column` to `column` +
    // 7, and the next eight columns.
    __device__ __forceinline__ void load_right(u32 (&to)[4], u32 row, u32 column) const {
        load_transposed(to, (*this)[row + lane_of() % 16] + column + lane_of() / 16 * 8);
    }

    // Loads fragments of a left operand that the tile stores transposed: columns `column` to `column` + 15.
    __device__ __forceinline__ void load_left_of_columns(u32 (&to)[4], u32 row, u32 column) const {
        load_transposed(to, (*this)[row + lane_of() % 8 + lane_of() / 16 * 8] + column + lane_of() / 8 % 2 * 8);
    }
};
