// Loops of a block over the elements of a row. Neighboring elements are moved together where addresses are aligned.
#pragma once
#include "reduce.cuh"

// Neighboring elements of a row. They are moved 16 bytes at a time if they have that many bytes.
template <typename T, u32 N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
    T at[N];

    __device__ __forceinline__ f32 operator[](u32 j) const { return load(&at[j]); }
    __device__ __forceinline__ void set(u32 j, T x) { at[j] = x; }
};

// Holds bf16 elements in pairs, because a compiler would use a whole register for each single element.
template <u32 N>
struct alignas(2 * N < 16 ? 2 * N : 16) Neighbours<bf16, N> {
    static_assert(N % 2 == 0, "pairs, or one alone");
    u32 pairs[N / 2];

    __device__ __forceinline__ f32 operator[](u32 j) const {
        return __uint_as_float(j % 2 == 0 ? pairs[j / 2] << 16 : pairs[j / 2] & 0xffff0000u);
    }
    // Sets element j, which must be zero before.
    __device__ __forceinline__ void set(u32 j, bf16 x) { pairs[j / 2] |= u32(x.bits) << (j % 2 * 16); }
};

template <>
struct Neighbours<bf16, 1> {
    bf16 at[1];

    __device__ __forceinline__ f32 operator[](u32) const { return load(at); }
    __device__ __forceinline__ void set(u32, bf16 x) { at[0] = x; }
};

template <u32 N, typename T>
__device__ __forceinline__ Neighbours<T, N> neighbours(const T* from) {
    return *reinterpret_cast<const Neighbours<T, N>*>(from);
}

// Loads N neighbors of a row. If PACKED, they are loaded together and without a branch; a group past the end of the row
// gives the row's last N elements. Otherwise elements are loaded one by one, and elements past the end are zeros.
template <bool PACKED, u32 N, typename T>
__device__ __forceinline__ Neighbours<T, N> neighbours_in(const T* row, u64 column, u64 width) {
    if constexpr (PACKED) return neighbours<N>(row + smaller(column, width - N));
    Neighbours<T, N> all = {};
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        if (column + j < width) all.set(j, row[column + j]);
    }
    return all;
}

template <u32 N, typename T>
__device__ __forceinline__ void unpack(f32 (&to)[N], const Neighbours<T, N>& from) {
#pragma unroll
    for (u32 j = 0; j < N; ++j) to[j] = from[j];
}

template <u32 N, typename T>
__device__ __forceinline__ void load_neighbours(f32 (&to)[N], const T* from) {
    unpack(to, neighbours<N>(from));
}

// Stores neighboring words in global memory. 8 or 16 bytes are stored by one instruction, because a compiler might store
// them one by one.
template <u32 WORDS>
__device__ __forceinline__ void store_words(void* to, const u32 (&words)[WORDS]) {
#ifdef ON_HOST
    *reinterpret_cast<Neighbours<u32, WORDS>*>(to) = reinterpret_cast<const Neighbours<u32, WORDS>&>(words);
#else
    if constexpr (WORDS == 1) {
        *(u32*)to = words[0];
    } else if constexpr (WORDS == 2) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    } else {
        static_assert(WORDS % 4 == 0, "packs");
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) {
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((u32*)to + i), "r"(words[i]), "r"(words[i + 1]),
                         "r"(words[i + 2]), "r"(words[i + 3])
                         : "memory");
        }
    }
#endif
}

template <u32 N>
__device__ __forceinline__ void store_neighbours(u8* to, const f32 (&from)[N]) {
    Neighbours<u8, N> all;
#pragma unroll
    for (u32 j = 0; j < N; ++j) store(&all.at[j], from[j]);
    *reinterpret_cast<Neighbours<u8, N>*>(to) = all;
}

template <u32 N>
__device__ __forceinline__ void store_neighbours(f32* to, const f32 (&from)[N]) {
    u32 words[N];
#pragma unroll
    for (u32 j = 0; j < N; ++j) words[j] = bits_of(from[j]);
    store_words(to, words);
}

template <u32 N>
__device__ __forceinline__ void store_neighbours(bf16* to, const f32 (&from)[N]) {
    if constexpr (N == 1) {
        store(to, from[0]);
    } else {
        u32 pairs[N / 2];
#pragma unroll
        for (u32 j = 0; j < N / 2; ++j) pairs[j] = pair_of(from[2 * j], from[2 * j + 1]);
        store_words(to, pairs);
    }
}

// Prevents a compiler from keeping the unpacked elements in registers. Packed elements take half as many registers.
template <typename T, u32 N>
__device__ __forceinline__ void stay_packed(Neighbours<T, N>& all) {
#ifndef ON_HOST
    if constexpr (sizeof(T) == 2 && N > 1) {
#pragma unroll
        for (u32 j = 0; j < N / 2; ++j) asm volatile("" : "+r"(all.pairs[j]));
    }
#endif
}

// A compile-time constant, passed as an argument.
template <u32 N>
struct Count {
    static constexpr u32 VALUE = N;
};

// The threads that process one row: all threads of a block, or some of its warps.
struct RowThreads {
    u64 row;
    // The index of this thread among the row's threads.
    u32 thread;
    // Number of the row's threads.
    u32 threads;

    // Returns the first column of this thread if each thread processes N neighboring columns at a time. `step` returns
    // the distance to the thread's next group.
    template <u32 N>
    __device__ __forceinline__ u64 first() const {
        return u64(thread) * N;
    }
    template <u32 N>
    __device__ __forceinline__ u64 step() const {
        return u64(threads) * N;
    }
};

// Calls f(count, column) for groups of `count` elements from `column` on, until this thread's elements of a row are
// covered. A row is packed if it starts at an aligned address. Then groups have N elements, and the remaining elements
// at the row's end come one by one. In other rows, all elements come one by one. Calls with the same `width` and
// `is_packed` assign the same elements to a thread.
template <u32 N, typename F>
__device__ __forceinline__ void each_of_row(const RowThreads& own, u64 width, bool is_packed, F f) {
    const u64 packed = is_packed ? width / N * N : 0;
    for (u64 i = own.first<N>(); i < packed; i += own.step<N>()) f(Count<N>(), i);
    for (u64 i = packed + own.first<1>(); i < width; i += own.step<1>()) f(Count<1>(), i);
}

// As above, for a row that all threads of the block process.
template <u32 N, typename F>
__device__ __forceinline__ void each_of_row(u64 width, bool is_packed, F f) {
    each_of_row<N>(RowThreads{blockIdx.x, threadIdx.x, blockDim.x}, width, is_packed, f);
}

// True if every row in a tensor of rows `pitch` elements apart starts at an aligned address.
template <typename T>
__device__ __forceinline__ bool are_packed(const T* rows, u64 pitch) {
    return is_aligned(rows) && pitch % Pack<T>::SIZE == 0;
}
