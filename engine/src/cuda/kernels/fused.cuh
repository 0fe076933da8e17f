// What generated kernels are made of (cuda/fused/source.rs).
#pragma once
#include "math.cuh"
#include "norm.cuh"
#include "random.cuh"
#include "strides.cuh"

// Neighbouring elements, moved 16 bytes at a time.
template <typename T, u32 N>
struct alignas(16) Neighbours {
    T at[N];

    __device__ __forceinline__ void to(T* address) const { *reinterpret_cast<Neighbours*>(address) = *this; }
};

template <u32 N, typename T>
__device__ __forceinline__ Neighbours<T, N> neighbours(const T* address) {
    return *reinterpret_cast<const Neighbours<T, N>*>(address);
}
