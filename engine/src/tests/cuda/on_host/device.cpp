// The blocks, fibers, barriers and exchanges of the simulated device (device.hpp).
#include "device.hpp"

#include "warpgroup.hpp"

#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

Coordinates gridDim, blockDim, blockIdx, threadIdx;
unsigned char* shared_memory;

namespace {

// A place at which a fiber or the scheduler goes on. GCC's own jumps save fewer registers than those of the C library, and
// unwind nothing.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
using Place = void* [5];
#define SET_PLACE(place) __builtin_setjmp(place)
#define GO_TO(place) go_to(place)
// Callers must not rely on registers that the function itself does not use.
#define SWITCHES [[gnu::noipa]]
// A function must not jump to one place while it sets another.
[[gnu::noipa, noreturn]] void go_to(Place place) { __builtin_longjmp(place, 1); }
#else
using Place = jmp_buf;
#define SET_PLACE(place) _setjmp(place)
#define GO_TO(place) _longjmp(place, 1)
#define SWITCHES
#endif

enum class State { RUNNABLE, AT_BLOCK_BARRIER, AT_WARP_BARRIER, OVER };

// An asynchronous copy that was started but has not arrived yet.
struct AsyncCopy {
    void* to;
    const void* from;
    unsigned count;
    unsigned group;
};

// This thread's part of a product of a warpgroup that was started.
struct WarpgroupProduct {
    float* d;
    unsigned n;
    // The address of the left operand's registers, and their content at the start. The address is null if the left
    // operand is in shared memory.
    const unsigned* registers;
    unsigned held[4];
    // This thread's rows of the left operand, collected from the registers of the warp.
    float left[2][16];
    unsigned long long a, b;
    bool are_columns, are_rows, adds;
    unsigned group;
    // The sums before the product; empty while an earlier product of the same sums is still running.
    std::vector<float> before;
};

struct Fiber {
    // `context` starts the fiber. Once it has begun, `here` is where it continues, in this block and in later ones. A
    // jump needs no call of the operating system.
    ucontext_t context;
    Place here;
    bool has_begun = false;
    // Not initialized, because pages that are never touched take no memory.
    std::unique_ptr<char[]> stack;
    State state = State::OVER;
    Coordinates index;
    // Number of exchanges so far. Exchanges alternate between two sets of slots, so that one barrier per exchange is
    // enough.
    unsigned exchanges;
    // Number of votes so far.
    unsigned votes;
    // Copies that have not been waited for, and the number of groups that were closed.
    std::deque<AsyncCopy> copies;
    unsigned groups;
    // Products that have not been waited for, the number of groups that were closed, and a hash of all products, which
    // must be equal in the whole warpgroup.
    std::deque<WarpgroupProduct> products;
    unsigned product_groups;
    unsigned long long history;
    // `has_fenced_registers`: registers were fenced since products were last waited for. `has_fenced_memory`: shared
    // memory was fenced since the last barrier.
    bool has_fenced_registers, has_fenced_memory;
};

// The fragments that a lane provides for a product of matrices.
struct Fragments {
    unsigned a[4], b[2];
};

struct Device {
    static constexpr unsigned MOST_THREADS = 1024;

    Place scheduler;
    // Has room for all threads from the start, because a context contains pointers into itself and must not move.
    std::vector<Fiber> fibers;
    std::vector<unsigned char> shared;
    // Shared memory as products of warpgroups see it: its content at the last barrier before which all threads had fenced
    // it.
    std::vector<unsigned char> fenced;
    // Indexed by the parity of the exchange's number, and then by thread.
    std::vector<unsigned long long> slots[2];
    // Whether any thread has voted for it, indexed by the number of the vote modulo 3: the one that is under way, the one
    // before, whose result may not have been read, and the next.
    bool any[3];
    std::vector<Fragments> fragments[2];
    unsigned current;
    void (*body)(const void*);
    const void* arguments;
    std::string error;

    static constexpr unsigned STACK_BYTES = 128 << 10;
    static constexpr unsigned GUARD_BYTES = 256;
    static constexpr unsigned char POISON = 0xff;
    // The address of shared memory in its window. It is not a multiple of 1024, because kernels may not rely on such an
    // alignment on a device.
    static constexpr unsigned WINDOW = 1024 + 16;

    Fiber& fiber() { return fibers[current]; }

    static void enter();

    // Runs the current fiber until it leaves.
    SWITCHES void go_on() {
        if (SET_PLACE(scheduler) != 0) return;
        if (fiber().has_begun) GO_TO(fiber().here);
        fiber().has_begun = true;
        setcontext(&fiber().context);
    }

    SWITCHES void leave(State at) {
        fiber().state = at;
        if (SET_PLACE(fiber().here) == 0) GO_TO(scheduler);
    }

    // If all threads of a range are at this barrier (or over, if `may_be_over`), lets them continue. Returns whether
    // any did.
    bool release(unsigned first, unsigned end, State at, bool may_be_over) {
        bool any = false;
        for (unsigned t = first; t < end; ++t) {
            any |= fibers[t].state == at;
            if (fibers[t].state != at && !(may_be_over && fibers[t].state == State::OVER)) return false;
        }
        for (unsigned t = first; t < end; ++t) {
            if (fibers[t].state == at) fibers[t].state = State::RUNNABLE;
        }
        return any;
    }

    // Runs a warp until it has to wait for other warps.
    void run_warp(unsigned warp, bool is_reversed) {
        do {
            for (unsigned i = 0; i < 32; ++i) {
                current = warp * 32 + (is_reversed ? 31 - i : i);
                if (fiber().state != State::RUNNABLE) continue;
                threadIdx = fiber().index;
                go_on();
            }
        } while (release(warp * 32, warp * 32 + 32, State::AT_WARP_BARRIER, false));
    }

    // Called at a barrier. If all threads have fenced shared memory, products see its current content from now on.
    void show_fenced(unsigned count) {
        bool all = true;
        for (unsigned t = 0; t < count; ++t) {
            all &= fibers[t].has_fenced_memory || fibers[t].state == State::OVER;
            fibers[t].has_fenced_memory = false;
        }
        if (all) fenced = shared;
    }

    void run_block(const Run& run) {
        const unsigned count = run.block;
        any[0] = false;
        memset(shared.data(), POISON, shared.size());
        memset(fenced.data(), POISON, fenced.size());
        shared_memory = shared.data();
        for (unsigned t = 0; t < count; ++t) {
            Fiber& fiber = fibers[t];
            if (!fiber.stack) {
                getcontext(&fiber.context);
                fiber.stack.reset(new char[STACK_BYTES]);
                fiber.context.uc_stack.ss_sp = fiber.stack.get();
                fiber.context.uc_stack.ss_size = STACK_BYTES;
                fiber.context.uc_link = nullptr;
                makecontext(&fiber.context, &Device::enter, 0);
            }
            // A fiber that is over continues with the next block. A fiber that an error has stopped starts from the
            // beginning.
            fiber.has_begun &= fiber.state == State::OVER;
            fiber.state = State::RUNNABLE;
            fiber.index = {t, 0, 0};
            fiber.exchanges = fiber.votes = 0;
            fiber.copies.clear();
            fiber.groups = 0;
            fiber.products.clear();
            fiber.product_groups = 0;
            fiber.history = 0;
            fiber.has_fenced_registers = fiber.has_fenced_memory = false;
        }
        const unsigned warps = count / 32;
        for (;;) {
            for (unsigned i = 0; i < warps; ++i) run_warp(run.is_reversed ? warps - 1 - i : i, run.is_reversed);
            if (release(0, count, State::AT_BLOCK_BARRIER, true)) {
                show_fenced(count);
                continue;
            }
            for (unsigned t = 0; t < count; ++t) {
                if (fibers[t].state == State::OVER) continue;
                error = "threads of a block wait at different barriers, or for a lane that is over";
                return;
            }
            break;
        }
        for (unsigned t = 0; t < count; ++t) {
            if (!fibers[t].copies.empty()) error = "a copy that nobody waits for";
            if (!fibers[t].products.empty()) error = "a product that nobody waits for";
            if (fibers[t].history != fibers[t / 128 * 128].history) error = "products that not all of a warpgroup start";
        }
        for (unsigned i = run.shared_bytes; i < shared.size(); ++i) {
            if (shared[i] != POISON) error = "a write behind the block's shared memory";
        }
    }

    void run(const Run& run) {
        error.clear();
        if (run.block == 0 || run.block % 32 != 0 || run.block > MOST_THREADS) {
            error = "a block is whole warps, 1024 threads at most";
            return;
        }
        if (run.grid[1] > 65535 || run.grid[2] > 65535) {
            error = "a grid has 65535 blocks at most along its second and third dimension";
            return;
        }
        fibers.reserve(MOST_THREADS);
        if (fibers.size() < run.block) fibers.resize(run.block);
        for (int parity : {0, 1}) {
            slots[parity].assign(run.block, 0);
            fragments[parity].assign(run.block, Fragments{});
        }
        shared.resize(run.shared_bytes + GUARD_BYTES);
        fenced.resize(shared.size());
        gridDim = {run.grid[0], run.grid[1], run.grid[2]};
        blockDim = {run.block, 1, 1};
        const unsigned long long blocks = 1ull * run.grid[0] * run.grid[1] * run.grid[2];
        for (unsigned long long i = 0; i < blocks && error.empty(); ++i) {
            const unsigned long long block = run.is_reversed ? blocks - 1 - i : i;
            blockIdx.x = unsigned(block % run.grid[0]);
            blockIdx.y = unsigned(block / run.grid[0] % run.grid[1]);
            blockIdx.z = unsigned(block / run.grid[0] / run.grid[1]);
            run_block(run);
        }
    }
};

Device device;

void Device::enter() {
    for (;;) {
        device.body(device.arguments);
        device.leave(State::OVER);
    }
}

// Returns the slots for this thread's next exchange.
template <typename Slot>
std::vector<Slot>& next(std::vector<Slot> (&slots)[2]) {
    return slots[device.fiber().exchanges++ % 2];
}

unsigned first_of_warp() { return device.current / 32 * 32; }

float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }

}  // namespace

const char* run(const Run& run, void (*body)(const void*), const void* arguments) {
    device.body = body;
    device.arguments = arguments;
    device.run(run);
    return device.error.empty() ? nullptr : device.error.c_str();
}

void __syncthreads() { device.leave(State::AT_BLOCK_BARRIER); }

void __syncwarp() { device.leave(State::AT_WARP_BARRIER); }

int __syncthreads_or(int vote) {
    const unsigned number = device.fiber().votes++;
    device.any[number % 3] |= vote != 0;
    // All threads have read the result of the vote before the last, because they have come to the last one.
    device.any[(number + 1) % 3] = false;
    __syncthreads();
    return device.any[number % 3];
}

unsigned long long exchange(unsigned long long own, unsigned lane) {
    std::vector<unsigned long long>& slots = next(device.slots);
    slots[device.current] = own;
    __syncwarp();
    return slots[first_of_warp() + lane % 32];
}

unsigned __ballot_sync(unsigned, int vote) {
    std::vector<unsigned long long>& slots = next(device.slots);
    slots[device.current] = vote != 0;
    __syncwarp();
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane) ballot |= unsigned(slots[first_of_warp() + lane]) << lane;
    return ballot;
}

void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    std::vector<Fragments>& all = next(device.fragments);
    all[device.current] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp();
    const Fragments* warp = &all[first_of_warp()];
    const unsigned row = device.current % 32 / 4, column = device.current % 4 * 2;
    for (unsigned e = 0; e < 4; ++e) {
        for (unsigned k = 0; k < 16; k += 2) {
            const unsigned of_a = warp[row * 4 + k % 8 / 2].a[e / 2 + k / 8 * 2];
            const unsigned of_b = warp[(column + e % 2) * 4 + k % 8 / 2].b[k / 8];
            d[e] += of_bf16(of_a & 0xffff) * of_bf16(of_b & 0xffff);
            d[e] += of_bf16(of_a >> 16) * of_bf16(of_b >> 16);
        }
    }
}

void load_fragments(unsigned (&to)[4], const void* row, bool is_transposed) {
    std::vector<unsigned long long>& rows = next(device.slots);
    if ((unsigned long long)row % 16 != 0) device.error = "a row of a matrix that is not aligned to 16 bytes";
    rows[device.current] = (unsigned long long)row;
    __syncwarp();
    const unsigned lane = device.current % 32, warp = first_of_warp();
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned short pair[2];
        for (unsigned i = 0; i < 2; ++i) {
            const unsigned outer = lane / 4, inner = lane % 4 * 2 + i;
            const unsigned short* from = (const unsigned short*)rows[warp + matrix * 8 + (is_transposed ? inner : outer)];
            memcpy(&pair[i], from + (is_transposed ? outer : inner), sizeof pair[i]);
        }
        to[matrix] = unsigned(pair[0]) | unsigned(pair[1]) << 16;
    }
}

void copy_async(void* to, const void* from, unsigned count) {
    if (((unsigned long long)to | (unsigned long long)from) % 16 != 0 || count > 16) device.error = "a copy that is not aligned";
    device.fiber().copies.push_back({to, from, count, device.fiber().groups});
}

void close_copies() { ++device.fiber().groups; }

void wait_for_copies(unsigned but) {
    std::deque<AsyncCopy>& copies = device.fiber().copies;
    device.fiber().has_fenced_memory = false;
    for (; !copies.empty() && copies.front().group + but < device.fiber().groups; copies.pop_front()) {
        memcpy(copies.front().to, copies.front().from, copies.front().count);
        memset((char*)copies.front().to + copies.front().count, 0, 16 - copies.front().count);
    }
}

unsigned shared_address(const void* at) { return Device::WINDOW + unsigned((const unsigned char*)at - device.shared.data()); }

void fence_shared_memory() { device.fiber().has_fenced_memory = true; }

void fence_registers() { device.fiber().has_fenced_registers = true; }

void close_products() { ++device.fiber().product_groups; }

namespace {

// Returns an element of an operand in shared memory.
float load_factor(const Descriptor& from, unsigned mn, unsigned k, bool is_mn_major) {
    const unsigned address = from.at(mn, k, is_mn_major) - Device::WINDOW;
    if (address + 2 > device.shared.size() - Device::GUARD_BYTES) {
        device.error = "a factor beside the block's shared memory";
        return 0.0f;
    }
    unsigned short seen, there;
    memcpy(&seen, &device.fenced[address], sizeof seen);
    memcpy(&there, &device.shared[address], sizeof there);
    if (seen != there) device.error = "a product of shared memory that was not fenced, or changed before it was waited for";
    return of_bf16(seen);
}

// Adds a product to this thread's sums: two rows, and in each row two of every eight columns.
void finish(const WarpgroupProduct& product, float* sums) {
    const Descriptor a(product.a), b(product.b);
    if (b.is_strange || (!product.registers && a.is_strange)) device.error = "a matrix descriptor that is not modelled";
    const unsigned lane = device.current % 32, first = device.current % 128 / 32 * 16 + lane / 4;
    float left[2][16];
    memcpy(left, product.left, sizeof left);
    for (unsigned half = 0; half < 2 && !product.registers; ++half) {
        for (unsigned k = 0; k < 16; ++k) left[half][k] = load_factor(a, first + half * 8, k, product.are_rows);
    }
    if (product.registers && memcmp(product.registers, product.held, sizeof product.held) != 0)
        device.error = "a product's registers changed before it was waited for";
    for (unsigned pair = 0; pair < product.n / 4; ++pair) {
        const unsigned column = pair / 2 * 8 + lane % 4 * 2 + pair % 2;
        float* const of_column = sums + pair / 2 * 4 + pair % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const float right = load_factor(b, column, k, product.are_columns);
            of_column[0] += left[0][k] * right;
            of_column[2] += left[1][k] * right;
        }
    }
}

}  // namespace

void start_product(float* d, unsigned n, const unsigned* registers, unsigned long long a, unsigned long long b, bool are_columns,
                   bool are_rows, bool adds) {
    Fiber& fiber = device.fiber();
    if (!fiber.has_fenced_registers) device.error = "a product without a fence of registers";
    for (unsigned long long part : {a, b, (unsigned long long)n * 8 + are_rows * 4 + are_columns * 2 + adds, (unsigned long long)(registers != nullptr)}) {
        fiber.history = (fiber.history ^ part) * 0x100000001b3ull + 1;
    }
    WarpgroupProduct product{d, n, registers, {}, {}, a, b, are_columns, are_rows, adds, fiber.product_groups, {}};
    if (registers) {
        memcpy(product.held, registers, sizeof product.held);
        std::vector<Fragments>& all = next(device.fragments);
        memcpy(all[device.current].a, registers, sizeof product.held);
        __syncwarp();
        const Fragments* const row = &all[first_of_warp() + device.current % 32 / 4 * 4];
        for (unsigned half = 0; half < 2; ++half) {
            for (unsigned k = 0; k < 16; ++k) {
                const unsigned pair = row[k % 8 / 2].a[half + k / 8 * 2];
                product.left[half][k] = of_bf16(k % 2 ? pair >> 16 : pair & 0xffff);
            }
        }
    }
    // Poisons the sums, so that a kernel that reads them before it has waited gets NaNs.
    bool is_first = true;
    for (const WarpgroupProduct& other : fiber.products) is_first &= other.d != d;
    if (is_first) {
        product.before.assign(d, d + n / 2);
        memset(d, Device::POISON, n / 2 * sizeof *d);
    }
    fiber.products.push_back(product);
}

void wait_for_products(unsigned but) {
    Fiber& fiber = device.fiber();
    fiber.has_fenced_registers = false;
    for (; !fiber.products.empty() && fiber.products.front().group + but < fiber.product_groups; fiber.products.pop_front()) {
        WarpgroupProduct& product = fiber.products.front();
        std::vector<float> sums = product.before;
        if (!product.adds) sums.assign(product.n / 2, 0.0f);
        finish(product, sums.data());
        // If a later product adds to the same sums, the results become that product's initial sums. Otherwise they are
        // stored in the thread's registers.
        WarpgroupProduct* heir = nullptr;
        for (WarpgroupProduct& other : fiber.products) {
            if (&other != &product && other.d == product.d && !heir) heir = &other;
        }
        if (heir) {
            heir->before = sums;
        } else {
            memcpy(product.d, sums.data(), sums.size() * sizeof(float));
        }
    }
}
