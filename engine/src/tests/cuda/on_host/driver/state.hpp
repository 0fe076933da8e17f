// What the double of the driver remembers.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "double.hpp"

// What a call is allowed to.
enum Needs : unsigned {
    NOTHING = 0,
    INITIALIZED = 1,
    // A context that is current to the thread.
    CONTEXT = 2 | INITIALIZED,
    // It may not be made while the thread captures: the documentation's "potentially unsafe" calls.
    SAFE = 4,
    // It goes over the legacy default stream.
    LEGACY = 8,
    // Another library has counted it.
    COUNTED = 16,
};

struct Context {
    int device = 0;
    int retained = 0;
    // Not 0 after a kernel has failed: what all calls return from then on.
    int error = 0;
    // Copies to the device that were staged, and have not arrived.
    std::deque<Work> landing;
    // Objects of libraries.
    std::map<std::string, int> others;
    // What the local memory of kernels takes of the device, from the first launch of a graph on.
    uint64_t local_bytes = 0;
};

enum class Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Stream {
    Context* context;
    bool is_blocking;
    std::deque<Work> queue;
    bool is_capturing = false, is_invalidated = false;
    Mode mode = Mode::GLOBAL;
    std::thread::id thread;
    std::vector<Work> captured;
};

struct Event {
    Context* context;
    bool is_timed;
    // The stream that it was last recorded on.
    void* stream = nullptr;
    // How often it was recorded, and the last of these that its stream has come to.
    uint64_t recorded = 0;
    std::shared_ptr<uint64_t> reached = std::make_shared<uint64_t>(0);
    std::chrono::steady_clock::time_point at;

    bool is_reached() const { return *reached == recorded; }
};

struct Module {
    Context* context;
    void* library;
};

struct Function {
    void* module;
    std::string name;
    const char* (*entry)(const void* run, const void* arguments);
    uint64_t bytes;
    int most_dynamic;
    bool is_loaded = false;
};

struct Graph {
    std::vector<Work> nodes;
    // What it takes of the device, once it is there.
    uint64_t bytes = 0;
    bool is_there = false;
};

// Objects by their handles. None is given twice, so that one that was destroyed is known as such.
template <typename T>
struct Table {
    const char* what;
    std::map<uint64_t, std::unique_ptr<T>> all;

    void* add(T object);
    // The object; or nothing, and the call breaks a rule.
    T* find(const Judged& call, const void* handle);
    // Whether it was there.
    bool remove(const Judged& call, const void* handle);
};

struct State {
    // Calls of several threads are made one after another, and so is what they start.
    std::recursive_mutex lock;
    bool is_initialized = false;
    uint64_t next_handle = 0xd0b1'0000'0000;
    uint64_t broken = 0;
    std::map<std::string, uint64_t> calls, settings;
    // The call that is to fail, with how many of its name come before it.
    std::string failing;
    uint64_t before_failing = 0;
    int failure = 0;
    // Objects of other libraries that are in no context.
    std::map<std::string, int> others;
    // What is taken of the device's memory.
    uint64_t used = 0;

    Table<Context> contexts{"context", {}};
    Table<Stream> streams{"stream", {}};
    Table<Event> events{"event", {}};
    Table<Module> modules{"module", {}};
    Table<Function> functions{"function", {}};
    Table<Graph> graphs{"graph", {}};
    Table<Graph> executables{"executable graph", {}};
    // The primary contexts' handles while they are retained, by device.
    std::map<int, void*> primaries;
    // Whether a primary context is over in which a library was: what that keeps for the process is lost.
    bool is_library_lost = false;
    // What runs now.
    std::string running;
};

State& state();

// The context that is current to this thread.
extern thread_local void* current;

// A call of the driver's: it holds the lock, and has been judged as far as its needs say.
struct Call : Judged {
    std::unique_lock<std::recursive_mutex> lock;
    Context* context = nullptr;
    // Not 0 if the call is to return this.
    int refused;

    Call(const char* name, unsigned needs);

 private:
    int judge(unsigned needs);
};

// Bytes of the device.
uint64_t total_bytes();
// 90 of sm_90.
int architecture();
int most_shared_bytes();

// Takes so many bytes of the device, if there are as many.
bool take(uint64_t bytes);
void give(uint64_t bytes);

// Whether a stream captures; and has nothing come of what it does.
bool is_capturing(const void* stream);
void invalidate(void* stream);

// What a stream returns that waits for another.
static constexpr int WAITING = -1;

// Has everything in a stream run, up to what waits for another stream; and copies to the device arrive, as far as the stream waits for
// them.
int run(Stream& stream);
// Has all streams run as far as they get.
void run_others();
// Has everything in a stream run. Other threads make their calls meanwhile.
int finish(Call& call, Stream& stream);
// Has copies arrive, and streams that wait for the legacy default stream run.
int run_legacy(Context& context);
// Leaves what is staged where it is, and has all else run that the legacy default stream waits for.
int run_blocking(Context& context);

// Lets the host touch the device's memory as long as this lives.
struct Window {
    Window();
    ~Window();
};

// What memory there is: how many of which kind.
void tell_of_memory(const std::function<void(uint64_t, const std::string&)>& tell);

template <typename T>
void* Table<T>::add(T object) {
    const uint64_t handle = state().next_handle += 16;
    all[handle] = std::make_unique<T>(std::move(object));
    return (void*)handle;
}

template <typename T>
T* Table<T>::find(const Judged& call, const void* handle) {
    const auto found = all.find((uint64_t)handle);
    if (found != all.end()) return found->second.get();
    const bool was = (uint64_t)handle > 0xd0b1'0000'0000 && (uint64_t)handle <= state().next_handle;
    call.breaks(0, "%p is no %s%s", handle, what, was ? " (any more)" : "");
    return nullptr;
}

template <typename T>
bool Table<T>::remove(const Judged& call, const void* handle) {
    return find(call, handle) != nullptr && all.erase((uint64_t)handle) == 1;
}
