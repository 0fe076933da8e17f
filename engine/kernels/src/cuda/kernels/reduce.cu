// Sums over dimensions, and over all elements. CPU counterparts: ops/sum.rs, ops/scaled_sum.rs. The order of
// additions depends on the shape only.
#include "pieces.cuh"
#include "reduce.cuh"
#include "strides.cuh"

struct ColumnSumsArguments {
    const void* x;
    Fold fold;
};

// Sums one piece of rows, in the columns of this block. Each warp sums a share of the rows, which it loads all at once.
// Then the first warp adds up the shares.
template <typename T>
__device__ void column_sums(const ColumnSumsArguments& to) {
    constexpr u32 COLUMNS = 32 * OWN_COLUMNS;
    const T* x = (const T*)to.x;
    const Fold& fold = to.fold;
    const Pieces& pieces = fold.pieces;
    const u32 piece = blockIdx.x, shares = blockDim.x / 32;
    const u64 first = pieces.first(piece) + warp_of() * pieces.share, end = smaller(first + pieces.share, pieces.end(piece));
    // Dimensions: [shares][COLUMNS].
    f32* const of_shares = (f32*)shared_memory;
    const auto own = [&](auto f) { own_columns(lane_of(), 32, fold.width, is_aligned(x), f); };
    own([&](auto count, u64 column) {
        f32 sums[decltype(count)::VALUE] = {};
        if (first < end) add_in_order<16>(sums, end - first, [&](u64 row) { return x + (first + row) * fold.width + column; });
        for (u32 j = 0; j < decltype(count)::VALUE; ++j) of_shares[warp_of() * COLUMNS + column % COLUMNS + j] = sums[j];
    });
    __syncthreads();
    const auto of_first = [&](auto f) {
        if (warp_of() == 0) own(f);
    };
    of_first([&](auto count, u64 column) {
        f32 sums[decltype(count)::VALUE] = {};
        add_in_order(sums, shares, [&](u64 share) { return of_shares + share * COLUMNS + column % COLUMNS; });
        store_neighbours(fold.part(0, piece) + column, sums);
    });
    fold.finish<T>(piece, blockIdx.y, of_first);
}
KERNELS(column_sums, ColumnSumsArguments)

struct SumArguments {
    const void* x;
    void* out;
    // Number of elements of the output.
    u64 outputs;
    // Number of elements of x that are summed into each element of the output.
    u64 summed;
    Strides kept;
    Strides reduced;
    u32 accumulate;
};

// Each warp computes one element of the output.
template <typename T, typename S = T>
__device__ void sum(const SumArguments& to) {
    const u64 output = global_thread() / 32;
    if (output >= to.outputs) return;
    const T* x = (const T*)to.x + to.kept.at(output);
    f32 sum = 0.0f;
    for (u64 i = lane_of(); i < to.summed; i += 32) sum += load(x + to.reduced.at(i));
    sum = fold_lanes<Sum>(sum, 32);
    if (lane_of() == 0) store_or_add((S*)to.out + output, sum, to.accumulate);
}
KERNELS(sum, SumArguments)
KERNEL(sum_bf16_to_f32, SumArguments) { sum<bf16, f32>(arguments); }

struct ScaledSumArguments {
    const void* x;
    f32* parts;
    u32* ticket;
    void* out;
    u64 count;
    // Number of elements per part.
    u64 length;
    f64 scale;
    u32 accumulate;
};

// Each block sums a part in f64, multiplies the sum by `scale` and rounds it to f32. The last block to finish adds up the
// parts in order.
template <typename T>
__device__ void scaled_sum(const ScaledSumArguments& to) {
    f64* sums = (f64*)shared_memory;
    const u64 first = blockIdx.x * to.length, end = smaller(first + to.length, to.count);
    f64 sum = 0.0;
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) sum += load((const T*)to.x + i);
    sums[threadIdx.x] = sum;
    for (u32 distance = blockDim.x / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
    }
    if (threadIdx.x == 0) to.parts[blockIdx.x] = f32(sums[0] * to.scale);
    if (!is_last_block(to.ticket, gridDim.x) || threadIdx.x != 0) return;
    T* out = (T*)to.out;
    f32 all = to.accumulate ? load(out) : 0.0f;
    for (u32 part = 0; part < gridDim.x; ++part) all += to.parts[part];
    store(out, all);
}
KERNELS(scaled_sum, ScaledSumArguments)
