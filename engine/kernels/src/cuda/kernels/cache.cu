// Caches of past keys and values, and attention over them. CPU counterparts: ops/cache_write.rs, ops/cached_attention.rs.
#include "attention.cuh"
#include "last_block.cuh"
#include "strides.cuh"

struct CacheWriteArguments {
    const void* x;
    const u32* positions;
    void* cache;
    // Number of elements of x, [batch][heads][tokens][size].
    u64 elements;
    u64 heads;
    u64 tokens;
    u64 size;
    // Number of rows that the cache has per head.
    u64 window;
    Strides at_x;
};

// A thread writes one element. Rows whose position is outside of the window are not written.
template <typename T>
__device__ void cache_write(const CacheWriteArguments& to) {
    const u64 i = global_thread();
    if (i >= to.elements) return;
    const u64 row = i / to.size, head = row / to.tokens;
    const u64 position = to.positions[head / to.heads * to.tokens + row % to.tokens];
    if (position >= to.window) return;
    ((T*)to.cache)[(head * to.window + position) * to.size + i % to.size] = ((const T*)to.x)[to.at_x.at(i)];
}
KERNELS(cache_write, CacheWriteArguments)

struct CachedAttentionArguments {
    // The keys and values are those of the whole window.
    AttentionArguments attention;
    // The position of each query, [batch][queries].
    const u32* positions;
    // A score per head that takes part in the softmax but has no value; null without sinks.
    const f32* sinks;
    // [batch][key heads][rows][splits][2 + value size], with the maximum and the sum of the exponentials first. Unused if
    // there is one split.
    f32* parts;
    u32* tickets;
    // Number of blocks that share the keys of a row.
    u32 splits;
    // True if the rows of q, k and v consist of whole packs and of groups of OWN elements.
    u32 is_packed;

    __device__ __forceinline__ u64 visible(u64 batch, u64 query) const {
        return smaller(u64(positions[batch * attention.queries + query]) + 1, attention.keys);
    }
};

// Number of neighbouring elements of a head that a lane processes.
constexpr u32 OWN = 8;

// A part of a row of a softmax: the maximum score, the sum of the exponentials, and one element of the weighted sum of
// the values.
struct RowPart {
    f32 max;
    f32 sum;
    f32 out;
};

// Combines parts of a row, in order. A part without keys has a maximum of minus infinity.
template <typename F>
__device__ __forceinline__ RowPart combined(u32 count, F part) {
    RowPart all = {minus_infinity(), 0.0f, 0.0f};
    for (u32 i = 0; i < count; ++i) all.max = fmaxf(all.max, part(i).max);
    for (u32 i = 0; i < count; ++i) {
        const RowPart one = part(i);
        const f32 weight = one.max == minus_infinity() ? 0.0f : expf(one.max - all.max);
        all.sum += weight * one.sum;
        all.out += weight * one.out;
    }
    return all;
}

// A block computes up to ROWS rows. A row is a query of one of the heads that read the same head of keys, so that each key
// is loaded once for all rows. Teams of LANES lanes process different keys, each lane OWN elements of the head. Grid:
// (groups of rows, splits of the keys, batch · key heads).
template <typename T, u32 LANES, u32 ROWS, bool PACKED>
__device__ __forceinline__ void cached_attention_of(const CachedAttentionArguments& all) {
    // AHEAD keys and values of a team are loaded before the first of them is used.
    constexpr u32 TEAMS = ATTENTION_THREADS / LANES, AHEAD = sizeof(T) == 2 ? 4 : 2, SIZE = LANES * OWN;
    const AttentionArguments& to = all.attention;
    const u32 kv_heads = u32(to.kv_heads), group = u32(to.heads) / kv_heads, rows = u32(to.queries) * group;
    const u32 size = u32(to.head_size), of_v = u32(to.value_size);
    const u32 team = threadIdx.x / LANES, column = threadIdx.x % LANES * OWN;
    const u32 batch = blockIdx.z / kv_heads, kv_head = blockIdx.z % kv_heads, first = blockIdx.x * ROWS;

    // Rows are sorted by query. If there are fewer than ROWS rows, the last one is computed several times.
    f32 q[ROWS][OWN];
    u64 seen[ROWS], hidden[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        const u32 row = first + r < rows ? first + r : rows - 1, query = row / group;
        const T* own = (const T*)to.q + to.at_q.at(batch, kv_head * group + row % group) + query * to.at_q.token;
        unpack(q[r], neighbours_in<false, OWN>(own, column, size));
        seen[r] = all.visible(batch, query);
        hidden[r] = to.first_key_from(0, seen[r]);
    }
    u64 begin = hidden[0], end = seen[0];
#pragma unroll
    for (u32 r = 1; r < ROWS; ++r) {
        begin = smaller(begin, hidden[r]);
        end = seen[r] > end ? seen[r] : end;
    }
    const u64 share = (end - begin + all.splits - 1) / all.splits;
    begin += blockIdx.y * share;
    end = smaller(begin + share, end);

    const T* k = (const T*)to.k + to.at_k.at(batch, kv_head);
    const T* v = (const T*)to.v + to.at_v.at(batch, kv_head);
    f32 max[ROWS], sum[ROWS] = {}, out[ROWS][OWN] = {};
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) max[r] = minus_infinity();
    for (u64 start = begin; start < end; start += TEAMS * AHEAD) {
        Neighbours<T, OWN> keys[AHEAD], values[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) {
            const u64 key = smaller(start + i * TEAMS + team, end - 1);
            keys[i] = neighbours_in<PACKED, OWN>(k + key * to.at_k.token, column, size);
            values[i] = neighbours_in<PACKED, OWN>(v + key * to.at_v.token, column, of_v);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) {
            const u64 key = start + i * TEAMS + team;
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                // Columns past the end of a head are zeros in q.
                f32 product = 0.0f;
#pragma unroll
                for (u32 j = 0; j < OWN; ++j) product += q[r][j] * keys[i][j];
                const f32 score = to.score(fold_lanes<Sum>(product, LANES));
                const bool sees = key < end && key < seen[r] && key >= hidden[r];
                const f32 greatest = sees ? fmaxf(max[r], score) : max[r];
                // Rows that have not seen a key yet have no maximum.
                const f32 kept = max[r] == minus_infinity() ? 0.0f : expf(max[r] - greatest);
                const f32 p = sees ? expf(score - greatest) : 0.0f;
                sum[r] = sum[r] * kept + p;
#pragma unroll
                for (u32 j = 0; j < OWN; ++j) out[r][j] = out[r][j] * kept + p * values[i][j];
                max[r] = greatest;
            }
        }
    }

    // The teams' parts, [rows][teams].
    f32* const maxima = (f32*)shared_memory;
    f32* const sums = maxima + ROWS * TEAMS;
    f32* const outs = sums + ROWS * TEAMS;
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        maxima[r * TEAMS + team] = max[r];
        sums[r * TEAMS + team] = sum[r];
#pragma unroll
        for (u32 j = 0; j < OWN; ++j) outs[(r * TEAMS + team) * SIZE + column + j] = out[r][j];
    }
    __syncthreads();
    const u32 stored = rows - first < ROWS ? rows - first : ROWS;
    const auto store_row = [&](u32 r, u32 element, const RowPart& part) {
        const u32 query = (first + r) / group, head = kv_head * group + (first + r) % group;
        const f32 sum = part.sum + (all.sinks ? expf(all.sinks[head] - part.max) : 0.0f);
        store((T*)to.out + to.at_out.at(batch, head) + query * to.at_out.token + element, part.out / sum);
    };
    f32* const parts = all.parts + u64(blockIdx.z) * rows * all.splits * (2 + of_v);
    const auto part_of = [&](u32 r, u32 split) { return parts + (u64(first + r) * all.splits + split) * (2 + of_v); };
    for (u32 i = threadIdx.x; i < stored * of_v; i += ATTENTION_THREADS) {
        const u32 r = i / of_v, element = i % of_v;
        const RowPart part = combined(TEAMS, [&](u32 t) {
            const u32 one = r * TEAMS + t;
            return RowPart{maxima[one], sums[one], outs[one * SIZE + element]};
        });
        if (all.splits == 1) {
            store_row(r, element, part);
        } else {
            f32* const to_part = part_of(r, blockIdx.y);
            if (element == 0) {
                to_part[0] = part.max;
                to_part[1] = part.sum;
            }
            to_part[2 + element] = part.out;
        }
    }
    if (all.splits == 1 || !is_last_block(all.tickets + blockIdx.z * gridDim.x + blockIdx.x, all.splits)) return;
    for (u32 i = threadIdx.x; i < stored * of_v; i += ATTENTION_THREADS) {
        const u32 r = i / of_v, element = i % of_v;
        store_row(r, element, combined(all.splits, [&](u32 split) {
            const f32* part = part_of(r, split);
            return RowPart{part[0], part[1], part[2 + element]};
        }));
    }
}

template <typename T, u32 LANES, u32 ROWS>
__device__ void cached_attention(const CachedAttentionArguments& all) {
    if (all.is_packed) {
        cached_attention_of<T, LANES, ROWS, true>(all);
    } else {
        cached_attention_of<T, LANES, ROWS, false>(all);
    }
}

// Kernels for heads of up to LANES · OWN elements.
#define CACHED_ATTENTION(lanes, size, rows)                                                                                     \
    KERNEL(cached_attention_##size##_##rows##_f32, CachedAttentionArguments) { cached_attention<f32, lanes, rows>(arguments); } \
    KERNEL(cached_attention_##size##_##rows##_bf16, CachedAttentionArguments) { cached_attention<bf16, lanes, rows>(arguments); }
CACHED_ATTENTION(8, 64, 1)
CACHED_ATTENTION(8, 64, 4)
CACHED_ATTENTION(16, 128, 1)
CACHED_ATTENTION(16, 128, 4)
CACHED_ATTENTION(32, 256, 1)
CACHED_ATTENTION(32, 256, 4)
