// The forward of attention_tensor_cores.cu with the asynchronous products of compute capability 9.0 (warpgroup.cuh). It
// follows FlashAttention-3 (Shah et al. 2024, section 3.2). While a warpgroup computes the exponentials of one tile of
// scores, the tensor cores multiply the previous tile's probabilities by its values. Products of other warpgroups use the
// tensor cores in the remaining time.
#include "attention_tensor_cores.cuh"
#include "warpgroup.cuh"

// The base that is subtracted from scores may be below their maximum by this much, as an exponent of two. Only when the
// maximum grows further is the base raised, and the sums so far are rescaled (as in FlashAttention-4). So probabilities
// are at most 2^8.
constexpr f32 SLACK = 8.0f;

// A block processes 64 queries of one head per warpgroup, and iterates over tiles of keys. With HOLDS_QUERIES, the
// queries are kept in registers, which leaves the bandwidth of shared memory to keys and values.
template <u32 SIZE, u32 WARPGROUPS, u32 TILE, bool HOLDS_QUERIES>
__device__ void attention_wg(const AttentionArguments& to) {
    constexpr u32 ROWS = WARPGROUPS * WARPGROUP_ROWS, THREADS = WARPGROUPS * WARPGROUP_THREADS;
    const SwizzledTile<SIZE, ROWS> q{swizzled_memory()};
    const SwizzledTile<SIZE, TILE> k{q.behind(1).bytes}, v = k.behind(2);
    const u64 head = blockIdx.x, batch = blockIdx.y, kv_head = to.kv_head_of(blockIdx.x);
    // The queries that see most keys are processed first, of all heads and sequences.
    const u32 first = (gridDim.z - 1 - blockIdx.z) * ROWS;
    const u32 own = first + warp_of() * BAND, group_row = warpgroup_of() * WARPGROUP_ROWS, of_group = first + group_row;
    const HeadRows queries = queries_of(to, batch, head);
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
    const f32 scale = exponent_scale(to);

    // Starts the copies of a turn: the keys of this turn, and the values of the previous turn.
    const auto start = [&](u32 turn) {
        if (turn < turns) keys.start<TILE, THREADS>(k.behind(turn % 2), (skipped + turn) * TILE);
        if (turn > 0 && turn <= turns) values.start<TILE, THREADS>(v.behind((turn - 1) % 2), (skipped + turn - 1) * TILE);
        close_copies();
    };
    const auto arrive = [&](u32 turn) {
        wait_for_copies<0>();
        fence_shared_memory();
        __syncthreads(); // All threads' copies have arrived, and no thread still reads the tiles that the next copies overwrite.
        start(turn + 1);
    };
    queries.start<ROWS, THREADS>(q, first);
    close_copies();
    start(0);
    u32 of_q[SIZE / 16][4];
    if (HOLDS_QUERIES) {
        wait_for_copies<1>();
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < SIZE / 16; ++i) {
            load_matrices(of_q[i], q.at(warp_of() * BAND + lane_of() % 16, i * 16 + lane_of() / 16 * 8));
        }
    }

    Bands<1, TILE> scores;
    Bands<1, SIZE> sums;
    u32 weights[TILE / 16][4];
    f32 base[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};
    const auto start_scores = [&](u32 turn) {
        const SwizzledTile<SIZE, TILE> tile = k.behind(turn % 2);
        fence_registers();
#pragma unroll
        for (u32 i = 0; i < SIZE / 16; ++i) {
            if constexpr (HOLDS_QUERIES) {
                start_product<false>(scores.at[0], of_q[i], tile.of_rows(0, i * 16), i > 0);
            } else {
                start_product<false>(scores.at[0], q.of_rows(group_row, i * 16), tile.of_rows(0, i * 16), i > 0);
            }
        }
        close_products();
    };
    arrive(0);
    if (seen_turns > 0) {
        start_scores(0);
        wait_for_products<0>(scores.at[0]);
    }
    for (u32 turn = 0; turn < seen_turns; ++turn) {
        const u32 at = (skipped + turn) * TILE;
        if (to.cap > 0.0f) scores.visit([&](f32& score, u32, u32) { score = to.score(score); });
        if (at + TILE > to.seen_by(own)) {
            u32 seen[2];
            for (u32 half = 0; half < 2; ++half) seen[half] = to.seen_by(own + scores.row_of(half));
            scores.visit([&](f32& score, u32 half, u32 column) {
                score = at + column < seen[half] ? score : minus_infinity();
            });
        }
        if (to.is_cut()) {
            u32 hidden[2];
            for (u32 half = 0; half < 2; ++half) hidden[half] = hidden_from(to, batch, own + scores.row_of(half));
            scores.visit([&](f32& score, u32 half, u32 column) {
                score = at + column >= hidden[half] ? score : minus_infinity();
            });
        }
        f32 greatest[2] = {minus_infinity(), minus_infinity()};
        scores.visit([&](f32& score, u32 half, u32) { greatest[half] = fmaxf(greatest[half], score); });
        bool grows = false;
        for (u32 half = 0; half < 2; ++half) {
            // The elements of a row are in four neighboring lanes.
            greatest[half] = fold_lanes<Max>(greatest[half], 4) * scale;
            grows |= greatest[half] > base[half] + SLACK;
        }
        grows = __ballot_sync(ALL_LANES, grows) != 0;
        f32 kept[2] = {1.0f, 1.0f}, subtracted[2];
        for (u32 half = 0; half < 2; ++half) {
            if (grows && greatest[half] > base[half]) {
                kept[half] = exp2_of(base[half] - greatest[half]);
                base[half] = greatest[half];
                sum[half] *= kept[half];
            }
            // A row that has not seen any key yet has no base.
            subtracted[half] = base[half] == minus_infinity() ? 0.0f : base[half];
        }
        scores.visit([&](f32& score, u32 half, u32) {
            score = exp2_of(score * scale - subtracted[half]);
            sum[half] += score;
        });
        keep_order(scores.at[0]);
        // Meanwhile, the previous tile's values are multiplied. The wait is duplicated into both branches, because the
        // assembler moves a wait to the start of its basic block, which would otherwise be before the exponentials.
        if (grows) {
            wait_for_products<0>(sums.at[0]);
            sums.visit([&](f32& sum, u32 half, u32) { sum *= kept[half]; });
        } else {
            wait_for_products<0>(sums.at[0]);
        }
#pragma unroll
        for (u32 i = 0; i < TILE / 16; ++i) scores.round_to(weights[i], 0, i * 2);
        arrive(turn + 1);
        if (turn + 1 < seen_turns) start_scores(turn + 1);
        const SwizzledTile<SIZE, TILE> tile = v.behind(turn % 2);
        fence_registers();
#pragma unroll
        for (u32 i = 0; i < TILE / 16; ++i) start_product<true>(sums.at[0], weights[i], tile.of_columns(i * 16), true);
        close_products();
        wait_for_products<1>(scores.at[0]);
    }
    wait_for_products<0>(sums.at[0]);
    for (u32 turn = seen_turns; turn < turns; ++turn) arrive(turn + 1);
    for (u32 half = 0; half < 2; ++half) {
        sum[half] = fold_lanes<Sum>(sum[half], 4);
        const u64 query = own + sums.row_of(half);
        if (lane_of() % 4 == 0 && query < to.queries) {
            to.lse[(batch * to.heads + head) * to.queries + query] = base[half] * (1.0f / LOG2_E) + logf(sum[half]);
        }
        sum[half] = 1.0f / sum[half];
    }
    sums.visit([&](f32& out, u32 half, u32) { out *= sum[half]; });
    sums.store((bf16*)to.out + to.at_out.at(batch, head), to.at_out.token, own, to.queries, u32(to.value_size));
}

// Defines the kernel for heads of up to SIZE elements. BLOCKS blocks fit on a multiprocessor at the same time.
#define FORWARD(SIZE, WARPGROUPS, TILE, HOLDS_QUERIES, BLOCKS)                                               \
    BOUNDED_KERNEL(attention_wg_##SIZE, AttentionArguments, WARPGROUPS * WARPGROUP_THREADS, BLOCKS) {        \
        attention_wg<SIZE, WARPGROUPS, TILE, HOLDS_QUERIES>(arguments);                                      \
    }
#ifdef FOLDED
// The places of queries take the registers.
FORWARD(64, 2, 64, false, 2)
#else
FORWARD(64, 2, 64, true, 2)
#endif
FORWARD(128, 2, 128, false, 1)
FORWARD(256, 2, 64, false, 1)
