// The kernels of attention.cu for bf16: the same scheme, with products on tensor cores. Probabilities and their
// gradients are rounded to bf16 before they are multiplied. The next tiles are copied while the current ones are
// multiplied.
//
// A warp has BANDS bands of sixteen rows. More bands mean more products for each read of shared memory, and more
// registers.
#include "attention.cuh"
#include "math.cuh"
#include "tensor_cores.cuh"

constexpr u32 BAND = 16;
constexpr u32 WARPS = ATTENTION_THREADS / 32;

// Declares a kernel for heads of up to SIZE elements, with BANDS bands per warp and TILE rows per streamed tile.
#define TENSOR_CORE_KERNEL(name, SIZE, BANDS, TILE) \
    BOUNDED_KERNEL(name##_##SIZE, AttentionArguments, ATTENTION_THREADS, 2) { name<SIZE, BANDS, TILE>(arguments); }

// Exponentials are computed with base 2, for which the device has an instruction.
constexpr f32 LOG2_E = 1.4426950408889634f;

// Rows of heads in global memory: the rows of a block, or those that are streamed past it.
struct HeadRows {
    const bf16* at;
    u64 stride;
    u64 end;
    u32 size;

    // Starts loading ROWS rows from `first` on; missing rows become zeros.
    template <u32 ROWS, u32 SIZE>
    __device__ __forceinline__ void start(HalfTile<SIZE> tile, u64 first) const {
        const u32 count = first < end ? u32(smaller(end - first, ROWS)) : 0;
        tile.template start<ROWS, ATTENTION_THREADS>(at + first * stride, stride, count, size);
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

// The sums of a warp: BANDS bands of sixteen rows of COLUMNS columns, in fragments of 16 × 8.
template <u32 BANDS, u32 COLUMNS>
struct Bands {
    f32 at[BANDS][COLUMNS / 8][4] = {};

    // Calls a function with each sum, its half band and its column.
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

    // The row of a half band in which this lane has sums.
    __device__ __forceinline__ static u32 row_of(u32 half) { return half * 8 + lane_of() / 4; }

    // Sets the sums to the products of rows of a, from `first` on, with the rows of b.
    template <u32 SIZE>
    __device__ __forceinline__ void set_to_products(HalfTile<SIZE> a, u32 first, HalfTile<SIZE> b) {
        visit([](f32& sum, u32, u32) { sum = 0.0f; });
        add_products(a, first, b);
    }

    // Adds the products to the sums.
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

    // Adds the weighted rows of b to each row. The weights, which are the fragments of a product, have the layout of a
    // factor's fragments once they are rounded.
    template <u32 TILE>
    __device__ __forceinline__ void add(const Bands<BANDS, TILE>& weights, HalfTile<COLUMNS> b) {
#pragma unroll
        for (u32 k = 0; k < TILE / 8; k += 2) {
            u32 of_a[BANDS][4];
#pragma unroll
            for (u32 band = 0; band < BANDS; ++band) {
                const f32(&left)[4] = weights.at[band][k], (&right)[4] = weights.at[band][k + 1];
                of_a[band][0] = pair_of(left[0], left[1]);
                of_a[band][1] = pair_of(left[2], left[3]);
                of_a[band][2] = pair_of(right[0], right[1]);
                of_a[band][3] = pair_of(right[2], right[3]);
            }
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

    // Rounds the rows, and stores those of tokens before `end`.
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

// Pairs of tiles that are streamed through shared memory, one pair in use and the next one being copied.
template <u32 SIZE, u32 TILE>
struct Passing {
    HalfTile<SIZE> tiles;

    __device__ __forceinline__ HalfTile<SIZE> first(u32 turn) const { return {tiles[turn % 2 * 2 * TILE]}; }
    __device__ __forceinline__ HalfTile<SIZE> second(u32 turn) const { return {tiles[(turn % 2 * 2 + 1) * TILE]}; }

    // Iterates over `turns` turns. Calls `start` to start a turn's copies, and `use` once the copies of all threads
    // have arrived.
    template <typename Start, typename Use>
    __device__ __forceinline__ void go_by(u32 turns, Start start, Use use) const {
        if (turns > 0) start(0);
        close_copies();
        for (u32 turn = 0; turn < turns; ++turn) {
            wait_for_copies<0>();
            __syncthreads(); // All threads' copies have arrived, and the previous pair has been read.
            if (turn + 1 < turns) start(turn + 1);
            close_copies();
            use(turn);
        }
    }
};

// The number of keys that a query sees, counted from a tile's start on.
__device__ __forceinline__ u32 seen_from(const AttentionArguments& to, u64 query, u64 start) {
    const u64 seen = to.visible(query);
    return seen > start ? u32(smaller(seen - start, 0xffff)) : 0;
}

// The first key that a query sees. Rows without a query see all keys.
__device__ __forceinline__ u32 hidden_from(const AttentionArguments& to, u64 batch, u64 query) {
    return query < to.queries ? u32(to.first_key(batch, query)) : 0;
}

// The end of the keys that a query sees, in 32 bits to save registers: a sequence has fewer than 2^32 tokens.
__device__ __forceinline__ u32 seen_by(const AttentionArguments& to, u32 query) {
    const u32 keys = u32(to.keys), seen = query + (keys - u32(to.queries)) + 1;
    return to.is_causal && seen < keys ? seen : keys;
}

// The factor that turns scores, after the cap, into exponents of 2.
__device__ __forceinline__ f32 exponent_scale(const AttentionArguments& to) {
    return (to.cap > 0.0f ? 1.0f : to.scale) * LOG2_E;
}

// The derivative of the cap, from a probability: the capped score is log2 of the probability plus lse, in base 2.
__device__ __forceinline__ f32 slope_of(const AttentionArguments& to, f32 p, f32 lse) {
    return p > 0.0f ? to.slope((log2f(p) + lse) * (1.0f / LOG2_E)) : 0.0f;
}

template <u32 SIZE, u32 BANDS, u32 TILE>
__device__ void attention_tc(const AttentionArguments& to) {
    constexpr u32 WARP_ROWS = BANDS * BAND, BLOCK_ROWS = WARPS * WARP_ROWS, HALVES = BANDS * 2;
    const u32 warp_row = warp_of() * WARP_ROWS;
    const HalfTile<SIZE> q{(bf16*)shared_memory};
    const Passing<SIZE, TILE> passing{{q[BLOCK_ROWS]}};
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = head / (to.heads / to.kv_heads);
    // Blocks whose queries see most keys start first.
    const u64 first = u64(gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS, own = first + warp_row;
    const HeadRows queries = queries_of(to, batch, head);
    const HeadRows keys = keys_of(to, batch, kv_head);
    const HeadRows values = values_of(to, batch, kv_head);
    const u32 skipped = u32(to.first_key_of<BLOCK_ROWS>(batch, first) / TILE);
    const u64 end = to.visible(smaller(first + BLOCK_ROWS, to.queries) - 1);
    const f32 scale = exponent_scale(to);

    f32 max[HALVES], sum[HALVES] = {};
    for (u32 half = 0; half < HALVES; ++half) max[half] = minus_infinity();
    Bands<BANDS, SIZE> sums;
    queries.start<BLOCK_ROWS>(q, first);
    passing.go_by(
        u32((end + TILE - 1) / TILE) - skipped,
        [&](u32 turn) {
            keys.start<TILE>(passing.first(turn), u64(skipped + turn) * TILE);
            values.start<TILE>(passing.second(turn), u64(skipped + turn) * TILE);
        },
        [&](u32 turn) {
            const u64 start = u64(skipped + turn) * TILE;
            if (start >= to.visible(own + WARP_ROWS - 1)) return;
            Bands<BANDS, TILE> scores;
            scores.set_to_products(q, warp_row, passing.first(turn));
            if (to.cap > 0.0f) scores.visit([&](f32& score, u32, u32) { score = to.score(score); });
            if (start + TILE > to.visible(own)) {
                u32 seen[HALVES];
                for (u32 half = 0; half < HALVES; ++half) seen[half] = seen_by(to, u32(own) + scores.row_of(half));
                scores.visit([&](f32& score, u32 half, u32 column) {
                    score = u32(start) + column < seen[half] ? score : minus_infinity();
                });
            }
            if (to.is_cut()) {
                u32 hidden[HALVES];
                for (u32 half = 0; half < HALVES; ++half) hidden[half] = hidden_from(to, batch, own + scores.row_of(half));
                scores.visit([&](f32& score, u32 half, u32 column) {
                    score = u32(start) + column >= hidden[half] ? score : minus_infinity();
                });
            }
            f32 greatest[HALVES], kept[HALVES], base[HALVES];
            for (u32 half = 0; half < HALVES; ++half) greatest[half] = max[half];
            scores.visit([&](f32& score, u32 half, u32) { greatest[half] = fmaxf(greatest[half], score); });
            for (u32 half = 0; half < HALVES; ++half) {
                // Four adjacent lanes share a row.
                greatest[half] = fold_lanes<Max>(greatest[half], 4);
                // Rows that have not seen a key yet have no maximum.
                base[half] = greatest[half] == minus_infinity() ? 0.0f : greatest[half] * scale;
                kept[half] = exp2_of(max[half] * scale - base[half]);
                max[half] = greatest[half];
                sum[half] *= kept[half];
            }
            scores.visit([&](f32& score, u32 half, u32) {
                score = exp2_of(score * scale - base[half]);
                sum[half] += score;
            });
            sums.visit([&](f32& sum, u32 half, u32) { sum *= kept[half]; });
            sums.add(scores, passing.second(turn));
        });
    for (u32 half = 0; half < HALVES; ++half) {
        sum[half] = fold_lanes<Sum>(sum[half], 4);
        const u64 query = own + sums.row_of(half);
        if (lane_of() % 4 == 0 && query < to.queries) {
            to.lse[(batch * to.heads + head) * to.queries + query] = max[half] * scale * (1.0f / LOG2_E) + logf(sum[half]);
        }
        sum[half] = 1.0f / sum[half];
    }
    sums.visit([&](f32& out, u32 half, u32) { out *= sum[half]; });
    sums.store((bf16*)to.out + to.at_out.at(batch, head), to.at_out.token, own, to.queries, u32(to.value_size));
}
TENSOR_CORE_KERNEL(attention_tc, 64, 2, 64)
TENSOR_CORE_KERNEL(attention_tc, 128, 2, 32)
TENSOR_CORE_KERNEL(attention_tc, 256, 1, 16)

// Stores delta = sum(out·d_out) of each query for the kernels for dk and dv.
template <u32 SIZE, u32 BANDS, u32 TILE>
__device__ void attention_tc_grad_q(const AttentionArguments& to) {
    constexpr u32 WARP_ROWS = BANDS * BAND, BLOCK_ROWS = WARPS * WARP_ROWS, HALVES = BANDS * 2;
    const u32 warp_row = warp_of() * WARP_ROWS;
    const HalfTile<SIZE> q{(bf16*)shared_memory}, d_out{q[BLOCK_ROWS]};
    const Passing<SIZE, TILE> passing{{d_out[BLOCK_ROWS]}};
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = head / (to.heads / to.kv_heads);
    const u64 first = u64(gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS, own = first + warp_row;
    const HeadRows queries = queries_of(to, batch, head);
    const HeadRows gradients = gradients_of(to, batch, head);
    const HeadRows keys = keys_of(to, batch, kv_head);
    const HeadRows values = values_of(to, batch, kv_head);
    const u32 skipped = u32(to.first_key_of<BLOCK_ROWS>(batch, first) / TILE);
    const u64 end = to.visible(smaller(first + BLOCK_ROWS, to.queries) - 1);
    const f32 scale = exponent_scale(to);

    Bands<BANDS, SIZE> dq;
    f32 lse[HALVES], delta[HALVES];
    for (u32 half = 0; half < HALVES; ++half) {
        const u64 query = own + dq.row_of(half), statistic = (batch * to.heads + head) * to.queries + query;
        lse[half] = query < to.queries ? to.lse[statistic] * LOG2_E : 0.0f;
        delta[half] = fold_lanes<Sum>(to.share_of_delta<bf16, 4>(batch, head, query, lane_of() % 4), 4);
        if (lane_of() % 4 == 0 && query < to.queries) to.delta[statistic] = delta[half];
    }
    queries.start<BLOCK_ROWS>(q, first);
    gradients.start<BLOCK_ROWS>(d_out, first);
    passing.go_by(
        u32((end + TILE - 1) / TILE) - skipped,
        [&](u32 turn) {
            keys.start<TILE>(passing.first(turn), u64(skipped + turn) * TILE);
            values.start<TILE>(passing.second(turn), u64(skipped + turn) * TILE);
        },
        [&](u32 turn) {
            const u64 start = u64(skipped + turn) * TILE;
            if (start >= to.visible(own + WARP_ROWS - 1)) return;
            Bands<BANDS, TILE> p, d_scores;
            p.set_to_products(q, warp_row, passing.first(turn));
            d_scores.set_to_products(d_out, warp_row, passing.second(turn));
            if (to.cap > 0.0f) p.visit([&](f32& p, u32, u32) { p = to.score(p); });
            p.visit([&](f32& p, u32 half, u32) { p = exp2_of(p * scale - lse[half]); });
            if (start + TILE > to.visible(own)) {
                u32 seen[HALVES];
                for (u32 half = 0; half < HALVES; ++half) seen[half] = seen_from(to, own + p.row_of(half), start);
                p.visit([&](f32& p, u32 half, u32 column) { p = column < seen[half] ? p : 0.0f; });
            }
            if (to.is_cut()) {
                u32 hidden[HALVES];
                for (u32 half = 0; half < HALVES; ++half) hidden[half] = hidden_from(to, batch, own + p.row_of(half));
                p.visit([&](f32& p, u32 half, u32 column) { p = u32(start) + column >= hidden[half] ? p : 0.0f; });
            }
            d_scores.visit([&](f32& d_score, u32 half, u32) { d_score -= delta[half]; });
            d_scores.multiply_by(p);
            if (to.cap > 0.0f) {
                p.visit([&](f32& p, u32 half, u32) { p = slope_of(to, p, lse[half]); });
                d_scores.multiply_by(p);
            }
            dq.add(d_scores, passing.first(turn));
        });
    dq.visit([&](f32& dq, u32, u32) { dq *= to.scale; });
    dq.store((bf16*)to.dq + to.at_dq.at(batch, head), to.at_dq.token, own, to.queries, u32(to.head_size));
}
TENSOR_CORE_KERNEL(attention_tc_grad_q, 64, 2, 32)
TENSOR_CORE_KERNEL(attention_tc_grad_q, 128, 1, 32)
TENSOR_CORE_KERNEL(attention_tc_grad_q, 256, 1, 16)

// Loads the values of a tile's columns, of which this lane has two out of every eight; missing ones become zeros.
template <u32 COUNT>
__device__ __forceinline__ void load_numbers(f32 (&to)[COUNT], const f32* from, u32 count) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        const u32 column = i / 2 * 8 + lane_of() % 4 * 2 + i % 2;
        to[i] = column < count ? from[column] : 0.0f;
    }
}

// A warp computes keys, so scores and their gradients are transposed. For the largest heads, registers only hold the
// sums of one gradient, so dk and dv are computed by separate kernels.
template <u32 SIZE, u32 BANDS, u32 TILE, bool OF_K, bool OF_V>
__device__ void attention_tc_grad_of(const AttentionArguments& to) {
    constexpr u32 WARP_ROWS = BANDS * BAND, BLOCK_ROWS = WARPS * WARP_ROWS, HALVES = BANDS * 2;
    const u32 warp_row = warp_of() * WARP_ROWS;
    const HalfTile<SIZE> k{(bf16*)shared_memory}, v{k[BLOCK_ROWS]};
    const Passing<SIZE, TILE> passing{{v[BLOCK_ROWS]}};
    const u64 kv_head = blockIdx.y, batch = blockIdx.z;
    const u32 group = u32(to.heads) / u32(to.kv_heads);
    const u32 first = blockIdx.x * BLOCK_ROWS, own = first + warp_row;
    // Iterate over each head's queries, from the first one that sees a key of this block.
    const u32 skipped = u32(to.first_query(first) / TILE);
    const u64 end = to.end_query(smaller(u64(first) + BLOCK_ROWS, to.keys) - 1);
    const u32 turns = u32((end + TILE - 1) / TILE) - skipped;
    const f32 scale = exponent_scale(to);

    Bands<BANDS, SIZE> dk, dv;
    keys_of(to, batch, kv_head).start<BLOCK_ROWS>(k, first);
    if (OF_K) values_of(to, batch, kv_head).start<BLOCK_ROWS>(v, first);
    passing.go_by(
        group * turns,
        [&](u32 turn) {
            const u64 head = kv_head * group + turn / turns;
            const u32 start = (skipped + turn % turns) * TILE;
            queries_of(to, batch, head).start<TILE>(passing.first(turn), start);
            gradients_of(to, batch, head).start<TILE>(passing.second(turn), start);
        },
        [&](u32 turn) {
            const u64 head = kv_head * group + turn / turns;
            const u32 start = (skipped + turn % turns) * TILE;
            const u32 queries = u32(to.queries), last = (start + TILE < queries ? start + TILE : queries) - 1;
            if (seen_by(to, last) <= own) return;
            if (to.first_key_of<TILE>(batch, start) >= own + WARP_ROWS) return;
            const u64 statistics = (batch * to.heads + head) * to.queries + start;
            const u32 there = last - start + 1;
            f32 lse[TILE / 4];
            load_numbers(lse, to.lse + statistics, there);
            Bands<BANDS, TILE> p;
            p.set_to_products(k, warp_row, passing.first(turn));
            if (to.cap > 0.0f) p.visit([&](f32& p, u32, u32) { p = to.score(p); });
            p.visit([&](f32& p, u32, u32 query) { p = exp2_of(p * scale - LOG2_E * lse[query / 8 * 2 + query % 2]); });
            if (seen_by(to, start) < own + WARP_ROWS) {
                // The first query that sees each key of this lane.
                u32 hidden[HALVES];
                for (u32 half = 0; half < HALVES; ++half) hidden[half] = u32(to.first_query(own + p.row_of(half)));
                p.visit([&](f32& p, u32 half, u32 query) { p = start + query >= hidden[half] ? p : 0.0f; });
            }
            if (to.is_cut()) {
                p.visit([&](f32& p, u32 half, u32 query) {
                    p = own + Bands<BANDS, TILE>::row_of(half) >= hidden_from(to, batch, start + query) ? p : 0.0f;
                });
            }
            if constexpr (OF_V) dv.add(p, passing.second(turn));
            if constexpr (OF_K) {
                f32 delta[TILE / 4];
                load_numbers(delta, to.delta + statistics, there);
                Bands<BANDS, TILE> d_scores;
                d_scores.visit([&](f32& d_score, u32, u32 query) { d_score = -delta[query / 8 * 2 + query % 2]; });
                d_scores.add_products(v, warp_row, passing.second(turn));
                d_scores.multiply_by(p);
                if (to.cap > 0.0f) {
                    // Loaded again, because there are too few registers to keep it during the product above.
                    load_numbers(lse, to.lse + statistics, there);
                    p.visit([&](f32& p, u32, u32 query) { p = slope_of(to, p, LOG2_E * lse[query / 8 * 2 + query % 2]); });
                    d_scores.multiply_by(p);
                }
                dk.add(d_scores, passing.first(turn));
            }
        });
    if constexpr (OF_K) {
        dk.visit([&](f32& dk, u32, u32) { dk *= to.scale; });
        dk.store((bf16*)to.dk + to.at_dk.at(batch, kv_head), to.at_dk.token, own, to.keys, u32(to.head_size));
    }
    if constexpr (OF_V) {
        dv.store((bf16*)to.dv + to.at_dv.at(batch, kv_head), to.at_dv.token, own, to.keys, u32(to.value_size));
    }
}

template <u32 SIZE, u32 BANDS, u32 TILE>
__device__ void attention_tc_grad_kv(const AttentionArguments& to) {
    attention_tc_grad_of<SIZE, BANDS, TILE, true, true>(to);
}
TENSOR_CORE_KERNEL(attention_tc_grad_kv, 64, 2, 32)
TENSOR_CORE_KERNEL(attention_tc_grad_kv, 128, 1, 32)

template <u32 SIZE, u32 BANDS, u32 TILE>
__device__ void attention_tc_grad_k(const AttentionArguments& to) {
    attention_tc_grad_of<SIZE, BANDS, TILE, true, false>(to);
}
TENSOR_CORE_KERNEL(attention_tc_grad_k, 256, 1, 16)

template <u32 SIZE, u32 BANDS, u32 TILE>
__device__ void attention_tc_grad_v(const AttentionArguments& to) {
    attention_tc_grad_of<SIZE, BANDS, TILE, false, true>(to);
}
TENSOR_CORE_KERNEL(attention_tc_grad_v, 256, 1, 16)
