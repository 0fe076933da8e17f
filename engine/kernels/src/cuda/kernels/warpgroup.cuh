// Products of a warpgroup, four warps whose first has a number that is a multiple of four: wgmma.mma_async (PTX ISA, "Asynchronous
// warpgroup level matrix multiply-accumulate operation"), for compute capability 9.0 alone.
//
// A product is started and goes on by itself: its sums, and the registers of its left factor, belong to it until it has been waited for;
// factors in shared memory must not change until then. Warp w of the warpgroup has rows 16w to 16w + 15 of the 64, and each lane of it
// has of these what it has of a result of mma.sync (tensor_cores.cuh).
#pragma once
#include "tensor_cores.cuh"

constexpr u32 WARPGROUP_THREADS = 128;
// Rows of a product of a warpgroup.
constexpr u32 WARPGROUP_ROWS = 64;

// A compiler has to know that it is the same for all lanes of a warp: products in paths that may diverge are waited for at once.
__device__ __forceinline__ u32 warpgroup_of() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP_THREADS, 0); }

#ifndef ON_HOST
__device__ __forceinline__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// Orders what was written to shared memory before products that are started behind the next barrier.
__device__ __forceinline__ void fence_shared_memory() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders what was done with registers before products that use them.
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// What was started since the last call is one group.
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Has a compiler do before this what makes these numbers, and behind it what is made of them.
template <u32 N>
__device__ __forceinline__ void keep_order(f32 (&x)[N][4]) {
#pragma unroll
    for (u32 n = 0; n < N; ++n) asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
}

// Waits for all groups but the last ones; the sums named are complete then.
template <u32 BUT, typename... Sums>
__device__ __forceinline__ void wait_for_products(Sums&... sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(BUT) : "memory");
    (keep_order(sums), ...);
}

// Names of so many registers, the first operands.
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

// The two forms for COLUMNS columns. R0 and so on are the numbers of the operands behind the sums.
#define PRODUCTS(COLUMNS, NAMES, SUMS, R0, R1, R2, R3, R4, R5, R6)                                                           \
    template <bool ARE_COLUMNS>                                                                                             \
    __device__ __forceinline__ void start_product(f32 (&d)[COLUMNS / 8][4], u64 a, u64 b, bool adds) {                      \
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" R2 ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES "}, %" R0 ", %" R1            \
                     ", adds, 1, 1, 0, %" R3 ";}"                                                                           \
                     : SUMS                                                                                                 \
                     : "l"(a), "l"(b), "r"(u32(adds)), "n"(u32(ARE_COLUMNS))                                                \
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

// d = a·b, or onto d. a is in shared memory, where rows have neighbours along k (64 × 16), or in registers as an operand of mma.sync is; b is in
// shared memory, where its columns have neighbours along k, or, if ARE_COLUMNS, its rows (16 × COLUMNS).
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

template <bool ARE_COLUMNS, u32 N>
static void start_product(f32 (&d)[N][4], u64 a, u64 b, bool adds) {
    start_product(&d[0][0], N * 8, nullptr, a, b, ARE_COLUMNS, adds);
}

template <bool ARE_COLUMNS, u32 N>
static void start_product(f32 (&d)[N][4], const u32 (&a)[4], u64 b, bool adds) {
    start_product(&d[0][0], N * 8, a, 0, b, ARE_COLUMNS, adds);
}
#endif

// ROWS rows of SIZE elements in shared memory, in blocks of 64 columns: 128 bytes of a row, eight rows one after another, whose packs
// of 16 bytes have changed places (the 128-byte swizzle of PTX ISA, "Shared memory matrix layout": bits 4 to 6 of an address are
// combined with bits 7 to 9). So rows and columns alike are read from all banks. It begins at a multiple of 1024 bytes.
template <u32 SIZE, u32 ROWS>
struct SwizzledTile {
    static constexpr u32 BYTES = SIZE * ROWS * u32(sizeof(bf16));
    // Bytes of a row in a block, and of eight of them.
    static constexpr u32 PITCH = 128, EIGHT_ROWS = 8 * PITCH, BLOCK = ROWS * PITCH;
    unsigned char* bytes;

    __device__ __forceinline__ bf16* at(u32 row, u32 column) const {
        const u32 pack = column % 64 / 8 ^ row % 8;
        return (bf16*)(bytes + column / 64 * BLOCK + row * PITCH + pack * 16) + column % 8;
    }

    // Starts to load COUNT rows with all THREADS of the block; all of them begin with a pack. `count` of them are there, and of these
    // `size` elements; the others are zeros.
    template <u32 COUNT, u32 THREADS>
    __device__ __forceinline__ void start(const bf16* from, u64 stride, u32 count, u32 size) const {
        // A thread copies the same columns of every so many rows.
        constexpr u32 PACK = Pack<bf16>::SIZE, ACROSS = SIZE / PACK, STEP = THREADS / ACROSS;
        static_assert(THREADS % ACROSS == 0 && COUNT % STEP == 0, "every thread has as many packs");
        const u32 row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * PACK;
        const u32 there = column < size ? u32(smaller(size - column, PACK)) * u32(sizeof(bf16)) : 0;
        const bf16* const pack = from + row * stride + column;
#pragma unroll
        for (u32 first = 0; first < COUNT; first += STEP) {
            // Of a pack that is not there no byte is read.
            copy_async(at(first + row, column), pack + first * stride, first + row < count ? there : 0);
        }
    }

    // What lies `count` tiles behind.
    __device__ __forceinline__ SwizzledTile behind(u32 count) const { return {bytes + count * BYTES}; }

    // For a factor whose rows (a) or columns (b) are rows here, from `row` on, and whose k begins at `column`.
    __device__ __forceinline__ u64 of_rows(u32 row, u32 column) const {
        return describe(row * PITCH + column / 64 * BLOCK + column % 64 * u32(sizeof(bf16)), 16);
    }

    // For a right factor whose rows, along k, are rows here, from `row` on.
    __device__ __forceinline__ u64 of_columns(u32 row) const { return describe(row * PITCH, BLOCK); }

    // A matrix descriptor: addresses and distances in 16 bytes. Between groups of eight rows lie EIGHT_ROWS bytes; the leading distance
    // is that between blocks, which factors have that are of columns.
    __device__ __forceinline__ u64 describe(u32 offset, u32 leading) const {
        const u32 start = shared_address(bytes) / 16 + offset / 16;
        return u64(1u << 30 | EIGHT_ROWS / 16) << 32 | (start + (leading / 16 << 16));
    }
};

// The first address of shared memory where a swizzled tile may begin.
__device__ __forceinline__ unsigned char* swizzled_memory() {
    return shared_memory + (0u - shared_address(shared_memory)) % 1024;
}
