// The parts that the fake libraries share: the report of broken rules, and the functions of the fake driver that the
// other libraries need.
//
// The fakes (the *double*) replace libcuda, libcublasLt, libnvrtc and libnccl. They were written from NVIDIA's
// documentation and check every call. If a call breaks a rule, it returns the documented error, and a line is written
// to the standard error.
#pragma once

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Prefix of every reported line, by which tests find them.
#define DOUBLE "double of the driver: "

// Values of cuda.h's CUresult.
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    UNKNOWN = 999,
};

// Header of a compiled program. A shared library for this CPU follows it.
struct Binary {
    char magic[8];
    // 90 for sm_90.
    uint32_t architecture;
    uint32_t is_specific;
    uint64_t bytes;

    static constexpr char MAGIC[8] = {'\x7f', 'd', 'o', 'u', 'b', 'l', 'e', '1'};
};

// An item of work on a stream. `run` returns an error text, an empty text, or WAITS. WAITS means that the item waits
// for another stream; `run` is then called again later.
struct Work {
    static constexpr char WAITS[] = "\1";

    std::string name;
    std::function<std::string()> run;
    // True if the item may access the device's memory directly. If false, it only accesses the memory after a call of
    // double_window.
    bool touches = true;
};

// Functions of the fake libcuda for the other libraries.

// Reports a broken rule, and counts it.
EXPORTED void double_broken(const char* call, const char* what);
// Counts a call. Returns a code other than 0 if the call must fail with it.
EXPORTED int double_called(const char* call);
// Checks that the thread has a context, that no capture forbids the call, and that the context has no error. Returns
// a Result.
EXPORTED int double_enter(const char* call, int is_unsafe_in_capture);
// Appends work to a stream or, while the stream is capturing, to the captured graph. Returns a Result.
EXPORTED int double_enqueue(const char* call, void* stream, const Work* work);
// Allows or forbids access to the device's memory.
EXPORTED void double_window(int opens);
// Acquires or releases the lock under which calls are checked and streams run.
EXPORTED void double_lock(int takes);
// Returns the device of the calling thread's context, or -1 if there is none.
EXPORTED int double_device();
// True if the device can read and write the whole range.
EXPORTED int double_is_accessible(uint64_t address, uint64_t bytes);
// Allocates device memory for a library, or frees it if `bytes` is negative. Returns a Result.
EXPORTED int double_take(int64_t bytes);
// Changes the number of existing objects of another library. Objects in the current context must be destroyed before
// the context.
EXPORTED void double_exists(const char* what, int difference, int is_in_context);
// Returns the value of a setting, or `otherwise` if no test has set it.
EXPORTED uint64_t double_setting(const char* name, uint64_t otherwise);

// Functions for tests.

// Changes a setting: ARCHITECTURE, MEMORY, DEVICES, VERSION, HAS_NO_EPILOGUES, LOCAL_MEMORY (taken by the first
// launch of a graph) or APPROXIMATE_TANH (in epilogues). The environment variable GAPLESS_DOUBLE_NAME sets NAME for a
// whole process.
EXPORTED void double_set(const char* name, uint64_t value);
// Makes a later call of this name return `code`: the `number`-th from now on, where the next is 1. A call of another
// library than the driver fails as if memory were missing.
EXPORTED void double_fail(const char* call, uint64_t number, int code);
// Returns the objects that still exist in all fake libraries, one line per kind. The text is empty if everything was
// released.
EXPORTED const char* double_left();
// Returns the calls since the last query, one line each such as "cuInit 1", and resets the counts.
EXPORTED const char* double_calls();

// A call that is checked.
struct Judged {
    const char* name;

    // Reports a broken rule, and returns the documented error for it.
    template <typename Code>
    __attribute__((format(printf, 3, 4))) Code breaks(Code code, const char* format, ...) const {
        char what[512];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(what, sizeof what, format, arguments);
        va_end(arguments);
        double_broken(name, what);
        return code;
    }
};
