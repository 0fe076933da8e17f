// The backward of attention_tensor_cores.cu with the asynchronous products of compute capability 9.0 (warpgroup.cuh). One
// kernel computes dq, and another one dk and dv, so that no two blocks add to the same sums. Two computations overlap
// with products: the probabilities are computed from the scores while the products for their gradients run, and these
// gradients are weighted while the next products run.
#include "attention_tensor_cores.cuh"
#include "warpgroup.cuh"

// Number of pairs of tiles in shared memory: one in use, one being copied, and one that products of the previous turn may
// still read.
constexpr u32 STAGES = 3;

// Defines the kernel for heads of up to SIZE elements. BLOCKS blocks fit on a multiprocessor at the same time.
#define BACKWARD(name, SIZE, WARPGROUPS, TILE, BLOCKS)                                                          \
    BOUNDED_KERNEL(name##_##SIZE, AttentionArguments, WARPGROUPS * WARPGROUP_THREADS, BLOCKS) {                 \
        name<SIZE, WARPGROUPS, TILE>(arguments);                                                                \
    }

// Waits until the copies of all threads have arrived, and makes them visible to products.
__device__ __forceinline__ void meet() {
    wait_for_copies<0>();
    fence_shared_memory();
    __syncthreads();
}

// Starts d = a·bᵀ for the rows of a from `row` on and all rows of b, as one group of products.
template <u32 TILE, u32 SIZE, u32 ROWS>
__device__ __forceinline__ void start_scores(Bands<1, TILE>& d, const SwizzledTile<SIZE, ROWS>& a, u32 row,
                                             const SwizzledTile<SIZE, TILE>& b) {
#pragma unroll
    for (u32 i = 0; i < SIZE; i += 16) start_product<false>(d.at[0], a.of_rows(row, i), b.of_rows(0, i), i > 0);
    close_products();
}

// Starts d += weights·b, as one group of products.
template <u32 TILE, u32 SIZE>
__device__ __forceinline__ void start_sums(Bands<1, SIZE>& d, const u32 (&weights)[TILE / 16][4], const SwizzledTile<SIZE, TILE>& b) {
#pragma unroll
    for (u32 i = 0; i < TILE / 16; ++i) start_product<true>(d.at[0], weights[i], b.of_columns(i * 16), true);
    close_products();
}

// Computes dq, and stores delta = sum(out·d_out) of each query for the kernel that computes dk and dv.
template <u32 SIZE, u32 WARPGROUPS, u32 TILE>
__device__ void attention_wg_grad_q(const AttentionArguments& to) {
    constexpr u32 ROWS = WARPGROUPS * WARPGROUP_ROWS, THREADS = WARPGROUPS * WARPGROUP_THREADS;
    const SwizzledTile<SIZE, ROWS> q{swizzled_memory()}, d_out = q.behind(1);
    const SwizzledTile<SIZE, TILE> k{d_out.behind(1).bytes}, v = k.behind(STAGES);
    const u64 head = blockIdx.x, batch = blockIdx.y, kv_head = to.kv_head_of(blockIdx.x);
    // The queries that see most keys are processed first, of all heads and sequences.
    const u32 first = (gridDim.z - 1 - blockIdx.z) * ROWS;
    const u32 own = first + warp_of() * BAND, group_row = warpgroup_of() * WARPGROUP_ROWS, of_group = first + group_row;
    const HeadRows keys = keys_of(to, batch, kv_head);
    const HeadRows values = values_of(to, batch, kv_head);
    const u32 skipped = u32(to.first_key_of<ROWS>(batch, first) / TILE);
    // Returns the number of tiles from tile `skipped` to the last key that any query before `end` sees. `turns` is this
    // number for the block, and `seen_turns` for this warpgroup.
    const auto turns_of = [&](u64 end) {
        return u32((to.visible(smaller(end, to.queries) - 1) + TILE - 1) / TILE) - skipped;
    };
    const u32 turns = turns_of(first + ROWS);
    const u32 seen_turns = of_group < to.queries ? turns_of(of_group + WARPGROUP_ROWS) : 0;
    const auto start = [&](u32 turn) {
        if (turn < turns) {
            keys.start<TILE, THREADS>(k.behind(turn % STAGES), (skipped + turn) * TILE);
            values.start<TILE, THREADS>(v.behind(turn % STAGES), (skipped + turn) * TILE);
        }
        close_copies();
    };
    queries_of(to, batch, head).start<ROWS, THREADS>(q, first);
    gradients_of(to, batch, head).start<ROWS, THREADS>(d_out, first);
    start(0);

    const f32 scale = exponent_scale(to);
    f32 lse[2], delta[2];
    for (u32 half = 0; half < 2; ++half) {
        const u64 query = own + Bands<1, SIZE>::row_of(half), statistic = (batch * to.heads + head) * to.queries + query;
        lse[half] = query < to.queries ? to.lse[statistic] : 0.0f;
        delta[half] = to.share_of_delta<bf16, 4, SIZE>(batch, head, query, lane_of() % 4);
    }
    for (u32 half = 0; half < 2; ++half) {
        const u64 query = own + Bands<1, SIZE>::row_of(half), statistic = (batch * to.heads + head) * to.queries + query;
        lse[half] *= LOG2_E;
        delta[half] = fold_lanes<Sum>(delta[half], 4);
        if (lane_of() % 4 == 0 && query < to.queries) to.delta[statistic] = delta[half];
    }
    Bands<1, SIZE> dq;
    Bands<1, TILE> p, d_scores;
    u32 weights[TILE / 16][4];
    for (u32 turn = 0; turn < seen_turns; ++turn) {
        const SwizzledTile<SIZE, TILE> of_k = k.behind(turn % STAGES), of_v = v.behind(turn % STAGES);
        const u32 at = (skipped + turn) * TILE;
        meet();
        start(turn + 1);
        fence_registers();
        start_scores(p, q, group_row, of_k);
        start_scores(d_scores, d_out, group_row, of_v);
        // The previous turn's sums are complete as well.
        wait_for_products<1>(p.at[0]);
        if (to.cap > 0.0f) p.visit([&](f32& p, u32, u32) { p = to.score(p); });
        p.visit([&](f32& p, u32 half, u32) { p = exp2_of(p * scale - lse[half]); });
        if (at + TILE > to.seen_by(own)) {
            u32 seen[2];
            for (u32 half = 0; half < 2; ++half) seen[half] = to.seen_by(own + p.row_of(half));
            p.visit([&](f32& p, u32 half, u32 column) { p = at + column < seen[half] ? p : 0.0f; });
        }
        if (to.is_cut()) {
            u32 hidden[2];
            for (u32 half = 0; half < 2; ++half) hidden[half] = hidden_from(to, batch, own + p.row_of(half));
            p.visit([&](f32& p, u32 half, u32 column) { p = at + column >= hidden[half] ? p : 0.0f; });
        }
        keep_order(p.at[0]);
        wait_for_products<0>(d_scores.at[0]);
        d_scores.visit([&](f32& d_score, u32 half, u32) { d_score -= delta[half]; });
        d_scores.multiply_by(p);
        if (to.cap > 0.0f) {
            p.visit([&](f32& p, u32 half, u32) { p = slope_of(to, p, lse[half]); });
            d_scores.multiply_by(p);
        }
#pragma unroll
        for (u32 i = 0; i < TILE / 16; ++i) d_scores.round_to(weights[i], 0, i * 2);
        fence_registers();
        start_sums<TILE>(dq, weights, of_k);
        // With two blocks per multiprocessor, there are no registers for further products in flight.
        if (SIZE == 64) wait_for_products<0>(dq.at[0]);
    }
    wait_for_products<0>(dq.at[0]);
    for (u32 turn = seen_turns; turn < turns; ++turn) {
        meet();
        start(turn + 1);
    }
    dq.visit([&](f32& dq, u32, u32) { dq *= to.scale; });
    dq.store((bf16*)to.dq + to.at_dq.at(batch, head), to.at_dq.token, own, to.queries, u32(to.head_size));
}
BACKWARD(attention_wg_grad_q, 64, 2, 64, 2)
BACKWARD(attention_wg_grad_q, 128, 2, 64, 1)

// Returns the end of the queries from `first` to `end` that see a key before `key_end` according to their documents.
// Returns `first` if there are none. All lanes of a warp must call this together. The indices are computed as f32, which
// is exact because there are fewer than 2^24 queries.
__device__ __forceinline__ u32 end_of(const AttentionArguments& to, u64 batch, u32 first, u32 end, u32 key_end) {
    if (!to.starts) return end;
    f32 most = f32(first);
    for (u32 query = first + lane_of(); query < end; query += 32) {
        if (to.first_key(batch, query) < key_end) most = fmaxf(most, f32(query + 1));
    }
    return u32(fold_lanes<Max>(most, 32));
}

// Computes dk and dv. Each warpgroup processes 64 keys, so the tiles of scores and of their gradients are transposed.
template <u32 SIZE, u32 WARPGROUPS, u32 TILE>
__device__ void attention_wg_grad_kv(const AttentionArguments& to) {
    constexpr u32 ROWS = WARPGROUPS * WARPGROUP_ROWS, THREADS = WARPGROUPS * WARPGROUP_THREADS;
    const SwizzledTile<SIZE, ROWS> k{swizzled_memory()}, v = k.behind(1);
    const SwizzledTile<SIZE, TILE> q{v.behind(1).bytes}, d_out = q.behind(STAGES);
    // Three values per query of each tile: the logarithm of the sum of exponentials, as an exponent of two; delta; and
    // the first key that the query sees.
    f32* const statistics = (f32*)d_out.behind(STAGES).bytes;
    static_assert(THREADS >= 3 * TILE, "a thread has one of them");
    // With larger heads, no register is left for the flag.
    const bool is_by_size = SIZE == 64 && to.is_by_size;
    const u64 kv_head = blockIdx.x, batch = is_by_size ? blockIdx.y : blockIdx.z;
    const u32 group = u32(to.heads) / u32(to.kv_heads);
    const u32 first = (is_by_size ? blockIdx.z : blockIdx.y) * ROWS;
    const u32 own = first + warp_of() * BAND, group_row = warpgroup_of() * WARPGROUP_ROWS, of_group = first + group_row;
    // `turns` is the number of tiles per head from the first query that sees a key of this block to the last such query.
    // `hidden_turns` is the number of these tiles before the first tile with a query that sees a key of this warpgroup.
    const u32 queries = u32(to.queries), first_query = u32(to.first_query(first)), skipped = first_query / TILE;
    const u32 end = end_of(to, batch, first_query, u32(to.end_query(smaller(u64(first) + ROWS, to.keys) - 1)), first + ROWS);
    const u32 turns = (end + TILE - 1) / TILE - skipped;
    const u32 hidden_turns = u32(smaller(to.first_query(of_group) / TILE - skipped, turns));
    f32 statistic = 0.0f;
    // The head and tile of the next turn.
    u32 next_head = turns > 0 ? 0 : group, next_tile = 0;
    const auto start = [&](u32 turn) {
        if (next_head < group) {
            const u64 head = kv_head * group + next_head;
            const u32 start = (skipped + next_tile) * TILE;
            queries_of(to, batch, head).start<TILE, THREADS>(q.behind(turn % STAGES), start);
            gradients_of(to, batch, head).start<TILE, THREADS>(d_out.behind(turn % STAGES), start);
            const u32 query = start + threadIdx.x % TILE;
            const u64 at = (batch * to.heads + head) * to.queries + query;
            if (threadIdx.x < 2 * TILE) {
                statistic = query >= queries ? 0.0f : threadIdx.x < TILE ? to.lse[at] * LOG2_E : to.delta[at];
            } else if (to.is_cut()) {
                // This is exact, because there are fewer than 2^24 keys.
                statistic = f32(hidden_from(to, batch, query));
            }
            if (++next_tile == turns) {
                next_tile = 0;
                ++next_head;
            }
        }
        close_copies();
    };
    keys_of(to, batch, kv_head).start<ROWS, THREADS>(k, first);
    values_of(to, batch, kv_head).start<ROWS, THREADS>(v, first);
    start(0);

    const f32 scale = exponent_scale(to);
    Bands<1, SIZE> dk, dv;
    Bands<1, TILE> p, d_scores;
    u32 of_p[TILE / 16][4], of_scores[TILE / 16][4];
    const auto arrive = [&](u32 turn) {
        statistics[turn % STAGES * THREADS + threadIdx.x] = statistic;
        meet();
        start(turn + 1);
    };
    u32 turn = 0;
    for (u32 of_head = 0; of_head < group; ++of_head) {
        u32 tile = 0;
        for (; tile < hidden_turns; ++tile, ++turn) arrive(turn);
        for (; tile < turns; ++tile, ++turn) {
            const SwizzledTile<SIZE, TILE> of_q = q.behind(turn % STAGES), of_d_out = d_out.behind(turn % STAGES);
            const f32* const lse = statistics + turn % STAGES * THREADS;
            const u32 at = (skipped + tile) * TILE;
            arrive(turn);
            fence_registers();
            start_scores(p, k, group_row, of_q);
            start_scores(d_scores, v, group_row, of_d_out);
            // The previous turn's sums are complete as well.
            wait_for_products<1>(p.at[0]);
            if (to.cap > 0.0f) p.visit([&](f32& p, u32, u32) { p = to.score(p); });
            p.visit_with(lse, [&](f32& p, u32, f32 lse) { p = exp2_of(p * scale - lse); });
            if (to.seen_by(at) < own + BAND) {
                u32 hidden[2];
                for (u32 half = 0; half < 2; ++half) hidden[half] = u32(to.first_query(own + p.row_of(half)));
                p.visit([&](f32& p, u32 half, u32 query) { p = at + query >= hidden[half] ? p : 0.0f; });
            }
            if (to.is_cut()) {
                f32 key[2];
                for (u32 half = 0; half < 2; ++half) key[half] = f32(own + p.row_of(half));
                p.visit_with(lse + 2 * TILE, [&](f32& p, u32 half, f32 first) { p = key[half] >= first ? p : 0.0f; });
            }
            // The registers of a product's left operand must be written while no products are in flight. Otherwise the
            // assembler waits for each product.
            keep_order(p.at[0]);
            wait_for_products<0>(d_scores.at[0]);
#pragma unroll
            for (u32 i = 0; i < TILE / 16; ++i) p.round_to(of_p[i], 0, i * 2);
            d_scores.visit_with(lse + TILE, [&](f32& d_score, u32, f32 delta) { d_score -= delta; });
            d_scores.multiply_by(p);
            if (to.cap > 0.0f) {
                d_scores.visit_beside(p, lse, [&](f32& d_score, f32 p, u32, f32 lse) { d_score *= slope_of(to, p, lse); });
            }
#pragma unroll
            for (u32 i = 0; i < TILE / 16; ++i) d_scores.round_to(of_scores[i], 0, i * 2);
            fence_registers();
            start_sums<TILE>(dv, of_p, of_d_out);
            start_sums<TILE>(dk, of_scores, of_q);
        }
        // Wait here, because the following turns may overwrite the tiles that products read.
        wait_for_products<0>(dk.at[0], dv.at[0]);
    }
    wait_for_copies<0>();
    dk.visit([&](f32& dk, u32, u32) { dk *= to.scale; });
    dk.store((bf16*)to.dk + to.at_dk.at(batch, kv_head), to.at_dk.token, own, to.keys, u32(to.head_size));
    dv.store((bf16*)to.dv + to.at_dv.at(batch, kv_head), to.at_dv.token, own, to.keys, u32(to.value_size));
}
BACKWARD(attention_wg_grad_kv, 64, 2, 64, 1)
BACKWARD(attention_wg_grad_kv, 128, 2, 64, 1)
