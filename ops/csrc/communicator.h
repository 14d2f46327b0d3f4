// The three operators over a shared segment: each rank's part of them.
//
// Protocol. Calls are numbered 1, 2, 3 ... alike on all ranks. In call n a rank writes only to its own
// stage, to the half n % 2, and says so by setting its counters to n; readers wait for the counter.
// In every call every rank waits for a counter of every other rank. So when a rank begins call n, it
// has finished n - 1, in which it saw that all others had begun n - 1, hence finished n - 2: nobody
// reads half n % 2 any more. No further signal is needed, none can be lost, no stage is overwritten.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "segment.h"

namespace ascend_parallel {

class Communicator {
 public:
  Communicator(const std::string& name, int64_t rank, int64_t ranks, int64_t half_bytes, double time_limit);

  // y [M, N] = the sum over ranks of x [M, K] times w [K, N], each sum taken in rank order in fp32.
  void matmul_all_reduce(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y);
  // y [M / R, N] = this rank's rows of that sum.
  void matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y);
  // y [M, N] = the rows x [M / R, K] of all ranks times w; they are also put in `gathered` [M, K], if that is defined.
  void all_gather_matmul(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, const at::Tensor& gathered);

  int64_t half_bytes() const { return static_cast<int64_t>(segment_.half_bytes()); }

 private:
  struct Call;

  template <typename Body>
  void run(const char* what, size_t needed, Body body);
  void publish(Counter& counter, uint64_t call) const { counter.value.store(call, std::memory_order_release); }
  void wait(const Counter& counter, uint64_t call, int rank, const char* what) const;
  void check_on(int rank, const char* what, std::chrono::steady_clock::time_point since) const;
  // Rows [begin, end) of every rank's stage, summed in rank order, to `out`.
  void sum(const at::Tensor& like, uint64_t half, int64_t begin, int64_t end, void* out) const;

  Segment segment_;
  int rank_;
  int ranks_;
  double time_limit_;
  uint64_t calls_ = 0;
  std::mutex one_at_a_time_;
};

}  // namespace ascend_parallel
