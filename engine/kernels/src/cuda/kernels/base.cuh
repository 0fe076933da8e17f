// Definitions that all kernels use: types of fixed size, storage types, and the declaration of kernels.
//
// No system header is included, so compiling on a GPU machine only requires NVRTC's library. An ordinary C++ compiler can
// compile the same text for tests. For this purpose, device.hpp is included first, which simulates a device and defines
// everything that CUDA would define.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// A bfloat16 value: the upper 16 bits of an f32. It is only used for storage; all arithmetic is in f32.
struct bf16 {
    u16 bits;
};

// Declares a kernel: KERNEL(name, Arguments) { .. arguments .. }. The kernel takes one struct, by value. BOUNDED_KERNEL
// also limits the kernel's registers, so that `blocks` blocks of `threads` threads fit on a multiprocessor at the same
// time.
#ifndef ON_HOST
#define KERNEL(name, Arguments) extern "C" __global__ void name(const __grid_constant__ Arguments arguments)
#define BOUNDED_KERNEL(name, Arguments, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Arguments arguments)
extern __shared__ __align__(16) unsigned char shared_memory[];
#else
#define BOUNDED_KERNEL(name, Arguments, threads, blocks) KERNEL(name, Arguments)
#endif

// Defines a kernel for f32 and one for bf16, from a template over the storage type.
#define KERNELS(name, Arguments)                                     \
    KERNEL(name##_f32, Arguments) { name<f32>(arguments); }          \
    KERNEL(name##_bf16, Arguments) { name<bf16>(arguments); }

__device__ __forceinline__ u32 bits_of(f32 x) { return __float_as_uint(x); }

__device__ __forceinline__ f32 load(const f32* from) { return *from; }
__device__ __forceinline__ f32 load(const bf16* from) { return __uint_as_float(u32(from->bits) << 16); }

// Converts masks and ids to f32. Values below 2^24 are exact.
__device__ __forceinline__ f32 load(const u8* from) { return f32(*from); }
__device__ __forceinline__ f32 load(const u32* from) { return f32(*from); }

// Rounds to the nearest bf16, and ties to even.
__device__ __forceinline__ bf16 round_to_bf16(f32 x) {
    const u32 bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{u16(bits >> 16 | 0x40u)};
    return bf16{u16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Rounds two values to bf16 and packs them into one register, the first in the low half.
__device__ __forceinline__ u32 pair_of(f32 low, f32 high) {
#ifdef ON_HOST
    return u32(round_to_bf16(low).bits) | u32(round_to_bf16(high).bits) << 16;
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

__device__ __forceinline__ void store(f32* to, f32 x) { *to = x; }
__device__ __forceinline__ void store(u8* to, f32 x) { *to = u8(x); }
__device__ __forceinline__ void store(bf16* to, f32 x) { *to = round_to_bf16(x); }

// Adds x to the stored value if `accumulate` is true; otherwise overwrites the value.
template <typename T>
__device__ __forceinline__ void store_or_add(T* to, f32 x, bool accumulate) {
    store(to, accumulate ? load(to) + x : x);
}

// 16 bytes of elements, which are moved by one instruction.
template <typename T>
struct alignas(16) Pack {
    static constexpr u32 SIZE = 16 / sizeof(T);
    T at[SIZE];
};

__device__ __forceinline__ bool is_aligned(const void* address) { return (reinterpret_cast<u64>(address) & 15) == 0; }

__device__ __forceinline__ u64 global_thread() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ __forceinline__ u32 warp_of() { return threadIdx.x / 32; }
__device__ __forceinline__ u32 lane_of() { return threadIdx.x % 32; }

__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
