// Definitions that the tensor-core kernels of attention share: rows of heads and their copies to shared memory, the sums
// of a warp, and masks.
#pragma once
#include "attention.cuh"
#include "math.cuh"
#include "tensor_cores.cuh"

constexpr u32 BAND = 16;

// Exponents are to base 2, for which the device has an instruction.
constexpr f32 LOG2_E = 1.4426950408889634f;

// Rows of one head in global memory, which a block holds or iterates over.
struct HeadRows {
    const bf16* at;
    u64 stride;
    u64 end;
    u32 size;

    // Starts to load ROWS rows from `first` on, with all THREADS of the block. Rows that do not exist are filled with
    // zeros.
    template <u32 ROWS, u32 THREADS = ATTENTION_THREADS, typename Tile>
    __device__ __forceinline__ void start(Tile tile, u64 first) const {
        const u32 count = first < end ? u32(smaller(end - first, ROWS)) : 0;
        tile.template start<ROWS, THREADS>(at + first * stride, stride, count, size);
    }
};

__device__ __forceinline__ HeadRows rows_of(const void* x, const HeadStrides& at,
                                                   u64 batch, u64 head, u64 end, u64 size) {
    return {(const bf16*)x + at.at(batch, head), at.token, end, u32(size)};
}

__device__ __forceinline__ HeadRows queries_of(const AttentionArguments& to, u64 batch, u64 head) {
    return rows_of(to.q, to.at_q, batch, head, to.queries, to.head_size);
}

__device__ __forceinline__ HeadRows gradients_of(const AttentionArguments& to, u64 batch, u64 head) {
    return rows_of(to.d_out, to.at_out, batch, head, to.queries, to.value_size);
}

__device__ __forceinline__ HeadRows keys_of(const AttentionArguments& to, u64 batch, u64 kv_head) {
    return rows_of(to.k, to.at_k, batch, kv_head, to.keys, to.head_size);
}

__device__ __forceinline__ HeadRows values_of(const AttentionArguments& to, u64 batch, u64 kv_head) {
    return rows_of(to.v, to.at_v, batch, kv_head, to.keys, to.value_size);
}

// The sums of a warp: BANDS bands of 16 rows and COLUMNS columns, as fragments of 16 × 8 elements.
template <u32 BANDS, u32 COLUMNS>
struct Bands {
    f32 at[BANDS][COLUMNS / 8][4] = {};

    // Calls f(sum, row, column) for each sum of this lane, where `row` counts half bands.
    template <typename F>
    __device__ __forceinline__ void visit(F f) {
#pragma unroll
        for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    const u32 half = band * 2 + e / 2;
                    f(at[band][n][e], half, n * 8 + lane_of() % 4 * 2 + e % 2);
                }
            }
        }
    }

    // Calls f(sum, other, row, value) for each sum of this lane. `other` is the element of `others` in the same place,
    // and `value` is the one in `of_columns` for the sum's column.
    template <typename F>
    __device__ __forceinline__ void visit_beside(const Bands& others, const f32* of_columns, F f) {
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 8; ++n) {
            f32 pair[2];
            load_neighbours(pair, of_columns + n * 8 + lane_of() % 4 * 2);
#pragma unroll
            for (u32 band = 0; band < BANDS; ++band) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) f(at[band][n][e], others.at[band][n][e], band * 2 + e / 2, pair[e % 2]);
            }
        }
    }

    // Calls f(sum, row, value) for each sum of this lane, where `value` is the one in `of_columns` for the sum's column.
    template <typename F>
    __device__ __forceinline__ void visit_with(const f32* of_columns, F f) {
        visit_beside(*this, of_columns, [&](f32& sum, f32, u32 half, f32 of_column) { f(sum, half, of_column); });
    }

    // Returns the row of a half band in which this lane holds sums.
    __device__ __forceinline__ static u32 row_of(u32 half) { return half * 8 + lane_of() / 4; }

    // Sets each sum to the product of a row of a, from row `first` on, and a row of b.
    template <u32 SIZE>
    __device__ __forceinline__ void set_to_products(HalfTile<SIZE> a, u32 first, HalfTile<SIZE> b) {
        visit([](f32& sum, u32, u32) { sum = 0.0f; });
        add_products(a, first, b);
    }

    // Adds the same products to the sums.
    template <u32 SIZE>
    __device__ __forceinline__ void add_products(HalfTile<SIZE> a, u32 first, HalfTile<SIZE> b) {
#pragma unroll
        for (u32 k = 0; k < SIZE; k += 16) {
            u32 of_a[BANDS][4];
#pragma unroll
            for (u32 band = 0; band < BANDS; ++band) a.load_left(of_a[band], first + band * BAND, k);
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 8; n += 2) {
                u32 of_b[4];
                b.load_right_of_rows(of_b, n * 8, k);
#pragma unroll
                for (u32 band = 0; band < BANDS; ++band) {
                    multiply_add(at[band][n], of_a[band], of_b[0], of_b[1]);
                    multiply_add(at[band][n + 1], of_a[band], of_b[2], of_b[3]);
                }
            }
        }
    }

    // Rounds columns 8k to 8k + 15 of a band to bf16, as fragments of a left operand. No exchange between lanes is
    // needed, because fragments of results and of left operands have the same layout.
    __device__ __forceinline__ void round_to(u32 (&to)[4], u32 band, u32 k) const {
        const f32(&left)[4] = at[band][k], (&right)[4] = at[band][k + 1];
        to[0] = pair_of(left[0], left[1]);
        to[1] = pair_of(left[2], left[3]);
        to[2] = pair_of(right[0], right[1]);
        to[3] = pair_of(right[2], right[3]);
    }

    // Adds weights·b to the sums.
    template <u32 TILE>
    __device__ __forceinline__ void add(const Bands<BANDS, TILE>& weights, HalfTile<COLUMNS> b) {
#pragma unroll
        for (u32 k = 0; k < TILE / 8; k += 2) {
            u32 of_a[BANDS][4];
#pragma unroll
            for (u32 band = 0; band < BANDS; ++band) weights.round_to(of_a[band], band, k);
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 8; n += 2) {
                u32 of_b[4];
                b.load_right(of_b, k * 8, n * 8);
#pragma unroll
                for (u32 band = 0; band < BANDS; ++band) {
                    multiply_add(at[band][n], of_a[band], of_b[0], of_b[1]);
                    multiply_add(at[band][n + 1], of_a[band], of_b[2], of_b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_by(const Bands& other) {
        visit([&](f32& x, u32 half, u32 column) { x *= other.at[half / 2][column / 8][half % 2 * 2 + column % 2]; });
    }

    // Rounds the rows to bf16, and stores those whose token is before `end`.
    __device__ __forceinline__ void store(bf16* to, u64 stride, u64 first, u64 end, u32 size) const {
        const bool is_paired = (reinterpret_cast<u64>(to) / sizeof(bf16) | stride | size) % 2 == 0;
#pragma unroll
        for (u32 half = 0; half < BANDS * 2; ++half) {
            const u64 token = first + row_of(half);
            if (token >= end) continue;
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 8; ++n) {
                const f32 low = at[half / 2][n][half % 2 * 2], high = at[half / 2][n][half % 2 * 2 + 1];
                const u32 column = n * 8 + lane_of() % 4 * 2;
                bf16* pair = to + token * stride + column;
                if (is_paired) {
                    if (column < size) *reinterpret_cast<u32*>(pair) = pair_of(low, high);
                } else {
                    if (column < size) ::store(pair, low);
                    if (column + 1 < size) ::store(pair + 1, high);
                }
            }
        }
    }
};

// Returns the number of keys from `start` on that a query sees, at most 0xffff.
__device__ __forceinline__ u32 seen_from(const AttentionArguments& to, u64 query, u64 start) {
    const u64 seen = to.visible(query);
    return seen > start ? u32(smaller(seen - start, 0xffff)) : 0;
}

// Returns the first key that a query sees. For rows past the last query it returns 0, so that they see all keys.
__device__ __forceinline__ u32 hidden_from(const AttentionArguments& to, u64 batch, u64 query) {
    return query < to.queries ? u32(to.first_key(batch, query)) : 0;
}

// Returns the factor that turns capped scores, or products if there is no cap, into exponents of two.
__device__ __forceinline__ f32 exponent_scale(const AttentionArguments& to) {
    return (to.cap > 0.0f ? 1.0f : to.scale) * LOG2_E;
}

// Returns the slope of a score's cap. The score is recovered as the logarithm of its probability, plus `lse`.
__device__ __forceinline__ f32 slope_of(const AttentionArguments& to, f32 p, f32 lse) {
    return p > 0.0f ? to.slope((log2_of(p) + lse) * (1.0f / LOG2_E)) : 0.0f;
}

// Loads the values of a tile's columns. Each lane holds two of every eight columns. Values past `count` are zeros.
template <u32 COUNT>
__device__ __forceinline__ void load_numbers(f32 (&to)[COUNT], const f32* from, u32 count) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        const u32 column = i / 2 * 8 + lane_of() % 4 * 2 + i % 2;
        to[i] = column < count ? from[column] : 0.0f;
    }
}

