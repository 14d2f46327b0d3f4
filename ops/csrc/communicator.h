// A rank's part of the three operators over a shared segment, on plain memory.
//
// Protocol. Work runs in steps, numbered 1, 2, 3 ... alike on all ranks. A call has a step for each piece of its rows.
// In step n a rank writes only to half n % 2 of its own stage, then sets its counters to n. Readers wait for the
// counter, and in every step every rank waits for a counter of every other rank. A rank that begins step n has
// finished n - 1, in which it saw that all others had begun n - 1 and hence finished n - 2: no rank still reads half
// n % 2. So no stage is overwritten too early, no further signal is needed, and no signal can be lost. Beside the
// counter a rank leaves a description of its call, also in halves. Every rank compares descriptions before it reads
// rows; if they differ, all ranks raise in this step. A call that needs a larger segment is a single step without
// rows. tests/ops/test_shm_protocol.py tries every interleaving.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"
#include "sum.h"

namespace ascend_parallel {

// A rank's matmul [m, k] x [k, n]; the same shape on all ranks.
struct Product {
  int64_t m, k, n;
  Dtype dtype;
  // Rows of a tile in which every rank's rows are multiplied, from the first row on; 0: no tiles.
  int64_t row_tile = 0;
};

// The rows in pieces, so that a stage need not hold a whole result.
class Pieces {
 public:
  // `sizes` are the rows of each piece, in order; the same on all ranks, except by a user's error.
  explicit Pieces(const std::vector<int64_t>& sizes);
  int32_t count() const { return static_cast<int32_t>(begins_.size()) - 1; }
  int64_t begin(int64_t piece) const { return begins_[static_cast<size_t>(piece)]; }
  int64_t end(int64_t piece) const { return begin(piece + 1); }
  int64_t longest() const { return longest_; }

 private:
  std::vector<int64_t> begins_{0};
  int64_t longest_ = 0;
};

// The services that a communicator needs from its process.
struct Host {
  using Body = std::function<void(int64_t begin, int64_t end)>;
  // Runs a body over [0, count) on this rank's threads, `grain` elements or more for each thread.
  std::function<void(int64_t count, int64_t grain, const Body& body)> parallel;
  // Called repeatedly during a wait; throws to end the wait.
  std::function<void()> interrupt;
};

class Communicator {
 public:
  // Errors name the group's ranks by `global_ranks`.
  Communicator(
      const std::string& name, int rank, const std::vector<int64_t>& global_ranks, size_t half_bytes, Host host);

  // Writes rows [begin, end) of this rank's matrix to `out`, dense.
  using Put = std::function<void(int64_t begin, int64_t end, char* out)>;
  // Reads rows [begin, end) of the matrix of `rank`, dense.
  using Take = std::function<void(int rank, int64_t begin, int64_t end, char* rows)>;

  // Each returns 0; or, if a half is too small, the bytes that a half needs, and then has moved nothing.
  // Throws if a wait takes more than `time_limit` seconds, or if ranks come with different calls; the communicator is
  // unusable after an error.

  // y [m, n] = the sum of all ranks' products.
  size_t all_reduce(const Product& product, const Pieces& pieces, const Put& put, char* y, double time_limit);
  // y [m / R, n] = this rank's rows of that sum; `pieces` are pieces of a single rank's rows.
  size_t reduce_scatter(const Product& product, const Pieces& pieces, const Put& put, char* y, double time_limit);
  // Passes every rank's rows, of `columns` elements each, to `take`, in pieces; this rank's rows first.
  size_t all_gather(
      const Pieces& pieces, int64_t columns, Dtype dtype, const Put& put, const Take& take, double time_limit);

  size_t half_bytes() const { return segment_.half_bytes(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Step {
    uint64_t number;
    char* stage;
    double time_limit;
    uint64_t half() const { return number % 2; }
  };

  using Count = std::atomic<uint64_t>;

  template <typename Body>
  size_t run(const Call& call, size_t needed, double time_limit, Body body);
  // Publishes that this rank's rows of a step of `call` are in its stage.
  void announce(const Call& call, const Step& step) const;
  // Waits for the rows of `rank`, or of all ranks, and throws unless they belong to the same call as this rank's.
  void wait_for(int rank, const Step& step) const;
  void wait_for_all(const Step& step) const;
  // Throws an error that describes every rank's call in a step.
  [[noreturn]] void disagree(Step step) const;
  std::string came_with(int rank, const Step& step) const;
  void wait(const Count& counter, int rank, const Step& step) const;
  void check_on(const Count& counter, int rank, const Step& step, Clock::time_point since) const;
  // out = elements [begin, end) of all stages, summed.
  void sum(Dtype dtype, const Step& step, int64_t begin, int64_t end, char* out) const;
  // Sums in parts: each rank sums a part for all ranks.
  void sum_in_parts(Dtype dtype, const Step& step, int64_t count, char* out) const;

  Segment segment_;
  int rank_;
  int ranks_;
  std::vector<int64_t> global_ranks_;
  Host host_;
  int process_;
  uint64_t steps_ = 0;
  std::mutex one_at_a_time_;
};

}  // namespace ascend_parallel
