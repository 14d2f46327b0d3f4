// The three operators over a shared segment: each rank's part of them, on plain memory.
//
// Protocol. Work is done in steps, numbered 1, 2, 3 ... alike on all ranks; a call is one step or several,
// each a piece of the rows. In step n a rank writes only to its own stage, to the half n % 2, and says so
// by setting its counters to n; readers wait for the counter. In every step every rank waits for a counter
// of every other rank. So when a rank begins step n, it has finished n - 1, in which it saw that all others
// had begun n - 1, hence finished n - 2: nobody reads half n % 2 any more. No further signal is needed,
// none can be lost, no stage is overwritten. tests/test_stage_protocol.py tries every interleaving.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"
#include "sum.h"

namespace ascend_parallel {

constexpr int64_t kRowTile = 16;                 // as ROW_TILE in ops/rows.py
constexpr int64_t kSmallest16BitProduct = 4096;  // as SMALLEST_16_BIT_PRODUCT in ops/registry.py

// One rank's matmul [m, k] x [k, n]; of the same shape on all ranks.
struct Product {
  int64_t m, k, n;
  Dtype dtype;

  // Whether its rows may be cut at multiples of kRowTile without changing a bit of it.
  bool may_be_cut() const;
};

// Rows cut into pieces of about `piece_bytes`, each a multiple of kRowTile rows but for the last, so that stages
// need not hold whole results.
class Pieces {
 public:
  Pieces(int64_t rows, int64_t row_bytes, int64_t piece_bytes, bool may_be_cut);
  int64_t count() const { return count_; }
  int64_t begin(int64_t piece) const;
  int64_t end(int64_t piece) const { return begin(piece + 1); }
  // No piece has more rows than this.
  int64_t longest() const;

 private:
  int64_t rows_, count_;
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
  Communicator(const std::string& name, int rank, const std::vector<int64_t>& global_ranks, size_t half_bytes,
               size_t piece_bytes, Host host);

  // Puts rows [begin, end) of this rank's matrix to `out`, dense.
  using Put = std::function<void(int64_t begin, int64_t end, char* out)>;
  // Takes rows [begin, end) of the matrix of `rank`, dense.
  using Take = std::function<void(int rank, int64_t begin, int64_t end, char* rows)>;

  // Each returns 0; or, having done nothing, the bytes that a half needs for it, where that is more than there are.
  // A wait of more than `time_limit` seconds is an error, after which the communicator is of no more use.

  // y [m, n] = the sum over ranks of their products.
  size_t all_reduce(const Product& product, const Put& put, char* y, double time_limit);
  // y [m / R, n] = this rank's rows of that sum.
  size_t reduce_scatter(const Product& product, const Put& put, char* y, double time_limit);
  // Hands every rank's `rows` rows to `take`, in pieces; the own ones first.
  size_t all_gather(int64_t rows, int64_t row_bytes, const Put& put, const Take& take, double time_limit);

  size_t half_bytes() const { return segment_.half_bytes(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Step {
    uint64_t number;
    char* stage;
    double time_limit;
    uint64_t half() const { return number % 2; }
  };

  template <typename Body>
  size_t run(size_t needed, int64_t steps, double time_limit, Body body);
  void set(Counter& counter, const Step& step) const { counter.value.store(step.number, std::memory_order_release); }
  void wait(const Counter& counter, int rank, const Step& step) const;
  // Waits for the rows of all ranks.
  void wait_for_all(const Step& step) const;
  void check_on(const Counter& counter, int rank, const Step& step, Clock::time_point since) const;
  // out = elements [begin, end) of all stages, summed.
  void sum(Dtype dtype, const Step& step, int64_t begin, int64_t end, char* out) const;
  // Sums part by part: each rank one part, for all.
  void sum_in_parts(Dtype dtype, const Step& step, int64_t count, char* out) const;

  Segment segment_;
  int rank_;
  int ranks_;
  std::vector<int64_t> global_ranks_;
  int64_t piece_bytes_;
  Host host_;
  int process_;
  uint64_t steps_ = 0;
  std::mutex one_at_a_time_;
};

}  // namespace ascend_parallel
