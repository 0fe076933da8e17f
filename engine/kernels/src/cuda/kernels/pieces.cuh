// Rows cut into pieces whose sums are taken side by side, and then added up in order.
//
// A piece has a fixed number of rows and never reaches into another sequence. So sums over several micro-batches, each of whole
// sequences and adding to the one before, have the same bits as one over all.
#pragma once
#include "rows.cuh"

struct Pieces {
    // Rows of a sequence.
    u64 sequence;
    // Rows of a piece, but for the last of a sequence.
    u64 length;

    __device__ __forceinline__ u64 of_sequence() const { return (sequence + length - 1) / length; }

    __device__ __forceinline__ u64 first(u64 piece) const {
        return piece / of_sequence() * sequence + piece % of_sequence() * length;
    }

    __device__ __forceinline__ u64 end(u64 piece) const {
        return smaller(first(piece) + length, (piece / of_sequence() + 1) * sequence);
    }
};

// Columns that a thread sums side by side.
constexpr u32 OWN_COLUMNS = 4;

// Calls f(how many, the first of them) for the columns of this thread, together if they may be and rows allow it. Blocks share the
// columns along the grid's second dimension.
template <typename F>
__device__ __forceinline__ void own_columns(u64 width, bool may_be_packed, F f) {
    const u64 first = (u64(blockIdx.y) * blockDim.x + threadIdx.x) * OWN_COLUMNS;
    if (may_be_packed && width % OWN_COLUMNS == 0) {
        if (first < width) f(Count<OWN_COLUMNS>(), first);
        return;
    }
    for (u64 column = first; column < smaller(first + OWN_COLUMNS, width); ++column) f(Count<1>(), column);
}
