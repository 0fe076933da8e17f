// Rows normalised, and their gradient: a block has one row, or a piece of them.
#pragma once
#include "pieces.cuh"

struct NormArguments {
    const void* x;
    const void* weight;
    const void* bias;
    void* y;
    f32* stats;
    u64 width;
    f32 eps;
};

// y = (x - mean)·rstd·weight + bias, and (mean, rstd) of the row.
template <typename T>
__device__ void layer_norm(const NormArguments& to) {
    constexpr u32 PACK = Pack<T>::SIZE;
    f32* scratch = (f32*)shared_memory;
    const T *x = (const T*)to.x + blockIdx.x * to.width, *weight = (const T*)to.weight, *bias = (const T*)to.bias;
    T* y = (T*)to.y + blockIdx.x * to.width;
    const bool is_packed = are_packed((const T*)to.x, to.width) && is_aligned(to.y) && is_aligned(weight) && is_aligned(bias);
    f32 sum = 0.0f;
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        f32 of_x[decltype(count)::VALUE];
        load_neighbours(of_x, x + i);
        for (const f32 x : of_x) sum += x;
    });
    const f32 mean = sum_block(sum, scratch) / f32(to.width);
    f32 squares = 0.0f;
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        f32 of_x[decltype(count)::VALUE];
        load_neighbours(of_x, x + i);
        for (const f32 x : of_x) squares += (x - mean) * (x - mean);
    });
    const f32 rstd = 1.0f / sqrtf(sum_block(squares, scratch) / f32(to.width) + to.eps);
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_x[N], of_weight[N], of_bias[N];
        load_neighbours(of_x, x + i);
        load_neighbours(of_weight, weight + i);
        load_neighbours(of_bias, bias + i);
        for (u32 j = 0; j < N; ++j) of_x[j] = (of_x[j] - mean) * rstd * of_weight[j] + of_bias[j];
        store_neighbours(y + i, of_x);
    });
    if (threadIdx.x == 0) {
        to.stats[2 * u64(blockIdx.x)] = mean;
        to.stats[2 * u64(blockIdx.x) + 1] = rstd;
    }
}

// y = x·rstd·weight, and (0, rstd) of the row.
template <typename T>
__device__ void rms_norm(const NormArguments& to) {
    constexpr u32 PACK = Pack<T>::SIZE;
    f32* scratch = (f32*)shared_memory;
    const T *x = (const T*)to.x + blockIdx.x * to.width, *weight = (const T*)to.weight;
    T* y = (T*)to.y + blockIdx.x * to.width;
    const bool is_packed = are_packed((const T*)to.x, to.width) && is_aligned(to.y) && is_aligned(weight);
    f32 squares = 0.0f;
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        f32 of_x[decltype(count)::VALUE];
        load_neighbours(of_x, x + i);
        for (const f32 x : of_x) squares += x * x;
    });
    const f32 rstd = 1.0f / sqrtf(sum_block(squares, scratch) / f32(to.width) + to.eps);
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_x[N], of_weight[N];
        load_neighbours(of_x, x + i);
        load_neighbours(of_weight, weight + i);
        for (u32 j = 0; j < N; ++j) of_x[j] *= rstd * of_weight[j];
        store_neighbours(y + i, of_x);
    });
    if (threadIdx.x == 0) {
        to.stats[2 * u64(blockIdx.x)] = 0.0f;
        to.stats[2 * u64(blockIdx.x) + 1] = rstd;
    }
}

struct NormGradInputArguments {
    const void* x;
    const void* weight;
    const f32* stats;
    const void* dy;
    void* dx;
    u64 width;
    u32 is_centred;
};

// dx = rstd·(g - mean(g) - x̂·mean(g·x̂)) with g = dy·weight, to put(how many, the first's index, dx): neighbours together if they
// may be. What is put may lie over x or dy: a thread puts an element behind its own last look at it, and nobody else looks at it
// then.
template <typename T, u32 PACK, typename Put>
__device__ void norm_grad_input_to(const NormGradInputArguments& to, bool may_be_packed, Put put) {
    f32* scratch = (f32*)shared_memory;
    const u64 row = blockIdx.x;
    const T *x = (const T*)to.x + row * to.width, *weight = (const T*)to.weight, *dy = (const T*)to.dy + row * to.width;
    const bool is_packed =
        may_be_packed && to.width % PACK == 0 && is_aligned(to.x) && is_aligned(to.dy) && is_aligned(weight);
    const f32 mean = to.stats[2 * row], rstd = to.stats[2 * row + 1];
    const auto load_all = [&](auto count, auto& of_x, auto& g, u64 i) {
        f32 of_weight[decltype(count)::VALUE];
        load_neighbours(of_x, x + i);
        load_neighbours(g, dy + i);
        load_neighbours(of_weight, weight + i);
        for (u32 j = 0; j < decltype(count)::VALUE; ++j) g[j] *= of_weight[j];
    };
    f32 sum_g = 0.0f, sum_gx = 0.0f;
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_x[N], g[N];
        load_all(count, of_x, g, i);
        for (u32 j = 0; j < N; ++j) {
            sum_g += g[j];
            sum_gx += g[j] * (of_x[j] - mean);
        }
    });
    const f32 mean_g = to.is_centred ? sum_block(sum_g, scratch) / f32(to.width) : 0.0f;
    const f32 mean_gx = sum_block(sum_gx, scratch) * rstd / f32(to.width);
    each_of_row<PACK>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_x[N], g[N];
        load_all(count, of_x, g, i);
        for (u32 j = 0; j < N; ++j) g[j] = rstd * (g[j] - mean_g - (of_x[j] - mean) * rstd * mean_gx);
        put(count, row * to.width + i, g);
    });
}

template <typename T>
__device__ void norm_grad_input(const NormGradInputArguments& to) {
    norm_grad_input_to<T, Pack<T>::SIZE>(to, is_aligned(to.dx), [&](auto, u64 i, const auto& dx) {
        store_neighbours((T*)to.dx + i, dx);
    });
}

// What one row adds to the gradients of weight and bias.
template <u32 N>
__device__ __forceinline__ void add_to_gradients(f32 (&weight)[N], f32 (&bias)[N], const f32 (&x)[N], const f32 (&d)[N], f32 mean,
                                                 f32 rstd) {
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        weight[j] += d[j] * (x[j] - mean) * rstd;
        bias[j] += d[j];
    }
}

// The gradient of the rows of a piece, to put(how many, the first's index, dx) as above, and the piece's share of those of weight and
// bias: rows are read once for all three. Each thread has PACK elements of a row at most, and so the sums of as many columns. A block
// has ROWS of them in registers at a time, whose loads are on their way together and which share barriers. Every sum has the order
// that the kernels for one of them have.
template <typename T, u32 PACK, u32 ROWS, typename Put>
__device__ void norm_grad_to(const NormGradInputArguments& to, const Fold& fold, bool may_be_packed, Put put) {
    f32* scratch = (f32*)shared_memory;
    const u64 piece = blockIdx.x, width = to.width;
    const bool is_packed =
        may_be_packed && width % PACK == 0 && is_aligned(to.x) && is_aligned(to.dy) && is_aligned(to.weight);
    // Calls f(how many, the first column, its place among this thread's).
    const auto own = [&](auto f) {
        if (is_packed) {
            if (threadIdx.x * PACK < width) f(Count<PACK>(), u64(threadIdx.x) * PACK, 0);
            return;
        }
#pragma unroll
        for (u32 j = 0; j < PACK; ++j) {
            const u64 column = threadIdx.x + u64(j) * blockDim.x;
            if (column < width) f(Count<1>(), column, j);
        }
    };
    const auto load_own = [&](f32(&all)[PACK], const void* rows, u64 row) {
        own([&](auto count, u64 column, u32 place) {
            f32 some[decltype(count)::VALUE];
            load_neighbours(some, (const T*)rows + row * width + column);
            for (u32 j = 0; j < decltype(count)::VALUE; ++j) all[place + j] = some[j];
        });
    };
    f32 of_weight[PACK] = {}, d_weight[PACK] = {}, d_bias[PACK] = {};
    load_own(of_weight, to.weight, 0);
    const u64 end = fold.pieces.end(piece);
    for (u64 first = fold.pieces.first(piece); first < end; first += ROWS) {
        f32 x[ROWS][PACK] = {}, d[ROWS][PACK] = {}, mean[ROWS] = {}, rstd[ROWS] = {};
        // Of each row the sum of g = dy·weight, and of g·(x - mean).
        f32 sums[2 * ROWS] = {};
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            if (first + r >= end) continue;
            mean[r] = to.stats[2 * (first + r)];
            rstd[r] = to.stats[2 * (first + r) + 1];
            load_own(x[r], to.x, first + r);
            load_own(d[r], to.dy, first + r);
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            own([&](auto count, u64, u32 place) {
                for (u32 j = place; j < place + decltype(count)::VALUE; ++j) {
                    const f32 g = d[r][j] * of_weight[j];
                    sums[2 * r] += g;
                    sums[2 * r + 1] += g * (x[r][j] - mean[r]);
                }
            });
        }
        sum_block_each(sums, scratch);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            if (first + r >= end) continue;
            const f32 mean_g = to.is_centred ? sums[2 * r] / f32(width) : 0.0f;
            const f32 mean_gx = sums[2 * r + 1] * rstd[r] / f32(width);
            add_to_gradients(d_weight, d_bias, x[r], d[r], mean[r], rstd[r]);
            own([&](auto count, u64 column, u32 place) {
                constexpr u32 N = decltype(count)::VALUE;
                f32 dx[N];
                for (u32 j = 0; j < N; ++j) {
                    const f32 g = d[r][place + j] * of_weight[place + j];
                    dx[j] = rstd[r] * (g - mean_g - (x[r][place + j] - mean[r]) * rstd[r] * mean_gx);
                }
                put(count, (first + r) * width + column, dx);
            });
        }
    }
    own([&](auto count, u64 column, u32 place) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 weight[N], bias[N];
        for (u32 j = 0; j < N; ++j) {
            weight[j] = d_weight[place + j];
            bias[j] = d_bias[place + j];
        }
        store_neighbours(fold.part(0, piece) + column, weight);
        store_neighbours(fold.part(1, piece) + column, bias);
    });
    fold.finish<T>(piece, 0, [&](auto f) { own([&](auto count, u64 column, u32) { f(count, column); }); });
}
