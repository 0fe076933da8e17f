// The last of several blocks, which goes on with what all of them have stored (CUDA C++ Programming Guide, "Memory Fence Functions").
#pragma once
#include "base.cuh"

// Whether this block is the last of `blocks` that come here with one ticket; all its threads get the answer, and see what the threads
// of the others have stored before. Tickets are 0 before the first block and behind the last, so that the next launch finds them so.
__device__ __forceinline__ bool is_last_block(u32* ticket, u32 blocks) {
    if (blocks == 1) return true;
    __threadfence();
    __syncthreads(); // Every thread's stores are behind its fence.
    const bool is_last = __syncthreads_or(threadIdx.x == 0 && atomicInc(ticket, blocks - 1) == blocks - 1);
    __threadfence();
    return is_last;
}
