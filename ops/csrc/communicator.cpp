#include "communicator.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace ascend_parallel {
namespace {

constexpr int kSpins = 200;   // spins before the first yield, some microseconds
constexpr int kYields = 300;  // yields before the first sleep
constexpr auto kNap = std::chrono::microseconds(50);
constexpr auto kLook = std::chrono::milliseconds(20);  // between checks whether the other rank is alive
constexpr int64_t kDirect = 64 * 1024;  // bytes up to which every rank sums the whole result
constexpr int64_t kGrain = 64 * 1024;   // fewest elements for a thread
constexpr int64_t kLine = 64;           // elements; no two ranks write to the same cache line

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int checked_ranks(int rank, size_t ranks) {
  if (ranks < 2 || ranks > kMaxRanks || rank < 0 || static_cast<size_t>(rank) >= ranks) {
    throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + ", not of 2 to " +
                             std::to_string(kMaxRanks));
  }
  return static_cast<int>(ranks);
}

// The call in words, with Python's names of the operators and dtypes. No message is built by a stream: with torch 2.11
// on one machine both messages that std::ostringstream built ended in a segmentation fault, and no other did.
std::string text_of(const Call& call) {
  constexpr const char* kOperators[] = {"matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"};
  constexpr const char* kDtypes[] = {"float32", "bfloat16", "float16"};
  std::string text = kOperators[static_cast<int>(call.operation)];
  text += " of " + std::to_string(call.rows) + " rows of " + std::to_string(call.columns) + " columns, ";
  text += kDtypes[static_cast<int>(call.dtype)];
  if (call.steps > 1) text += ", in " + std::to_string(call.steps) + " pieces";
  return text;
}

// The first element of part `index` when `count` elements are divided among `ranks`.
int64_t part_begin(int64_t count, int ranks, int index) {
  return index == ranks ? count : count / kLine * index / ranks * kLine;
}

}  // namespace

Pieces::Pieces(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) {
    begins_.push_back(begins_.back() + size);
    longest_ = std::max(longest_, size);
  }
}

Communicator::Communicator(
    const std::string& name, int rank, const std::vector<int64_t>& global_ranks, size_t half_bytes, Host host)
    : segment_(name, rank, checked_ranks(rank, global_ranks.size()), half_bytes),
      rank_(rank),
      ranks_(static_cast<int>(global_ranks.size())),
      global_ranks_(global_ranks),
      host_(std::move(host)),
      process_(::getpid()) {}

template <typename Body>
size_t Communicator::run(const Call& call, size_t needed, double time_limit, Body body) {
  if (::getpid() != process_) throw std::runtime_error("a forked process has no part in its parent's group");
  std::lock_guard<std::mutex> hold(one_at_a_time_);
  Counter& failed = segment_.header().failed[rank_];
  if (failed.value.load(std::memory_order_relaxed) != 0) {
    throw std::runtime_error("an earlier call on this group failed; make the group anew");
  }
  const auto next = [&] {
    const uint64_t number = ++steps_;
    return Step{number, segment_.stage(rank_, number % 2), time_limit};
  };
  try {
    if (needed > segment_.half_bytes()) {
      // All ranks need more room, or their calls differ. The wait finds the difference before a rank goes for a larger
      // segment alone.
      const Step step = next();
      announce(call, step);
      wait_for_all(step);
      return needed;
    }
    for (int64_t index = 0; index < call.steps; ++index) body(next(), index);
  } catch (...) {
    failed.value.store(1, std::memory_order_release);  // spares the other ranks their time limit
    throw;
  }
  return 0;
}

void Communicator::announce(const Call& call, const Step& step) const {
  Announcement& mine = segment_.header().ready[rank_];
  mine.calls[step.half()] = call;
  mine.value.store(step.number, std::memory_order_release);
}

void Communicator::wait_for(int rank, const Step& step) const {
  const Announcement *ready = segment_.header().ready, &theirs = ready[rank];
  wait(theirs.value, rank, step);
  if (!(theirs.calls[step.half()] == ready[rank_].calls[step.half()])) disagree(step);
}

void Communicator::wait_for_all(const Step& step) const {
  for (int next = 1; next < ranks_; ++next) wait_for((rank_ + next) % ranks_, step);
}

void Communicator::disagree(Step step) const {
  const auto end = Clock::now() + std::chrono::duration<double>(step.time_limit);  // one limit for all waits
  std::string all;
  for (int rank = 0; rank < ranks_; ++rank) {
    step.time_limit = std::max(0.0, std::chrono::duration<double>(end - Clock::now()).count());
    all += (rank == 0 ? "" : "; ") + came_with(rank, step);
  }
  throw std::runtime_error("ranks came with different calls: " + all);
}

std::string Communicator::came_with(int rank, const Step& step) const {
  const Announcement& ready = segment_.header().ready[rank];
  try {
    wait(ready.value, rank, step);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "rank " + std::to_string(global_ranks_[rank]) + ": " + text_of(ready.calls[step.half()]);
}

void Communicator::wait(const Count& counter, int rank, const Step& step) const {
  const auto is_set = [&] { return counter.load(std::memory_order_acquire) >= step.number; };
  for (int i = 0; i < kSpins; ++i) {
    if (is_set()) return;
    pause();
  }
  const auto since = Clock::now();
  auto look = since + kLook;
  for (int64_t i = 0; !is_set(); ++i) {
    if (i < kYields) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
    if (Clock::now() >= look) {
      check_on(counter, rank, step, since);
      look = Clock::now() + kLook;
    }
  }
}

void Communicator::check_on(const Count& counter, int rank, const Step& step, Clock::time_point since) const {
  host_.interrupt();
  const double waited = std::chrono::duration<double>(Clock::now() - since).count();
  std::string verdict;
  if (segment_.header().failed[rank].value.load(std::memory_order_acquire) != 0) {
    verdict = " left the operator by an error of its own";
  } else if (!segment_.alive(rank)) {
    verdict = " has ended";
  } else if (waited > step.time_limit) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", step.time_limit);
    verdict = std::string(" did not come within ") + seconds + " s";
  }
  // Read the counter again after the verdict: a rank may set its counter and then end.
  if (verdict.empty() || counter.load(std::memory_order_acquire) >= step.number) return;
  throw std::runtime_error("rank " + std::to_string(global_ranks_[rank]) + verdict);
}

void Communicator::sum(Dtype dtype, const Step& step, int64_t begin, int64_t end, char* out) const {
  const char* parts[kMaxRanks];
  for (int rank = 0; rank < ranks_; ++rank) {
    parts[rank] = segment_.stage(rank, step.half()) + begin * size_of(dtype);
  }
  host_.parallel(end - begin, kGrain, [&](int64_t first, int64_t last) {
    sum_in_rank_order(dtype, out, parts, ranks_, first, last);
  });
}

void Communicator::sum_in_parts(Dtype dtype, const Step& step, int64_t count, char* out) const {
  const int64_t size = size_of(dtype), part_at = count * size;
  const int64_t begin = part_begin(count, ranks_, rank_), end = part_begin(count, ranks_, rank_ + 1);
  sum(dtype, step, begin, end, step.stage + part_at);
  segment_.header().reduced[rank_].value.store(step.number, std::memory_order_release);
  for (int next = 0; next < ranks_; ++next) {
    const int rank = (rank_ + next) % ranks_;
    if (rank != rank_) wait(segment_.header().reduced[rank].value, rank, step);
    const int64_t first = part_begin(count, ranks_, rank), last = part_begin(count, ranks_, rank + 1);
    const char* part = segment_.stage(rank, step.half()) + part_at;
    host_.parallel((last - first) * size, kGrain * size, [&](int64_t from, int64_t to) {
      std::memcpy(out + first * size + from, part + from, static_cast<size_t>(to - from));
    });
  }
}

size_t Communicator::all_reduce(
    const Product& product, const Pieces& pieces, const Put& put, char* y, double time_limit) {
  const int64_t size = size_of(product.dtype), row = product.n * size;
  const int64_t longest = pieces.longest() * product.n;
  // With two ranks or few bytes every rank sums the whole result; else each rank sums a part for all.
  const bool direct = ranks_ == 2 || longest * size <= kDirect;
  const int64_t part = direct ? 0 : longest - part_begin(longest, ranks_, ranks_ - 1);
  const auto needed = static_cast<size_t>((longest + part) * size);
  const Call call{product.m, product.n, pieces.count(), Operator::kAllReduce, product.dtype};
  return run(call, needed, time_limit, [&](const Step& step, int64_t piece) {
    const int64_t begin = pieces.begin(piece), end = pieces.end(piece), count = (end - begin) * product.n;
    put(begin, end, step.stage);
    announce(call, step);
    wait_for_all(step);
    direct ? sum(product.dtype, step, 0, count, y + begin * row)
           : sum_in_parts(product.dtype, step, count, y + begin * row);
  });
}

size_t Communicator::reduce_scatter(
    const Product& product, const Pieces& pieces, const Put& put, char* y, double time_limit) {
  const int64_t rows = product.m / ranks_, row = product.n * size_of(product.dtype);
  const auto needed = static_cast<size_t>(ranks_ * pieces.longest() * row);
  const Call call{product.m, product.n, pieces.count(), Operator::kReduceScatter, product.dtype};
  return run(call, needed, time_limit, [&](const Step& step, int64_t piece) {
    const int64_t begin = pieces.begin(piece), length = pieces.end(piece) - begin;
    if (pieces.count() == 1 && product.row_tile == 0) {
      put(0, product.m, step.stage);  // a single matmul is quicker
    } else {
      for (int rank = 0; rank < ranks_; ++rank) {
        put(rank * rows + begin, rank * rows + begin + length, step.stage + rank * length * row);
      }
    }
    announce(call, step);
    wait_for_all(step);
    sum(product.dtype, step, rank_ * length * product.n, (rank_ + 1) * length * product.n, y + begin * row);
  });
}

size_t Communicator::all_gather(
    const Pieces& pieces, int64_t columns, Dtype dtype, const Put& put, const Take& take, double time_limit) {
  const int64_t row = columns * size_of(dtype);
  const auto needed = static_cast<size_t>(pieces.longest() * row);
  const Call call{pieces.end(pieces.count() - 1), columns, pieces.count(), Operator::kAllGather, dtype};
  return run(call, needed, time_limit, [&](const Step& step, int64_t piece) {
    const int64_t begin = pieces.begin(piece), end = pieces.end(piece);
    put(begin, end, step.stage);
    announce(call, step);
    for (int next = 0; next < ranks_; ++next) {
      const int rank = (rank_ + next) % ranks_;
      if (rank != rank_) wait_for(rank, step);
      take(rank, begin, end, segment_.stage(rank, step.half()));
    }
  });
}

}  // namespace ascend_parallel
