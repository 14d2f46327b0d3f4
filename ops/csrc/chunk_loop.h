// The loops of ops/chunked.py: a call's chunks are multiplied and their collectives started, then waited for, in C++.
//
// Python's loop makes the same calls of torch in the same order, and runs where this one is missing or does not cover a
// call (ops/chunk_loop.py). Python makes the results; it turns errors of collectives into its own.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace ascend_parallel {

// Of a layer: dx, dw, and db if it was asked for.
using Gradients = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>>;

// Of a layer that communicates nothing in forward: x w^T [..., N] and the bias, if there is one; x [..., K], w [N, K].
// Nothing for operands that do not fit, or a bias that would promote the result.
std::optional<at::Tensor> local_product(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias);

// Of a layer that communicates nothing in backward: dx = dy w [..., K], and dy^T x [N, K].
std::pair<at::Tensor, at::Tensor> local_gradients(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x);

// The collectives of one call, chunk by chunk, and what runs behind the wait for each.
//
// A loop starts its collectives once. An exception of a start or a wait leaves `starting` or `waiting` at the chunk
// whose collective failed, elsewhere they are -1; whoever catches it waits for the collectives that have started.
class ChunkLoop {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Sizes = std::vector<int64_t>;
  using Limit = std::optional<std::chrono::milliseconds>;

  // How the rows of a chunk reach their places, as in process_groups/backend.py.
  enum class Way { kSends, kAllToAll, kChunkMajor };

  explicit ChunkLoop(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Starts y = all_reduce(x w): x [M, K], w [K, N], y [M, N], in chunks of `sizes` rows.
  void all_reduce(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, const Sizes& sizes, int64_t row_tile);

  // Starts y = reduce_scatter(x w): partial [M, N] holds the products chunk after chunk, y [M / R, N].
  //   own_scatter  the backend's own reduce-scatter moves what it has to; else every rank sends, with `tag`
  //   by_rank      sums in rank order also where the backend has another
  //   batched      one matmul for the rows of all ranks
  void reduce_scatter(const at::Tensor& x, const at::Tensor& w, const at::Tensor& partial, const at::Tensor& y,
                      const Sizes& sizes, int64_t row_tile, bool own_scatter, bool by_rank, bool batched, int tag);

  // Starts gathered = all_gather(x): x [M / R, K]; returns gathered [R, M / R, K], undefined if nobody keeps it.
  // If w is given, then multiplies the rank's own rows, and behind each wait the peers' rows of the chunk:
  // y [R, M / R, N] = gathered w.
  at::Tensor all_gather(const at::Tensor& x, const Sizes& sizes, Way way, int tag, bool keep,
                        const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& y, int64_t row_tile,
                        bool batched);

  // The operators whole, of x [..., K] as a layer has it: started, waited for, and in the result's shape, which is no
  // view. The rows of a rank are the first dimension's.
  at::Tensor run_all_reduce(const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile, Limit limit);
  at::Tensor run_reduce_scatter(const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile,
                                bool own_scatter, bool by_rank, bool batched, int tag, Limit limit);
  // Returns gathered [M, K] too, undefined if nobody keeps it.
  std::pair<at::Tensor, at::Tensor> run_all_gather(const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, Way way,
                                                   int tag, bool keep, int64_t row_tile, bool batched, Limit limit);

  // The gradients of a row layer with sequence parallelism, whose dy [S / R, ..., N] is gathered: dx of input
  // x [S, ..., K] and weight w [N, K], and dy^T x [N, K].
  std::pair<at::Tensor, at::Tensor> run_row_sequence_gradients(const at::Tensor& dy, const at::Tensor& w,
                                                               const at::Tensor& x, const Sizes& sizes, Way way,
                                                               int tag, int64_t row_tile, bool batched, Limit limit);

  // The gradients of a column layer with input x [..., K] and weight w [N, K]: all_reduce(dy w) in the shape of x, and
  // dy^T x [N, K], which is multiplied under the all-reduce. bias: also the sum of dy over its rows, last.
  Gradients run_column_gradients(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x, bool bias,
                                 const Sizes& sizes, int64_t row_tile, Limit limit);

  // The same with sequence parallelism: `gather` gathers the rows of x [S / R, ..., K], under which dy w is multiplied
  // and its reduce-scatter started.
  Gradients run_column_sequence_gradients(ChunkLoop& gather, const Sizes& gather_sizes, Way way, int gather_tag,
                                          const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x, bool bias,
                                          const Sizes& sizes, int64_t row_tile, bool own_scatter, bool by_rank,
                                          bool batched, int tag, Limit limit);

  // Waits for the chunks from `first` to before `stop`, and runs what is behind each; chunks that are done are passed
  // by. No limit: the backend's own.
  void wait(size_t first, size_t stop, Limit limit);

  // Waits for all collectives that have started, whatever they raise; runs nothing behind them. Receives of others are
  // given up: where each rank has met the error, nobody sends, and a wait would last as long as the limit.
  void drain(Limit limit);

  // Whether a chunk's wait has run, or would return at once; sends tell it by their wait alone.
  bool is_completed(size_t index) const;
  bool tells_completion(size_t index) const { return !chunks_.at(index).finishes; }

  size_t size() const { return chunks_.size(); }
  int starting() const { return starting_; }
  int waiting() const { return waiting_; }
  // The work that failed, while `waiting` names its chunk.
  Work failed() const { return chunks_.at(waiting_).works.at(chunks_.at(waiting_).waited); }

 private:
  using Step = std::function<void()>;

  struct Chunk {
    std::vector<Work> works;
    size_t waited = 0;      // of the works; gloo's would block if they were waited for again
    bool started = false;   // its collective; of one that is not only receives are posted, for which no peer may send
    bool finishes = false;  // it has a wait of this package, which completes it
    bool done = false;
    std::vector<Step> steps;  // behind the wait
  };

  // Starts the first two operators; y as rows [M, N], [M / R, N].
  at::Tensor start_all_reduce(const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile);
  at::Tensor start_reduce_scatter(const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile,
                                  bool own_scatter, bool by_rank, bool batched, int tag);

  // Starts the collective of a chunk.
  void start(size_t index, const std::function<Work()>& call);
  void keep(Chunk& chunk, Work work);
  void send(Chunk& chunk, const at::Tensor& tensor, int peer, int tag);
  void receive(Chunk& chunk, const at::Tensor& tensor, int peer, int tag);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int rank_, ranks_;
  std::vector<int> peers_;
  std::vector<Chunk> chunks_;
  int starting_ = -1, waiting_ = -1;
};

}  // namespace ascend_parallel
