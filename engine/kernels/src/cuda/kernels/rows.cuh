// Rows that a block goes through, neighbours together where they can be moved so.
#pragma once
#include "reduce.cuh"

// Elements that lie side by side, moved 16 bytes at a time if they are that many.
template <typename T, u32 N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
    T at[N];
};

template <u32 N, typename T>
__device__ __forceinline__ void load_neighbours(f32 (&to)[N], const T* from) {
    const Neighbours<T, N> all = *reinterpret_cast<const Neighbours<T, N>*>(from);
#pragma unroll
    for (u32 j = 0; j < N; ++j) to[j] = load(&all.at[j]);
}

template <u32 N, typename T>
__device__ __forceinline__ void store_neighbours(T* to, const f32 (&from)[N]) {
    Neighbours<T, N> all;
#pragma unroll
    for (u32 j = 0; j < N; ++j) store(&all.at[j], from[j]);
    *reinterpret_cast<Neighbours<T, N>*>(to) = all;
}

template <u32 N, typename T>
__device__ __forceinline__ void add_neighbours(f32 (&to)[N], const T* from) {
    f32 all[N];
    load_neighbours(all, from);
#pragma unroll
    for (u32 j = 0; j < N; ++j) to[j] += all[j];
}

// A number that is known when a kernel is compiled.
template <u32 N>
struct Count {
    static constexpr u32 VALUE = N;
};

// Calls f(how many, the first of them) for this thread's elements of a row: N at a time if the row is packed, that is, begins at an
// address that is aligned; what is left at its end, and others, one by one. Every call shares the elements out alike.
template <u32 N, typename F>
__device__ __forceinline__ void each_of_row(u64 width, bool is_packed, F f) {
    const u64 packed = is_packed ? width / N * N : 0;
    for (u64 i = u64(threadIdx.x) * N; i < packed; i += u64(blockDim.x) * N) f(Count<N>(), i);
    for (u64 i = packed + threadIdx.x; i < width; i += blockDim.x) f(Count<1>(), i);
}

// Whether all rows of so many elements are packed.
template <typename T>
__device__ __forceinline__ bool are_packed(const T* rows, u64 pitch) {
    return is_aligned(rows) && pitch % Pack<T>::SIZE == 0;
}
