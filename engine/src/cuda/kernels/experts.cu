// Rows to experts and back, and the experts' gated unit. Twins: ops/experts/combine.rs, slot_weights.rs, routed_swiglu.rs. A
// block has one row.
#include "math.cuh"
#include "reduce.cuh"

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
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        if (slot == NONE) {
            store(out + i, 0.0f);
        } else {
            out[i] = row[i];
        }
    }
}
KERNELS(dispatch, RowsArguments)

// The sum of a token's rows, in the order of its choices.
template <typename T>
__device__ void combine(const RowsArguments& to) {
    const u32* places = to.indices + blockIdx.x * to.k;
    T* out = (T*)to.out + blockIdx.x * to.width;
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        f32 sum = 0.0f;
        for (u64 choice = 0; choice < to.k; ++choice) {
            if (places[choice] != NONE) sum += load((const T*)to.from + u64(places[choice]) * to.width + i);
        }
        store(out + i, sum);
    }
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
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        store(y + i, is_used ? load(up + i) * weight * silu(load(gate + i)) : 0.0f);
    }
}
KERNELS(routed_swiglu, RoutedSwiGluArguments)

// d_gate may lie over gate, and d_up over up: a thread overwrites what it alone reads.
template <typename T>
__device__ void routed_swiglu_grad(const RoutedSwiGluArguments& to) {
    const u64 row = blockIdx.x, first = row * to.width;
    const bool is_used = row < *to.end;
    const f32 weight = is_used ? load((const T*)to.weights + row) : 0.0f;
    f32 d_weight = 0.0f;
    for (u64 i = first + threadIdx.x; i < first + to.width; i += blockDim.x) {
        f32 d_gate = 0.0f, d_up = 0.0f;
        if (is_used) {
            const f32 g = load((const T*)to.gate + i), u = load((const T*)to.up + i), d = load((const T*)to.dy + i);
            d_weight += d * silu(g) * u;
            d_gate = weight * d * u * silu_derivative(g);
            d_up = weight * d * silu(g);
        }
        store((T*)to.d_gate + i, d_gate);
        store((T*)to.d_up + i, d_up);
    }
    d_weight = sum_block(d_weight, (f32*)shared_memory);
    if (threadIdx.x == 0) store((T*)to.d_weights + row, d_weight);
}
KERNELS(routed_swiglu_grad, RoutedSwiGluArguments)
