// One POSIX shared-memory segment that the ranks of a group on one host share.
//
// Rank 0 makes it under a name nobody can guess or have made before (O_EXCL, mode 0600); the others
// open it; once all have, the name is unlinked, so that nothing is left behind however the ranks end.
// Each rank holds a lock on one byte of it for as long as it lives, which the kernel takes away when
// the process ends: that is how the others tell a slow rank from a dead one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "sum.h"

namespace ascend_parallel {

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters are shared between processes");

enum class Operator : uint8_t { kAllReduce, kReduceScatter, kAllGather };

// What has to be alike on all ranks that come to a step: else they would read each other's rows wrongly.
struct Call {
  int64_t rows, columns;  // of what this rank puts in its stage in all steps of the call
  int32_t steps;          // which may depend on the inner dimension too
  Operator operation;
  Dtype dtype;

  bool operator==(const Call& other) const {
    return rows == other.rows && columns == other.columns && steps == other.steps && operation == other.operation &&
           dtype == other.dtype;
  }
};

// A counter and, in the same line of a cache, what the rank came with to the steps of either parity.
struct alignas(64) Announcement {
  std::atomic<uint64_t> value;
  Call calls[2];
};
static_assert(sizeof(Announcement) == 64, "a look at the counter brings the calls along");

// Starts as zeros, which is what a new segment holds.
struct Header {
  // ready[q]: the last step in which rank q put its rows in its stage, and its call. Only ever grows.
  Announcement ready[kMaxRanks];
  // reduced[q]: the last step in which rank q put its part of the sum in its stage. Only ever grows.
  Counter reduced[kMaxRanks];
  // failed[q]: not zero once rank q has left a call by an exception.
  Counter failed[kMaxRanks];
  // process[q]: a number that the process of rank q drew, for ranks that are threads of one process.
  Counter process[kMaxRanks];
};

class Segment {
 public:
  // Makes (rank 0) or opens (the others) the segment `name` of `ranks` stages of 2 x `half_bytes` each.
  Segment(const std::string& name, int rank, int ranks, size_t half_bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *static_cast<Header*>(memory_); }
  // The stage of `rank` for steps of the parity `half`.
  char* stage(int rank, uint64_t half) const;
  size_t half_bytes() const { return half_bytes_; }
  // Whether the process of `rank` still holds its lock.
  bool alive(int rank) const;

  static void unlink(const std::string& name);

 private:
  void open(const std::string& name, int rank);

  int file_ = -1;
  void* memory_ = nullptr;
  size_t half_bytes_;
  size_t bytes_;
};

}  // namespace ascend_parallel
