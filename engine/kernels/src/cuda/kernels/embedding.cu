// Lookup of a table's rows by ids. CPU counterpart: ops/embedding.rs. The table's gradient is in
// embedding_grad.cu.
#include "rows.cuh"

struct EmbeddingArguments {
    const void* table;
    const u32* ids;
    void* out;
    u64 width;
    // The id of the table's first row, and the number of rows. The result for any other id is zeros.
    u32 first;
    u32 rows;
};

// Each block copies one row.
template <typename T>
__device__ void embedding(const EmbeddingArguments& to) {
    // An id below the first wraps around, and is then not below the number of rows.
    const u32 index = to.ids[blockIdx.x] - to.first;
    const bool is_there = index < to.rows;
    const T* row = (const T*)to.table + (is_there ? u64(index) : 0) * to.width;
    T* out = (T*)to.out + blockIdx.x * to.width;
    const bool is_packed = are_packed((const T*)to.table, to.width) && is_aligned(to.out);
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        using Together = Neighbours<T, decltype(count)::VALUE>;
        *reinterpret_cast<Together*>(out + i) = is_there ? *reinterpret_cast<const Together*>(row + i) : Together{};
    });
}
KERNELS(embedding, EmbeddingArguments)
KERNEL(embedding_u8, EmbeddingArguments) { embedding<u8>(arguments); }
KERNEL(embedding_u32, EmbeddingArguments) { embedding<u32>(arguments); }
