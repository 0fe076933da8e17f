// Lookup of a table's rows by ids. CPU counterpart: ops/embedding.rs. The table's gradient is in
// embedding_grad.cu.
#include "rows.cuh"

struct EmbeddingArguments {
    const void* table;
    const u32* ids;
    void* out;
    u64 width;
};

// Each block copies one row.
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
