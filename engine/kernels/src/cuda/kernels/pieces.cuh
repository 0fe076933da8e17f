// Rows divided into pieces, whose sums are computed in parallel and then added up in order.
//
// A piece has a fixed number of rows, and all of them belong to one sequence. Therefore a sum that is accumulated over
// several micro-batches of whole sequences has the same bits as the sum over one batch.
#pragma once
#include "last_block.cuh"
#include "rows.cuh"

struct Pieces {
    // Number of rows per sequence.
    u64 sequence;
    // Number of pieces per sequence.
    u64 of_sequence;
    // Number of rows per piece. The last piece of a sequence may have fewer.
    u64 length;
    // Number of rows per share. The rows of a share are summed first, and then the shares of a piece in order.
    u64 share;

    __device__ __forceinline__ u64 first(u32 piece) const {
        return piece / u32(of_sequence) * sequence + piece % u32(of_sequence) * length;
    }

    __device__ __forceinline__ u64 end(u32 piece) const {
        return smaller(first(piece) + length, (piece / u32(of_sequence) + 1) * sequence);
    }
};

// Number of neighboring columns that a thread sums.
constexpr u32 OWN_COLUMNS = 4;

// Calls f(count, column) for groups of `count` columns from `column` on, until all columns of this thread are covered.
// Groups have OWN_COLUMNS columns if `may_be_packed` and if the width is a multiple of that number. Otherwise they have
// one column. Columns are distributed over the blocks along the grid's second dimension, and over `threads` threads of
// each, of which this is number `thread`.
template <typename F>
__device__ __forceinline__ void own_columns(u32 thread, u32 threads, u64 width, bool may_be_packed, F f) {
    const bool is_packed = may_be_packed && width % OWN_COLUMNS == 0;
    const u64 step = u64(gridDim.y) * threads * OWN_COLUMNS;
    for (u64 first = (u64(blockIdx.y) * threads + thread) * OWN_COLUMNS; first < width; first += step) {
        if (is_packed) {
            f(Count<OWN_COLUMNS>(), first);
        } else {
            for (u64 column = first; column < smaller(first + OWN_COLUMNS, width); ++column) f(Count<1>(), column);
        }
    }
}

// As above, with all threads of the block.
template <typename F>
__device__ __forceinline__ void own_columns(u64 width, bool may_be_packed, F f) {
    own_columns(threadIdx.x, blockDim.x, width, may_be_packed, f);
}

// Adds `count` rows in order. row(i) returns the address of row i. AHEAD rows are loaded before the first of them is
// added.
template <u32 AHEAD = 8, u32 N, typename Row>
__device__ __forceinline__ void add_in_order(f32 (&sums)[N], u64 count, Row row) {
    for (u64 first = 0; first < count; first += AHEAD) {
        decltype(neighbours<N>(row(first))) rows[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) rows[i] = neighbours<N>(row(smaller(first + i, count - 1)));
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) {
            f32 all[N];
            unpack(all, rows[i]);
            for (u32 j = 0; j < N; ++j) sums[j] = first + i < count ? sums[j] + all[j] : sums[j];
        }
    }
}

// Number of pieces in a run: pieces of one sequence that follow each other, whose sums are added up first.
constexpr u32 RUN = 16;

// Adds up the sums of pieces: first those of each run, and then the runs in order. The result overwrites the output or is
// added to it.
//
// Each block sums one piece. The last block of a run to finish adds up the run. The last of these blocks to finish
// adds up all runs. Which block is last may differ between executions, but the order of additions does not.
struct Fold {
    // Dimensions: [results][pieces][width].
    f32* parts;
    // For each block of columns, one ticket per run and one ticket for all runs.
    u32* tickets;
    // The outputs of one or two results.
    void* out[2];
    u64 width;
    u64 sequences;
    Pieces pieces;
    u32 results;
    // A bit per result: 1 if the result is added to the output.
    u32 accumulate;
    // A bit per result: 1 if the output is f32, 0 if it has the type of the summed rows.
    u32 is_f32;

    __device__ __forceinline__ f32* part(u32 result, u64 piece) const {
        return parts + (result * sequences * pieces.of_sequence + piece) * width;
    }

    // Must be called by each block after it has stored the sums of its piece. `own(f)` must call f(count, column) for the
    // same groups of columns as when the sums were stored.
    template <typename T, typename Own>
    __device__ __forceinline__ void finish(u32 piece, u64 columns, Own own) const {
        const u32 of_sequence = u32(pieces.of_sequence), runs_of_sequence = (of_sequence + RUN - 1) / RUN;
        const u32 runs = u32(sequences) * runs_of_sequence, sequence = piece / of_sequence, run = piece % of_sequence / RUN;
        const u64 first = sequence * of_sequence + run * RUN, end = smaller(first + RUN, (sequence + 1) * of_sequence);
        u32* own_tickets = tickets + columns * (runs + 1);
        if (!is_last_block(own_tickets + sequence * runs_of_sequence + run, u32(end - first))) return;
        for (u32 result = 0; result < results; ++result) {
            own([&](auto count, u64 column) {
                f32 sums[decltype(count)::VALUE] = {};
                add_in_order(sums, end - first, [&](u64 i) { return part(result, first + i) + column; });
                store_neighbours(part(result, first) + column, sums);
            });
        }
        if (!is_last_block(own_tickets + runs, runs)) return;
        for (u32 result = 0; result < results; ++result) {
            T* const to = (T*)out[result];
            f32* const to_f32 = (f32*)out[result];
            const bool adds = accumulate >> result & 1, stores_f32 = is_f32 >> result & 1;
            own([&](auto count, u64 column) {
                constexpr u32 N = decltype(count)::VALUE;
                f32 sums[N] = {};
                for (u32 j = 0; j < N && adds; ++j) sums[j] = stores_f32 ? to_f32[column + j] : load(to + column + j);
                add_in_order(sums, runs, [&](u32 run) {
                    return part(result, run / runs_of_sequence * of_sequence + run % runs_of_sequence * RUN) + column;
                });
                for (u32 j = 0; j < N; ++j) stores_f32 ? store(to_f32 + column + j, sums[j]) : store(to + column + j, sums[j]);
            });
        }
    }
};
