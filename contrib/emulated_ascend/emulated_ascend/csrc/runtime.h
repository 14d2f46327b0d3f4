// The device: streams, failures, settings, counts. A stream is a thread with a queue; device memory is host memory.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace emulated {

// What a queue holds. Work is left out once the device has failed; a mark (an event) always comes.
enum class Task { Work, Mark };

// Queue a task on a stream; nullptr is the default stream of the current device. Returns when it is queued. `name` is what it is called in
// messages; a task that touches no memory needs none.
void enqueue(void* stream, Task kind, std::function<void()> run, const std::string& name = "");
// Wait until a stream has run what it holds now.
void drain(void* stream);
// The stream itself, where nullptr stands for the default one.
void* the_stream(void* stream);

// A record of an event: who waits for it has the mark, so that a later record of the event changes nothing for it.
struct Mark;
using MarkOf = std::shared_ptr<Mark>;
// Queue a new mark on a stream; a stream's wait for one.
MarkOf put_mark(void* stream);
void put_wait(void* stream, const MarkOf& mark);

// While a graph is replayed the host launches once, and its tasks wait for nothing more of the host's.
struct Replay {
  Replay();
  ~Replay();
};

// The device fails: what is queued is left out, and every synchronise returns `code`. The first failure stays.
void fail(int code, const std::string& text);
int failure_code();
std::string failure_text();
// Calls back when the device fails, so that peers that wait for this rank are told.
void on_failure(std::function<void(const std::string&)> tell);

// Whether an address lies in memory of the device.
bool is_of_device(const void* address);

// The text that aclGetRecentErrMsg returns next.
void say(const std::string& text);

void count(const std::string& name);
double seconds();
long setting(const char* name, long otherwise);

constexpr int kKernelFailed = 507015;  // ACL_ERROR_RT_AICORE_EXCEPTION
constexpr int kNoKernel = 561103;      // ACLNN_ERR_INNER_NULLPTR's neighbourhood: aclnn refuses the call
constexpr int kWaitedTooLong = 507046; // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT

}  // namespace emulated

#define API extern "C" __attribute__((visibility("default")))
