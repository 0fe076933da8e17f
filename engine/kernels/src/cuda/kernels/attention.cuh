// Shared parts of the attention kernels: operands, tiles in shared memory, and the keys that a query sees. With FOLDED, the
// queries of causal attention are the chunks that a rank has of the keys' sequence (fold.rs), in ascending order. Kernels
// only assume that later queries see the same keys and more.
#pragma once
#include "rows.cuh"

// Strides in elements; the elements of a head are contiguous.
struct HeadStrides {
    u64 batch;
    u64 head;
    u64 token;

    __device__ __forceinline__ u64 at(u64 b, u64 h) const { return b * batch + h * head; }
};

struct AttentionArguments {
    const void* q;
    const void* k;
    const void* v;
    // Of the backward: the forward's outputs, their gradient, and the sum of each row's products of the two.
    void* out;
    f32* lse;
    const void* d_out;
    f32* delta;
    void* dq;
    void* dk;
    void* dv;
    u64 heads;
    u64 kv_heads;
    u64 queries;
    u64 keys;
    // Sizes of a query and key head, and of a value and output head.
    u64 head_size;
    u64 value_size;
    HeadStrides at_q;
    HeadStrides at_k;
    HeadStrides at_v;
    // Strides of the outputs and of their gradient.
    HeadStrides at_out;
    HeadStrides at_dq;
    HeadStrides at_dk;
    HeadStrides at_dv;
    // The first key that each query sees, [batch][queries]; null if all begin at key 0.
    const u32* starts;
    // The number of most recent keys that a query sees; 0 for all.
    u64 window;
    // The number of keys of a chunk, of which a query sees its own; 0 for all. Chunks begin at the query's start.
    u32 chunk_size;
    // (2^32 - 1) / chunk_size, rounded down.
    u32 chunk_inverse;
    f32 scale;
    // If above 0, a score s is replaced by cap·tanh(s/cap).
    f32 cap;
    u32 is_causal;
    // Only read by attention_wg_grad_kv_64: true if the grid is [heads][batch][blocks], false if it is [heads][blocks][batch].
    u32 is_by_size;
    // Only read with FOLDED. Of each `round` tokens of the sequence, two chunks of `chunk` tokens are queries. They begin
    // `near` and `far` tokens after the start of the round.
    u32 chunk;
    u32 near;
    u32 far;
    u32 round;

    // The head of keys that a head of queries reads. Divisions of 32 bits take far fewer instructions than those of 64.
    __device__ __forceinline__ u64 kv_head_of(u32 head) const { return head / (u32(heads) / u32(kv_heads)); }

#ifdef FOLDED
    // The (exclusive) end of the range of keys that a query sees.
    __device__ __forceinline__ u64 visible(u64 query) const { return seen_by(u32(query)); }

    // The same, for fewer registers: a sequence has fewer than 2^32 tokens.
    __device__ __forceinline__ u32 seen_by(u32 query) const {
        const u32 number = query / chunk, seen = number / 2 * round + (number % 2 ? far : near) + query - number * chunk + 1;
        return seen < u32(keys) ? seen : u32(keys);
    }

    // The first query that sees a key: the number of queries at earlier places.
    __device__ __forceinline__ u64 first_query(u64 key) const {
        const u32 number = u32(key) / round, within = u32(key) - number * round;
        const auto before = [&](u32 start) { return within > start ? smaller(within - start, chunk) : 0; };
        return u64(number) * 2 * chunk + before(near) + before(far);
    }

    // The first query for which a key has left the window.
    __device__ __forceinline__ u64 end_query(u64 key) const {
        return window ? first_query(smaller(key + window, keys)) : queries;
    }
#else
    // The (exclusive) end of the range of keys that a query sees.
    __device__ __forceinline__ u64 visible(u64 query) const {
        return is_causal ? smaller(query + (keys - queries) + 1, keys) : keys;
    }

    // The same, for fewer registers: a sequence has fewer than 2^32 tokens.
    __device__ __forceinline__ u32 seen_by(u32 query) const {
        const u32 all = u32(keys), seen = query + (all - u32(queries)) + 1;
        return is_causal && seen < all ? seen : all;
    }

    // The first query that sees a key.
    __device__ __forceinline__ u64 first_query(u64 key) const {
        const u64 offset = keys - queries;
        return is_causal && key > offset ? key - offset : 0;
    }

    // The first query for which a key has left the window.
    __device__ __forceinline__ u64 end_query(u64 key) const {
        return window ? smaller(first_query(key) + window, queries) : queries;
    }
#endif

    // True if some queries do not see the first key.
    __device__ __forceinline__ bool is_cut() const { return starts || window || chunk_size; }

    // The first key that a query sees.
    __device__ __forceinline__ u64 first_key(u64 batch, u64 query) const {
        return first_key_from(starts ? starts[batch * queries + query] : 0, visible(query));
    }

    // The first key that a query sees whose keys begin at `start`, and which sees keys before `seen`.
    __device__ __forceinline__ u64 first_key_from(u64 start, u64 seen) const {
        const u32 last = u32(seen) > 0 ? u32(seen) - 1 : 0;
        u32 back = u32(start) < last ? last - u32(start) : 0;
        if (chunk_size) {
            // The quotient may be too small by one. A division would take more registers.
            back -= __umulhi(back, chunk_inverse) * chunk_size;
            if (back >= chunk_size) back -= chunk_size;
        }
        if (window && back >= window) back = u32(window) - 1;
        return last - back;
    }

    // The first key that any of ROWS queries from `first` on sees. Must be called by whole warps. f32 is exact because
    // there are fewer than 2^24 keys.
    template <u32 ROWS>
    __device__ __forceinline__ u64 first_key_of(u64 batch, u64 first) const {
        if (!is_cut()) return 0;
        f32 least = f32(keys);
        for (u32 row = lane_of(); row < ROWS; row += 32) {
            if (first + row < queries) least = fminf(least, f32(first_key(batch, first + row)));
        }
        return u64(-fold_lanes<Max>(-least, 32));
    }

    // The share of one of LANES lanes in the sum of out·d_out of a query; 0 if the query does not exist. Heads have at most
    // SIZE elements. All packs are loaded before the first of them is used.
    template <typename T, u32 LANES, u32 SIZE>
    __device__ __forceinline__ f32 share_of_delta(u64 batch, u64 head, u64 query, u32 lane) const {
        if (query >= queries) return 0.0f;
        constexpr u32 PACK = Pack<T>::SIZE, PACKS = (SIZE + LANES * PACK - 1) / (LANES * PACK);
        const u64 row = at_out.at(batch, head) + query * at_out.token;
        const T *a = (const T*)out + row, *b = (const T*)d_out + row;
        const u64 packed = value_size % PACK == 0 && is_aligned(out) && is_aligned(d_out) ? value_size : 0;
        f32 sum = 0.0f;
        Neighbours<T, PACK> packs_of_a[PACKS] = {}, packs_of_b[PACKS] = {};
#pragma unroll
        for (u32 i = 0; i < PACKS; ++i) {
            const u64 column = (i * LANES + lane) * PACK;
            if (column >= packed) continue;
            packs_of_a[i] = neighbours<PACK>(a + column);
            packs_of_b[i] = neighbours<PACK>(b + column);
        }
#pragma unroll
        for (u32 i = 0; i < PACKS; ++i) {
            for (u32 j = 0; j < PACK; ++j) sum += packs_of_a[i][j] * packs_of_b[i][j];
        }
        for (u64 i = packed + lane; i < value_size; i += LANES) sum += load(a + i) * load(b + i);
        return sum;
    }

    // The score of a query and a key from their dot product.
    __device__ __forceinline__ f32 score(f32 product) const {
        return cap > 0.0f ? cap * tanhf(product * (scale / cap)) : scale * product;
    }

    // The derivative of the cap, at a capped score.
    __device__ __forceinline__ f32 slope(f32 score) const {
        const f32 part = score * (1.0f / cap);
        return cap > 0.0f ? 1.0f - part * part : 1.0f;
    }
};

constexpr u32 ATTENTION_THREADS = 128;

// Rows of heads in shared memory. The pitch is one more than the row length, so that adjacent rows use different banks.
struct Tile {
    f32* rows;
    u32 pitch;

    __device__ __forceinline__ f32* operator[](u32 row) const { return rows + row * pitch; }

    // Loads `count` rows of `size` elements; rows from `end` on become zeros.
    __device__ __forceinline__ void load_rows(const f32* from, u64 stride, u64 first, u64 end, u32 count, u32 size) const {
        for (u32 i = threadIdx.x; i < count * size; i += blockDim.x) {
            const u32 row = i / size, column = i % size;
            (*this)[row][column] = first + row < end ? from[(first + row) * stride + column] : 0.0f;
        }
    }
};

__device__ __forceinline__ f32 dot(const f32* a, const f32* b, u32 size) {
    f32 sum = 0.0f;
    for (u32 i = 0; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

// The division of a tile among the ATTENTION_THREADS of a block: each of ROWS rows has LANES threads, each of which
// owns every LANES-th column.
template <u32 ROWS, u32 COLUMNS>
struct Shape {
    static constexpr u32 LANES = ATTENTION_THREADS / ROWS;
    // The largest head size.
    static constexpr u32 HEAD_SIZE = LANES * COLUMNS;
};
