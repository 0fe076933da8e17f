// Rows cut into pieces whose sums are taken side by side, and then added up in order.
//
// A piece has a fixed number of rows and never reaches into another sequence. So sums over several micro-batches, each of whole
// sequences and adding to the one before, have the same bits as one over all.
#pragma once
#include "base.cuh"

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
