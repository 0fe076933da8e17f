// Buffers whose place is found while a program runs. Launches are recorded before: they have the address of a slot, with the top bit
// set, and the host writes to the slot where the buffer lies (runtime/src/cuda/slots.rs).
#pragma once
#include "base.cuh"

struct Slot {
    u64 address;
    // As many as were counted.
    u64 bytes;
};

constexpr u64 IS_SLOT = 1ull << 63;

__device__ __forceinline__ bool has_slot(const void* address) { return (reinterpret_cast<u64>(address) & IS_SLOT) != 0; }

__device__ __forceinline__ const Slot& slot_of(const void* address) {
    return *reinterpret_cast<const Slot*>(reinterpret_cast<u64>(address) & ~IS_SLOT);
}

// Where a tensor lies, whether it has a slot or not.
template <typename T>
__device__ __forceinline__ T* placed(T* address) {
    return has_slot(address) ? reinterpret_cast<T*>(slot_of(address).address) : address;
}

// How many elements a tensor with a slot has.
template <typename T>
__device__ __forceinline__ u64 counted(const T* address) {
    return slot_of(address).bytes / sizeof(T);
}
