// A POSIX shared-memory segment of a group's ranks on the same host.
//
// Rank 0 creates the segment under a random, new name (O_EXCL, mode 0600); the other ranks open it. Then all
// unlink the name, so that no segment is left behind, however the ranks end. Each rank locks a byte of the segment
// for as long as it lives; the kernel releases the lock when the process ends. The lock distinguishes a slow rank from
// a dead rank.
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

// The description of a call. It must be the same on all ranks in a step; else they would misread each other's rows.
struct Call {
  int64_t rows, columns;  // of the matrix that this rank puts in its stage in all steps of the call
  int32_t steps;          // may also depend on the inner dimension
  Operator operation;
  Dtype dtype;

  bool operator==(const Call& other) const {
    return rows == other.rows && columns == other.columns && steps == other.steps && operation == other.operation &&
           dtype == other.dtype;
  }
};

// A counter and, in the same cache line, the rank's calls in the latest steps of either parity.
struct alignas(64) Announcement {
  std::atomic<uint64_t> value;
  Call calls[2];
};
static_assert(sizeof(Announcement) == 64, "a look at the counter brings the calls along");

// Starts as zeros: a new segment is zero-filled.
struct Header {
  // ready[q]: the last step in which rank q put its rows in its stage, and its call. Never decreases.
  Announcement ready[kMaxRanks];
  // reduced[q]: the last step in which rank q put its part of the sum in its stage. Never decreases.
  Counter reduced[kMaxRanks];
  // failed[q]: nonzero after an exception in a call of rank q.
  Counter failed[kMaxRanks];
  // process[q]: a random number of rank q's process, for ranks that are threads of the same process.
  Counter process[kMaxRanks];
};

class Segment {
 public:
  // Creates (rank 0) or opens (other ranks) the segment `name` with `ranks` stages of 2 x `half_bytes` each.
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
