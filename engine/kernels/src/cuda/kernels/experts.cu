// Moves rows to experts and back, and computes the experts' gated activation. CPU counterparts:
// ops/experts/combine.rs, slot_weights.rs, routed_swiglu.rs. Each block handles one row.
#include "math.cuh"
#include "rows.cuh"
#include "slots.cuh"

constexpr u32 NONE = 0xffffffffu;

struct RowsArguments {
    const void* from;
    void* out;
    // For dispatch, the slot of each row. For combine, the places of each token.
    const u32* indices;
    u64 width;
    u64 k;
};

// Copies to each row the token of its slot. Rows without a slot are set to zero.
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

// Sums the expert rows of each token, in the order of the token's choices.
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

// Copies the element at each index, or 0 if there is no index.
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
    // The number of used rows.
    const u32* end;
    // Only used by the backward.
    const void* dy;
    void* d_gate;
    void* d_up;
    void* d_weights;
    // Only used by the forward.
    void* y;
    u64 width;
    // The unit (u + shift)·g·sigmoid(alpha·g) of the limited gate and up.
    f32 alpha;
    f32 limit;
    f32 shift;

    // A limited gate times its sigmoid. NaN stays NaN.
    __device__ __forceinline__ f32 activated(f32 gate) const {
        return silu(alpha * (gate > limit ? limit : gate)) / alpha;
    }

    // Limited up with its summand.
    __device__ __forceinline__ f32 factor(f32 up) const {
        return (up > limit ? limit : up < -limit ? -limit : up) + shift;
    }
};

// y = w·unit(gate, up). If y was allocated for all rows, unused rows are set to zero. y may overwrite up.
template <typename T>
__device__ void routed_swiglu(const RoutedSwiGluArguments& to) {
    const u64 row = blockIdx.x, first = row * to.width;
    const bool is_used = row < *to.end;
    if (!is_used && has_slot(to.y)) return;
    const T *gate = placed((const T*)to.gate), *up = placed((const T*)to.up);
    T* y = placed((T*)to.y);
    const f32 weight = is_used ? load(placed((const T*)to.weights) + row) : 0.0f;
    const bool is_packed = are_packed(gate, to.width) && is_aligned(up) && is_aligned(y);
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_gate[N] = {}, of_up[N] = {};
        if (is_used) {
            load_neighbours(of_gate, gate + first + i);
            load_neighbours(of_up, up + first + i);
        }
        for (u32 j = 0; j < N; ++j) of_up[j] = is_used ? to.factor(of_up[j]) * (weight * to.activated(of_gate[j])) : 0.0f;
        store_neighbours(y + first + i, of_up);
    });
}
KERNELS(routed_swiglu, RoutedSwiGluArguments)

// d_gate may overwrite gate, and d_up may overwrite up, because no other thread reads the elements that a thread
// overwrites.
template <typename T>
__device__ void routed_swiglu_grad(const RoutedSwiGluArguments& to) {
    const u64 row = blockIdx.x, first = row * to.width;
    const bool is_used = row < *to.end;
    if (!is_used && has_slot(to.d_weights)) return;
    const T *gate = placed((const T*)to.gate), *up = placed((const T*)to.up), *dy = placed((const T*)to.dy);
    T *d_gate = placed((T*)to.d_gate), *d_up = placed((T*)to.d_up);
    const f32 weight = is_used ? load(placed((const T*)to.weights) + row) : 0.0f;
    const bool is_packed =
        are_packed(gate, to.width) && is_aligned(up) && is_aligned(dy) && is_aligned(d_gate) && is_aligned(d_up);
    f32 d_weight = 0.0f;
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 g[N] = {}, u[N] = {}, d[N] = {};
        if (is_used) {
            load_neighbours(g, gate + first + i);
            load_neighbours(u, up + first + i);
            load_neighbours(d, dy + first + i);
        }
        for (u32 j = 0; j < N; ++j) {
            // A limited element has no gradient.
            const f32 activated = to.activated(g[j]), factor = to.factor(u[j]);
            const f32 slope = g[j] > to.limit ? 0.0f : silu_derivative(to.alpha * g[j]);
            d_weight += d[j] * activated * factor;
            g[j] = weight * d[j] * factor * slope;
            u[j] = fabsf(u[j]) > to.limit ? 0.0f : weight * d[j] * activated;
        }
        store_neighbours(d_gate + first + i, g);
        store_neighbours(d_up + first + i, u);
    });
    d_weight = sum_block(d_weight, (f32*)shared_memory);
    if (threadIdx.x == 0) store(placed((T*)to.d_weights) + row, d_weight);
}
KERNELS(routed_swiglu_grad, RoutedSwiGluArguments)
