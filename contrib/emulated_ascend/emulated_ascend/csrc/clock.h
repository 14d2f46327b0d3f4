// The virtual clock: the host's time is the processor time of the program's threads, a kernel takes what a table says.
// Off unless EMULATED_ASCEND_CLOCK is set. Times are nanoseconds of virtual time since the device was initialised.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "objects.h"

namespace emulated {
namespace clock {

using Nanos = int64_t;

// A lane's span: what a stream did, or for what it stood still.
enum class Span : char { Kernel = 'k', Matmul = 'm', Shared = 's', Copy = 'c', Collective = 'l', Host = 'h', Wait = 'w', Exposed = 'x', Ranks = 'r' };

// What the clock keeps of a stream.
struct Lane {
  int stream = 0;
  Nanos now = 0;
  bool communicates = false;
  Nanos debt = 0;  // time that collectives beside a matmul cost it, to be added to its next task
};

void start();
bool on();

// The host's time, with the processor time of the calling thread if it is one of the program's.
Nanos host();
// The host waits until a moment of a stream, which it may have passed already.
void host_waits(Nanos until);
// The host works for so long beside what its threads compute.
void host_spends(double microseconds);

// The work of this library on a thread of the program: its processor time is not the program's.
struct Section {
  Section();
  ~Section();
};

// A launch on the host; returns when the device may begin. A mark is an event's record or wait.
Nanos launch(bool mark);

// ---- on a stream's thread
Lane*& lane();                                                       // of the calling stream's thread
void arrive(Lane& lane, Nanos launched);                             // the stream has run dry until the launch came
void wait_until(Nanos moment, Span why);                             // the stream stands still
void spend(const std::string& name, Nanos duration, Span kind);      // the stream works

// ---- what the table says
struct Work {
  Nanos duration = 0;
  bool matmul = false, computes = true;
  std::string shape;        // of a product, for the lanes
  std::string fused;        // the collective of an operator that multiplies and communicates; "" for others
  double fused_bytes = 0;   // of the whole, or of this rank's part
  bool fused_of_rank = false;
};
struct Argument {
  char letter;
  const void* container;  // of tensors, lists and arrays; null otherwise
  int64_t integer = 0;
  const char* text = nullptr;
};
Work work_of(const std::string& name, const std::vector<Argument>& arguments);
double collective_launch();  // microseconds of the host, beside what a launch takes
Nanos copy_time(size_t bytes, bool across);
Nanos collective_time(const std::string& kind, int ranks, double bytes);
// In hccl.cpp: the ranks of a fused operator meet; returns how long it takes behind that.
Nanos fused_time(const std::string& group, const std::string& name, const Work& work);
// Whether a collective's or a copy's data is moved: what programs decide by is, large floating point is not.
bool moves(double bytes, bool floating);
// A moment of the run: the host's part now, the stream's when the stream gets there.
size_t mark(size_t memory);
void mark_reached(size_t mark);

}  // namespace clock
}  // namespace emulated
