// The three operators over a shared segment: each rank's part of them, on plain memory.
//
// Protocol. Work is done in steps, numbered 1, 2, 3 ... alike on all ranks; a call is one step or several,
// each a piece of the rows. In step n a rank writes only to its own stage, to the half n % 2, and says so
// by setting its counters to n; readers wait for the counter. In every step every rank waits for a counter
// of every other rank. So when a rank begins step n, it has finished n - 1, in which it saw that all others
// had begun n - 1, hence finished n - 2: nobody reads half n % 2 any more. No further signal is needed,
// none can be lost, no stage is overwritten. Beside the counter a rank leaves what call it came with, in a half
// of its own, and every rank compares before it reads rows: ranks that differ all raise in this step. A call that
// needs a larger segment is one step without rows. tests/ops/test_shm_protocol.py tries every interleaving.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"
#include "sum.h"

namespace ascend_parallel {

// One rank's matmul [m, k] x [k, n]; of the same shape on all ranks.
struct Product {
  int64_t m, k, n;
  Dtype dtype;
  // Rows of a tile in which every rank's rows are multiplied, from the first on; 0: as many as come together.
  int64_t row_tile = 0;
};

// Rows cut into pieces, so that stages need not hold whole results.
class Pieces {
 public:
  // `sizes` are the rows of each piece, in order; of the same sum and, but for an error, the same on all ranks.
  explicit Pieces(const std::vector<int64_t>& sizes);
  int32_t count() const { return static_cast<int32_t>(begins_.size()) - 1; }
  int64_t begin(int64_t piece) const { return begins_[static_cast<size_t>(piece)]; }
  int64_t end(int64_t piece) const { return begin(piece + 1); }
  int64_t longest() const { return longest_; }

 private:
  std::vector<int64_t> begins_{0};
  int64_t longest_ = 0;
};

// What a communicator asks of its process.
struct Host {
  using Body = std::function<void(int64_t begin, int64_t end)>;
  // Runs a body over [0, count) on the threads of this rank, `grain` or more to each.
  std::function<void(int64_t count, int64_t grain, const Body& body)> parallel;
  // Called now and then while waiting; ends the wait by throwing.
  std::function<void()> interrupt;
};

class Communicator {
 public:
  // `global_ranks` are the names of the group's ranks in errors.
  Communicator(
      const std::string& name, int rank, const std::vector<int64_t>& global_ranks, size_t half_bytes, Host host);

  // Puts rows [begin, end) of this rank's matrix to `out`, dense.
  using Put = std::function<void(int64_t begin, int64_t end, char* out)>;
  // Takes rows [begin, end) of the matrix of `rank`, dense.
  using Take = std::function<void(int rank, int64_t begin, int64_t end, char* rows)>;

  // Each returns 0; or, having moved nothing, the bytes that a half needs for it, where that is more than there are.
  // A wait of more than `time_limit` seconds is an error, and so are ranks that come with different calls; after an
  // error the communicator is of no more use.

  // y [m, n] = the sum over ranks of their products.
  size_t all_reduce(const Product& product, const Pieces& pieces, const Put& put, char* y, double time_limit);
  // y [m / R, n] = this rank's rows of that sum; the pieces are of one rank's rows.
  size_t reduce_scatter(const Product& product, const Pieces& pieces, const Put& put, char* y, double time_limit);
  // Hands every rank's rows, of `columns` elements each, to `take`, in pieces; the own ones first.
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
  // Says that this rank's rows of a step of `call` are in its stage.
  void announce(const Call& call, const Step& step) const;
  // Waits for the rows of `rank`, or of all, and makes sure that they are of the same call as this rank's.
  void wait_for(int rank, const Step& step) const;
  void wait_for_all(const Step& step) const;
  // Raises what each rank came with to a step.
  [[noreturn]] void disagree(Step step) const;
  std::string came_with(int rank, const Step& step) const;
  void wait(const Count& counter, int rank, const Step& step) const;
  void check_on(const Count& counter, int rank, const Step& step, Clock::time_point since) const;
  // out = elements [begin, end) of all stages, summed.
  void sum(Dtype dtype, const Step& step, int64_t begin, int64_t end, char* out) const;
  // Sums part by part: each rank one part, for all.
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
