// Dense elements, a pack of them for each thread, moved 16 bytes at a time where addresses and what is left allow it.
#pragma once
#include "base.cuh"

// The elements of this thread.
template <typename T>
struct Elements {
    u64 first;
    u64 end;

    __device__ __forceinline__ explicit Elements(u64 count)
        : first(smaller(global_thread() * Pack<T>::SIZE, count)), end(smaller(first + Pack<T>::SIZE, count)) {}

    // Whether they are a whole pack in all of these.
    __device__ __forceinline__ bool is_pack(const T* a, const T* b, const T* c) const {
        return end - first == Pack<T>::SIZE && is_aligned(a) && is_aligned(b) && is_aligned(c);
    }

    __device__ __forceinline__ Pack<T> pack(const T* of) const { return *reinterpret_cast<const Pack<T>*>(of + first); }

    __device__ __forceinline__ void set_pack(T* of, const Pack<T>& to) const { *reinterpret_cast<Pack<T>*>(of + first) = to; }
};

// y[i] = f(i, x[i]).
template <typename T, typename F>
__device__ __forceinline__ void map(const T* x, T* y, u64 count, F f) {
    const Elements<T> own(count);
    if (own.is_pack(x, x, y)) {
        Pack<T> pack = own.pack(x);
        for (u32 i = 0; i < Pack<T>::SIZE; ++i) store(&pack.at[i], f(own.first + i, load(&pack.at[i])));
        own.set_pack(y, pack);
        return;
    }
    for (u64 i = own.first; i < own.end; ++i) store(y + i, f(i, load(x + i)));
}

// y[i] = f(a[i], b[i]).
template <typename T, typename F>
__device__ __forceinline__ void zip(const T* a, const T* b, T* y, u64 count, F f) {
    const Elements<T> own(count);
    if (own.is_pack(a, b, y)) {
        Pack<T> pack = own.pack(a);
        const Pack<T> other = own.pack(b);
        for (u32 i = 0; i < Pack<T>::SIZE; ++i) store(&pack.at[i], f(load(&pack.at[i]), load(&other.at[i])));
        own.set_pack(y, pack);
        return;
    }
    for (u64 i = own.first; i < own.end; ++i) store(y + i, f(load(a + i), load(b + i)));
}
