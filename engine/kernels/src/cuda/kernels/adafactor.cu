// Adafactor. CPU counterpart: optim/adafactor.rs, which has the formulas.
#include "reduce.cuh"

struct AdafactorArguments {
    void* parameter;
    // The f32 master copy of a parameter that is stored in bf16, or null.
    f32* master;
    const void* gradient;
    // The means of squares of each row and column. For a vector, `rows_sq` is null and `columns_sq` has the squares.
    f32* rows_sq;
    f32* columns_sq;
    const f32* norm;
    // Learning rate, and decay of the means.
    const f32* scalars;
    // The sum of `rows_sq` of each matrix.
    const f32* of_rows;
    // Two values per row: the squares of its direction, and those of its parameters. First all of the former.
    f32* squares;
    // The sums of `squares` of each matrix, in the same order.
    const f32* totals;
    u64 matrices;
    u64 rows;
    u64 columns;
    f32 max_norm;
    f32 clip_threshold;
    f32 least_scale;
    f32 decay;
    // True if gradients are f32. Otherwise they have the parameters' type.
    u32 sums_in_f32;
};

// If the norm is not finite, the step is skipped and the model does not change.
__device__ __forceinline__ bool is_skipped(const AdafactorArguments& to) { return !(*to.norm - *to.norm == 0.0f); }

template <typename T>
__device__ __forceinline__ f32 clipped(const AdafactorArguments& to, u64 i) {
    const f32 g = to.sums_in_f32 ? ((const f32*)to.gradient)[i] : load((const T*)to.gradient + i);
    return g * fminf(to.max_norm / (*to.norm + 1e-6f), 1.0f);
}

__device__ __forceinline__ f32 square(f32 g) { return g * g + 1e-30f; }

__device__ __forceinline__ void move_mean(const AdafactorArguments& to, f32* mean, f32 current) {
    const f32 beta = to.scalars[1];
    *mean = beta * *mean + (1.0f - beta) * current;
}

// Updates the mean of the row that the block processes.
template <typename T>
__device__ void adafactor_rows(const AdafactorArguments& to) {
    if (is_skipped(to)) return;
    const u64 row = blockIdx.x;
    f32 sum = 0.0f;
    for (u64 j = threadIdx.x; j < to.columns; j += blockDim.x) sum += square(clipped<T>(to, row * to.columns + j));
    sum = sum_block(sum, (f32*)shared_memory);
    if (threadIdx.x == 0) move_mean(to, to.rows_sq + row, sum / f32(to.columns));
}
KERNELS(adafactor_rows, AdafactorArguments)

// Updates the means of 32 columns of one matrix. Each warp sums every n-th row, where n is the number of warps.
template <typename T>
__device__ void adafactor_columns(const AdafactorArguments& to) {
    if (is_skipped(to)) return;
    const u64 groups = (to.columns + 31) / 32, matrix = blockIdx.x / groups;
    const u64 column = blockIdx.x % groups * 32 + lane_of(), first = matrix * to.rows * to.columns + column;
    const u32 warps = blockDim.x / 32;
    f32 sum = 0.0f;
    if (column < to.columns) {
#pragma unroll 4
        for (u64 row = warp_of(); row < to.rows; row += warps) sum += square(clipped<T>(to, first + row * to.columns));
    }
    f32* sums = (f32*)shared_memory;
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp_of() > 0 || column >= to.columns) return;
    for (u32 warp = 1; warp < warps; ++warp) sum += sums[warp * 32 + lane_of()];
    move_mean(to, to.columns_sq + matrix * to.columns + column, sum / f32(to.rows));
}
KERNELS(adafactor_columns, AdafactorArguments)

// Returns the direction of the element of a row and a column. The square roots divide one after the other, because the
// product of the means may leave the range of f32.
template <typename T>
__device__ __forceinline__ f32 direction(const AdafactorArguments& to, u64 matrix, u64 row, u64 column) {
    const f32 g = clipped<T>(to, row * to.columns + column), of_column = sqrtf(to.columns_sq[matrix * to.columns + column]);
    return to.rows_sq ? g / sqrtf(to.rows_sq[row] / (to.of_rows[matrix] / f32(to.rows))) / of_column : g / of_column;
}

template <typename T>
__device__ __forceinline__ f32 before(const AdafactorArguments& to, u64 i) {
    return to.master ? to.master[i] : load((const T*)to.parameter + i);
}

// Sums the squares of the direction and of the parameters of one row. For a vector, first updates the means.
template <typename T>
__device__ void adafactor_squares(const AdafactorArguments& to) {
    if (is_skipped(to)) return;
    const u64 row = blockIdx.x, matrix = row / to.rows;
    f32 of_u = 0.0f, of_p = 0.0f;
    for (u64 j = threadIdx.x; j < to.columns; j += blockDim.x) {
        if (!to.rows_sq) move_mean(to, to.columns_sq + j, square(clipped<T>(to, j)));
        const f32 u = direction<T>(to, matrix, row, j), p = before<T>(to, row * to.columns + j);
        of_u += u * u;
        of_p += p * p;
    }
    of_u = sum_block(of_u, (f32*)shared_memory);
    of_p = sum_block(of_p, (f32*)shared_memory);
    if (threadIdx.x == 0) {
        to.squares[row] = of_u;
        to.squares[to.matrices * to.rows + row] = of_p;
    }
}
KERNELS(adafactor_squares, AdafactorArguments)

// Moves the parameters of one row.
template <typename T>
__device__ void adafactor_apply(const AdafactorArguments& to) {
    if (is_skipped(to)) return;
    const u64 row = blockIdx.x, matrix = row / to.rows;
    const f32 rate = to.scalars[0], size = f32(to.rows * to.columns);
    const f32 of_u = sqrtf(to.totals[matrix] / size), of_p = sqrtf(to.totals[to.matrices + matrix] / size);
    const f32 far = rate * fmaxf(of_p, to.least_scale) / fmaxf(of_u / to.clip_threshold, 1.0f);
    const f32 keep = 1.0f - rate * to.decay;
    for (u64 j = threadIdx.x; j < to.columns; j += blockDim.x) {
        const u64 i = row * to.columns + j;
        const f32 p = before<T>(to, i) * keep - far * direction<T>(to, matrix, row, j);
        if (to.master) to.master[i] = p;
        store((T*)to.parameter + i, p);
    }
}
KERNELS(adafactor_apply, AdafactorArguments)
