// The gradient of a table whose rows were looked up by ids. CPU counterpart: ops/embedding.rs.
//
// The rows of dy are sorted by their ids: first within chunks, and then over all chunks, by a search in every chunk.
// The rows of one id are added by a warp or, if there are many, by a block. Both add in the same order: first the rows
// of each span (neighbouring places of one sequence) in order, and then the sums of the spans in order. This order does
// not depend on other sequences, so accumulation over micro-batches gives the same bits.
#include "pieces.cuh"

// The sort key of a place: the id, and then the place.
__device__ __forceinline__ u64 key_of(u32 id, u64 place) { return u64(id) << 32 | place; }
__device__ __forceinline__ u32 id_of(u64 key) { return u32(key >> 32); }

// The id of places that add nothing. No vocabulary has so many ids.
constexpr u32 NO_ID = 0xffffffffu;

struct SortArguments {
    const u32* ids;
    u64* keys;
    u64 count;
    // The id of padding, which adds nothing.
    u32 padding;
    // The id of the table's first row, and the number of rows. Any other id adds nothing. Keys count from the first row.
    u32 first;
    u32 rows;
    // Number of places per chunk, a power of two.
    u32 length;
};

// Sorts chunks. Each block sorts one chunk in shared memory, with a bitonic sorting network (Batcher, Sorting networks
// and their applications, 1968).
KERNEL(embedding_sort, SortArguments) {
    const SortArguments& to = arguments;
    u64* keys = (u64*)shared_memory;
    const u64 first = u64(blockIdx.x) * to.length;
    for (u32 i = threadIdx.x; i < to.length; i += blockDim.x) {
        const bool is_there = first + i < to.count;
        const u32 id = is_there ? to.ids[first + i] : NO_ID, row = id - to.first;
        keys[i] = is_there ? key_of(id == to.padding || row >= to.rows ? NO_ID : row, first + i) : ~u64(0);
    }
    for (u32 size = 2; size <= to.length; size *= 2) {
        for (u32 distance = size / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < to.length / 2; i += blockDim.x) {
                const u32 a = 2 * i - (i & (distance - 1)), b = a + distance;
                const u64 of_a = keys[a], of_b = keys[b];
                if ((of_a > of_b) == ((a & size) == 0)) {
                    keys[a] = of_b;
                    keys[b] = of_a;
                }
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < to.length; i += blockDim.x) to.keys[first + i] = keys[i];
}

// Number of places per chunk, if there are several chunks.
constexpr u32 CHUNK = 2048;

struct RankArguments {
    const u64* chunks;
    u64* sorted;
    u64 count;
};

// Merges the sorted chunks. The new index of a key is the number of smaller keys in all chunks.
KERNEL(embedding_rank, RankArguments) {
    const RankArguments& to = arguments;
    const u64 i = global_thread();
    if (i >= to.count) return;
    const u64 key = to.chunks[i];
    u64 rank = 0;
#pragma unroll 4
    for (u64 first = 0; first < to.count; first += CHUNK) {
        const u64* chunk = to.chunks + first;
        u32 less = 0;
#pragma unroll
        for (u32 step = CHUNK / 2; step > 0; step /= 2) less += chunk[less + step - 1] < key ? step : 0;
        rank += less + (chunk[less] < key ? 1 : 0);
    }
    to.sorted[rank] = key;
}

struct EmbeddingGradArguments {
    const u64* sorted;
    const void* dy;
    void* d_table;
    u64 count;
    u64 width;
    // The spans of rows that are summed first. Each is a piece.
    Pieces spans;
    u64 span_count;
    // Number of blocks for ids with many rows. All further blocks are for the other ids.
    u32 long_blocks;
    // If not 0, the rows of an id are summed before the sum is added to the table's values, as in the sum of two
    // tensors. Otherwise each sum of a span is added to them.
    u32 sums_first;

    __device__ __forceinline__ u32 span_of(u32 place) const {
        return place / u32(spans.sequence) * u32(spans.of_sequence) + place % u32(spans.sequence) / u32(spans.length);
    }

    // True if key number i exists and has this id.
    __device__ __forceinline__ bool has(u64 i, u32 id) const { return i < count && id_of(sorted[i]) == id; }
};

// Maximum number of rows of an id that one warp adds by itself.
constexpr u32 SHORT = 128;

// Number of columns per thread, if a warp adds all rows of an id.
constexpr u32 OWN = 8;
// Number of rows that such a warp loads before it adds the first of them. If the rows are not packed, it loads one.
constexpr u32 SHORT_AHEAD = 4;

// Adds the rows of the id whose first key has number `first`, if there are few, in some of the columns.
template <typename T, typename S, bool PACKED>
__device__ __forceinline__ void add_short(const EmbeddingGradArguments& to, u64 first, u64 column) {
    const u32 id = id_of(to.sorted[first]);
    if (id == NO_ID || (first > 0 && id_of(to.sorted[first - 1]) == id)) return;
    u32 rows = 1;
#pragma unroll
    for (u32 i = 1; i <= SHORT; i += 32) rows += __popc(__ballot_sync(ALL_LANES, to.has(first + i + lane_of(), id)));
    if (rows > SHORT) return;
    S* d_row = (S*)to.d_table + u64(id) * to.width;
    const Neighbours<S, OWN> before = neighbours_in<PACKED, OWN>(d_row, column, to.width);
    f32 all[OWN], of_span[OWN] = {};
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) all[j] = to.sums_first ? 0.0f : before[j];
    constexpr u32 ROWS = PACKED ? SHORT_AHEAD : 1;
    u32 span = to.span_of(u32(to.sorted[first]));
    for (u32 start = 0; start < rows; start += ROWS) {
        u32 places[ROWS];
        Neighbours<T, OWN> loaded[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) places[i] = u32(to.sorted[first + smaller(start + i, rows - 1)]);
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            loaded[i] = neighbours_in<PACKED, OWN>((const T*)to.dy + places[i] * to.width, column, to.width);
        }
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            if (start + i >= rows) break;
            f32 row[OWN];
            unpack(row, loaded[i]);
            const bool begins = to.span_of(places[i]) != span;
            span = to.span_of(places[i]);
#pragma unroll
            for (u32 j = 0; j < OWN; ++j) {
                all[j] = begins ? all[j] + of_span[j] : all[j];
                of_span[j] = (begins ? 0.0f : of_span[j]) + row[j];
            }
        }
    }
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) all[j] += of_span[j];
    if (to.sums_first) {
#pragma unroll
        for (u32 j = 0; j < OWN; ++j) all[j] += before[j];
    }
    if (PACKED) {
        if (column < to.width) store_neighbours(d_row + column, all);
    } else {
#pragma unroll
        for (u32 j = 0; j < OWN; ++j) {
            if (column + j < to.width) store(d_row + column + j, all[j]);
        }
    }
}

// Number of columns per block, if the warps of a block share the rows of an id. Each thread has two of them.
constexpr u32 SHARED_COLUMNS = 64;
// Number of rows that such a warp loads before it adds the first of them.
constexpr u32 LONG_AHEAD = 16;

// Returns the number of the first key from `first` on that is not less than `key`.
__device__ __forceinline__ u64 first_not_less(const EmbeddingGradArguments& to, u64 first, u64 key) {
    u64 end = to.count;
    while (first < end) {
        const u64 middle = (first + end) / 2;
        if (to.sorted[middle] < key) first = middle + 1;
        else end = middle;
    }
    return first;
}

// Adds the rows of the id of key number `at`, if there are many, in some of the columns. `at` is a multiple of SHORT.
// Does nothing unless `at` is the first such number among the id's keys. Each warp sums the rows of a span. Then one
// thread per column adds the sums of the spans.
template <typename T, typename S, bool PACKED>
__device__ __forceinline__ void add_long(const EmbeddingGradArguments& to, u64 at, u64 first_column) {
    const u32 id = id_of(to.sorted[at]), warps = blockDim.x / 32;
    if (id == NO_ID || !to.has(at + 1, id) || (at >= SHORT && to.has(at - SHORT, id))) return;
    u64 first = at;
#pragma unroll
    for (u32 i = 1; i <= SHORT; i += 32) {
        const u64 back = i + lane_of();
        first -= __popc(__ballot_sync(ALL_LANES, back <= at && to.has(at - back, id)));
    }
    if (!to.has(first + SHORT, id)) return;
    // `starts` has the number of the first key of each span, and `of_spans` has the sums of each warp's span.
    u32* const starts = (u32*)shared_memory;
    f32* const of_spans = (f32*)(starts + blockDim.x);
    const u64 own = first_column + threadIdx.x;
    S* const out = (S*)to.d_table + u64(id) * to.width + own;
    const bool adds_spans = threadIdx.x < SHARED_COLUMNS && own < to.width;
    const f32 before = adds_spans ? load(out) : 0.0f;
    f32 all = to.sums_first ? 0.0f : before;
    const u32 spans = blockDim.x - 1;
    for (u64 first_span = 0; first_span < to.span_count; first_span += spans) {
        const u64 span = first_span + threadIdx.x;
        const u64 key = span < to.span_count ? key_of(id, to.spans.first(u32(span))) : key_of(id + 1, 0);
        starts[threadIdx.x] = u32(first_not_less(to, first, key));
        __syncthreads();
        for (u32 side_by_side = 0; side_by_side < spans; side_by_side += warps) {
            const u32 end = u32(smaller(side_by_side + warps, spans));
            if (starts[side_by_side] == starts[end]) continue;
            const u32 mine = side_by_side + warp_of();
            const u32 start = mine < end ? starts[mine] : 0, rows = mine < end ? starts[mine + 1] - start : 0;
            const u64 column = first_column + 2 * lane_of();
            f32 sums[2] = {};
            constexpr u32 ROWS = PACKED ? LONG_AHEAD : 1;
            for (u32 row = 0; row < rows; row += ROWS) {
                Neighbours<T, 2> loaded[ROWS];
                const u32 own_place = u32(to.sorted[start + smaller(row + lane_of(), rows - 1)]);
#pragma unroll
                for (u32 i = 0; i < ROWS; ++i) {
                    const u64 place = __shfl_sync(ALL_LANES, own_place, i);
                    loaded[i] = neighbours_in<PACKED, 2>((const T*)to.dy + place * to.width, column, to.width);
                }
#pragma unroll
                for (u32 i = 0; i < ROWS; ++i) {
                    for (u32 j = 0; j < 2; ++j) sums[j] = row + i < rows ? sums[j] + loaded[i][j] : sums[j];
                }
            }
            for (u32 j = 0; j < 2; ++j) of_spans[warp_of() * SHARED_COLUMNS + 2 * lane_of() + j] = sums[j];
            __syncthreads();
            for (u32 i = side_by_side; i < end && adds_spans; ++i) {
                const f32 sum = of_spans[(i - side_by_side) * SHARED_COLUMNS + threadIdx.x];
                all = starts[i] < starts[i + 1] ? all + sum : all;
            }
            __syncthreads();
        }
        __syncthreads(); // All threads have read the starts.
    }
    if (adds_spans) store(out, to.sums_first ? all + before : all);
}

// The first blocks handle ids with many rows, which take the longest. Each of them has one multiple of SHORT and some
// of the columns. In the other blocks, each warp has one key and some of the columns.
template <typename T, typename S, bool PACKED>
__device__ __forceinline__ void add_rows(const EmbeddingGradArguments& to) {
    if (blockIdx.x < to.long_blocks) {
        const u32 parts = u32((to.width + SHARED_COLUMNS - 1) / SHARED_COLUMNS);
        return add_long<T, S, PACKED>(to, u64(blockIdx.x / parts) * SHORT, u64(blockIdx.x % parts) * SHARED_COLUMNS);
    }
    const u32 parts = u32((to.width + 32 * OWN - 1) / (32 * OWN));
    const u64 warp = u64(blockIdx.x - to.long_blocks) * (blockDim.x / 32) + warp_of();
    const u64 first = warp / parts;
    if (first < to.count) add_short<T, S, PACKED>(to, first, warp % parts * (32 * OWN) + OWN * lane_of());
}

template <typename T, typename S = T>
__device__ void embedding_grad(const EmbeddingGradArguments& to) {
    if (to.width % OWN == 0 && is_aligned(to.dy) && is_aligned(to.d_table)) add_rows<T, S, true>(to);
    else add_rows<T, S, false>(to);
}
BOUNDED_KERNEL(embedding_grad_f32, EmbeddingGradArguments, 512, 1) { embedding_grad<f32>(arguments); }
BOUNDED_KERNEL(embedding_grad_bf16, EmbeddingGradArguments, 512, 2) { embedding_grad<bf16>(arguments); }
BOUNDED_KERNEL(embedding_grad_bf16_to_f32, EmbeddingGradArguments, 512, 2) { embedding_grad<bf16, f32>(arguments); }
