// Routing: the best experts of each token, and the rows of each expert. CPU counterparts: ops/experts/top_k.rs,
// route.rs, starts.rs, load.rs, document_load.rs. All counts and places equal those of the CPU, because no atomics
// are used.
#include "reduce.cuh"

constexpr u32 NONE = 0xffffffffu;

__device__ __forceinline__ u32 lanes_below() { return (1u << lane_of()) - 1; }

// A score and its index. If two scores are equal or cannot be compared (NaN), the candidate with the smaller index is
// better.
struct Candidate {
    f32 score;
    u32 index;

    __device__ __forceinline__ void improve(f32 other, u32 place) {
        if (place == NONE) return;
        if (index == NONE || other > score || (!(score > other) && place < index)) *this = Candidate{other, place};
    }
};

// Returns the best of all lanes' candidates, in every lane.
__device__ __forceinline__ Candidate best_of_warp(Candidate own) {
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const f32 score = __shfl_xor_sync(ALL_LANES, own.score, distance);
        own.improve(score, __shfl_xor_sync(ALL_LANES, own.index, distance));
    }
    return own;
}

struct TopKArguments {
    const void* scores;
    // A bias per expert; null if there is none.
    const void* bias;
    // The weight of each token, 0 for padding; null if all tokens count.
    const f32* routed;
    void* values;
    u32* ids;
    u64 tokens;
    u64 experts;
    u64 k;
    // Number of groups of experts; 0 if experts are not grouped.
    u64 groups;
    u64 group_limit;
    // Number of best experts whose scores rank a group.
    u64 ranking;
};

// Chooses the k best experts of each token. Each warp handles one token. For each warp, `shared_memory` holds the
// score of every group, and then a flag for every group that says whether it is chosen.
template <typename T>
__device__ void top_k(const TopKArguments& to) {
    const u64 token = global_thread() / 32;
    if (token >= to.tokens) return;
    const u32 experts = u32(to.experts), groups = u32(to.groups), lane = lane_of();
    const T *scores = (const T*)to.scores + token * experts, *bias = (const T*)to.bias;
    const auto score = [=](u32 expert) { return load(scores + expert) + (bias ? load(bias + expert) : 0.0f); };
    f32* worth = (f32*)shared_memory + 2 * groups * warp_of();
    u32* is_taken = (u32*)(worth + groups);
    const u32 size = groups ? experts / groups : experts;
    for (u32 group = 0; group < groups; ++group) {
        f32 sum = 0.0f;
        u32 best = NONE;
        for (u32 nth = 0; nth < smaller(size, u32(to.ranking)); ++nth) {
            Candidate own{0.0f, NONE};
            for (u32 i = group * size + lane; i < (group + 1) * size; i += 32) {
                if (i != best) own.improve(score(i), i);
            }
            own = best_of_warp(own);
            best = own.index;
            sum += own.score;
        }
        if (lane == 0) {
            worth[group] = sum;
            is_taken[group] = 0;
        }
    }
    __syncwarp();
    for (u32 nth = 0; nth < (groups ? u32(to.group_limit) : 0); ++nth) {
        Candidate own{0.0f, NONE};
        for (u32 group = lane; group < groups; group += 32) {
            if (!is_taken[group]) own.improve(worth[group], group);
        }
        own = best_of_warp(own);
        __syncwarp(); // All lanes have read the flags.
        if (lane == 0) is_taken[own.index] = 1;
        __syncwarp();
    }
    // Bit i is set if this lane's expert `lane + 32·i` has been chosen.
    u32 chosen = 0;
    for (u32 nth = 0; nth < to.k; ++nth) {
        Candidate own{0.0f, NONE};
        for (u32 i = lane; i < experts; i += 32) {
            if (!(chosen >> i / 32 & 1) && (!groups || is_taken[i / size])) own.improve(score(i), i);
        }
        own = best_of_warp(own);
        if (own.index % 32 == lane) chosen |= 1u << own.index / 32;
        if (lane == 0) {
            to.ids[token * to.k + nth] = !to.routed || to.routed[token] > 0.0f ? own.index : NONE;
            ((T*)to.values)[token * to.k + nth] = scores[own.index];
        }
    }
}
KERNELS(top_k, TopKArguments)

struct TopKGradArguments {
    const u32* ids;
    const void* dy;
    void* d_scores;
    u64 tokens;
    u64 experts;
    u64 k;
};

// Each thread handles one token and one expert. If the token has chosen the expert, stores the gradient of the
// expert's score. If not, stores zero.
template <typename T>
__device__ void top_k_grad(const TopKGradArguments& to) {
    const u64 token = global_thread() / to.experts, expert = global_thread() % to.experts;
    if (token >= to.tokens) return;
    f32 d_score = 0.0f;
    for (u64 slot = token * to.k; slot < (token + 1) * to.k; ++slot) {
        if (to.ids[slot] == expert) d_score = load((const T*)to.dy + slot);
    }
    store((T*)to.d_scores + token * to.experts + expert, d_score);
}
KERNELS(top_k_grad, TopKGradArguments)

struct RouteArguments {
    // The expert of each slot. Null if experts choose tokens; each pair of a token and an expert is then a slot.
    const u32* ids;
    // Router weights. Null unless the slots with the least weight are dropped first.
    const void* weights;
    // The weight of each token, 0 for padding; null if all tokens count.
    const f32* routed;
    // The capacity of an expert and sequence, indexed by how many of the sequence's tokens are not padding. Null if
    // the capacity is fixed.
    const u32* limits;
    // Places in another routing: a slot without one gets no row. Null if all slots may have rows.
    const u32* kept;
    // If `weights` is given, a flag per slot that says whether the slot is kept.
    u32* stays;
    u32* places;
    u32* slots;
    u32* starts;
    u64 experts;
    u64 sequences;
    // Number of slots per sequence.
    u64 length;
    // Number of slots per token.
    u64 k;
    // Total number of rows.
    u64 rows;
    // Maximum number of rows of an expert and sequence.
    u64 capacity;

    // Returns the expert of a slot, or NONE if the slot gets no row.
    __device__ __forceinline__ u32 expert(u64 slot) const {
        if (routed && !(routed[slot / k] > 0.0f)) return NONE;
        if (kept && kept[slot] == NONE) return NONE;
        return ids ? ids[slot] : u32(slot % experts);
    }

    // Returns how many tokens of a slot's sequence are not padding. Counts only every `step`th token, from token
    // `start` on.
    __device__ __forceinline__ u32 tokens_of(u64 slot, u32 start, u32 step) const {
        u32 count = 0;
        const u64 tokens = length / k, first = slot / length * tokens;
        for (u64 token = first + start; token < first + tokens; token += step) count += routed[token] > 0.0f;
        return count;
    }
};

// Returns bits whose unsigned order is the order of f32 values, with minus zero below zero.
__device__ __forceinline__ u32 ordered(f32 x) {
    const u32 bits = bits_of(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Clears places and slots. If `weights` is given, also sets a flag for each slot: the slot is kept if the number of
// heavier slots of its expert and sequence is below the capacity.
template <typename T>
__device__ void route_clear(const RouteArguments& to) {
    const u64 slot = global_thread(), count = to.sequences * to.length;
    if (slot < to.rows) to.slots[slot] = NONE;
    if (slot >= count) return;
    to.places[slot] = NONE;
    if (!to.weights) return;
    const u32 expert = to.expert(slot), own = ordered(load((const T*)to.weights + slot));
    const u64 first = slot / to.length * to.length;
    u64 heavier = 0;
    for (u64 other = first; other < first + to.length; ++other) {
        if (to.expert(other) != expert) continue;
        const u32 weight = ordered(load((const T*)to.weights + other));
        heavier += weight > own || (weight == own && other < slot);
    }
    to.stays[slot] = heavier < (to.limits ? to.limits[to.tokens_of(slot, 0, 1)] : to.capacity);
}
KERNELS(route_clear, RouteArguments)

// Iterates with one warp over the kept slots of a run, which is one expert and sequence. Calls `f` with each slot and
// the slot's index in the run. Returns the number of these slots.
template <typename F>
__device__ __forceinline__ u64 for_each_of_run(const RouteArguments& to, u64 run, F f) {
    const u32 expert = u32(run / to.sequences);
    const u64 first = run % to.sequences * to.length;
    const u64 most = to.limits ? to.limits[u32(fold_lanes<Sum>(f32(to.tokens_of(first, lane_of(), 32)), 32))] : to.capacity;
    u64 count = 0;
    for (u64 start = first; start < first + to.length; start += 32) {
        const u64 slot = start + lane_of();
        const bool is_here = slot < first + to.length && to.expert(slot) == expert && (!to.weights || to.stays[slot]);
        const u32 here = __ballot_sync(ALL_LANES, is_here);
        const u64 number = count + __popc(here & lanes_below());
        if (is_here && number < most) f(slot, number);
        count += __popc(here);
    }
    return smaller(count, most);
}

// Counts the rows of every run. Each warp handles one run.
KERNEL(route_count, RouteArguments) {
    const u64 run = global_thread() / 32;
    if (run >= arguments.experts * arguments.sequences) return;
    const u64 count = for_each_of_run(arguments, run, [](u64, u64) {});
    if (lane_of() == 0) arguments.starts[run] = u32(count);
}

// Assigns a place to every kept slot, and the slot to the place. Each warp handles one run.
KERNEL(route_place, RouteArguments) {
    const u64 run = global_thread() / 32;
    if (run >= arguments.experts * arguments.sequences) return;
    const u32 first = arguments.starts[run];
    for_each_of_run(arguments, run, [=](u64 slot, u64 number) {
        arguments.places[slot] = first + u32(number);
        arguments.slots[first + number] = u32(slot);
    });
}

struct RunsArguments {
    const u32* from;
    u32* to;
    u64 runs;
};

// Computes row offsets from the runs' lengths, followed by the end of the last run. The offsets may overwrite the
// lengths. Uses one warp.
KERNEL(run_starts, RunsArguments) {
    u32 end = 0;
    for (u64 first = 0; first < arguments.runs; first += 32) {
        const u64 run = first + lane_of();
        const u32 length = run < arguments.runs ? arguments.from[run] : 0;
        u32 sum = length;
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u32 before = __shfl_sync(ALL_LANES, sum, lane_of() - distance);
            if (lane_of() >= distance) sum += before;
        }
        if (run < arguments.runs) arguments.to[run] = end + sum - length;
        end += __shfl_sync(ALL_LANES, sum, 31);
    }
    if (lane_of() == 0) arguments.to[arguments.runs] = end;
}

// Lengths from row offsets.
KERNEL(run_lengths, RunsArguments) {
    const u64 run = global_thread();
    if (run < arguments.runs) arguments.to[run] = arguments.from[run + 1] - arguments.from[run];
}

struct CountArguments {
    const u32* from;
    // Only used by `unplaced`: the weight of each token, 0 for padding. Null if all tokens count.
    const f32* routed;
    f32* out;
    // Number of ids of a sequence, or total number of places.
    u64 length;
    u64 experts;
    u64 sequences;
    // Only used by `unplaced`: number of places per token, and number of places that are counted together.
    u64 k;
    u64 group;
    u32 accumulate;
};

// Counts how many ids of a sequence refer to an expert. Each block handles one expert and sequence.
KERNEL(expert_load, CountArguments) {
    const u32* ids = arguments.from + blockIdx.x / arguments.experts * arguments.length;
    const u32 expert = u32(blockIdx.x % arguments.experts);
    u32 count = 0;
    // Several ids are loaded before the first of them is compared.
#pragma unroll 8
    for (u64 i = threadIdx.x; i < arguments.length; i += blockDim.x) count += ids[i] == expert;
    const f32 all = sum_block(f32(count), (f32*)shared_memory); // Exact: there are fewer than 2^24 ids.
    if (threadIdx.x == 0) store_or_add(arguments.out + blockIdx.x, all, arguments.accumulate);
}

struct DocumentLoadArguments {
    const u32* ids;
    const u32* starts;
    f32* shares;
    u64 batch_tokens;
    // Tokens of a sequence.
    u64 tokens;
    u64 experts;
    u64 k;
};

// Computes, for each token and expert, the expert's share of the choices in the token's document. Each warp has a
// token and an expert. If the token is the first of its document, the warp counts, and writes the share for all
// tokens of the document.
KERNEL(document_load, DocumentLoadArguments) {
    const u64 token = global_thread() / 32 / arguments.experts, expert = global_thread() / 32 % arguments.experts;
    if (token >= arguments.batch_tokens) return;
    const u64 first = token % arguments.tokens, behind = token - first + arguments.tokens;
    if (arguments.starts[token] != first) return;
    u32 chosen = 0, all = 0;
    u64 end = token;
    for (bool goes_on = true; goes_on;) {
        const u64 own = end + lane_of();
        const bool is_inside = own < behind && arguments.starts[own] == first;
        for (u64 slot = own * arguments.k; slot < (own + 1) * arguments.k; ++slot) {
            const u32 id = is_inside ? arguments.ids[slot] : NONE;
            chosen += __popc(__ballot_sync(ALL_LANES, id == expert));
            all += __popc(__ballot_sync(ALL_LANES, id != NONE));
        }
        const u32 inside = __popc(__ballot_sync(ALL_LANES, is_inside));
        end += inside;
        goes_on = inside == 32;
    }
    const f32 share = f32(chosen) / f32(all > 1 ? all : 1);
    for (u64 own = token + lane_of(); own < end; own += 32) arguments.shares[own * arguments.experts + expert] = share;
}

// Counts the groups of places of which none was assigned. Uses one block.
KERNEL(unplaced, CountArguments) {
    f32 count = 0.0f;
    for (u64 group = threadIdx.x; group < arguments.length / arguments.group; group += blockDim.x) {
        bool is_nowhere = !arguments.routed || arguments.routed[group * arguments.group / arguments.k] > 0.0f;
        for (u64 i = 0; i < arguments.group; ++i) is_nowhere &= arguments.from[group * arguments.group + i] == NONE;
        count += is_nowhere ? 1.0f : 0.0f;
    }
    count = sum_block(count, (f32*)shared_memory);
    if (threadIdx.x == 0) store_or_add(arguments.out, count, arguments.accumulate);
}

struct LoadBiasArguments {
    f32* bias;
    const f32* load;
    const f32* norm;
    u64 experts;
    f32 rate;
};

// Adjusts the biases with which experts are chosen, towards a balanced load. If the norm is not finite, the biases
// are unchanged. Uses one block. CPU counterpart: optim/load_bias.rs.
KERNEL(load_bias, LoadBiasArguments) {
    // Loads are integers, so below 2^24 the order of summation does not matter.
    f32 sum = 0.0f;
    for (u64 i = threadIdx.x; i < arguments.experts; i += blockDim.x) sum += arguments.load[i];
    const f32 mean = sum_block(sum, (f32*)shared_memory) / f32(arguments.experts), norm = *arguments.norm;
    if (!(norm - norm == 0.0f)) return;
    for (u64 i = threadIdx.x; i < arguments.experts; i += blockDim.x) {
        const f32 load = arguments.load[i];
        if (load != mean) arguments.bias[i] += load < mean ? arguments.rate : -arguments.rate;
    }
}
