// The experts' products in bf16 with the asynchronous products of compute capability 9.0 (warpgroup.cuh).
//
// Each block computes several tiles of the result, one after another: every gridDim.x-th one. Copies of operands run
// AHEAD steps ahead of the products, also into the block's next tile. So while the sums of a tile are stored, the
// operands of the next tile are being copied.
#include "grouped.cuh"
#include "rows.cuh"
#include "warpgroup.cuh"

// The rows and columns of a tile, and how much of the summed dimension a step multiplies.
constexpr u32 ROWS = 128, COLUMNS = 256, DEPTH = 64;
// Number of steps whose operands fit into shared memory, and number of steps that are copied ahead. While the products of
// a step are started, those of the step before may still read their operands.
constexpr u32 STAGES = 4, AHEAD = STAGES - 2;

// Where a tile is in the result: its expert (or group of rows), its rows, and its first column.
struct Place {
    u32 expert;
    u32 row;
    u32 end;
    u32 column;
};

// A step of a tile, and how much of the summed dimension it has: more than DEPTH / 2, or at most that.
struct Step {
    Place place;
    bool is_there;
    bool is_last;
    bool is_short;
};

// The part of an operand that a step multiplies, with the order of rows and columns in global memory.
template <bool ALONG, u32 EXTENT>
struct Stage {
    static constexpr u32 DOWN = ALONG ? EXTENT : DEPTH;
    SwizzledTile<ALONG ? DEPTH : EXTENT, DOWN> tile;

    // Starts to load a range of the summed dimension. Missing elements become zeros.
    __device__ __forceinline__ void start(const Factor<bf16, ALONG>& of, const Range& range) const {
        const Range own{of.first, of.end}, &down = ALONG ? own : range, &along = ALONG ? range : own;
        const bf16* const from = of.at + u64(down.first) * of.pitch + along.first;
        tile.template start<DOWN, GROUPED_THREADS>(from, of.pitch, down.end - down.first, along.end - along.first);
    }

    // Returns the descriptor of the part that starts at row (or column) `first` of the operand and has 16 elements of the
    // summed dimension, from `d` on.
    __device__ __forceinline__ u64 part(u32 first, u32 d) const {
        return ALONG ? tile.of_rows(first, d) : tile.of_columns(d, first);
    }
};

// The tiles of c[row] = a[row] · b, with b of the row's expert, as in multiply_by_row (grouped.cuh).
template <bool ALONG_B>
struct RowTiles {
    using A = Factor<bf16, true>;
    using B = Factor<bf16, ALONG_B>;
    using Ranges = Whole<DEPTH>;
    const GroupedArguments& to;
    u32 inner;
    u32 columns;

    // Finds the tile with an index. Returns false if there is none.
    __device__ __forceinline__ bool find(u32 index, Place& place) const {
        const u32 across = (columns + COLUMNS - 1) / COLUMNS;
        const OwnRows rows = rows_of<ROWS>(to, index / across);
        place = Place{rows.group, rows.first, rows.end, index % across * COLUMNS};
        return rows.first < rows.end;
    }

    // Returns the ranges of the summed dimension. Unused rows have none, so their sums are zero.
    __device__ __forceinline__ Ranges ranges(const Place& place) const {
        return Ranges{0, place.expert < to.sources * to.experts ? inner : 0};
    }

    __device__ __forceinline__ A a(const Place& place) const { return A{placed((const bf16*)to.a), inner, place.row, place.end}; }

    __device__ __forceinline__ B b(const Place& place) const {
        const bf16* const of_expert = (const bf16*)to.b + place.expert % to.experts * inner * columns;
        return B{of_expert, ALONG_B ? inner : columns, place.column, u32(smaller(place.column + COLUMNS, columns))};
    }

    __device__ __forceinline__ bf16* row(const Place&, u32 row) const { return placed((bf16*)to.c) + u64(row) * columns; }
};

// The tiles of c = aᵀ · b over the rows of each expert, as in multiply_by_expert (grouped.cuh).
template <typename S>
struct ExpertTiles {
    using A = Factor<bf16, false>;
    using B = Factor<bf16, false>;
    using Ranges = ExpertRows<DEPTH>;
    const GroupedArguments& to;
    u32 columns;

    __device__ __forceinline__ bool find(u32 index, Place& place) const {
        const u32 across = (columns + COLUMNS - 1) / COLUMNS, down = u32(to.out + ROWS - 1) / ROWS;
        const u32 row = index / across % down * ROWS;
        place = Place{index / across / down, row, u32(smaller(row + ROWS, to.out)), index % across * COLUMNS};
        return place.expert < to.experts;
    }

    __device__ __forceinline__ Ranges ranges(const Place& place) const { return Ranges{&to, place.expert, 0, {0, 0}}; }

    __device__ __forceinline__ A a(const Place& place) const { return A{placed((const bf16*)to.a), to.out, place.row, place.end}; }

    __device__ __forceinline__ B b(const Place& place) const {
        return B{placed((const bf16*)to.b), columns, place.column, u32(smaller(place.column + COLUMNS, columns))};
    }

    __device__ __forceinline__ S* row(const Place& place, u32 row) const {
        return (S*)to.c + (place.expert * to.out + row) * columns;
    }
};

// Two and four neighboring elements, which are moved by one instruction.
struct alignas(8) Pair {
    f32 low;
    f32 high;
};
struct alignas(8) TwoPairs {
    u32 first;
    u32 second;
};

// The sums of a warpgroup: 64 rows. A thread holds parts of two rows: two of every eight columns.
struct TileSums {
    f32 at[COLUMNS / 8][4];

    // Returns the tile's row with the thread's half.
    __device__ __forceinline__ static u32 row_of(u32 half) { return warp_of() * 16 + lane_of() / 4 + half * 8; }

    // Sets one half of the sums to the elements of a row. Columns from `end` on do not exist.
    __device__ __forceinline__ void load_row(const f32* row, u32 half, u32 end) {
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 8; ++n) {
            const u32 column = n * 8 + lane_of() % 4 * 2;
            const Pair pair = column < end ? *(const Pair*)(row + column) : Pair{0.0f, 0.0f};
            at[n][half * 2] = pair.low;
            at[n][half * 2 + 1] = pair.high;
        }
    }

    __device__ __forceinline__ void load_row(const bf16* row, u32 half, u32 end) {
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 8; ++n) {
            const u32 column = n * 8 + lane_of() % 4 * 2;
            const u32 pair = column < end ? *(const u32*)(row + column) : 0;
            at[n][half * 2] = __uint_as_float(pair << 16);
            at[n][half * 2 + 1] = __uint_as_float(pair & 0xffff0000u);
        }
    }

    // Stores one half of the sums, unless the row is null. In f32, four lanes store 32 neighboring bytes.
    __device__ __forceinline__ void store_row(f32* row, u32 half, u32 end) const {
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 8; ++n) {
            const u32 column = n * 8 + lane_of() % 4 * 2;
            if (row && column < end) *(Pair*)(row + column) = Pair{at[n][half * 2], at[n][half * 2 + 1]};
        }
    }

    // In bf16, two neighboring lanes first exchange pairs. The lane with the even index then has four neighboring
    // elements of columns 8n to 8n + 7, and the other lane has four of the next eight columns.
    __device__ __forceinline__ void store_row(bf16* row, u32 half, u32 end) const {
        const bool is_odd = lane_of() % 2 == 1;
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 8; n += 2) {
            const u32 even = pair_of(at[n][half * 2], at[n][half * 2 + 1]);
            const u32 odd = pair_of(at[n + 1][half * 2], at[n + 1][half * 2 + 1]);
            const u32 other = __shfl_xor_sync(ALL_LANES, is_odd ? even : odd, 1);
            const u32 column = (n + is_odd) * 8 + lane_of() % 4 / 2 * 4;
            if (row && column < end) *(TwoPairs*)(row + column) = is_odd ? TwoPairs{other, odd} : TwoPairs{even, other};
        }
    }
};

// Computes the block's tiles. All rows of the operands and of c start at aligned addresses.
template <typename Tiles>
__device__ __forceinline__ void multiply_tiles(const Tiles& tiles, bool accumulate) {
    using A = Stage<Tiles::A::IS_ALONG, ROWS>;
    using B = Stage<Tiles::B::IS_ALONG, COLUMNS>;
    unsigned char* const of_a = swizzled_memory();
    unsigned char* const of_b = of_a + STAGES * ROWS * DEPTH * u32(sizeof(bf16));
    const auto stage_a = [&](u32 stage) { return A{of_a + stage % STAGES * ROWS * DEPTH * u32(sizeof(bf16))}; };
    const auto stage_b = [&](u32 stage) { return B{of_b + stage % STAGES * COLUMNS * DEPTH * u32(sizeof(bf16))}; };

    // The tile of the next step to be copied, its operands, and the step's range of the summed dimension. A tile has at
    // least one step.
    u32 index = blockIdx.x;
    Place place;
    typename Tiles::A a;
    typename Tiles::B b;
    typename Tiles::Ranges ranges;
    Range range;
    const auto begin_tile = [&] {
        const bool is_there = tiles.find(index, place);
        a = tiles.a(place);
        b = tiles.b(place);
        ranges = tiles.ranges(place);
        range = Range{0, 0};
        if (is_there) ranges.take(range);
        return is_there;
    };
    bool is_there = begin_tile();
    const auto start = [&](u32 stage) {
        Step step{place, is_there, false, range.end - range.first <= DEPTH / 2};
        if (is_there) {
            stage_a(stage).start(a, range);
            stage_b(stage).start(b, range);
            step.is_last = !ranges.take(range);
            if (step.is_last) {
                index += gridDim.x;
                is_there = begin_tile();
            }
        }
        close_copies();
        return step;
    };

    Step steps[AHEAD];
#pragma unroll
    for (u32 ahead = 0; ahead < AHEAD; ++ahead) steps[ahead] = start(ahead);
    TileSums sums;
    for (u32 stage = 0; steps[0].is_there;) {
        const Place own = steps[0].place;
        const u32 columns = tiles.columns - own.column;
        // Without an accumulation, no column of the result is loaded, and all sums start at zero.
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = own.row + sums.row_of(half);
            sums.load_row(tiles.row(own, row) + own.column, half, accumulate && row < own.end ? columns : 0);
        }
        keep_order(sums.at);
        bool is_last;
        do {
            wait_for_copies<AHEAD - 1>();
            fence_shared_memory();
            __syncthreads(); // All threads' copies have arrived, and all products but those of the previous step have ended.
            const A at_a = stage_a(stage);
            const B at_b = stage_b(stage);
            const auto multiply = [&](auto depth) {
                fence_registers();
#pragma unroll
                for (u32 d = 0; d < decltype(depth)::VALUE; d += 16) {
                    const u64 left = at_a.part(warpgroup_of() * WARPGROUP_ROWS, d);
                    start_product<!Tiles::B::IS_ALONG, !Tiles::A::IS_ALONG>(sums.at, left, at_b.part(0, d), true);
                }
                close_products();
            };
            steps[0].is_short ? multiply(Count<DEPTH / 2>()) : multiply(Count<DEPTH>());
            is_last = steps[0].is_last;
#pragma unroll
            for (u32 ahead = 1; ahead < AHEAD; ++ahead) steps[ahead - 1] = steps[ahead];
            steps[AHEAD - 1] = start(stage + AHEAD);
            wait_for_products<1>();
            ++stage;
        } while (!is_last);
        wait_for_products<0>(sums.at);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = own.row + sums.row_of(half);
            sums.store_row(row < own.end ? tiles.row(own, row) + own.column : nullptr, half, columns);
        }
    }
}

BOUNDED_KERNEL(grouped_linear_wg_bf16, GroupedArguments, GROUPED_THREADS, 1) {
    multiply_tiles(RowTiles<true>{arguments, u32(arguments.width), u32(arguments.out)}, false);
}
BOUNDED_KERNEL(grouped_linear_grad_input_wg_bf16, GroupedArguments, GROUPED_THREADS, 1) {
    multiply_tiles(RowTiles<false>{arguments, u32(arguments.out), u32(arguments.width)}, false);
}
BOUNDED_KERNEL(grouped_linear_grad_weight_wg_bf16, GroupedArguments, GROUPED_THREADS, 1) {
    multiply_tiles(ExpertTiles<bf16>{arguments, u32(arguments.width)}, arguments.accumulate != 0);
}
BOUNDED_KERNEL(grouped_linear_grad_weight_wg_bf16_to_f32, GroupedArguments, GROUPED_THREADS, 1) {
    multiply_tiles(ExpertTiles<f32>{arguments, u32(arguments.width)}, arguments.accumulate != 0);
}
