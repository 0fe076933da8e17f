// Access to buffers that are allocated while a program runs. Launches are recorded earlier. Instead of the buffer's
// address, a launch contains the address of a slot, whose top bit is set. The host writes the buffer's address to the
// slot (runtime/src/cuda/slots.rs).
#pragma once
#include "base.cuh"

struct Slot {
    u64 address;
    // Size of the buffer's rows in bytes.
    u64 bytes;
};

constexpr u64 IS_SLOT = 1ull << 63;

__device__ __forceinline__ bool has_slot(const void* address) { return (reinterpret_cast<u64>(address) & IS_SLOT) != 0; }

__device__ __forceinline__ const Slot& slot_of(const void* address) {
    return *reinterpret_cast<const Slot*>(reinterpret_cast<u64>(address) & ~IS_SLOT);
}

// Returns the address of a tensor, which is read from a slot if the tensor has one.
template <typename T>
__device__ __forceinline__ T* placed(T* address) {
    return has_slot(address) ? reinterpret_cast<T*>(slot_of(address).address) : address;
}

// Returns the number of elements of a tensor that has a slot.
template <typename T>
__device__ __forceinline__ u64 counted(const T* address) {
    return slot_of(address).bytes / sizeof(T);
}
