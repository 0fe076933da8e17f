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
    const T* x = (const T*)to.x;
    own_columns(to.width, is_aligned(x), [&](auto count, u64 column) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 sums[N] = {};
        for (u64 row = to.pieces.first(blockIdx.x); row < to.pieces.end(blockIdx.x); ++row) {
            f32 of_x[N];
            load_neighbours(of_x, x + row * to.width + column);
            for (u32 j = 0; j < N; ++j) sums[j] += of_x[j];
        }
        store_neighbours(to.parts + blockIdx.x * to.width + column, sums);
    });
}
KERNELS(column_sums, ColumnSumsArguments)

// Pieces that a warp adds up while others add up theirs: neighbours in one sequence.
constexpr u32 RUN = 16;

struct FoldPiecesArguments {
    const f32* parts;
    // One result, or two: the parts of the second lie so many elements behind those of the first.
    void* out[2];
    u64 second;
    u64 sequences;
    // Pieces of a sequence.
    u64 pieces;
    u64 width;
    // Bit by bit.
    u32 accumulate;
};

// The pieces' sums: those of a run, and then the runs in order, onto what is there or from the first on. A block has as many
// columns as a warp has lanes; a row of blocks has one result.
template <typename T>
__device__ void fold_pieces(const FoldPiecesArguments& to) {
    f32* sums = (f32*)shared_memory;
    const u64 column = u64(blockIdx.x) * 32 + lane_of();
    const bool is_there = column < to.width;
    const u32 warps = blockDim.x / 32;
    const u64 of_sequence = (to.pieces + RUN - 1) / RUN, runs = to.sequences * of_sequence;
    const f32* parts = to.parts + blockIdx.y * to.second;
    T* out = (T*)to.out[blockIdx.y] + column;
    f32 sum = (to.accumulate >> blockIdx.y & 1) && is_there ? load(out) : 0.0f;
    for (u64 first = 0; first < runs; first += warps) {
        const u64 run = first + warp_of(), sequence = run / of_sequence;
        const u64 start = sequence * to.pieces + run % of_sequence * RUN;
        const u64 end = run < runs && is_there ? smaller(start + RUN, (sequence + 1) * to.pieces) : start;
        f32 of_run = 0.0f;
        for (u64 piece = start; piece < end; ++piece) of_run += parts[piece * to.width + column];
        __syncthreads(); // The sums before have been read.
        sums[threadIdx.x] = of_run;
        __syncthreads();
        for (u32 warp = 0; warp < warps && first + warp < runs; ++warp) sum += sums[warp * 32 + lane_of()];
    }
    if (is_there && warp_of() == 0) store(out, sum);
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
