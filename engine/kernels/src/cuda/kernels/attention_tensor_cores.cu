// The kernels of attention.cu for bf16: the same scheme, with products on tensor cores. Probabilities and their
// gradients are rounded to bf16 before they are multiplied. The next tiles are copied while the current ones are
// multiplied.
//
// A warp has BANDS bands of sixteen rows. More bands mean more products for each read of shared memory, and more
// registers.
#include "attention_tensor_cores.cuh"

constexpr u32 WARPS = ATTENTION_THREADS / 32;

// Declares a kernel for heads of up to SIZE elements, with BANDS bands per warp and TILE rows per streamed tile.
#define TENSOR_CORE_KERNEL(name, SIZE, BANDS, TILE) \
    BOUNDED_KERNEL(name##_##SIZE, AttentionArguments, ATTENTION_THREADS, 2) { name<SIZE, BANDS, TILE>(arguments); }

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
        // The block's own rows are copied even if there is no turn.
        if (turns == 0) wait_for_copies<0>();
    }
};

template <u32 SIZE, u32 BANDS, u32 TILE>
__device__ void attention_tc(const AttentionArguments& to) {
    constexpr u32 WARP_ROWS = BANDS * BAND, BLOCK_ROWS = WARPS * WARP_ROWS, HALVES = BANDS * 2;
    const u32 warp_row = warp_of() * WARP_ROWS;
    const HalfTile<SIZE> q{(bf16*)shared_memory};
    const Passing<SIZE, TILE> passing{{q[BLOCK_ROWS]}};
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = to.kv_head_of(blockIdx.y);
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
                for (u32 half = 0; half < HALVES; ++half) seen[half] = to.seen_by(u32(own) + scores.row_of(half));
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
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = to.kv_head_of(blockIdx.y);
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
        delta[half] = fold_lanes<Sum>(to.share_of_delta<bf16, 4, SIZE>(batch, head, query, lane_of() % 4), 4);
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

// Each warp handles a range of keys and iterates over queries, so scores and their gradients are transposed. For the largest heads, the
// registers can hold the sums of only one of dk and dv, so separate kernels compute them.
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
            if (to.seen_by(last) <= own) return;
            if (to.first_key_of<TILE>(batch, start) >= own + WARP_ROWS) return;
            const u64 statistics = (batch * to.heads + head) * to.queries + start;
            const u32 there = last - start + 1;
            f32 lse[TILE / 4];
            load_numbers(lse, to.lse + statistics, there);
            Bands<BANDS, TILE> p;
            p.set_to_products(k, warp_row, passing.first(turn));
            if (to.cap > 0.0f) p.visit([&](f32& p, u32, u32) { p = to.score(p); });
            p.visit([&](f32& p, u32, u32 query) { p = exp2_of(p * scale - LOG2_E * lse[query / 8 * 2 + query % 2]); });
            if (to.seen_by(start) < own + WARP_ROWS) {
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
