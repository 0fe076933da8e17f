// Lets the last of several blocks continue with the results that all of them have stored (CUDA C++ Programming Guide,
// "Memory Fence Functions").
#pragma once
#include "base.cuh"

// Returns true in all threads of the last of `blocks` blocks that take this ticket. These threads see everything that
// the other blocks' threads stored before. The ticket must be 0 before the first block and is 0 again after the last
// one, ready for the next launch.
__device__ __forceinline__ bool is_last_block(u32* ticket, u32 blocks) {
    if (blocks == 1) return true;
    __threadfence();
    __syncthreads(); // Orders every thread's stores before its fence.
    const bool is_last = __syncthreads_or(threadIdx.x == 0 && atomicInc(ticket, blocks - 1) == blocks - 1);
    __threadfence();
    return is_last;
}
