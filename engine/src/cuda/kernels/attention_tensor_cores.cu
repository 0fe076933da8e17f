// The kernels of attention.cu once more, for bf16 and heads of up to 128 elements: the same scheme with its products on tensor
// cores. Probabilities and their gradients are rounded to bf16 where they are multiplied. A block has four warps, each warp
// sixteen rows.
#include "attention.cuh"
#include "tensor_cores.cuh"

constexpr u32 WARP_ROWS = 16;
constexpr u32 BLOCK_ROWS = WARP_ROWS * ATTENTION_THREADS / 32;

#define TENSOR_CORE_KERNELS(name)                                                     \
    KERNEL(name##_64, AttentionArguments) { name<64>(arguments); }                    \
    KERNEL(name##_128, AttentionArguments) { name<128>(arguments); }

// Rounds sixteen rows of sums, of which this lane has some, and stores those of tokens before `end`.
template <u32 SIZE>
__device__ __forceinline__ void store_rows(bf16* to, u64 stride, u64 first, u64 end, u32 size, const f32 (&sums)[SIZE / 8][4]) {
#pragma unroll
    for (u32 n = 0; n < SIZE / 8; ++n) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const u64 token = first + lane_of() / 4 + e / 2 * 8;
            const u32 column = n * 8 + lane_of() % 4 * 2 + e % 2;
            if (token < end && column < size) store(to + token * stride + column, sums[n][e]);
        }
    }
}

// Keys of a tile in the forward, and keys or queries of one in the backward.
constexpr u32 FORWARD_TILE = 64;
constexpr u32 BACKWARD_TILE = 32;

template <u32 SIZE>
__device__ void attention_tc(const AttentionArguments& to) {
    constexpr u32 TILES = FORWARD_TILE / 8;
    const u32 size = u32(to.head_size);
    const HalfTile<SIZE> q{(bf16*)shared_memory}, k{q[BLOCK_ROWS]}, v{k[FORWARD_TILE]};
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = head / (to.heads / to.kv_heads);
    const u64 first = u64(blockIdx.x) * BLOCK_ROWS, end = to.visible(smaller(first + BLOCK_ROWS, to.queries) - 1);
    const bf16* keys = (const bf16*)to.k + to.at_k.at(batch, kv_head);
    const bf16* values = (const bf16*)to.v + to.at_v.at(batch, kv_head);
    q.load_rows((const bf16*)to.q + to.at_q.at(batch, head), to.at_q.token, first, to.queries, BLOCK_ROWS, size);

    u64 seen[2];
    f32 max[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};
    for (u32 half = 0; half < 2; ++half) {
        const u64 query = first + warp_of() * WARP_ROWS + lane_of() / 4 + half * 8;
        seen[half] = query < to.queries ? to.visible(query) : 0;
    }
    f32 sums[SIZE / 8][4] = {};
    for (u64 start = 0; start < end; start += FORWARD_TILE) {
        __syncthreads(); // The last tile has been read.
        k.load_rows(keys, to.at_k.token, start, to.keys, FORWARD_TILE, size);
        v.load_rows(values, to.at_v.token, start, to.keys, FORWARD_TILE, size);
        __syncthreads();
        f32 scores[TILES][4];
        multiply_rows(scores, q, warp_of() * WARP_ROWS, k);
        f32 greatest[2] = {max[0], max[1]}, kept[2], part[2] = {};
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const bool is_seen = start + n * 8 + lane_of() % 4 * 2 + e % 2 < seen[e / 2];
                scores[n][e] = is_seen ? to.scale * scores[n][e] : minus_infinity();
                greatest[e / 2] = fmaxf(greatest[e / 2], scores[n][e]);
            }
        }
        for (u32 half = 0; half < 2; ++half) {
            // Four neighbouring lanes have a row.
            greatest[half] = fold_lanes<Max>(greatest[half], 4);
            // Rows that have seen nothing yet have no maximum.
            kept[half] = max[half] == minus_infinity() ? 0.0f : expf(max[half] - greatest[half]);
            max[half] = greatest[half];
        }
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                scores[n][e] = scores[n][e] == minus_infinity() ? 0.0f : expf(scores[n][e] - max[e / 2]);
                part[e / 2] += scores[n][e];
            }
        }
        for (u32 half = 0; half < 2; ++half) sum[half] = sum[half] * kept[half] + fold_lanes<Sum>(part[half], 4);
#pragma unroll
        for (u32 n = 0; n < SIZE / 8; ++n) {
            for (u32 e = 0; e < 4; ++e) sums[n][e] *= kept[e / 2];
        }
        add_rows(sums, scores, v);
    }
#pragma unroll
    for (u32 n = 0; n < SIZE / 8; ++n) {
        for (u32 e = 0; e < 4; ++e) sums[n][e] = sum[e / 2] > 0.0f ? sums[n][e] / sum[e / 2] : 0.0f;
    }
    bf16* out = (bf16*)to.out + to.at_out.at(batch, head);
    store_rows<SIZE>(out, to.at_out.token, first + warp_of() * WARP_ROWS, to.queries, size, sums);
    for (u32 half = 0; half < 2; ++half) {
        const u64 query = first + warp_of() * WARP_ROWS + lane_of() / 4 + half * 8;
        if (lane_of() % 4 == 0 && query < to.queries) {
            const f32 lse = sum[half] > 0.0f ? max[half] + logf(sum[half]) : max[half];
            to.lse[(batch * to.heads + head) * to.queries + query] = lse;
        }
    }
}
TENSOR_CORE_KERNELS(attention_tc)

template <u32 SIZE>
__device__ void attention_tc_grad_q(const AttentionArguments& to) {
    constexpr u32 TILES = BACKWARD_TILE / 8;
    const u32 size = u32(to.head_size);
    const HalfTile<SIZE> q{(bf16*)shared_memory}, d_out{q[BLOCK_ROWS]}, k{d_out[BLOCK_ROWS]}, v{k[BACKWARD_TILE]};
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = head / (to.heads / to.kv_heads);
    const u64 first = u64(blockIdx.x) * BLOCK_ROWS, end = to.visible(smaller(first + BLOCK_ROWS, to.queries) - 1);
    q.load_rows((const bf16*)to.q + to.at_q.at(batch, head), to.at_q.token, first, to.queries, BLOCK_ROWS, size);
    d_out.load_rows((const bf16*)to.d_out + to.at_out.at(batch, head), to.at_out.token, first, to.queries, BLOCK_ROWS, size);

    u64 seen[2];
    f32 lse[2], delta[2];
    for (u32 half = 0; half < 2; ++half) {
        const u64 query = first + warp_of() * WARP_ROWS + lane_of() / 4 + half * 8;
        const u64 statistic = (batch * to.heads + head) * to.queries + query;
        const bool is_there = query < to.queries;
        seen[half] = is_there ? to.visible(query) : 0;
        lse[half] = is_there ? to.lse[statistic] : 0.0f;
        delta[half] = is_there ? to.delta[statistic] : 0.0f;
    }
    f32 dq[SIZE / 8][4] = {};
    for (u64 start = 0; start < end; start += BACKWARD_TILE) {
        __syncthreads(); // The last tile has been read.
        k.load_rows((const bf16*)to.k + to.at_k.at(batch, kv_head), to.at_k.token, start, to.keys, BACKWARD_TILE, size);
        v.load_rows((const bf16*)to.v + to.at_v.at(batch, kv_head), to.at_v.token, start, to.keys, BACKWARD_TILE, size);
        __syncthreads();
        f32 scores[TILES][4], d_scores[TILES][4];
        multiply_rows(scores, q, warp_of() * WARP_ROWS, k);
        multiply_rows(d_scores, d_out, warp_of() * WARP_ROWS, v);
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                const bool is_seen = start + n * 8 + lane_of() % 4 * 2 + e % 2 < seen[e / 2];
                const f32 p = is_seen ? expf(to.scale * scores[n][e] - lse[e / 2]) : 0.0f;
                d_scores[n][e] = is_seen ? to.scale * p * (d_scores[n][e] - delta[e / 2]) : 0.0f;
            }
        }
        add_rows(dq, d_scores, k);
    }
    bf16* out = (bf16*)to.dq + to.at_out.at(batch, head);
    store_rows<SIZE>(out, to.at_out.token, first + warp_of() * WARP_ROWS, to.queries, size, dq);
}
TENSOR_CORE_KERNELS(attention_tc_grad_q)

// A warp has sixteen keys: scores and their gradients are transposed.
template <u32 SIZE>
__device__ void attention_tc_grad_kv(const AttentionArguments& to) {
    constexpr u32 TILES = BACKWARD_TILE / 8;
    const u32 size = u32(to.head_size);
    const HalfTile<SIZE> k{(bf16*)shared_memory}, v{k[BLOCK_ROWS]}, q{v[BLOCK_ROWS]}, d_out{q[BACKWARD_TILE]};
    f32* lse = (f32*)d_out[BACKWARD_TILE];
    f32* delta = lse + BACKWARD_TILE;
    const u64 kv_head = blockIdx.y, batch = blockIdx.z, group = to.heads / to.kv_heads;
    const u64 first = u64(blockIdx.x) * BLOCK_ROWS, own = first + warp_of() * WARP_ROWS + lane_of() / 4;
    k.load_rows((const bf16*)to.k + to.at_k.at(batch, kv_head), to.at_k.token, first, to.keys, BLOCK_ROWS, size);
    v.load_rows((const bf16*)to.v + to.at_v.at(batch, kv_head), to.at_v.token, first, to.keys, BLOCK_ROWS, size);

    f32 dk[SIZE / 8][4] = {}, dv[SIZE / 8][4] = {};
    for (u64 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const u64 statistics = (batch * to.heads + head) * to.queries;
        const bf16* queries = (const bf16*)to.q + to.at_q.at(batch, head);
        const bf16* gradients = (const bf16*)to.d_out + to.at_out.at(batch, head);
        for (u64 start = to.first_query(first) / BACKWARD_TILE * BACKWARD_TILE; start < to.queries; start += BACKWARD_TILE) {
            __syncthreads(); // The last tile has been read.
            q.load_rows(queries, to.at_q.token, start, to.queries, BACKWARD_TILE, size);
            d_out.load_rows(gradients, to.at_out.token, start, to.queries, BACKWARD_TILE, size);
            if (threadIdx.x < BACKWARD_TILE && start + threadIdx.x < to.queries) {
                lse[threadIdx.x] = to.lse[statistics + start + threadIdx.x];
                delta[threadIdx.x] = to.delta[statistics + start + threadIdx.x];
            }
            __syncthreads();
            f32 p[TILES][4], d_scores[TILES][4];
            multiply_rows(p, k, warp_of() * WARP_ROWS, q);
            multiply_rows(d_scores, v, warp_of() * WARP_ROWS, d_out);
#pragma unroll
            for (u32 n = 0; n < TILES; ++n) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    const u32 i = n * 8 + lane_of() % 4 * 2 + e % 2;
                    const bool is_seen = start + i < to.queries && own + e / 2 * 8 < to.visible(start + i);
                    p[n][e] = is_seen ? expf(to.scale * p[n][e] - lse[i]) : 0.0f;
                    d_scores[n][e] = is_seen ? to.scale * p[n][e] * (d_scores[n][e] - delta[i]) : 0.0f;
                }
            }
            add_rows(dv, p, d_out);
            add_rows(dk, d_scores, q);
        }
    }
    const u64 at = to.at_d_kv.at(batch, kv_head), first_own = first + warp_of() * WARP_ROWS;
    store_rows<SIZE>((bf16*)to.dk + at, to.at_d_kv.token, first_own, to.keys, size, dk);
    store_rows<SIZE>((bf16*)to.dv + at, to.at_d_kv.token, first_own, to.keys, size, dv);
}
TENSOR_CORE_KERNELS(attention_tc_grad_kv)
