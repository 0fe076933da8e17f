// Matrix products of warpgroups: wgmma.mma_async (PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate
// operation"). Only compute capability 9.0 has them. A warpgroup consists of four consecutive warps; the index of its
// first warp is a multiple of four.
//
// A product is started and runs asynchronously. Until the warpgroup has waited for the product,
// - no other instruction may use the registers of its sums and of its left operand, and
// - its operands in shared memory must not change.
//
// A product has 64 rows. Warp w of the warpgroup holds rows 16w to 16w + 15. Within these rows, each lane holds the same
// elements as in a result of mma.sync (tensor_cores.cuh).
#pragma once
#include "tensor_cores.cuh"

constexpr u32 WARPGROUP_THREADS = 128;
// Number of rows of a product.
constexpr u32 WARPGROUP_ROWS = 64;

// Returns the index of this thread's warpgroup. The shuffle proves to the compiler that all lanes of a warp have the same
// index. Without this proof, paths count as divergent, and the compiler waits for each product at once.
__device__ __forceinline__ u32 warpgroup_of() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP_THREADS, 0); }

#ifndef ON_HOST
__device__ __forceinline__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// Makes earlier writes to shared memory visible to products that are started after the next barrier.
__device__ __forceinline__ void fence_shared_memory() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders earlier accesses to registers before products that use the registers.
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Combines the products started since the last call into one group.
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Prevents the compiler from moving computations across this point: x is computed before, and is used only afterwards.
template <u32 N>
__device__ __forceinline__ void keep_order(f32 (&x)[N][4]) {
#pragma unroll
    for (u32 n = 0; n < N; ++n) asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
}

// Waits until at most the last BUT groups are still running. The given sums must belong to finished groups; they may be
// used afterwards.
template <u32 BUT, typename... Sums>
__device__ __forceinline__ void wait_for_products(Sums&... sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(BUT) : "memory");
    (keep_order(sums), ...);
}

// The assembler's names of the first 32, 64 and 128 operands.
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SUMS_4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SUMS_32(n) SUMS_4(n), SUMS_4(n + 1), SUMS_4(n + 2), SUMS_4(n + 3), SUMS_4(n + 4), SUMS_4(n + 5), SUMS_4(n + 6), SUMS_4(n + 7)
#define SUMS_64(n) SUMS_32(n), SUMS_32(n + 8)
#define SUMS_128(n) SUMS_64(n), SUMS_64(n + 16)

// Defines start_product for COLUMNS columns, with the left operand in shared memory or in registers. R0 to R6 are the
// numbers of the operands that follow the sums.
#define PRODUCTS(COLUMNS, NAMES, SUMS, R0, R1, R2, R3, R4, R5, R6)                                                           \
    template <bool ARE_COLUMNS, bool ARE_ROWS = false>                                                                      \
    __device__ __forceinline__ void start_product(f32 (&d)[COLUMNS / 8][4], u64 a, u64 b, bool adds) {                      \
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" R2 ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES "}, %" R0 ", %" R1            \
                     ", adds, 1, 1, %" R4 ", %" R3 ";}"                                                                     \
                     : SUMS                                                                                                 \
                     : "l"(a), "l"(b), "r"(u32(adds)), "n"(u32(ARE_COLUMNS)), "n"(u32(ARE_ROWS))                            \
                     : "memory");                                                                                           \
    }                                                                                                                       \
    template <bool ARE_COLUMNS>                                                                                             \
    __device__ __forceinline__ void start_product(f32 (&d)[COLUMNS / 8][4], const u32 (&a)[4], u64 b, bool adds) {          \
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" R5 ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES "}, {%" R0 ", %" R1 ", %" R2  \
                     ", %" R3 "}, %" R4 ", adds, 1, 1, %" R6 ";}"                                                           \
                     : SUMS                                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(u32(adds)), "n"(u32(ARE_COLUMNS))            \
                     : "memory");                                                                                           \
    }

// Starts the product d = a·b or, if `adds`, d += a·b.
// - a has 64 × 16 elements. It is in shared memory, with neighbors along k or, if ARE_ROWS, along the rows; or it is in
//   registers, with the layout of a left operand of mma.sync.
// - b has 16 × COLUMNS elements. It is in shared memory, with neighbors along k or, if ARE_COLUMNS, along the columns.
PRODUCTS(64, NAMES_32, SUMS_32(0), "32", "33", "34", "35", "36", "37", "38")
PRODUCTS(128, NAMES_64, SUMS_64(0), "64", "65", "66", "67", "68", "69", "70")
PRODUCTS(256, NAMES_128, SUMS_128(0), "128", "129", "130", "131", "132", "133", "134")
#else
template <u32 N>
static void keep_order(f32 (&)[N][4]) {}

template <unsigned BUT, typename... Sums>
static void wait_for_products(Sums&...) {
    wait_for_products(BUT);
}

template <bool ARE_COLUMNS, bool ARE_ROWS = false, u32 N>
static void start_product(f32 (&d)[N][4], u64 a, u64 b, bool adds) {
    start_product(&d[0][0], N * 8, nullptr, a, b, ARE_COLUMNS, ARE_ROWS, adds);
}

template <bool ARE_COLUMNS, u32 N>
static void start_product(f32 (&d)[N][4], const u32 (&a)[4], u64 b, bool adds) {
    start_product(&d[0][0], N * 8, a, 0, b, ARE_COLUMNS, false, adds);
}
#endif

// A tile of ROWS rows of SIZE elements in shared memory. It must start at a multiple of 1024 bytes.
//
// The tile consists of blocks of 64 columns, so a row has 128 bytes in each block. The packs of 16 bytes are permuted
// within groups of eight rows by the 128-byte swizzle (PTX ISA, "Shared memory matrix layout"): bits 4 to 6 of an address
// are xored with bits 7 to 9. As a result, reads of rows and reads of columns both use all banks.
template <u32 SIZE, u32 ROWS>
struct SwizzledTile {
    static constexpr u32 BYTES = SIZE * ROWS * u32(sizeof(bf16));
    // Bytes per row of a block, and per eight rows of a block.
    static constexpr u32 PITCH = 128, EIGHT_ROWS = 8 * PITCH, BLOCK = ROWS * PITCH;
    unsigned char* bytes;

    __device__ __forceinline__ bf16* at(u32 row, u32 column) const {
        const u32 pack = column % 64 / 8 ^ row % 8;
        return (bf16*)(bytes + column / 64 * BLOCK + row * PITCH + pack * 16) + column % 8;
    }

    // Starts to load COUNT rows, with all THREADS of the block. All rows must start at aligned addresses. Only `count`
    // rows of `size` elements exist in memory. The rest is filled with zeros.
    template <u32 COUNT, u32 THREADS>
    __device__ __forceinline__ void start(const bf16* from, u64 stride, u32 count, u32 size) const {
        // Each thread copies the same columns in every STEP-th row.
        constexpr u32 PACK = Pack<bf16>::SIZE, ACROSS = SIZE / PACK, STEP = THREADS / ACROSS;
        static_assert(THREADS % ACROSS == 0 && COUNT % STEP == 0, "every thread has as many packs");
        const u32 row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * PACK;
        const u32 there = column < size ? u32(smaller(size - column, PACK)) * u32(sizeof(bf16)) : 0;
        const bf16* const pack = from + row * stride + column;
#pragma unroll
        for (u32 first = 0; first < COUNT; first += STEP) {
            // For a pack that does not exist, no byte is read.
            copy_async(at(first + row, column), pack + first * stride, first + row < count ? there : 0);
        }
    }

    // Returns the tile that is `count` tiles after this one.
    __device__ __forceinline__ SwizzledTile behind(u32 count) const { return {bytes + count * BYTES}; }

    // Returns the descriptor of an operand whose neighbors are along k: a left operand whose rows are rows of the tile,
    // or a right operand whose columns are rows of the tile. `row` is the first of these rows, and `column` is where k
    // starts.
    __device__ __forceinline__ u64 of_rows(u32 row, u32 column) const {
        return describe(row * PITCH + column / 64 * BLOCK + column % 64 * u32(sizeof(bf16)), 16);
    }

    // Returns the descriptor of an operand whose neighbors are along the columns of the tile: a right operand with its
    // columns, or a left operand whose 64 rows they are. k is along the rows of the tile, from `row` on. `column` is the
    // first of the columns, a multiple of 64.
    __device__ __forceinline__ u64 of_columns(u32 row, u32 column = 0) const {
        return describe(row * PITCH + column / 64 * BLOCK, BLOCK);
    }

    // Returns the matrix descriptor of an operand that starts `offset` bytes after the start of the tile. A descriptor
    // has the operand's address and two distances, all in units of 16 bytes. The stride distance, between groups of
    // eight rows, is EIGHT_ROWS bytes. The leading distance, between blocks of 64 columns, is `leading` bytes. wgmma
    // only uses the leading distance of operands from of_columns. Bit 62 selects the 128-byte swizzle.
    __device__ __forceinline__ u64 describe(u32 offset, u32 leading) const {
        const u32 start = shared_address(bytes) / 16 + offset / 16;
        return u64(1u << 30 | EIGHT_ROWS / 16) << 32 | (start + (leading / 16 << 16));
    }
};

// Returns the first address in shared memory at which a swizzled tile may start.
__device__ __forceinline__ unsigned char* swizzled_memory() {
    return shared_memory + (0u - shared_address(shared_memory)) % 1024;
}
