// Weights that are stored in eight or four bits per element: dequantization, and the squared norms of an adapted weight's
// rows. CPU counterparts: cpu/quantized.rs, which documents the formats, ops/quantized_linear.rs and ops/weight_squares.rs.
// Dequantized elements have the bits of the CPU's, so products and sums are not contracted.
#include "rows.cuh"

constexpr u32 NF4_CODES = 16;
// Neighbouring elements of a format with four bits that share a scale, and scales that share a scale.
constexpr u32 SCALED = 64;
constexpr u32 NESTED = 256;

// Formats.
constexpr u32 INT8 = 0;
constexpr u32 NF4 = 1;
// In any other, the scales of NF4 are quantized, too.

// Roundings of dequantized elements.
constexpr u32 TO_BF16 = 1;
constexpr u32 TO_F16 = 2;

// Rounds to the nearest f16, and ties to even.
__device__ __forceinline__ f32 nearest_f16(f32 x) {
    const f32 size = fabsf(x);
    // Below 2^-14, f16 values are multiples of 2^-24, as are f32 values from 0.5 on.
    if (size < 6.103515625e-05f) return copysignf(__fadd_rn(__fadd_rn(size, 0.5f), -0.5f), x);
    if (size >= 65520.0f) return copysignf(-minus_infinity(), x);
    const u32 bits = bits_of(x);
    return __uint_as_float((bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu);
}

// Divides in 32 bits if possible, which takes far fewer instructions.
__device__ __forceinline__ u64 quotient(u64 a, u64 b) { return (a | b) >> 32 ? a / b : u32(a) / u32(b); }

// A quantized matrix.
struct Quantized {
    const u8* codes;
    // A scale per row for INT8, and per SCALED elements for NF4. If scales are quantized, a scale per NESTED of
    // them, and a value that is added to each.
    const f32* scales;
    const u8* scale_codes;
    const f32* offset;
    // The place of the matrix's blocks of SCALED elements among those of the matrix of which it is a part (`Spread`).
    u64 start;
    u64 inner;
    u64 near;
    u64 stride;
    u64 columns;
    u32 format;
    u32 rounding;
    // The values of the codes of elements, and of those of scales.
    f32 values[NF4_CODES];
    f32 map[256];

    // Copies the values of NF4's codes to shared memory, where the lanes of a warp read different ones at a time.
    __device__ __forceinline__ const f32* shared_values() const {
        f32* const to = (f32*)shared_memory;
        if (threadIdx.x < NF4_CODES) to[threadIdx.x] = values[threadIdx.x];
        __syncthreads();
        return to;
    }

    // The scale of the element with index `at` in row-major order.
    __device__ __forceinline__ f32 scale(u64 at) const {
        if (format == INT8) return __fmul_rn(scales[quotient(at, columns)], 1.0f / 127.0f);
        const u64 block = at / SCALED;
        if (format == NF4) return scales[block];
        const u64 run = quotient(block, inner), whole = start + run / 2 * stride + run % 2 * near + (block - run * inner);
        return __fadd_rn(__fmul_rn(map[scale_codes[block]], scales[whole / NESTED]), *offset);
    }

    // The element with index `at`, whose scale is given.
    __device__ __forceinline__ f32 element(u64 at, f32 scale, const f32* of_codes) const {
        const u32 code = format == INT8 ? codes[at] : codes[at / 2] >> (at % 2 == 0 ? 4 : 0) & 15u;
        const f32 x = __fmul_rn(format == INT8 ? f32((signed char)code) : of_codes[code], scale);
        if (rounding == TO_BF16) return __uint_as_float(u32(round_to_bf16(x).bits) << 16);
        return rounding == TO_F16 ? nearest_f16(x) : x;
    }
};

struct DequantizeArguments {
    Quantized weight;
    void* out;
    u64 count;
};

// Neighbouring elements that a thread dequantizes.
constexpr u32 OWN = 8;

template <typename T>
__device__ void dequantize(const DequantizeArguments& to) {
    const Quantized& weight = to.weight;
    const f32* const values = weight.shared_values();
    const u64 first = global_thread() * OWN;
    if (first >= to.count) return;
    T* const out = (T*)to.out + first;
    const u32 count = u32(smaller(OWN, to.count - first));
    // The elements of a thread share a scale, unless rows of eight-bit codes end among them.
    const bool is_shared = weight.format != INT8 || weight.columns % OWN == 0;
    f32 scale = weight.scale(first), all[OWN] = {};
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) {
        if (j >= count) break;
        if (!is_shared && j > 0) scale = weight.scale(first + j);
        all[j] = weight.element(first + j, scale, values);
    }
    if (count == OWN && is_aligned(to.out)) {
        store_neighbours(out, all);
    } else {
        for (u32 j = 0; j < count; ++j) store(out + j, all[j]);
    }
}
KERNELS(dequantize, DequantizeArguments)

struct WeightSquaresArguments {
    // The quantized weight; without codes if the weight is `plain`.
    Quantized weight;
    const void* plain;
    // [rank][columns] and [rows][rank].
    const void* a;
    const void* b;
    f32* squares;
    u64 rows;
    u64 rank;
    f32 scale;
};

// Rows of a block, and columns of a thread at a time.
constexpr u32 ROWS = 8;
constexpr u32 COLUMNS = 4;

// A block computes ROWS sums of squares of the rows of W + scale·B·A.
template <typename T>
__device__ void weight_squares(const WeightSquaresArguments& to) {
    const f32* const values = to.weight.shared_values();
    const u64 first = u64(blockIdx.x) * ROWS, columns = to.weight.columns;
    const T *a = (const T*)to.a, *b = (const T*)to.b, *plain = (const T*)to.plain;
    const auto row_of = [&](u32 r) { return smaller(first + r, to.rows - 1); };
    f32 sums[ROWS] = {};
    for (u64 start = threadIdx.x; start < columns; start += blockDim.x * COLUMNS) {
        f32 added[ROWS][COLUMNS] = {};
        for (u64 k = 0; k < to.rank; ++k) {
            f32 of_a[COLUMNS];
#pragma unroll
            for (u32 c = 0; c < COLUMNS; ++c) {
                const u64 column = start + c * blockDim.x;
                of_a[c] = column < columns ? load(a + k * columns + column) : 0.0f;
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                const f32 of_b = load(b + row_of(r) * to.rank + k);
#pragma unroll
                for (u32 c = 0; c < COLUMNS; ++c) added[r][c] += of_b * of_a[c];
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; ++c) {
                const u64 column = start + c * blockDim.x, at = row_of(r) * columns + column;
                if (column >= columns) continue;
                const f32 w = plain ? load(plain + at) : to.weight.element(at, to.weight.scale(at), values);
                const f32 x = w + to.scale * added[r][c];
                sums[r] += x * x;
            }
        }
    }
    sum_warps(sums, blockDim.x / 32, (f32*)shared_memory + NF4_CODES);
#pragma unroll
    for (u32 r = 0; r < ROWS; ++r) {
        if (threadIdx.x == r && first + r < to.rows) to.squares[first + r] = sums[r];
    }
}
KERNELS(weight_squares, WeightSquaresArguments)
