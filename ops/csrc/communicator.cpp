#include "communicator.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

namespace ascend_parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;              // about a microsecond or two before the core is yielded
constexpr int kYields = 200;              // then this often, before sleeping
constexpr auto kNap = std::chrono::microseconds(50);
constexpr auto kLook = std::chrono::milliseconds(20);  // between looks at whether the rank still lives
constexpr int64_t kBlock = 1024;          // elements summed at a time, so that the sums stay in the cache
constexpr int64_t kRowTile = 16;          // as ROW_TILE in ops/rows.py
constexpr int64_t kDirect = 64 * 1024;    // bytes up to which every rank sums everything itself

template <typename T>
inline __attribute__((always_inline)) void sum_block(T* out, const T* const* parts, int ranks, int64_t begin, int64_t end) {
  float total[kBlock];
  const int64_t count = end - begin;
  const T* first = parts[0] + begin;
  for (int64_t i = 0; i < count; ++i) total[i] = static_cast<float>(first[i]);
  for (int rank = 1; rank < ranks; ++rank) {
    const T* part = parts[rank] + begin;
    for (int64_t i = 0; i < count; ++i) total[i] += static_cast<float>(part[i]);
  }
  for (int64_t i = 0; i < count; ++i) out[begin + i] = static_cast<T>(total[i]);
}

// One function a type: the compiler makes a version of each for every kind of CPU.
#define DEFINE_SUM(NAME, T)                                                                              \
  FOR_EACH_CPU void NAME(T* out, const T* const* parts, int ranks, int64_t begin, int64_t end) {         \
    for (int64_t i = begin; i < end; i += kBlock) sum_block(out, parts, ranks, i, std::min(i + kBlock, end)); \
  }
DEFINE_SUM(sum_range, float)
DEFINE_SUM(sum_range, c10::BFloat16)
DEFINE_SUM(sum_range, c10::Half)
#undef DEFINE_SUM

template <typename T>
void sum_in_rank_order(void* out, char* const* parts, int ranks, int64_t count) {
  const T* typed[kMaxRanks];
  for (int rank = 0; rank < ranks; ++rank) typed[rank] = reinterpret_cast<const T*>(parts[rank]);
  at::parallel_for(0, count, 64 * kBlock, [&](int64_t begin, int64_t end) {
    sum_range(static_cast<T*>(out), typed, ranks, begin, end);
  });
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

at::Tensor rows_at(char* memory, const at::Tensor& like, int64_t rows, int64_t columns) {
  return at::from_blob(memory, {rows, columns}, like.options());
}

}  // namespace

Communicator::Communicator(const std::string& name, int64_t rank, int64_t ranks, int64_t half_bytes, double time_limit)
    : segment_(name, static_cast<int>(rank), static_cast<int>(ranks), static_cast<size_t>(half_bytes)),
      rank_(static_cast<int>(rank)),
      ranks_(static_cast<int>(ranks)),
      time_limit_(time_limit) {
  TORCH_CHECK(ranks >= 2 && ranks <= kMaxRanks, "shared memory: 2 to ", kMaxRanks, " ranks, not ", ranks);
}

template <typename Body>
void Communicator::run(const char* what, size_t needed, Body body) {
  std::lock_guard<std::mutex> hold(one_at_a_time_);
  TORCH_CHECK(needed <= segment_.half_bytes(), what, ": the stage has ", segment_.half_bytes(), " bytes, needed are ", needed);
  const uint64_t call = ++calls_;
  try {
    body(call, call % 2);
  } catch (...) {
    publish(segment_.header().failed[rank_], call);  // the others need not wait for their time limit
    throw;
  }
}

void Communicator::wait(const Counter& counter, uint64_t call, int rank, const char* what) const {
  for (int i = 0; i < kSpins; ++i) {
    if (counter.value.load(std::memory_order_acquire) >= call) return;
    pause();
  }
  const auto since = Clock::now();
  auto look = since + kLook;
  for (int64_t i = 0;; ++i) {
    if (counter.value.load(std::memory_order_acquire) >= call) return;
    if (i < kYields) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
    if (Clock::now() >= look) {
      // Once more before the verdict: a rank may publish and end.
      const bool published = counter.value.load(std::memory_order_acquire) >= call;
      if (published) return;
      check_on(rank, what, since);
      look = Clock::now() + kLook;
    }
  }
}

void Communicator::check_on(int rank, const char* what, Clock::time_point since) const {
  const std::string who = std::string(what) + ": rank " + std::to_string(rank) + " of " + std::to_string(ranks_);
  if (segment_.header().failed[rank].value.load(std::memory_order_acquire) != 0) {
    throw std::runtime_error(who + " left the operator by an error of its own");
  }
  if (!segment_.alive(rank)) throw std::runtime_error(who + " has ended");
  const double waited = std::chrono::duration<double>(Clock::now() - since).count();
  if (waited > time_limit_) {
    throw std::runtime_error(who + " did not come within " + std::to_string(time_limit_) + " s");
  }
}

void Communicator::sum(const at::Tensor& like, uint64_t half, int64_t begin, int64_t end, void* out) const {
  const int64_t row = like.size(1) * like.element_size();
  char* parts[kMaxRanks];
  for (int rank = 0; rank < ranks_; ++rank) parts[rank] = segment_.stage(rank, half) + begin * row;
  const int64_t count = (end - begin) * like.size(1);
  switch (like.scalar_type()) {
    case at::kFloat: return sum_in_rank_order<float>(out, parts, ranks_, count);
    case at::kBFloat16: return sum_in_rank_order<c10::BFloat16>(out, parts, ranks_, count);
    case at::kHalf: return sum_in_rank_order<c10::Half>(out, parts, ranks_, count);
    default: TORCH_CHECK(false, "shared memory: float32, bfloat16 and float16, not ", like.scalar_type());
  }
}

void Communicator::matmul_all_reduce(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  constexpr const char* what = "matmul_all_reduce";
  const int64_t m = x.size(0), n = w.size(1), row = n * x.element_size();
  // Few bytes, or those of two ranks, are summed by every rank for itself; else each sums its part for all.
  const bool direct = ranks_ == 2 || m * row <= kDirect;
  // Parts begin at multiples of a row tile, so that cutting the matmul does not change its bits.
  const auto first_of = [&](int64_t rank) { return rank == ranks_ ? m : m / kRowTile * rank / ranks_ * kRowTile; };
  const int64_t own = first_of(rank_ + 1) - first_of(rank_);
  const size_t needed = static_cast<size_t>((m + (direct ? 0 : m - first_of(ranks_ - 1))) * row);
  run(what, needed, [&](uint64_t call, uint64_t half) {
    Header& header = segment_.header();
    char* stage = segment_.stage(rank_, half);
    auto* out = static_cast<char*>(y.data_ptr());
    if (direct) {
      auto whole = rows_at(stage, x, m, n);
      at::mm_out(whole, x, w);
      publish(header.ready[rank_][rank_], call);
      for (int step = 1; step < ranks_; ++step) {
        const int rank = (rank_ + step) % ranks_;
        wait(header.ready[rank][rank], call, rank, what);
      }
      return sum(y, half, 0, m, out);
    }
    for (int step = 1; step <= ranks_; ++step) {  // in ring order, the own rows last: nobody waits for them
      const int owner = (rank_ + step) % ranks_;
      const int64_t begin = first_of(owner), rows = first_of(owner + 1) - begin;
      auto part = rows_at(stage + begin * row, x, rows, n);
      at::mm_out(part, x.narrow(0, begin, rows), w);
      publish(header.ready[rank_][owner], call);
    }
    for (int step = 1; step < ranks_; ++step) {
      const int rank = (rank_ + step) % ranks_;
      wait(header.ready[rank][rank_], call, rank, what);
    }
    char* result = stage + m * row;
    sum(y, half, first_of(rank_), first_of(rank_ + 1), result);
    publish(header.reduced[rank_], call);
    std::memcpy(out + first_of(rank_) * row, result, static_cast<size_t>(own * row));
    for (int step = 1; step < ranks_; ++step) {
      const int owner = (rank_ + step) % ranks_;
      const int64_t begin = first_of(owner), rows = first_of(owner + 1) - begin;
      wait(header.reduced[owner], call, owner, what);
      std::memcpy(out + begin * row, segment_.stage(owner, half) + m * row, static_cast<size_t>(rows * row));
    }
  });
}

void Communicator::matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  constexpr const char* what = "matmul_reduce_scatter";
  const int64_t m = x.size(0), n = w.size(1), rows = m / ranks_, row = n * x.element_size();
  run(what, static_cast<size_t>(m * row), [&](uint64_t call, uint64_t half) {
    Header& header = segment_.header();
    for (int step = 1; step <= ranks_; ++step) {
      const int owner = (rank_ + step) % ranks_;
      auto part = rows_at(segment_.stage(rank_, half) + owner * rows * row, x, rows, n);
      at::mm_out(part, x.narrow(0, owner * rows, rows), w);
      publish(header.ready[rank_][owner], call);
    }
    for (int step = 1; step < ranks_; ++step) {
      const int rank = (rank_ + step) % ranks_;
      wait(header.ready[rank][rank_], call, rank, what);
    }
    sum(y, half, rank_ * rows, (rank_ + 1) * rows, y.data_ptr());
  });
}

void Communicator::all_gather_matmul(
    const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, const at::Tensor& gathered) {
  constexpr const char* what = "all_gather_matmul";
  const int64_t rows = x.size(0), k = x.size(1);
  run(what, static_cast<size_t>(x.numel() * x.element_size()), [&](uint64_t call, uint64_t half) {
    Header& header = segment_.header();
    rows_at(segment_.stage(rank_, half), x, rows, k).copy_(x);
    publish(header.ready[rank_][rank_], call);
    for (int step = 0; step < ranks_; ++step) {  // the own rows first
      const int rank = (rank_ + step) % ranks_;
      if (step > 0) wait(header.ready[rank][rank], call, rank, what);
      const auto part = rows_at(segment_.stage(rank, half), x, rows, k);
      auto out = y.narrow(0, rank * rows, rows);
      at::mm_out(out, part, w);
      if (gathered.defined()) gathered.narrow(0, rank * rows, rows).copy_(part);
    }
  });
}

}  // namespace ascend_parallel
