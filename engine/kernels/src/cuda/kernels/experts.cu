// Rows to experts and back, and the experts' gated unit. Twins: ops/experts/combine.rs, slot_weights.rs, routed_swiglu.rs. A
// block has one row.
#include "math.cuh"
#include "rows.cuh"

constexpr u32 NONE = 0xffffffffu;

struct RowsArguments {
    const void* from;
    void* out;
    // Slots of dispatch's rows, or places of combine's tokens.
    const u32* indices;
    u64 width;
    u64 k;
};

// The token of every row; zeros for rows of no slot.
template <typename T>
__device__ void dispatch(const RowsArguments& to) {
    const u32 slot = to.indices[blockIdx.x];
    const T* row = (const T*)to.from + (slot == NONE ? 0 : slot / to.k) * to.width;
    T* out = (T*)to.out + blockIdx.x * to.width;
    const bool is_packed = are_packed((const T*)to.from, to.width) && is_aligned(to.out);
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        f32 all[decltype(count)::VALUE] = {};
        if (slot != NONE) load_neighbours(all, row + i);
        store_neighbours(out + i, all);
    });
}
KERNELS(dispatch, RowsArguments)

// The sum of a token's rows, in the order of its choices.
template <typename T>
__device__ void combine(const RowsArguments& to) {
    const u32* places = to.indices + blockIdx.x * to.k;
    T* out = (T*)to.out + blockIdx.x * to.width;
    const T* from = (const T*)to.from;
    each_of_row<Pack<T>::SIZE>(to.width, are_packed(from, to.width) && is_aligned(to.out), [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 sums[N] = {}, all[N];
        for (u64 choice = 0; choice < to.k; ++choice) {
            if (places[choice] == NONE) continue;
            load_neighbours(all, from + u64(places[choice]) * to.width + i);
            for (u32 j = 0; j < N; ++j) sums[j] += all[j];
        }
        store_neighbours(out + i, sums);
    });
}
KERNELS(combine, RowsArguments)

struct GatherArguments {
    const void* from;
    void* out;
    const u32* indices;
    u64 count;
};

// The number at every index; 0 where there is none.
template <typename T>
__device__ void gather(const GatherArguments& to) {
    const u64 i = global_thread();
    if (i >= to.count) return;
    const u32 index = to.indices[i];
    if (index == NONE) {
        store((T*)to.out + i, 0.0f);
    } else {
        ((T*)to.out)[i] = ((const T*)to.from)[index];
    }
}
KERNELS(gather, GatherArguments)

struct RoutedSwiGluArguments {
    const void* gate;
    const void* up;
    const void* weights;
    // Where the used rows end.
    const u32* end;
    // Of the backward.
    const void* dy;
    void* d_gate;
    void* d_up;
    void* d_weights;
    // Of the forward.
    void* y;
    u64 width;
};

// y = w·silu(gate)·up; zeros behind the rows that are used. y may lie over up.
template <typename T>
__device__ void routed_swiglu(const RoutedSwiGluArguments& to) {
    const u64 row = blockIdx.x;
    const T *gate = (const T*)to.gate + row * to.width, *up = (const T*)to.up + row * to.width;
    T* y = (T*)to.y + row * to.width;
    const bool is_used = row < *to.end;
    const f32 weight = is_used ? load((const T*)to.weights + row) : 0.0f;
    const bool is_packed = are_packed((const T*)to.gate, to.width) && is_aligned(to.up) && is_aligned(to.y);
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_gate[N] = {}, of_up[N] = {};
        if (is_used) {
            load_neighbours(of_gate, gate + i);
            load_neighbours(of_up, up + i);
        }
        for (u32 j = 0; j < N; ++j) of_up[j] *= weight * silu(of_gate[j]);
        store_neighbours(y + i, of_up);
    });
}
KERNELS(routed_swiglu, RoutedSwiGluArguments)

// d_gate may lie over gate, and d_up over up: a thread overwrites what it alone reads.
template <typename T>
__device__ void routed_swiglu_grad(const RoutedSwiGluArguments& to) {
    const u64 row = blockIdx.x, first = row * to.width;
    const T *gate = (const T*)to.gate + first, *up = (const T*)to.up + first, *dy = (const T*)to.dy + first;
    const bool is_used = row < *to.end;
    const f32 weight = is_used ? load((const T*)to.weights + row) : 0.0f;
    const bool is_packed = are_packed((const T*)to.gate, to.width) && is_aligned(to.up) && is_aligned(to.dy) &&
                           is_aligned(to.d_gate) && is_aligned(to.d_up);
    f32 d_weight = 0.0f;
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 g[N] = {}, u[N] = {}, d[N] = {};
        if (is_used) {
            load_neighbours(g, gate + i);
            load_neighbours(u, up + i);
            load_neighbours(d, dy + i);
        }
        for (u32 j = 0; j < N; ++j) {
            const f32 activated = silu(g[j]), of_gate = weight * d[j] * u[j] * silu_derivative(g[j]);
            d_weight += d[j] * activated * u[j];
            u[j] = weight * d[j] * activated;
            g[j] = of_gate;
        }
        store_neighbours((T*)to.d_gate + first + i, g);
        store_neighbours((T*)to.d_up + first + i, u);
    });
    d_weight = sum_block(d_weight, (f32*)shared_memory);
    if (threadIdx.x == 0) store((T*)to.d_weights + row, d_weight);
}
KERNELS(routed_swiglu_grad, RoutedSwiGluArguments)
