// Rows of a table by ids, and the gradient of the table. Twin: ops/embedding.rs.
#include "base.cuh"

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
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) out[i] = row[i];
}
KERNELS(embedding, EmbeddingArguments)

struct EmbeddingGradArguments {
    const u32* ids;
    const void* dy;
    void* d_table;
    u64 count;
    u64 width;
};

// A block for every id: the one that comes first with its id adds all rows of dy with that id to the table's row, in order.
// Others leave. `shared_memory` holds a number for each thread: positions of rows to add.
template <typename T>
__device__ void embedding_grad(const EmbeddingGradArguments& to) {
    u32* found = (u32*)shared_memory;
    const u64 own = blockIdx.x;
    const u32 id = to.ids[own];
    for (u64 start = 0; start < own; start += blockDim.x) {
        const u64 i = start + threadIdx.x;
        if (__syncthreads_or(i < own && to.ids[i] == id)) return;
    }
    T* d_row = (T*)to.d_table + u64(id) * to.width;
    // A stretch of columns at a time, so that sums stay in registers.
    constexpr u32 COLUMNS = 8;
    for (u64 column = 0; column < to.width; column += COLUMNS * blockDim.x) {
        f32 sums[COLUMNS];
        for (u32 c = 0; c < COLUMNS; ++c) {
            const u64 i = column + c * blockDim.x + threadIdx.x;
            sums[c] = i < to.width ? load(d_row + i) : 0.0f;
        }
        for (u64 start = own; start < to.count; start += blockDim.x) {
            const u64 i = start + threadIdx.x;
            const bool is_here = i < to.count && to.ids[i] == id;
            // Behind this all have read what was found before.
            if (!__syncthreads_or(is_here)) continue;
            found[threadIdx.x] = is_here;
            __syncthreads();
            const u64 end = smaller(to.count - start, blockDim.x);
            for (u64 other = 0; other < end; ++other) {
                if (!found[other]) continue;
                const T* dy = (const T*)to.dy + (start + other) * to.width;
                for (u32 c = 0; c < COLUMNS; ++c) {
                    const u64 i = column + c * blockDim.x + threadIdx.x;
                    if (i < to.width) sums[c] += load(dy + i);
                }
            }
        }
        for (u32 c = 0; c < COLUMNS; ++c) {
            const u64 i = column + c * blockDim.x + threadIdx.x;
            if (i < to.width) store(d_row + i, sums[c]);
        }
    }
}
KERNELS(embedding_grad, EmbeddingGradArguments)
