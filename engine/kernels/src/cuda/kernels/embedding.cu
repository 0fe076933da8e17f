// Rows of a table by ids, and the gradient of the table. Twin: ops/embedding.rs.
#include "rows.cuh"

struct EmbeddingArguments {
    const void* table;
    const u32* ids;
    void* out;
    u64 width;
};

// A block copies one row.
template <typename T>
__device__ void embedding(const EmbeddingArguments& to) {
    const T* row = (const T*)to.table + u64(to.ids[blockIdx.x]) * to.width;
    T* out = (T*)to.out + blockIdx.x * to.width;
    const bool is_packed = are_packed((const T*)to.table, to.width) && is_aligned(to.out);
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        using Together = Neighbours<T, decltype(count)::VALUE>;
        *reinterpret_cast<Together*>(out + i) = *reinterpret_cast<const Together*>(row + i);
    });
}
KERNELS(embedding, EmbeddingArguments)

struct EmbeddingGradArguments {
    const u32* ids;
    const void* dy;
    void* d_table;
    u64 count;
    u64 width;
    // An id that adds nothing.
    u32 padding;
    // Whether rows are summed before they are added to what is there, rather than each by itself: as a sum of two tensors is.
    u32 sums_first;
};

// Columns of a thread, and rows that it reads before it adds the first of them.
constexpr u32 OWN = 8;
constexpr u32 AHEAD = 4;

// A block for every id: the one that comes first with its id adds all rows of dy with that id to the table's row, in order.
// Others leave. `shared_memory` holds a number for each warp: which of its lanes have found a row to add.
template <typename T, typename S = T>
__device__ void embedding_grad(const EmbeddingGradArguments& to) {
    u32* found = (u32*)shared_memory;
    const u64 own = blockIdx.x;
    const u32 id = to.ids[own];
    if (id == to.padding) return;
    for (u64 start = 0; start < own; start += blockDim.x) {
        const u64 i = start + threadIdx.x;
        if (__syncthreads_or(i < own && to.ids[i] == id)) return;
    }
    S* d_row = (S*)to.d_table + u64(id) * to.width;
    const bool is_packed = to.width % OWN == 0 && is_aligned(to.dy) && is_aligned(to.d_table);
    // A stretch of columns at a time, so that sums stay in registers.
    for (u64 stretch = 0; stretch < to.width; stretch += OWN * blockDim.x) {
        const u64 column = stretch + OWN * threadIdx.x;
        const auto load_own = [&](f32(&all)[OWN], const auto* row) {
            if (is_packed && column < to.width) return load_neighbours(all, row + column);
            for (u32 c = 0; c < OWN; ++c) all[c] = column + c < to.width ? load(row + column + c) : 0.0f;
        };
        f32 before[OWN] = {}, sums[OWN], rows[AHEAD][OWN];
        load_own(sums, d_row);
        if (to.sums_first) {
            for (u32 c = 0; c < OWN; ++c) {
                before[c] = sums[c];
                sums[c] = 0.0f;
            }
        }
        u32 waiting = 0;
        const auto add_waiting = [&] {
#pragma unroll
            for (u32 row = 0; row < AHEAD; ++row) {
                for (u32 c = 0; c < OWN; ++c) sums[c] += row < waiting ? rows[row][c] : 0.0f;
            }
            waiting = 0;
        };
        for (u64 start = own; start < to.count; start += blockDim.x) {
            const u64 i = start + threadIdx.x;
            const bool is_here = i < to.count && to.ids[i] == id;
            // Behind this all have read what was found before.
            if (!__syncthreads_or(is_here)) continue;
            const u32 ballot = __ballot_sync(ALL_LANES, is_here);
            if (lane_of() == 0) found[warp_of()] = ballot;
            __syncthreads();
            for (u32 warp = 0; warp < blockDim.x / 32; ++warp) {
                for (u32 lanes = found[warp]; lanes != 0; lanes &= lanes - 1) {
                    const u32 lane = __popc((lanes & (0u - lanes)) - 1);
                    const T* dy = (const T*)to.dy + (start + warp * 32 + lane) * to.width;
#pragma unroll
                    for (u32 row = 0; row < AHEAD; ++row) {
                        if (row == waiting) load_own(rows[row], dy);
                    }
                    if (++waiting == AHEAD) add_waiting();
                }
            }
        }
        add_waiting();
        for (u32 c = 0; c < OWN && to.sums_first; ++c) sums[c] += before[c];
        if (is_packed && column < to.width) {
            store_neighbours(d_row + column, sums);
        } else {
            for (u32 c = 0; c < OWN; ++c) {
                if (column + c < to.width) store(d_row + column + c, sums[c]);
            }
        }
    }
}
KERNELS(embedding_grad, EmbeddingGradArguments)
KERNEL(embedding_grad_bf16_to_f32, EmbeddingGradArguments) { embedding_grad<bf16, f32>(arguments); }
