// Products of every expert's rows and the expert's weight, tile by tile. CPU counterpart:
// ops/experts/grouped_linear.rs.
//
// The number of rows of an expert is only known when a kernel runs, while the number of blocks is fixed before. There
// are enough blocks for any distribution of the rows. Each block finds its own tile, and exits if there is none. (In
// grouped_warpgroups.cu, each block computes several tiles.)
//
// The computation of a tile depends on the type `Products<ALONG_A, ALONG_B>`. It represents a tile of TILE × TILE sums
// that start at zero. `add` adds a product of two operands, DEPTH of the inner index at a time. `visit` calls a
// function with each sum and its indices in the tile, and sets the sum to the function's result.
#pragma once
#include "reduce.cuh"
#include "slots.cuh"

// Threads per block.
constexpr u32 GROUPED_THREADS = 256;

struct GroupedArguments {
    // The rows: x or dy.
    const void* a;
    // The weights, [experts, out, width]. For the weights' gradient, the rows x.
    const void* b;
    void* c;
    // Row offsets of the runs, ordered by source, expert and sequence, followed by the end of the last run.
    const u32* starts;
    u64 rows;
    u64 width;
    u64 out;
    u64 sources;
    u64 experts;
    u64 sequences;
    u32 accumulate;

    // Returns the number of groups of rows: one per source and expert, and one of unused rows. If c was allocated for
    // the used rows only, there are no unused rows, and the last group is omitted.
    __device__ __forceinline__ u32 groups() const { return u32(sources * experts) + (has_slot(c) ? 0 : 1); }

    // Returns the first row of a group. For the index after the last group, returns the number of rows.
    __device__ __forceinline__ u32 start_of(u64 group) const {
        return group <= sources * experts ? starts[group * sequences] : u32(rows);
    }
};

// An operand of a product, of which a block reads the rows (or columns) from `first` to `end`. `ALONG` is true if the
// summed dimension is contiguous.
template <typename T, bool ALONG>
struct Factor {
    static constexpr bool IS_ALONG = ALONG;
    const T* at;
    // Distance between the starts of consecutive rows in memory, in elements.
    u64 pitch;
    u32 first;
    u32 end;
};

// A part of the index range of the summed dimension.
struct Range {
    u32 first;
    u32 end;
};

// Iterates over the whole index range of the summed dimension, DEPTH at a time.
template <u32 DEPTH>
struct Whole {
    u32 next;
    u32 end;

    __device__ __forceinline__ bool take(Range& range) {
        range = Range{next, end - next < DEPTH ? end : next + DEPTH};
        next = range.end;
        return range.first < range.end;
    }
};

// Iterates over the rows of an expert, at most DEPTH at a time. A step never contains rows of two sequences. So
// accumulating over several micro-batches of whole sequences gives the same bits as one sum over all sequences.
template <u32 DEPTH>
struct ExpertRows {
    const GroupedArguments* of;
    u32 expert;
    u32 run;
    Whole<DEPTH> rows;

    __device__ __forceinline__ bool take(Range& range) {
        while (!rows.take(range)) {
            if (run == of->sources * of->sequences) return false;
            const u32 sequences = u32(of->sequences), experts = u32(of->experts);
            const u32* start = of->starts + (run / sequences * experts + expert) * sequences + run % sequences;
            rows = Whole<DEPTH>{start[0], start[1]};
            ++run;
        }
        return true;
    }
};

// The rows of one tile: at most TILE rows of one source and expert. Empty if there is no such tile.
struct OwnRows {
    u32 group;
    u32 first;
    u32 end;
};

// Finds the rows of the tile with index `tile`. Each lane counts the tiles of a range of groups. The lane whose range
// contains the tile then finds the tile's group.
template <u32 TILE>
__device__ __forceinline__ OwnRows rows_of(const GroupedArguments& to, u32 tile) {
    const u32 groups = to.groups(), share = (groups + 31) / 32;
    const u32 first = lane_of() * share, end = u32(smaller(first + share, groups));
    const auto tiles_of = [&](u32 group) { return (to.start_of(group + 1) - to.start_of(group) + TILE - 1) / TILE; };
    u32 own = 0;
    for (u32 group = first; group < end; ++group) own += tiles_of(group);
    u32 through = own;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 before = __shfl_sync(ALL_LANES, through, lane_of() - distance);
        if (lane_of() >= distance) through += before;
    }
    const u32 owner = __popc(__ballot_sync(ALL_LANES, through <= tile));
    if (owner == 32) return OwnRows{groups, 0, 0};
    u32 group = first, left = tile - (through - own);
    while (lane_of() == owner && left >= tiles_of(group)) left -= tiles_of(group++);
    group = __shfl_sync(ALL_LANES, group, owner);
    left = __shfl_sync(ALL_LANES, left, owner);
    const u32 row = to.start_of(group) + left * TILE;
    return OwnRows{group, row, u32(smaller(u64(row) + TILE, to.start_of(group + 1)))};
}

// Computes c[row] = a[row] · b, with b of the row's expert. b is [columns, inner] if `ALONG`, and [inner, columns] if
// not. Unused rows of c are set to zero.
template <template <bool, bool> class Products, bool ALONG>
__device__ __forceinline__ void multiply_by_row(const GroupedArguments& to, u64 inner, u64 columns) {
    using Own = Products<true, ALONG>;
    using T = typename Own::Number;
    const u64 across = (columns + Own::TILE - 1) / Own::TILE;
    const OwnRows rows = rows_of<Own::TILE>(to, u32(blockIdx.x / across));
    if (rows.first == rows.end) return;
    const u32 column = u32(blockIdx.x % across) * Own::TILE;
    Own sums;
    if (rows.group < to.sources * to.experts) {
        const T* b = (const T*)to.b + rows.group % to.experts * inner * columns;
        const Factor<T, true> of_a{placed((const T*)to.a), inner, rows.first, rows.end};
        const Factor<T, ALONG> of_b{b, ALONG ? inner : columns, column, u32(columns)};
        sums.add(of_a, of_b, Whole<Own::DEPTH>{0, u32(inner)});
    }
    T* const c = placed((T*)to.c);
    sums.visit([&](u32 i, u32 j, f32 sum) {
        const u32 row = rows.first + i;
        if (row < rows.end && column + j < columns) store(c + u64(row) * columns + column + j, sum);
        return sum;
    });
}

// Computes c = aᵀ·b over the rows of each expert. If `accumulate`, adds the result to c. c is [out, width] of type S
// for each expert.
template <template <bool, bool> class Products, typename S>
__device__ __forceinline__ void multiply_by_expert(const GroupedArguments& to) {
    using Own = Products<false, false>;
    using T = typename Own::Number;
    const u64 across = (to.width + Own::TILE - 1) / Own::TILE, down = (to.out + Own::TILE - 1) / Own::TILE;
    const u32 column = u32(blockIdx.x % across) * Own::TILE, row = u32(blockIdx.x / across % down) * Own::TILE;
    const u32 expert = u32(blockIdx.x / across / down);
    S* c = (S*)to.c + expert * to.out * to.width;
    const auto is_there = [&](u32 i, u32 j) { return row + i < to.out && column + j < to.width; };
    const auto at = [&](u32 i, u32 j) { return c + u64(row + i) * to.width + column + j; };
    Own sums;
    if (to.accumulate) sums.visit([&](u32 i, u32 j, f32) { return is_there(i, j) ? load(at(i, j)) : 0.0f; });
    const Factor<T, false> of_a{placed((const T*)to.a), to.out, row, u32(to.out)};
    const Factor<T, false> of_b{placed((const T*)to.b), to.width, column, u32(to.width)};
    sums.add(of_a, of_b, ExpertRows<Own::DEPTH>{&to, expert, 0, {0, 0}});
    sums.visit([&](u32 i, u32 j, f32 sum) {
        if (is_there(i, j)) store(at(i, j), sum);
        return sum;
    });
}

#define GROUPED_KERNELS(type, Products)                                                                    \
    BOUNDED_KERNEL(grouped_linear_##type, GroupedArguments, GROUPED_THREADS, 2) {                          \
        multiply_by_row<Products, true>(arguments, arguments.width, arguments.out);                        \
    }                                                                                                      \
    BOUNDED_KERNEL(grouped_linear_grad_input_##type, GroupedArguments, GROUPED_THREADS, 2) {               \
        multiply_by_row<Products, false>(arguments, arguments.out, arguments.width);                       \
    }                                                                                                      \
    BOUNDED_KERNEL(grouped_linear_grad_weight_##type, GroupedArguments, GROUPED_THREADS, 2) {              \
        multiply_by_expert<Products, type>(arguments);                                                     \
    }
