// What the kernels of attention share: operands, tiles in shared memory, and which keys a query sees.
#pragma once
#include "rows.cuh"

// Distances in elements; the elements of a head are neighbours.
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
    // Of the backward: the forward's outputs, their gradient, and the sums of their products.
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
    // Elements of a head of queries and keys, and of one of values and outputs.
    u64 head_size;
    u64 value_size;
    HeadStrides at_q;
    HeadStrides at_k;
    HeadStrides at_v;
    // Of the outputs and their gradient.
    HeadStrides at_out;
    HeadStrides at_dq;
    HeadStrides at_dk;
    HeadStrides at_dv;
    // The first key that each query sees, [batch][queries], or null.
    const u32* starts;
    // How many of the last keys a query sees, or 0.
    u64 window;
    f32 scale;
    // Above 0, scores s count as cap·tanh(s/cap).
    f32 cap;
    u32 is_causal;

    // The number of the first keys behind which a query sees none.
    __device__ __forceinline__ u64 visible(u64 query) const {
        return is_causal ? smaller(query + (keys - queries) + 1, keys) : keys;
    }

    // The first query that sees a key.
    __device__ __forceinline__ u64 first_query(u64 key) const {
        const u64 offset = keys - queries;
        return is_causal && key > offset ? key - offset : 0;
    }

    // Whether some queries do not see the first key.
    __device__ __forceinline__ bool is_cut() const { return starts || window; }

    // The first key that a query sees.
    __device__ __forceinline__ u64 first_key(u64 batch, u64 query) const {
        const u64 seen = visible(query), start = starts ? starts[batch * queries + query] : 0;
        const u64 in_window = window && seen > window ? seen - window : 0, first = start > in_window ? start : in_window;
        return seen > 0 ? smaller(first, seen - 1) : 0;
    }

    // The first key that one of ROWS queries from `first` on sees. For whole warps; there are fewer than 2^24 keys.
    template <u32 ROWS>
    __device__ __forceinline__ u64 first_key_of(u64 batch, u64 first) const {
        if (!is_cut()) return 0;
        f32 least = f32(keys);
        for (u32 row = lane_of(); row < ROWS; row += 32) {
            if (first + row < queries) least = fminf(least, f32(first_key(batch, first + row)));
        }
        return u64(-fold_lanes<Max>(-least, 32));
    }

    // The first query that a window hides a key from.
    __device__ __forceinline__ u64 end_query(u64 key) const {
        return window ? smaller(first_query(key) + window, queries) : queries;
    }

    // One of LANES lanes' share of the sum of out·d_out of a query, 0 if there is none.
    template <typename T, u32 LANES>
    __device__ __forceinline__ f32 share_of_delta(u64 batch, u64 head, u64 query, u32 lane) const {
        if (query >= queries) return 0.0f;
        constexpr u32 PACK = Pack<T>::SIZE;
        const u64 row = at_out.at(batch, head) + query * at_out.token;
        const T *a = (const T*)out + row, *b = (const T*)d_out + row;
        const u64 packed = value_size % PACK == 0 && is_aligned(out) && is_aligned(d_out) ? value_size : 0;
        f32 sum = 0.0f;
        for (u64 i = lane * PACK; i < packed; i += LANES * PACK) {
            f32 of_a[PACK], of_b[PACK];
            load_neighbours(of_a, a + i);
            load_neighbours(of_b, b + i);
            for (u32 j = 0; j < PACK; ++j) sum += of_a[j] * of_b[j];
        }
        for (u64 i = packed + lane; i < value_size; i += LANES) sum += load(a + i) * load(b + i);
        return sum;
    }

    // What the product of a query with a key counts.
    __device__ __forceinline__ f32 score(f32 product) const {
        return cap > 0.0f ? cap * tanhf(product * (scale / cap)) : scale * product;
    }

    // How much of its gradient a score passes on.
    __device__ __forceinline__ f32 slope(f32 score) const {
        const f32 part = score * (1.0f / cap);
        return cap > 0.0f ? 1.0f - part * part : 1.0f;
    }
};

constexpr u32 ATTENTION_THREADS = 128;

// Rows of heads in shared memory, one float further apart than they are long, so that neighbouring rows use different banks.
struct Tile {
    f32* rows;
    u32 pitch;

    __device__ __forceinline__ f32* operator[](u32 row) const { return rows + row * pitch; }

    // Loads `count` rows of `size` elements; rows from `end` on are zeros.
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

// How a block of ATTENTION_THREADS shares a tile: each row of ROWS has LANES threads, which own every LANES-th of its columns.
template <u32 ROWS, u32 COLUMNS>
struct Shape {
    static constexpr u32 LANES = ATTENTION_THREADS / ROWS;
    // The largest head.
    static constexpr u32 HEAD_SIZE = LANES * COLUMNS;
};
