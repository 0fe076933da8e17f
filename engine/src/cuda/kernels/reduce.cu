// Sums over dimensions and over everything. Twins: ops/sum.rs, ops/scaled_sum.rs. No atomics: the order is the shape's.
#include "pieces.cuh"
#include "reduce.cuh"
#include "strides.cuh"

struct ColumnSumsArguments {
    const void* x;
    // [pieces][width]
    f32* parts;
    u64 width;
    Pieces pieces;
};

// The sums of one piece of rows, for the columns of this block.
template <typename T>
__device__ void column_sums(const ColumnSumsArguments& to) {
    const u64 column = u64(blockIdx.y) * blockDim.x + threadIdx.x;
    if (column >= to.width) return;
    const T* x = (const T*)to.x;
    f32 sum = 0.0f;
    for (u64 row = to.pieces.first(blockIdx.x); row < to.pieces.end(blockIdx.x); ++row) {
        sum += load(x + row * to.width + column);
    }
    to.parts[blockIdx.x * to.width + column] = sum;
}
KERNELS(column_sums, ColumnSumsArguments)

struct FoldPiecesArguments {
    const f32* parts;
    void* out;
    u64 pieces;
    u64 width;
    u32 accumulate;
};

// The pieces' sums, added up in order: onto what is there, or from the first on.
template <typename T>
__device__ void fold_pieces(const FoldPiecesArguments& to) {
    const u64 column = global_thread();
    if (column >= to.width) return;
    T* out = (T*)to.out + column;
    f32 sum = to.accumulate ? load(out) : 0.0f;
    for (u64 piece = 0; piece < to.pieces; ++piece) sum += to.parts[piece * to.width + column];
    store(out, sum);
}
KERNELS(fold_pieces, FoldPiecesArguments)

struct SumArguments {
    const void* x;
    void* out;
    // Elements of the output, and of x that are summed into each.
    u64 outputs;
    u64 summed;
    Strides kept;
    Strides reduced;
    u32 accumulate;
};

// A warp sums into one element of the output.
template <typename T>
__device__ void sum(const SumArguments& to) {
    const u64 output = global_thread() / 32;
    if (output >= to.outputs) return;
    const T* x = (const T*)to.x + to.kept.at(output);
    f32 sum = 0.0f;
    for (u64 i = lane_of(); i < to.summed; i += 32) sum += load(x + to.reduced.at(i));
    sum = fold_lanes<Sum>(sum, 32);
    if (lane_of() == 0) store_or_add((T*)to.out + output, sum, to.accumulate);
}
KERNELS(sum, SumArguments)

struct ScaledSumArguments {
    const void* x;
    f32* parts;
    void* out;
    u64 count;
    // Elements of a part.
    u64 length;
    u64 part_count;
    f64 scale;
    u32 accumulate;
};

// scale · the sum of one part, in f64 and rounded.
template <typename T>
__device__ void scaled_sum_parts(const ScaledSumArguments& to) {
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
}
KERNELS(scaled_sum_parts, ScaledSumArguments)

// The parts, added up in order by one thread.
template <typename T>
__device__ void scaled_sum(const ScaledSumArguments& to) {
    if (threadIdx.x != 0) return;
    T* out = (T*)to.out;
    f32 sum = to.accumulate ? load(out) : 0.0f;
    for (u64 part = 0; part < to.part_count; ++part) sum += to.parts[part];
    store(out, sum);
}
KERNELS(scaled_sum, ScaledSumArguments)
