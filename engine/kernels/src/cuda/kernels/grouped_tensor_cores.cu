// The experts' products in bf16 on tensor cores, with sums in f32. While the current tiles of the operands are
// multiplied, the next ones are copied to shared memory.
#include "grouped.cuh"
#include "tensor_cores.cuh"

// Number of tiles of each operand that are in shared memory at a time.
constexpr u32 STAGES = 3;

// The sums of one block: a tile of 128 × 128. Each of eight warps computes 64 × 32 of it, in fragments of 16 × 8.
template <bool ALONG_A, bool ALONG_B>
struct TensorCoreProducts {
    using Number = bf16;
    static constexpr u32 TILE = 128;
    static constexpr u32 DEPTH = 32;
    static constexpr u32 WARP_ROWS = 64;
    static constexpr u32 WARP_COLUMNS = 32;

    f32 sums[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = {};

    __device__ __forceinline__ static u32 first_row() { return warp_of() / (TILE / WARP_COLUMNS) * WARP_ROWS; }
    __device__ __forceinline__ static u32 first_column() { return warp_of() % (TILE / WARP_COLUMNS) * WARP_COLUMNS; }

    template <typename F>
    __device__ __forceinline__ void visit(F f) {
        const u32 row = first_row() + lane_of() / 4, column = first_column() + lane_of() % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < WARP_ROWS / 16; ++i) {
#pragma unroll
            for (u32 j = 0; j < WARP_COLUMNS / 8; ++j) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    sums[i][j][e] = f(row + i * 16 + e / 2 * 8, column + j * 8 + e % 2, sums[i][j][e]);
                }
            }
        }
    }

    // The tile of an operand in shared memory, with the order of rows and columns in global memory.
    template <bool ALONG>
    struct Shared {
        static constexpr u32 ROWS = ALONG ? TILE : DEPTH;
        static constexpr u32 WIDTH = ALONG ? DEPTH : TILE;
        static constexpr u32 SIZE = ROWS * HalfTile<WIDTH>::PITCH;
        HalfTile<WIDTH> rows;

        __device__ __forceinline__ explicit Shared(bf16* at) : rows{at} {}

        // Starts to load the tile. Missing elements become zeros.
        __device__ __forceinline__ void start(const Factor<bf16, ALONG>& of, const Range& range) const {
            const Range own{of.first, of.end}, &down = ALONG ? own : range, &along = ALONG ? range : own;
            const u32 count = u32(smaller(down.end - down.first, ROWS)), size = u32(smaller(along.end - along.first, WIDTH));
            rows.template start<ROWS, GROUPED_THREADS>(of.at + u64(down.first) * of.pitch + along.first, of.pitch, count, size);
        }

        // Loads 16 rows of a as a fragment of the left operand.
        __device__ __forceinline__ void load_left(u32 (&to)[4], u32 row, u32 d) const {
            ALONG ? rows.load_left(to, row, d) : rows.load_left_of_columns(to, d, row);
        }

        // Loads 16 columns of b as two fragments of the right operand.
        __device__ __forceinline__ void load_right(u32 (&to)[4], u32 column, u32 d) const {
            ALONG ? rows.load_right_of_rows(to, column, d) : rows.load_right(to, d, column);
        }
    };

    __device__ __forceinline__ static Shared<ALONG_A> stage_a(u32 stage) {
        return Shared<ALONG_A>((bf16*)shared_memory + stage % STAGES * Shared<ALONG_A>::SIZE);
    }

    __device__ __forceinline__ static Shared<ALONG_B> stage_b(u32 stage) {
        return Shared<ALONG_B>((bf16*)shared_memory + STAGES * Shared<ALONG_A>::SIZE + stage % STAGES * Shared<ALONG_B>::SIZE);
    }

    template <typename Ranges>
    __device__ __forceinline__ void add(const Factor<bf16, ALONG_A>& a, const Factor<bf16, ALONG_B>& b, Ranges ranges) {
        u32 started = 0;
        const auto start_next = [&] {
            Range range;
            if (ranges.take(range)) {
                stage_a(started).start(a, range);
                stage_b(started).start(b, range);
                ++started;
            }
            close_copies();
        };
        for (u32 stage = 0; stage < STAGES - 1; ++stage) start_next();
        for (u32 stage = 0; stage < started; ++stage) {
            wait_for_copies<STAGES - 2>();
            __syncthreads(); // All threads' copies have arrived, and the previous tile has been read.
            start_next();
            multiply(stage_a(stage), stage_b(stage));
        }
    }

    __device__ __forceinline__ void multiply(const Shared<ALONG_A>& a, const Shared<ALONG_B>& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#pragma unroll 1 // If it is unrolled, NVRTC 13.5 spills 32 bytes.
#else
#pragma unroll
#endif
        for (u32 d = 0; d < DEPTH; d += 16) {
            u32 of_b[WARP_COLUMNS / 16][4];
#pragma unroll
            for (u32 j = 0; j < WARP_COLUMNS / 16; ++j) b.load_right(of_b[j], first_column() + j * 16, d);
#pragma unroll
            for (u32 i = 0; i < WARP_ROWS / 16; ++i) {
                u32 of_a[4];
                a.load_left(of_a, first_row() + i * 16, d);
#pragma unroll
                for (u32 j = 0; j < WARP_COLUMNS / 8; ++j) {
                    multiply_add(sums[i][j], of_a, of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
};
GROUPED_KERNELS(bf16, TensorCoreProducts)
BOUNDED_KERNEL(grouped_linear_grad_weight_bf16_to_f32, GroupedArguments, GROUPED_THREADS, 2) {
    multiply_by_expert<TensorCoreProducts, f32>(arguments);
}
