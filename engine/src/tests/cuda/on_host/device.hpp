// A simulated CUDA device, with which kernels can be checked on machines without a GPU. It defines what CUDA defines,
// in plain C++.
//
// Blocks run one after another. The threads of a block are fibers of one thread of the operating system. Each fiber
// runs until it reaches a barrier, and each warp until all of its threads wait for other warps. So the order of
// threads is known, is as uneven as possible, and can be reversed. If a kernel's results are wrong, or change when
// the order is reversed, the kernel lacks a barrier.
//
// The device also checks that
// - every thread of a block (or a warp) reaches the same barrier,
// - no lane leaves while others exchange values with it, and
// - nothing is written after the end of the requested shared memory.
//
// The simulation does not show how fast a kernel is, how a compiler for the device translates it, or whether threads
// of a warp race with each other.
//
// This file is compiled with every kernel, so it only contains declarations and uses no library. device.cpp is
// compiled once, and linked to each kernel.
#ifndef GAPLESS_ON_HOST_DEVICE
#define GAPLESS_ON_HOST_DEVICE
#define ON_HOST

#define __device__
#define __forceinline__ inline

// The functions of <math.h> that CUDA provides. The header itself is not included, because it is longer than a
// kernel.
extern "C" {
#define OF_ONE(name)      \
    float name##f(float); \
    double name(double);
#define OF_TWO(name)             \
    float name##f(float, float); \
    double name(double, double);
OF_ONE(acos) OF_ONE(acosh) OF_ONE(asin) OF_ONE(asinh) OF_ONE(atan) OF_ONE(atanh) OF_ONE(cbrt) OF_ONE(ceil) OF_ONE(cos)
OF_ONE(cosh) OF_ONE(erf) OF_ONE(erfc) OF_ONE(exp) OF_ONE(exp2) OF_ONE(expm1) OF_ONE(fabs) OF_ONE(floor) OF_ONE(lgamma)
OF_ONE(log) OF_ONE(log10) OF_ONE(log1p) OF_ONE(log2) OF_ONE(rint) OF_ONE(round) OF_ONE(sin) OF_ONE(sinh) OF_ONE(sqrt)
OF_ONE(tan) OF_ONE(tanh) OF_ONE(tgamma) OF_ONE(trunc) OF_TWO(atan2) OF_TWO(copysign) OF_TWO(fmax) OF_TWO(fmin) OF_TWO(fmod)
OF_TWO(hypot) OF_TWO(pow)
float fmaf(float, float, float);
double fma(double, double, double);
}

// Symbols are hidden, so that every kernel library has a device of its own.
#pragma GCC visibility push(hidden)

struct Coordinates {
    unsigned x, y, z;
};

// The parameters of a launch.
struct Run {
    unsigned grid[3];
    unsigned block;
    unsigned shared_bytes;
    // True if blocks and threads run from the last to the first.
    unsigned is_reversed;
};

extern Coordinates gridDim, blockDim, blockIdx, threadIdx;
extern unsigned char* shared_memory;

// Runs all blocks. Returns an error text, or null if no error was found.
const char* run(const Run& run, void (*body)(const void*), const void* arguments);

void __syncthreads();
void __syncwarp();
int __syncthreads_or(int vote);
unsigned __ballot_sync(unsigned, int vote);

// Blocks run one after another, so each block sees everything that earlier blocks have stored.
static inline void __threadfence() {}

// Increments a counter, which is reset to 0 after it has reached `greatest`. Returns the old value.
static inline unsigned atomicInc(unsigned* at, unsigned greatest) {
    const unsigned before = *at;
    *at = before >= greatest ? 0 : before + 1;
    return before;
}

// Returns the value that lane `lane` of this warp passes to the same exchange.
unsigned long long exchange(unsigned long long own, unsigned lane);

template <typename T>
static T __shfl_sync(unsigned, T x, unsigned from) {
    static_assert(sizeof(T) <= sizeof(unsigned long long), "a number of at most 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &x, sizeof(T));
    bits = exchange(bits, from);
    __builtin_memcpy(&x, &bits, sizeof(T));
    return x;
}

template <typename T>
static T __shfl_xor_sync(unsigned, T x, unsigned distance) {
    return __shfl_sync(0, x, threadIdx.x ^ distance);
}

// Sums and products that a compiler for the device does not contract.
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }

static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }

static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// mma.sync.m16n8k16: every lane provides its fragments, and computes its four elements of the result from those of
// all lanes.
void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

// ldmatrix.m8n8.x4: every lane provides the address of one row of a matrix, and receives two elements of each of four
// matrices. The two elements are neighbors in a row or, if `is_transposed`, in a column.
void load_fragments(unsigned (&to)[4], const void* row, bool is_transposed);

template <typename Half>
static void load_matrices(unsigned (&to)[4], const Half* row) {
    static_assert(sizeof(Half) == 2, "elements of 16 bits");
    load_fragments(to, row, false);
}

template <typename Half>
static void load_transposed(unsigned (&to)[4], const Half* row) {
    static_assert(sizeof(Half) == 2, "elements of 16 bits");
    load_fragments(to, row, true);
}

// cp.async: the bytes arrive only when the thread waits for the copy.
void copy_async(void* to, const void* from, unsigned count);
void close_copies();
void wait_for_copies(unsigned but);

template <unsigned BUT>
static void wait_for_copies() {
    wait_for_copies(BUT);
}

// wgmma (warpgroup.cuh): a product of a warpgroup, with n columns of f32 sums. Its left operand is in registers or, if
// `registers` is null, described by `a`. The product is computed when the thread waits for it. It reads shared memory
// as it was at the last barrier before which all threads of the block had fenced it.
unsigned shared_address(const void* at);
void fence_shared_memory();
void fence_registers();
void start_product(float* d, unsigned n, const unsigned* registers, unsigned long long a, unsigned long long b, bool are_columns,
                   bool are_rows, bool adds);
void close_products();
void wait_for_products(unsigned but);

#pragma GCC visibility pop

// A kernel is a function that runs all blocks. It returns an error text, or null if no error was found.
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define KERNEL(name, Arguments)                                                                                  \
    static void name##_thread(const Arguments& arguments);                                                       \
    EXPORTED unsigned long long name##_bytes() { return sizeof(Arguments); }                                     \
    EXPORTED const char* name(const Run* asked, const void* arguments) {                                         \
        return run(*asked, [](const void* all) { name##_thread(*(const Arguments*)all); }, arguments);           \
    }                                                                                                            \
    static void name##_thread(const Arguments& arguments)

#endif
