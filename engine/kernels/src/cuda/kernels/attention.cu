// Attention, softmax(scale·q·kᵀ)·v, and its gradients, without storing the matrix of scores. CPU counterparts:
// ops/attention.rs, cpu/attention.
//
// The scheme is FlashAttention-2's (Dao 2023, algorithms 1 and 2). The forward iterates over tiles of keys with a
// running maximum and sum per query. The backward recomputes the probabilities from the log-sum-exp. Instead of
// atomics, it has two kernels: one iterates over keys for dq, the other over queries for dk and dv. So the order of
// every sum is fixed. All products here are in f32; those of bf16 are in attention_tensor_cores.cu.
#include "attention.cuh"

// Declares a kernel from a template over rows and columns, for heads of up to 64, 128 and 256 elements.
#define ATTENTION_KERNELS(name)                                             \
    KERNEL(name##_64_f32, AttentionArguments) { name<32, 16>(arguments); }  \
    KERNEL(name##_128_f32, AttentionArguments) { name<32, 32>(arguments); } \
    KERNEL(name##_256_f32, AttentionArguments) { name<16, 32>(arguments); }

// A block computes ROWS queries of one head. Grid: (tiles of queries, heads, batch).
template <u32 ROWS, u32 COLUMNS>
__device__ void attention(const AttentionArguments& to) {
    constexpr u32 LANES = Shape<ROWS, COLUMNS>::LANES;
    const u32 size = u32(to.head_size), of_v = u32(to.value_size), pitch = (size > of_v ? size : of_v) + 1;
    const Tile q{(f32*)shared_memory, pitch}, kv{q[ROWS], pitch}, scores{kv[ROWS], ROWS + 1};
    const u32 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = to.kv_head_of(blockIdx.y);
    const u64 first = u64(blockIdx.x) * ROWS, query = first + row;
    const u64 seen = query < to.queries ? to.visible(query) : 0, hidden = query < to.queries ? to.first_key(batch, query) : 0;
    const u64 begin = to.first_key_of<ROWS>(batch, first) / ROWS * ROWS, end = to.visible(smaller(first + ROWS, to.queries) - 1);
    const f32* k = (const f32*)to.k + to.at_k.at(batch, kv_head);
    const f32* v = (const f32*)to.v + to.at_v.at(batch, kv_head);
    q.load_rows((const f32*)to.q + to.at_q.at(batch, head), to.at_q.token, first, to.queries, ROWS, size);

    f32 sums[COLUMNS] = {};
    f32 max = minus_infinity(), sum = 0.0f;
    for (u64 start = begin; start < end; start += ROWS) {
        __syncthreads(); // The values of the previous tile have been read.
        kv.load_rows(k, to.at_k.token, start, to.keys, ROWS, size);
        __syncthreads();
        f32 greatest = minus_infinity();
        for (u32 j = lane; j < ROWS; j += LANES) {
            const bool sees = start + j < seen && start + j >= hidden;
            const f32 score = sees ? to.score(dot(q[row], kv[j], size)) : minus_infinity();
            scores[row][j] = score;
            greatest = fmaxf(greatest, score);
        }
        greatest = fmaxf(max, fold_lanes<Max>(greatest, LANES));
        // Rows that have not seen a key yet have no maximum.
        const f32 kept = max == minus_infinity() ? 0.0f : expf(max - greatest);
        f32 part = 0.0f;
        for (u32 j = lane; j < ROWS; j += LANES) {
            const f32 p = scores[row][j] == minus_infinity() ? 0.0f : expf(scores[row][j] - greatest);
            scores[row][j] = p;
            part += p;
        }
        sum = sum * kept + fold_lanes<Sum>(part, LANES);
        max = greatest;
        __syncthreads(); // The keys have been read.
        kv.load_rows(v, to.at_v.token, start, to.keys, ROWS, of_v);
        __syncthreads();
#pragma unroll
        for (u32 c = 0; c < COLUMNS; ++c) sums[c] *= kept;
        for (u32 j = 0; j < ROWS; ++j) {
            const f32 p = scores[row][j];
#pragma unroll
            for (u32 c = 0; c < COLUMNS; ++c) {
                if (lane + c * LANES < of_v) sums[c] += p * kv[j][lane + c * LANES];
            }
        }
    }
    if (query >= to.queries) return;
    f32* out = (f32*)to.out + to.at_out.at(batch, head) + query * to.at_out.token;
#pragma unroll
    for (u32 c = 0; c < COLUMNS; ++c) {
        if (lane + c * LANES < of_v) store(out + lane + c * LANES, sums[c] / sum);
    }
    if (lane == 0) to.lse[(batch * to.heads + head) * to.queries + query] = max + logf(sum);
}
ATTENTION_KERNELS(attention)

// A block computes ROWS queries of one head, as in the forward. Stores delta = sum(out·d_out) of each query for
// attention_grad_kv.
template <u32 ROWS, u32 COLUMNS>
__device__ void attention_grad_q(const AttentionArguments& to) {
    constexpr u32 LANES = Shape<ROWS, COLUMNS>::LANES;
    const u32 size = u32(to.head_size), of_v = u32(to.value_size), pitch = (size > of_v ? size : of_v) + 1;
    const Tile q{(f32*)shared_memory, pitch}, d_out{q[ROWS], pitch}, k{d_out[ROWS], pitch}, v{k[ROWS], pitch};
    const Tile d_scores{v[ROWS], ROWS + 1};
    const u32 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u64 head = blockIdx.y, batch = blockIdx.z, kv_head = to.kv_head_of(blockIdx.y);
    const u64 first = u64(blockIdx.x) * ROWS, query = first + row;
    const u64 seen = query < to.queries ? to.visible(query) : 0, hidden = query < to.queries ? to.first_key(batch, query) : 0;
    const u64 begin = to.first_key_of<ROWS>(batch, first) / ROWS * ROWS, end = to.visible(smaller(first + ROWS, to.queries) - 1);
    const u64 statistic = (batch * to.heads + head) * to.queries + query;
    const f32 lse = query < to.queries ? to.lse[statistic] : 0.0f;
    const f32 delta = fold_lanes<Sum>(to.share_of_delta<f32, LANES, Shape<ROWS, COLUMNS>::HEAD_SIZE>(batch, head, query, lane), LANES);
    if (lane == 0 && query < to.queries) to.delta[statistic] = delta;
    q.load_rows((const f32*)to.q + to.at_q.at(batch, head), to.at_q.token, first, to.queries, ROWS, size);
    d_out.load_rows((const f32*)to.d_out + to.at_out.at(batch, head), to.at_out.token, first, to.queries, ROWS, of_v);

    f32 dq[COLUMNS] = {};
    for (u64 start = begin; start < end; start += ROWS) {
        __syncthreads(); // The keys of the previous tile have been read.
        k.load_rows((const f32*)to.k + to.at_k.at(batch, kv_head), to.at_k.token, start, to.keys, ROWS, size);
        v.load_rows((const f32*)to.v + to.at_v.at(batch, kv_head), to.at_v.token, start, to.keys, ROWS, of_v);
        __syncthreads();
        for (u32 j = lane; j < ROWS; j += LANES) {
            f32 d_score = 0.0f;
            if (start + j < seen && start + j >= hidden) {
                const f32 score = to.score(dot(q[row], k[j], size)), p = expf(score - lse);
                d_score = to.scale * to.slope(score) * p * (dot(d_out[row], v[j], of_v) - delta);
            }
            d_scores[row][j] = d_score;
        }
        __syncwarp(); // The lanes of a row are in one warp.
        for (u32 j = 0; j < ROWS; ++j) {
            const f32 d_score = d_scores[row][j];
#pragma unroll
            for (u32 c = 0; c < COLUMNS; ++c) {
                if (lane + c * LANES < size) dq[c] += d_score * k[j][lane + c * LANES];
            }
        }
    }
    if (query >= to.queries) return;
    f32* out = (f32*)to.dq + to.at_dq.at(batch, head) + query * to.at_dq.token;
#pragma unroll
    for (u32 c = 0; c < COLUMNS; ++c) {
        if (lane + c * LANES < size) store(out + lane + c * LANES, dq[c]);
    }
}
ATTENTION_KERNELS(attention_grad_q)

// A block computes ROWS keys of one key head, and iterates over the queries of all heads that read it. Grid: (tiles of
// keys, key heads, batch).
template <u32 ROWS, u32 COLUMNS>
__device__ void attention_grad_kv(const AttentionArguments& to) {
    constexpr u32 LANES = Shape<ROWS, COLUMNS>::LANES;
    const u32 size = u32(to.head_size), of_v = u32(to.value_size), pitch = (size > of_v ? size : of_v) + 1;
    const Tile k{(f32*)shared_memory, pitch}, v{k[ROWS], pitch}, q{v[ROWS], pitch}, d_out{q[ROWS], pitch};
    const Tile p{d_out[ROWS], ROWS + 1}, d_scores{p[ROWS], ROWS + 1};
    const u32 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u64 kv_head = blockIdx.y, batch = blockIdx.z, group = to.heads / to.kv_heads;
    const u64 first = u64(blockIdx.x) * ROWS, key = first + row;
    k.load_rows((const f32*)to.k + to.at_k.at(batch, kv_head), to.at_k.token, first, to.keys, ROWS, size);
    v.load_rows((const f32*)to.v + to.at_v.at(batch, kv_head), to.at_v.token, first, to.keys, ROWS, of_v);

    f32 dk[COLUMNS] = {}, dv[COLUMNS] = {};
    for (u64 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const u64 statistics = (batch * to.heads + head) * to.queries;
        const u64 end = to.end_query(smaller(first + ROWS, to.keys) - 1);
        for (u64 start = to.first_query(first) / ROWS * ROWS; start < end; start += ROWS) {
            __syncthreads(); // The queries of the previous tile have been read.
            q.load_rows((const f32*)to.q + to.at_q.at(batch, head), to.at_q.token, start, to.queries, ROWS, size);
            d_out.load_rows((const f32*)to.d_out + to.at_out.at(batch, head), to.at_out.token, start, to.queries, ROWS, of_v);
            __syncthreads();
            for (u32 i = lane; i < ROWS; i += LANES) {
                const u64 query = start + i;
                f32 probability = 0.0f, d_score = 0.0f;
                if (query < to.queries && key < to.visible(query) && key >= to.first_key(batch, query)) {
                    const f32 score = to.score(dot(q[i], k[row], size));
                    probability = expf(score - to.lse[statistics + query]);
                    const f32 d_probability = dot(d_out[i], v[row], of_v) - to.delta[statistics + query];
                    d_score = to.scale * to.slope(score) * probability * d_probability;
                }
                p[row][i] = probability;
                d_scores[row][i] = d_score;
            }
            __syncwarp(); // The lanes of a row are in one warp.
            for (u32 i = 0; i < ROWS; ++i) {
                const f32 probability = p[row][i], d_score = d_scores[row][i];
#pragma unroll
                for (u32 c = 0; c < COLUMNS; ++c) {
                    if (lane + c * LANES < of_v) dv[c] += probability * d_out[i][lane + c * LANES];
                    if (lane + c * LANES < size) dk[c] += d_score * q[i][lane + c * LANES];
                }
            }
        }
    }
    if (key >= to.keys) return;
    f32* of_k = (f32*)to.dk + to.at_dk.at(batch, kv_head) + key * to.at_dk.token;
    f32* of_values = (f32*)to.dv + to.at_dv.at(batch, kv_head) + key * to.at_dv.token;
#pragma unroll
    for (u32 c = 0; c < COLUMNS; ++c) {
        if (lane + c * LANES < size) store(of_k + lane + c * LANES, dk[c]);
        if (lane + c * LANES < of_v) store(of_values + lane + c * LANES, dv[c]);
    }
}
ATTENTION_KERNELS(attention_grad_kv)
