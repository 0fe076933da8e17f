// Rows cut into pieces whose sums are taken side by side, and then added up in order.
//
// A piece has a fixed number of rows and never reaches into another sequence. So sums over several micro-batches, each of whole
// sequences and adding to the one before, have the same bits as one over all.
#pragma once
#include "last_block.cuh"
#include "rows.cuh"

struct Pieces {
    // Rows of a sequence, and pieces.
    u64 sequence;
    u64 of_sequence;
    // Rows of a piece, but for the last of a sequence.
    u64 length;
    // Rows of a share: those of a piece are summed share by share, and the sums in order.
    u64 share;

    __device__ __forceinline__ u64 first(u32 piece) const {
        return piece / u32(of_sequence) * sequence + piece % u32(of_sequence) * length;
    }

    __device__ __forceinline__ u64 end(u32 piece) const {
        return smaller(first(piece) + length, (piece / u32(of_sequence) + 1) * sequence);
    }
};

// Columns that a thread sums side by side.
constexpr u32 OWN_COLUMNS = 4;

// Calls f(how many, the first of them) for the columns of this thread, together if they may be and rows allow it. Blocks share the
// columns along the grid's second dimension.
template <typename F>
__device__ __forceinline__ void own_columns(u64 width, bool may_be_packed, F f) {
    const bool is_packed = may_be_packed && width % OWN_COLUMNS == 0;
    const u64 step = u64(gridDim.y) * blockDim.x * OWN_COLUMNS;
    for (u64 first = (u64(blockIdx.y) * blockDim.x + threadIdx.x) * OWN_COLUMNS; first < width; first += step) {
        if (is_packed) {
            f(Count<OWN_COLUMNS>(), first);
        } else {
            for (u64 column = first; column < smaller(first + OWN_COLUMNS, width); ++column) f(Count<1>(), column);
        }
    }
}

// Rows that a thread loads before it adds the first of them.
constexpr u32 AHEAD = 8;

// Adds up `count` rows in order: number i is at row(i).
template <u32 N, typename Row>
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

// Pieces that are added up by themselves: neighbours in one sequence.
constexpr u32 RUN = 16;

// Where the sums of pieces go, and what becomes of them: those of a run are added up, and then the runs in order, onto what is there
// or from the first on. Blocks have a piece each; the last one of a run that has its sums adds them up, and the last one of all adds
// up the runs. Who that is differs, what it adds does not.
struct Fold {
    // [results][pieces][width]
    f32* parts;
    // For each block of columns one for every run, and one for all of them.
    u32* tickets;
    // One result, or two.
    void* out[2];
    u64 width;
    u64 sequences;
    Pieces pieces;
    u32 results;
    // Of each result a bit: whether it is added to, and whether it is f32, rather than of the type that was summed.
    u32 accumulate;
    u32 is_f32;

    __device__ __forceinline__ f32* part(u32 result, u64 piece) const {
        return parts + (result * sequences * pieces.of_sequence + piece) * width;
    }

    // What a block does when it has stored the sums of its piece. `own` calls a function with (how many, the first of them) for the
    // columns of a thread, as it did when they were stored.
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
