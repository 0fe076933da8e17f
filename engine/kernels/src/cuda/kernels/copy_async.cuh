// Asynchronous copies from global to shared memory: cp.async (PTX ISA, "Data movement and conversion instructions:
// asynchronous copy"). A thread can only wait for its own copies.
#pragma once
#include "base.cuh"

#ifndef ON_HOST
// Copies the first `count` of 16 bytes and fills the rest with zeros. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async(void* to, const void* from, u32 count) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(u32(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)), "r"(count)
                 : "memory");
}

// Forms a group of the copies started since the last call.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all groups but the last BUT.
template <u32 BUT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(BUT) : "memory");
}
#endif
