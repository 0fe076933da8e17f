// Normalization of rows, and its gradient. One or several warps of a block process a row. They hold the row in registers,
// so memory is read once.
//
// The speed of these kernels depends on the number of loads in flight. So there is no branch between a thread's
// loads. Where a row or column does not exist, the thread loads another one and ignores the values.
#pragma once
#include "pieces.cuh"

struct NormArguments {
    const void* x;
    const void* weight;
    const void* bias;
    void* y;
    f32* stats;
    u64 width;
    u64 rows;
    f32 eps;
    // Number of threads per row, a multiple of 32.
    u32 row_threads;
};

// Returns this thread's row and its place among the row's threads. A block processes several rows at a time.
__device__ __forceinline__ RowThreads row_threads(const NormArguments& to) {
    const u32 rows = blockDim.x / to.row_threads, own = threadIdx.x / to.row_threads;
    return RowThreads{u64(blockIdx.x) * rows + own, threadIdx.x - own * to.row_threads, to.row_threads};
}

// Number of packs of a row that a thread holds in registers. In longer rows, the other packs are read again in each pass.
constexpr u32 NORM_CHUNKS = 4;

template <typename T, bool IS_CENTRED, u32 N, u32 CHUNKS>
__device__ __forceinline__ void norm_row(const NormArguments& to) {
    f32* scratch = (f32*)shared_memory;
    const RowThreads own = row_threads(to);
    const bool is_there = own.row < to.rows;
    const u64 width = to.width, first = own.first<N>(), step = own.step<N>();
    const u32 warps = own.threads / 32;
    const T *x = (const T*)to.x + (is_there ? own.row : to.rows - 1) * width, *weight = (const T*)to.weight;
    T* y = (T*)to.y + own.row * width;
    Neighbours<T, N> kept[CHUNKS];
#pragma unroll
    for (u32 k = 0; k < CHUNKS; ++k) kept[k] = neighbours<N>(x + smaller(first + k * step, width - N));
    // Calls f(column, x at this column and its neighbors) for each group of this thread's columns.
    const auto each = [&](auto f) {
        f32 of_x[N];
#pragma unroll
        for (u32 k = 0; k < CHUNKS; ++k) {
            unpack(of_x, kept[k]);
            if (first + k * step < width) f(first + k * step, of_x);
        }
        for (u64 column = first + CHUNKS * step; column < width; column += step) {
            load_neighbours(of_x, x + column);
            f(column, of_x);
        }
    };
    f32 sum[1] = {}, squares[1] = {};
    if (IS_CENTRED) {
        each([&](u64, const f32(&of_x)[N]) {
            for (const f32 x : of_x) sum[0] += x;
        });
        sum_warps(sum, warps, scratch);
    }
    const f32 mean = sum[0] / f32(width);
    each([&](u64, const f32(&of_x)[N]) {
        for (const f32 x : of_x) squares[0] += (x - mean) * (x - mean);
    });
    sum_warps(squares, warps, scratch);
    const f32 rstd = 1.0f / sqrtf(squares[0] / f32(width) + to.eps);
    if (!is_there) return;
    each([&](u64 column, f32(&of_x)[N]) {
        f32 of_weight[N], of_bias[N] = {};
        load_neighbours(of_weight, weight + column);
        if (IS_CENTRED) load_neighbours(of_bias, (const T*)to.bias + column);
        for (u32 j = 0; j < N; ++j) of_x[j] = (of_x[j] - mean) * rstd * of_weight[j] + of_bias[j];
        store_neighbours(y + column, of_x);
    });
    if (own.thread == 0) {
        to.stats[2 * own.row] = mean;
        to.stats[2 * own.row + 1] = rstd;
    }
}

template <typename T, bool IS_CENTRED>
__device__ __forceinline__ void norm_rows(const NormArguments& to) {
    constexpr u32 PACK = Pack<T>::SIZE;
    const bool is_packed = are_packed((const T*)to.x, to.width) && is_aligned(to.y) && is_aligned(to.weight) &&
                           (!IS_CENTRED || is_aligned(to.bias));
    if (is_packed) norm_row<T, IS_CENTRED, PACK, NORM_CHUNKS>(to);
    else norm_row<T, IS_CENTRED, 1, NORM_CHUNKS>(to);
}

// Computes y = (x - mean)·rstd·weight + bias, and stores (mean, rstd) of the row.
template <typename T>
__device__ void layer_norm(const NormArguments& to) {
    norm_rows<T, true>(to);
}

// Computes y = x·rstd·weight, and stores (0, rstd) of the row.
template <typename T>
__device__ void rms_norm(const NormArguments& to) {
    norm_rows<T, false>(to);
}

struct NormGradInputArguments {
    const void* x;
    const void* weight;
    const f32* stats;
    const void* dy;
    void* dx;
    u64 width;
    u64 rows;
    u32 is_centred;
    // Number of threads per row, a multiple of 32.
    u32 row_threads;
};

// Adds one row's summands to the gradients of weight and bias.
template <u32 N>
__device__ __forceinline__ void add_to_gradients(f32 (&weight)[N], f32 (&bias)[N], const f32 (&x)[N], const f32 (&d)[N], f32 mean,
                                                 f32 rstd) {
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        weight[j] += d[j] * (x[j] - mean) * rstd;
        bias[j] += d[j];
    }
}

// A range of `length` rows from `first` on, which some warps process. Rows from `end` on do not exist.
struct Share {
    u64 first;
    u64 length;
    u64 end;
};

// Computes dx = rstd·(g - mean(g) - x̂·mean(g·x̂)) with g = dy·weight for the rows of a share, ROWS at a time. With SUMS,
// also computes the share's part of the gradients of weight and bias. Each thread holds CHUNKS times N columns in
// registers. With SUMS, rows must not have more columns than that.
template <typename T, bool PACKED, u32 N, u32 CHUNKS, u32 ROWS, bool SUMS, typename Fetch, typename Put, typename Sums>
__device__ __forceinline__ void norm_grad_share(const NormGradInputArguments& to, const Share& share, Fetch fetch, Put put,
                                                Sums sums_at) {
    using Some = Neighbours<T, N>;
    f32* scratch = (f32*)shared_memory;
    const u64 width = to.width, step = u64(to.row_threads) * N, first = threadIdx.x % to.row_threads * N;
    const T *x = (const T*)to.x, *dy = (const T*)to.dy;
    const auto load_weight = [&](u64 column) {
        const Some all = neighbours_in<PACKED, N>((const T*)to.weight, column, width);
        return column < width ? all : Some{};
    };
    const u32 there = share.end > share.first ? u32(smaller(share.end - share.first, share.length)) : 0;
    const f32 part = 1.0f / f32(width);
    f32 d_weight[CHUNKS][N] = {}, d_bias[CHUNKS][N] = {};
    for (u32 i = 0; i < u32(share.length); i += ROWS) {
        Some kept_x[ROWS][CHUNKS], kept_dy[ROWS][CHUNKS];
        decltype(fetch(Count<N>(), u64(0))) fetched[ROWS][CHUNKS];
        f32 mean[ROWS], rstd[ROWS];
        Some weight[CHUNKS];
#pragma unroll
        for (u32 k = 0; k < CHUNKS; ++k) weight[k] = load_weight(first + k * step);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u64 row = smaller(share.first + i + r, share.end - 1);
            mean[r] = to.stats[2 * row];
            rstd[r] = to.stats[2 * row + 1];
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) {
                const u64 column = first + k * step;
                kept_x[r][k] = neighbours_in<PACKED, N>(x + row * width, column, width);
                kept_dy[r][k] = neighbours_in<PACKED, N>(dy + row * width, column, width);
                if constexpr (PACKED) fetched[r][k] = fetch(Count<N>(), row * width + smaller(column, width - N));
            }
        }
        // For each row, the sums of g and of g·(x - mean). The weight is 0 in columns that do not exist.
        f32 sums[2 * ROWS] = {};
        const auto add = [&](u32 r, const Some& some_x, const Some& some_dy, const Some& by) {
            f32 x[N], g[N], of_weight[N];
            unpack(x, some_x);
            unpack(g, some_dy);
            unpack(of_weight, by);
            for (u32 j = 0; j < N; ++j) {
                g[j] *= of_weight[j];
                sums[2 * r] += g[j];
                sums[2 * r + 1] += g[j] * (x[j] - mean[r]);
            }
        };
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) add(r, kept_x[r][k], kept_dy[r][k], weight[k]);
            const u64 start = smaller(share.first + i + r, share.end - 1) * width;
            for (u64 column = first + CHUNKS * step; !SUMS && column < width; column += step) {
                add(r, neighbours_in<PACKED, N>(x + start, column, width), neighbours_in<PACKED, N>(dy + start, column, width),
                    load_weight(column));
            }
        }
        sum_warps(sums, to.row_threads / 32, scratch);
#pragma unroll
        for (u32 k = 0; k < CHUNKS; ++k) weight[k] = load_weight(first + k * step);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u64 row = share.first + i + r, start = row * width;
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) stay_packed(kept_x[r][k]), stay_packed(kept_dy[r][k]), stay_packed(weight[k]);
            if (i + r >= there) continue;
            const f32 mean_g = to.is_centred ? sums[2 * r] * part : 0.0f;
            const f32 mean_gx = sums[2 * r + 1] * rstd[r] * part;
            f32 of_x[N], d[N], of_weight[N];
            const auto differentiate = [&](f32(&dx)[N]) {
                for (u32 j = 0; j < N; ++j) {
                    dx[j] = rstd[r] * (d[j] * of_weight[j] - mean_g - (of_x[j] - mean[r]) * rstd[r] * mean_gx);
                }
            };
            const auto put_all = [&](u64 column, const auto& fetched) {
                f32 dx[N];
                differentiate(dx);
                if constexpr (PACKED) {
                    put(Count<N>(), start + column, fetched, dx);
                } else {
#pragma unroll
                    for (u32 j = 0; j < N; ++j) {
                        if (column + j >= width) break;
                        const f32 one[1] = {dx[j]};
                        put(Count<1>(), start + column + j, fetch(Count<1>(), start + column + j), one);
                    }
                }
            };
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) {
                const u64 column = first + k * step;
                unpack(of_x, kept_x[r][k]);
                unpack(d, kept_dy[r][k]);
                unpack(of_weight, weight[k]);
                if (SUMS) add_to_gradients(d_weight[k], d_bias[k], of_x, d, mean[r], rstd[r]);
                if (column < width) put_all(column, fetched[r][k]);
            }
            for (u64 column = first + CHUNKS * step; !SUMS && column < width; column += step) {
                unpack(of_x, neighbours_in<PACKED, N>(x + start, column, width));
                unpack(d, neighbours_in<PACKED, N>(dy + start, column, width));
                unpack(of_weight, load_weight(column));
                if constexpr (PACKED) put_all(column, fetch(Count<N>(), start + column));
                else put_all(column, 0);
            }
        }
    }
    if constexpr (SUMS) {
        f32 *const d_weight_to = sums_at(0), *const d_bias_to = sums_at(1);
#pragma unroll
        for (u32 k = 0; k < CHUNKS; ++k) {
            const u64 column = first + k * step;
            for (u32 j = 0; j < N && column + j < width; ++j) {
                d_weight_to[column + j] = d_weight[k][j];
                d_bias_to[column + j] = d_bias[k][j];
            }
        }
    }
}

// True if threads may process groups of PACK neighboring elements of a row.
template <u32 PACK>
__device__ __forceinline__ bool is_packed(const NormGradInputArguments& to, bool may_be_packed) {
    return may_be_packed && to.width % PACK == 0 && is_aligned(to.x) && is_aligned(to.dy) && is_aligned(to.weight);
}

// Computes the gradient of x. Calls put(count, index, fetched, dx) for each group of `count` elements from `index` on,
// where `fetched` is the result of fetch(count, index). fetch is called together with the loads of x and dy.
//
// `put` may overwrite the memory that `fetch` reads. Each element is read and written by the same thread, and its last
// read comes before the write.
template <typename T, u32 PACK, typename Fetch, typename Put>
__device__ void norm_grad_input_to(const NormGradInputArguments& to, bool may_be_packed, Fetch fetch, Put put) {
    const u64 first = u64(blockIdx.x) * (blockDim.x / to.row_threads) + threadIdx.x / to.row_threads;
    const Share share = {first, 1, to.rows};
    if (is_packed<PACK>(to, may_be_packed)) {
        norm_grad_share<T, true, PACK, 1, 1, false>(to, share, fetch, put, 0);
    } else {
        norm_grad_share<T, false, PACK, 1, 1, false>(to, share, fetch, put, 0);
    }
}

template <typename T>
__device__ void norm_grad_input(const NormGradInputArguments& to) {
    const auto fetch = [](auto, u64) { return 0; };
    norm_grad_input_to<T, Pack<T>::SIZE>(to, is_aligned(to.dx), fetch, [&](auto, u64 i, int, const auto& dx) {
        store_neighbours((T*)to.dx + i, dx);
    });
}

// Computes the gradients of x, weight and bias. Each block processes one piece of rows, and reads its rows once for all
// three gradients. Every sum has the same order as in the kernels that compute one of these gradients.
template <typename T, u32 PACK, u32 CHUNKS, u32 ROWS, typename Fetch, typename Put>
__device__ void norm_grad_to(const NormGradInputArguments& to, const Fold& fold, bool may_be_packed, Fetch fetch, Put put) {
    const Pieces& pieces = fold.pieces;
    const u32 piece = blockIdx.x, own = threadIdx.x / to.row_threads;
    const u64 width = to.width;
    const u32 shares = u32(blockDim.x) / to.row_threads;
    const Share share = {pieces.first(piece) + own * pieces.share, pieces.share, pieces.end(piece)};
    // Dimensions: [shares][results][width].
    f32* const of_shares = (f32*)shared_memory + 2 * ROWS * MAX_WARPS;
    const auto sums_at = [&](u32 result) { return shares == 1 ? fold.part(result, piece) : of_shares + (2 * own + result) * width; };
    if (is_packed<PACK>(to, may_be_packed)) {
        norm_grad_share<T, true, PACK, CHUNKS, ROWS, true>(to, share, fetch, put, sums_at);
    } else {
        norm_grad_share<T, false, PACK, CHUNKS, ROWS, true>(to, share, fetch, put, sums_at);
    }
    __syncthreads();
    const auto columns = [&](auto f) { own_columns(width, true, f); };
    for (u32 result = 0; result < 2 && shares > 1; ++result) {
        columns([&](auto count, u64 column) {
            f32 sums[decltype(count)::VALUE] = {};
            add_in_order(sums, shares, [&](u64 share) { return of_shares + (2 * share + result) * width + column; });
            store_neighbours(fold.part(result, piece) + column, sums);
        });
    }
    fold.finish<T>(piece, 0, columns);
}
