// The fake driver: events. An event is reached when its stream runs up to the event. This only happens when something
// waits for the stream.
#include "state.hpp"

enum : unsigned { BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 };

EXPORTED int cuEventCreate(void** event, unsigned flags) {
    const Call call("cuEventCreate", CONTEXT);
    if (call.refused) return call.refused;
    const bool is_known = (flags & ~(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS)) == 0;
    if (event == nullptr || !is_known || (flags & (INTERPROCESS | DISABLE_TIMING)) == INTERPROCESS)
        return call.breaks(INVALID_VALUE, "flags %u", flags);
    *event = state().events.add(Event{call.context, (flags & DISABLE_TIMING) == 0});
    return SUCCESS;
}

EXPORTED int cuEventRecord(void* handle, void* stream) {
    const Call call("cuEventRecord", CONTEXT);
    if (call.refused) return call.refused;
    Event* const event = state().events.find(call, handle);
    if (event == nullptr) return INVALID_HANDLE;
    if (event->context != call.context) return call.breaks(INVALID_HANDLE, "an event of another context");
    if (is_capturing(stream)) {
        capture(*event, (uint64_t)stream);
        return SUCCESS;
    }
    event->captured_on = 0;
    // The event may be destroyed before it is reached.
    const Work work{"an event", [handle, reached = event->reached, number = ++event->recorded] {
                        *reached = number;
                        const auto found = state().events.all.find((uint64_t)handle);
                        if (found != state().events.all.end()) found->second->at = std::chrono::steady_clock::now();
                        return std::string();
                    },
                    false};
    event->stream = stream;
    return double_enqueue("cuEventRecord", stream, &work);
}

EXPORTED int cuStreamWaitEvent(void* stream, void* handle, unsigned flags) {
    const Call call("cuStreamWaitEvent", CONTEXT);
    if (call.refused) return call.refused;
    const Event* const event = state().events.find(call, handle);
    if (event == nullptr) return INVALID_HANDLE;
    if (flags != 0) return call.breaks(INVALID_VALUE, "flags %u", flags);
    if (event->captured_on != 0) {
        Stream* const waiting = state().streams.find(call, stream);
        return waiting == nullptr ? INVALID_HANDLE : capture_wait(call, *waiting, *event);
    }
    if (is_capturing(stream)) {
        invalidate(stream);
        return call.breaks(CAPTURED_EVENT, "a capturing stream waits for an event from outside of the capture");
    }
    // Waits for the latest recording so far. Later recordings do not matter.
    const Work work{"a wait for an event", [reached = event->reached, number = event->recorded] {
                        return std::string(*reached < number ? Work::WAITS : "");
                    },
                    false};
    return double_enqueue("cuStreamWaitEvent", stream, &work);
}

EXPORTED int cuEventQuery(void* handle) {
    const Call call("cuEventQuery", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    const Event* const event = state().events.find(call, handle);
    if (event == nullptr) return INVALID_HANDLE;
    const auto stream = state().streams.all.find((uint64_t)event->stream);
    if (!event->is_reached() && stream != state().streams.all.end()) {
        const int code = run(*stream->second);
        if (code == WAITING) run_others();
        if (code > 0) return code;
    }
    return event->is_reached() ? SUCCESS : NOT_READY;
}

EXPORTED int cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
    const Call call("cuEventElapsedTime", CONTEXT);
    if (call.refused) return call.refused;
    const Event *const begin = state().events.find(call, from), *const end = state().events.find(call, to);
    if (begin == nullptr || end == nullptr) return INVALID_HANDLE;
    if (milliseconds == nullptr) return call.breaks(INVALID_VALUE, "nowhere to put the time");
    if (begin->recorded == 0 || end->recorded == 0) return call.breaks(INVALID_HANDLE, "an event that was not recorded");
    if (!begin->is_timed || !end->is_timed) return call.breaks(INVALID_HANDLE, "an event without timing");
    if (!begin->is_reached() || !end->is_reached()) return call.breaks(NOT_READY, "an event that was not waited for");
    *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
    return SUCCESS;
}

EXPORTED int cuEventDestroy_v2(void* handle) {
    const Call call("cuEventDestroy", CONTEXT);
    if (call.refused) return call.refused;
    return state().events.remove(call, handle) ? SUCCESS : INVALID_HANDLE;
}
