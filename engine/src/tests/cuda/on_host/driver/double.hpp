// What the libraries of the double of the driver share: how a broken rule is told, and what the others ask of the driver's.
//
// The double stands in for libcuda, libcublasLt, libnvrtc and libnccl. It is written from NVIDIA's documentation of these, and judges the
// calls that it gets: one that breaks a rule gets the error that the documentation names, and a line on the standard error.
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

// What every line begins with, so that a judge finds them.
#define DOUBLE "double of the driver: "

// Numbers of cuda.h's CUresult.
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
    CAPTURE_IMPLICIT = 906,
    CAPTURE_WRONG_THREAD = 908,
    UNKNOWN = 999,
};

// What a compiled program begins with; behind it lies a shared library for this processor.
struct Binary {
    char magic[8];
    // 90 for sm_90.
    uint32_t architecture;
    uint32_t is_specific;
    uint64_t bytes;

    static constexpr char MAGIC[8] = {'\x7f', 'd', 'o', 'u', 'b', 'l', 'e', '1'};
};

// What a stream does when its turn has come. It returns what was wrong, or nothing, or that it waits for another stream: then it is
// asked again.
struct Work {
    static constexpr char WAITS[] = "\1";

    std::string name;
    std::function<std::string()> run;
    // Whether it may touch the device's memory; else it does so by double_window alone.
    bool touches = true;
};

// What libcuda does for the others.

// Tells of a broken rule, and counts it.
EXPORTED void double_broken(const char* call, const char* what);
// Counts a call; not 0 if it is to fail: what it is to return.
EXPORTED int double_called(const char* call);
// Whether the calling thread has a context, no capture is in its way, and the context is well: a Result.
EXPORTED int double_enter(const char* call, int is_unsafe_in_capture);
// Puts work at the end of a stream, or into the graph that it captures: a Result.
EXPORTED int double_enqueue(const char* call, void* stream, const Work* work);
// Lets the device's memory be touched, or no more.
EXPORTED void double_window(int opens);
// Takes the lock under which calls are judged and streams run, or gives it back.
EXPORTED void double_lock(int takes);
// The device of the calling thread's context, or -1.
EXPORTED int double_device();
// Whether all of it can be read and written on the device.
EXPORTED int double_is_accessible(uint64_t address, uint64_t bytes);
// Takes device memory that belongs to a library, or gives it back: a Result.
EXPORTED int double_take(int64_t bytes);
// Objects of other libraries: so many more of them, in the current context (which should not be over before they are) or in none.
EXPORTED void double_exists(const char* what, int difference, int is_in_context);
// What a judge has set, or else this.
EXPORTED uint64_t double_setting(const char* name, uint64_t otherwise);

// What a judge asks of the double.

// ARCHITECTURE, MEMORY, DEVICES, VERSION, HAS_NO_EPILOGUES; LOCAL_MEMORY, which the first launch of a graph takes; and
// APPROXIMATE_TANH, of epilogues. An environment variable GAPLESS_DOUBLE_NAME sets NAME for a whole process.
EXPORTED void double_set(const char* name, uint64_t value);
// From now on, has this call of this name (1 is the next) return this code: of all libraries a failure of memory or the like.
EXPORTED void double_fail(const char* call, uint64_t number, int code);
// Whatever exists in the driver's library or the others': a line for each kind, and nothing if all was given back.
EXPORTED const char* double_left();
// The calls so far, as "cuInit 1" a line each; then they are counted anew.
EXPORTED const char* double_calls();

// A call that is judged.
struct Judged {
    const char* name;

    // Tells of a broken rule, and returns the error for it.
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
