// Runs the communicator without torch, so that a sanitizer sees all of it: make sanitize.
//
//   driver threads     ranks are threads (linked with heap_segment.cpp, for ThreadSanitizer)
//   driver processes   ranks are processes (linked with ops/csrc/segment.cpp, for Address- and UBSanitizer)
//   driver planted     as threads, but each rank writes to its stage again after a call: has to be found
//
// Matrices hold small whole numbers, so that every sum is exact; each result is compared with what it has to be.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "communicator.h"

using namespace ascend_parallel;

namespace {

constexpr int kCalls = 300;
constexpr double kTimeLimit = 120;
constexpr size_t kPieceBytes = 16 * 1024;  // so that many calls take several steps
bool planted = false;

// What row `row` and column `column` of rank `rank`'s matrix hold in a call.
int value(int call, int rank, int64_t row, int64_t column) {
  return static_cast<int>(((call + 1) * 31 + rank * 7 + row * 5 + column) % 16);
}

// Numbers as 16-bit types hold them, without a conversion of the code under test: whole ones from 0 to 127.
uint16_t small_number(Dtype dtype, int number) {
  if (number == 0) return 0;
  const int exponent = 31 - __builtin_clz(static_cast<unsigned>(number));
  const int bits = dtype == Dtype::kBFloat16 ? 7 : 10, bias = dtype == Dtype::kBFloat16 ? 127 : 15;
  return static_cast<uint16_t>(((exponent + bias) << bits) | ((number << bits >> exponent) & ((1 << bits) - 1)));
}

void write(Dtype dtype, char* at, int number) {
  const float wide = static_cast<float>(number);
  const uint16_t narrow = small_number(dtype, number);
  dtype == Dtype::kFloat32 ? std::memcpy(at, &wide, 4) : std::memcpy(at, &narrow, 2);
}

void expect(Dtype dtype, const char* at, int number, const char* what, int call) {
  char wanted[4];
  write(dtype, wanted, number);
  if (std::memcmp(at, wanted, static_cast<size_t>(size_of(dtype))) != 0) {
    std::fprintf(stderr, "%s, call %d: wrong result\n", what, call);
    std::abort();
  }
}

class Rank {
 public:
  Rank(const std::string& name, int rank, int ranks) : name_(name), rank_(rank), ranks_(ranks) { open(4096); }

  void run() {
    std::mt19937 draw(7);  // the same calls on every rank
    for (int call = 0; call < kCalls; ++call) {
      Product product{};
      product.dtype = static_cast<Dtype>(draw() % 3);
      product.m = static_cast<int64_t>(draw() % 40) * (draw() % 40) * ranks_;
      product.k = 1 + draw() % 100;
      product.n = 1 + draw() % 100;
      const auto operation = draw() % 3;
      while (const size_t needed = operation == 0 ? all_reduce(call, product)
                                   : operation == 1 ? reduce_scatter(call, product)
                                                    : all_gather(call, product)) {
        open(needed);
      }
      if (planted && stage_ != nullptr) *static_cast<volatile char*>(stage_) = *stage_;  // a race, but no other value
    }
    disagree();
  }

 private:
  // The last rank comes with another call than the others: all have to be told, and nobody reads.
  void disagree() {
    Product product{ranks_ * 16, 4, 8, Dtype::kFloat32};
    if (rank_ == ranks_ - 1) product.n = 4;
    try {
      all_reduce(kCalls, product);
    } catch (const std::runtime_error& error) {
      if (std::strstr(error.what(), "different calls") != nullptr) return;
    }
    std::fprintf(stderr, "rank %d was not told of different calls\n", rank_);
    std::abort();
  }

  // A larger segment, made by rank 0 before the others look for it.
  void open(size_t half_bytes) {
    const std::string name = name_ + "-" + std::to_string(opened_++);
    const std::vector<int64_t> ranks{10, 11, 12, 13};
    const Host host{[](int64_t count, int64_t, const Host::Body& body) { body(0, count); }, [] {}};
    for (int tries = 0;; ++tries) {
      try {
        communicator_ = std::make_unique<Communicator>(
            name, rank_, std::vector<int64_t>(ranks.begin(), ranks.begin() + ranks_), half_bytes, host);
        break;
      } catch (const std::runtime_error&) {  // not there yet, or not of full size yet
        if (rank_ == 0 || tries > 20000) throw;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    all_gather(-1, {ranks_, 1, 1, Dtype::kFloat32});  // all have opened it
    Segment::unlink(name);
  }

  Communicator::Put put(int call, const Product& product) {
    return [this, call, &product](int64_t begin, int64_t end, char* out) {
      stage_ = out;
      const int64_t size = size_of(product.dtype);
      for (int64_t i = 0; i < (end - begin) * product.n; ++i) {
        write(product.dtype, out + i * size, value(call, rank_, begin + i / product.n, i % product.n));
      }
    };
  }

  void expect_sum(int call, const Product& product, int64_t first_row, const std::vector<char>& y, const char* what) {
    const int64_t size = size_of(product.dtype);
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()) / size; ++i) {
      int total = 0;
      for (int rank = 0; rank < ranks_; ++rank) {
        total += value(call, rank, first_row + i / product.n, i % product.n);
      }
      expect(product.dtype, y.data() + i * size, total, what, call);
    }
  }

  // Rows in pieces of about kPieceBytes, the last one shorter.
  static Pieces cut(int64_t rows, int64_t row_bytes) {
    const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(kPieceBytes) / std::max<int64_t>(row_bytes, 1));
    std::vector<int64_t> sizes;
    for (; rows > most; rows -= most) sizes.push_back(most);
    sizes.push_back(rows);
    return Pieces(sizes);
  }

  size_t all_reduce(int call, const Product& product) {
    std::vector<char> y(static_cast<size_t>(product.m * product.n * size_of(product.dtype)));
    const size_t needed = communicator_->all_reduce(
        product, cut(product.m, product.n * size_of(product.dtype)), put(call, product), y.data(), kTimeLimit);
    if (needed == 0) expect_sum(call, product, 0, y, "all_reduce");
    return needed;
  }

  size_t reduce_scatter(int call, const Product& product) {
    const int64_t rows = product.m / ranks_;
    std::vector<char> y(static_cast<size_t>(rows * product.n * size_of(product.dtype)));
    const size_t needed = communicator_->reduce_scatter(
        product, cut(rows, product.n * size_of(product.dtype)), put(call, product), y.data(), kTimeLimit);
    if (needed == 0) expect_sum(call, product, rank_ * rows, y, "reduce_scatter");
    return needed;
  }

  size_t all_gather(int call, const Product& product) {
    const int64_t size = size_of(product.dtype);
    const auto take = [&](int rank, int64_t begin, int64_t end, const char* memory) {
      for (int64_t i = 0; i < (end - begin) * product.n; ++i) {
        const int wanted = value(call, rank, begin + i / product.n, i % product.n);
        expect(product.dtype, memory + i * size, wanted, "all_gather", call);
      }
    };
    const Pieces pieces = cut(product.m / ranks_, product.n * size);
    return communicator_->all_gather(pieces, product.n, product.dtype, put(call, product), take, kTimeLimit);
  }

  std::string name_;
  int rank_, ranks_, opened_ = 0;
  char* stage_ = nullptr;
  std::unique_ptr<Communicator> communicator_;
};

void as_threads(const std::string& name, int ranks) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([=] { Rank(name, rank, ranks).run(); });
  for (std::thread& thread : threads) thread.join();
}

bool as_processes(const std::string& name, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (::fork() == 0) {
      Rank(name, rank, ranks).run();
      std::exit(0);
    }
  }
  bool good = true;
  for (int status; ::wait(&status) > 0;) good = good && status == 0;
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string how = count == 2 ? arguments[1] : "";
  planted = how == "planted";
  if (how != "threads" && how != "processes" && !planted) return 2;
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const std::string name = "/ascend_parallel-sanitize-" + std::to_string(::getpid()) + "-" + std::to_string(ranks);
    if (how == "processes" && !as_processes(name, ranks)) return 1;
    if (how != "processes") as_threads(name, ranks);
  }
  std::printf("%s: right\n", how.c_str());
  return 0;
}
