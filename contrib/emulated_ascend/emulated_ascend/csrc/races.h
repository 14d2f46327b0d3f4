// Races: accesses to device memory that no stream, event or synchronise orders, found by vector clocks (EMULATED_ASCEND_RACES=1).
//
// Each stream, and the host, has a clock: for every stream the number of its tasks that are known to lie before. A task takes its
// stream's clock when the host queues it. Two tasks that touch the same bytes, one of them writing, are ordered if the later clock
// has the earlier task. What is late by chance does not matter: an order that is missing is found though the numbers are right.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulated::races {

using Clock = std::vector<uint64_t>;  // by stream; 0 is the host

// A task, or an access of the host.
struct Point {
  size_t actor;
  Clock clock;
  std::string name, line;  // what runs; the line of Python that asked for it
};
using PointOf = std::shared_ptr<const Point>;

bool on();

// The host queues a task on a stream.
PointOf launched(int stream, const std::string& name);
// What lies before a mark that is recorded on a stream now, and before the host's synchronise with it.
Clock recorded(int stream);
// A stream waits for a mark.
void waits(int stream, const Clock& mark);
// The host has seen that a mark has come. A query says so too, but not to a thread that only watches.
void host_saw(const Clock& mark);
void host_queried(const Clock& mark);

// The task that the calling thread runs.
class Running {
 public:
  explicit Running(PointOf point);
  ~Running();
};

// The running task, or the host, touches memory.
void access(const void* memory, size_t bytes, bool writes);
void access_strided(const void* memory, size_t item, const int64_t* dims, const int64_t* strides, int number, bool writes);
// Memory is given back.
void forget(const void* memory, size_t bytes);

}  // namespace emulated::races
