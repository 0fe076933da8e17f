// Asynchronous copies from global to shared memory, with cp.async (PTX ISA, "Data movement and conversion
// instructions: asynchronous copy"). A thread can only wait for the copies that it has started itself.
#pragma once
#include "base.cuh"

#ifndef ON_HOST
// Starts to copy 16 bytes, of which only the first `count` are read and the others are set to zero. Both addresses
// must be multiples of 16.
__device__ __forceinline__ void copy_async(void* to, const void* from, u32 count) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(u32(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)), "r"(count)
                 : "memory");
}

// Puts the copies that this thread has started since the last call into a group.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all of this thread's groups except the last BUT ones.
template <u32 BUT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(BUT) : "memory");
}
#endif
