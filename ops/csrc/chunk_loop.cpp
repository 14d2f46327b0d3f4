#include "chunk_loop.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/version.h>

#include <utility>

#include "products.h"

namespace ascend_parallel {

namespace {

using Tensors = std::vector<at::Tensor>;
using Group = c10d::ProcessGroup;

// torch 2.13 renamed three collectives.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
constexpr auto kAllGather = &Group::all_gather_single;
constexpr auto kReduceScatter = &Group::reduce_scatter_single;
constexpr auto kAllToAll = &Group::all_to_all_single;
#else
constexpr auto kAllGather = &Group::_allgather_base;
constexpr auto kReduceScatter = &Group::_reduce_scatter_base;
constexpr auto kAllToAll = &Group::alltoall_base;
#endif

// One matmul of a block of rows [m, K], or of several ranks' rows [r, m, K].
void multiply_block(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, int64_t row_tile) {
  if (x.dim() == 2) return multiply(x, w, y, row_tile);
  at::Tensor out = y;
  at::bmm_out(out, x, w.dim() == 3 ? w : w.expand({x.size(0), w.size(0), w.size(1)}));
}

// `_sum_in_rank_order` of ops/collectives.py.
void sum_in_rank_order(const Tensors& parts, at::Tensor out) {
  const bool wide = parts.size() > 2 && out.element_size() == 2;
  at::Tensor total = wide ? parts[0].to(at::kFloat).add_(parts[1]) : at::add_out(out, parts[0], parts[1]);
  for (size_t index = 2; index < parts.size(); ++index) total.add_(parts[index]);
  if (wide) out.copy_(total);
}

// The ranks' rows [R, m, K] without those of `rank`, in one launch each: no stride leads over a rank's own rows.
Tensors batches(const at::Tensor& rows, int64_t rank) {
  Tensors found;
  const std::pair<int64_t, int64_t> bounds[] = {{0, rank}, {rank + 1, rows.size(0)}};
  for (const auto& [start, stop] : bounds) {
    if (stop - start == 1) found.push_back(rows.select(0, start));
    if (stop - start > 1) found.push_back(rows.slice(0, start, stop));
  }
  return found;
}

// The rows of each rank [R, m, K] but `rank`.
Tensors of_peers(const at::Tensor& rows, int64_t rank) {
  Tensors found = rows.unbind();
  found.erase(found.begin() + rank);
  return found;
}

// `rows_of` of ops/operators.py.
at::Tensor rows_of(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  return x.dim() > 2 ? x.flatten(0, -2) : x.unsqueeze(0);
}

// `shaped` of ops/operators.py: rows [*, N] in the shape of x [..., K] with another first dimension, not as a view.
at::Tensor shaped(const at::Tensor& y_m, const at::Tensor& x, int64_t first) {
  std::vector<int64_t> shape = x.sizes().vec();
  if (shape.size() > 1) shape[0] = first;
  shape.back() = y_m.size(1);
  return at::_unsafe_view(y_m, shape);
}

// `weight_gradient_of` of overlap/sequence_backward.py, of torch's arithmetic: dy^T x [N, K] of x [..., K], dy [..., N].
at::Tensor weight_gradient(const at::Tensor& x, const at::Tensor& dy) {
  const at::Tensor x_m = rows_of(x.contiguous()), dy_m = rows_of(dy.contiguous());
  return at::mm(dy_m.t(), x_m);
}

// `bias_gradient_of` of overlap/sequence_backward.py, of torch's arithmetic.
std::optional<at::Tensor> bias_gradient(const at::Tensor& dy, bool wanted) {
  if (!wanted) return std::nullopt;
  return at::sum(rows_of(dy.contiguous()), at::IntArrayRef{0});
}

// The loops whole, and the products, run where autograd records nothing: in its functions' forward and backward. Their
// calls need not pass through its layers of torch's dispatcher, unless a mode of dispatch is to see them as usual.
class BelowAutograd {
 public:
  BelowAutograd() {
    if (!c10::impl::dispatch_mode_enabled()) below_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
};

ChunkLoop::Sizes times(const ChunkLoop::Sizes& sizes, int64_t factor) {
  ChunkLoop::Sizes found;
  for (const int64_t size : sizes) found.push_back(factor * size);
  return found;
}

}  // namespace

ChunkLoop::ChunkLoop(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), rank_(group_->getRank()), ranks_(group_->getSize()) {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) peers_.push_back(peer);
  }
}

void ChunkLoop::keep(Chunk& chunk, Work work) {
  TORCH_CHECK(work, "this rank is not a member of the group");
  chunk.works.push_back(std::move(work));
}

void ChunkLoop::start(size_t index, const std::function<Work()>& call) {
  starting_ = static_cast<int>(index);
  keep(chunks_[index], call());
  chunks_[index].started = true;
  starting_ = -1;
}

void ChunkLoop::send(Chunk& chunk, const at::Tensor& tensor, int peer, int tag) {
  Tensors tensors{tensor};
  keep(chunk, group_->send(tensors, peer, tag));
}

void ChunkLoop::receive(Chunk& chunk, const at::Tensor& tensor, int peer, int tag) {
  Tensors tensors{tensor};
  keep(chunk, group_->recv(tensors, peer, tag));
}

void ChunkLoop::all_reduce(
    const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, const Sizes& sizes, int64_t row_tile) {
  chunks_.resize(sizes.size());
  const Tensors rows = x.split_with_sizes(sizes), places = y.split_with_sizes(sizes);
  for (size_t index = 0; index < sizes.size(); ++index) {
    multiply(rows[index], w, places[index], row_tile);
    start(index, [&] {
      Tensors tensors{places[index]};
      return group_->allreduce(tensors);
    });
  }
}

void ChunkLoop::reduce_scatter(
    const at::Tensor& x, const at::Tensor& w, const at::Tensor& partial, const at::Tensor& y, const Sizes& sizes,
    int64_t row_tile, bool own_scatter, bool by_rank, bool batched, int tag) {
  const size_t count = sizes.size();
  const int64_t rows = y.size(0);
  chunks_.resize(count);
  const Tensors outs = y.split_with_sizes(sizes);
  std::vector<Tensors> received(count);  // of each chunk, from each peer
  if (!own_scatter) {  // receives come before matmuls: `_send_and_sum` of ops/collectives.py says why
    starting_ = 0;
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      const Tensors parts = at::empty_like(y).split_with_sizes(sizes);
      for (size_t index = 0; index < count; ++index) received[index].push_back(parts[index]);
    }
    for (size_t index = 0; index < count; ++index) {
      for (size_t peer = 0; peer < peers_.size(); ++peer) {
        receive(chunks_[index], received[index][peer], peers_[peer], tag);
      }
    }
    starting_ = -1;
  }
  const Tensors outputs = partial.split_with_sizes(times(sizes, ranks_));
  const Tensors blocks = batched ? x.view({ranks_, rows, x.size(1)}).split_with_sizes(sizes, 1) : Tensors();
  const Tensors of_ranks = batched ? Tensors() : x.split_with_sizes(Sizes(ranks_, rows));
  const at::Tensor w_r = batched ? w.expand({ranks_, w.size(0), w.size(1)}) : w;
  int64_t begin = 0;
  for (size_t index = 0; index < count; ++index) {
    const int64_t size = sizes[index];
    const Tensors parts = outputs[index].split_with_sizes(Sizes(ranks_, size));
    if (batched) {
      multiply_block(blocks[index], w_r, outputs[index].view({ranks_, size, w.size(1)}), row_tile);
    } else {
      for (int rank = 0; rank < ranks_; ++rank) {
        multiply(of_ranks[rank].narrow(0, begin, size), w, parts[rank], row_tile);
      }
    }
    begin += size;
    Chunk& chunk = chunks_[index];
    at::Tensor output = outputs[index], out = outs[index];
    if (!own_scatter) {
      Tensors summed = parts;
      starting_ = static_cast<int>(index);
      for (size_t peer = 0; peer < peers_.size(); ++peer) {
        send(chunk, parts[peers_[peer]], peers_[peer], tag);
        summed[peers_[peer]] = received[index][peer];
      }
      chunk.started = true;
      starting_ = -1;
      chunk.steps.push_back([summed = std::move(summed), parts, out] { sum_in_rank_order(summed, out); });
    } else if (by_rank) {
      at::Tensor gathered = at::empty_like(output);
      start(index, [&] {
        Sizes equal_in, equal_out;
        return ((*group_).*kAllToAll)(gathered, output, equal_out, equal_in, {});
      });
      chunk.steps.push_back([gathered, output, out, ranks = ranks_, size] {
        sum_in_rank_order(gathered.view({ranks, size, out.size(1)}).unbind(), out);
      });
    } else {
      start(index, [&] { return ((*group_).*kReduceScatter)(out, output, {}); });
    }
    chunk.finishes = !chunk.steps.empty();
  }
}

at::Tensor ChunkLoop::all_gather(
    const at::Tensor& x, const Sizes& sizes, Way way, int tag, bool keep_gathered, const std::optional<at::Tensor>& w,
    const std::optional<at::Tensor>& y, int64_t row_tile, bool batched) {
  const size_t count = sizes.size();
  const int64_t rows = x.size(0), k = x.size(1);
  chunks_.resize(count);
  const bool in_place = way != Way::kChunkMajor && (count > 1 || way == Way::kSends);
  const bool whole = count == 1 && way != Way::kSends;
  at::Tensor gathered;
  if (in_place || whole || keep_gathered) gathered = x.new_empty({ranks_, rows, k});
  const Tensors chunks = whole ? Tensors{x} : x.split_with_sizes(sizes);
  // The rows [R, c, K] of all ranks of each chunk; in place, without this rank's own.
  Tensors arriving;
  if (whole) {
    arriving.push_back(gathered);
  } else if (in_place) {
    arriving = gathered.split_with_sizes(sizes, 1);
  } else {
    for (const at::Tensor& buffer : x.new_empty({ranks_ * rows, k}).split_with_sizes(times(sizes, ranks_))) {
      arriving.push_back(buffer.view({ranks_, -1, k}));
    }
  }
  if (way == Way::kSends) {
    starting_ = 0;
    for (size_t index = 0; index < count; ++index) {
      for (const int peer : peers_) receive(chunks_[index], arriving[index].select(0, peer), peer, tag);
    }
    starting_ = -1;
  }
  const Tensors places =
      !in_place && !whole && keep_gathered ? gathered.split_with_sizes(sizes, 1) : Tensors();
  for (size_t index = 0; index < count; ++index) {
    Chunk& chunk = chunks_[index];
    at::Tensor x_c = chunks[index].contiguous();
    if (way == Way::kSends) {
      starting_ = static_cast<int>(index);
      for (const int peer : peers_) send(chunk, x_c, peer, tag);
      starting_ = -1;
      chunk.started = chunk.finishes = true;
    } else if (in_place) {
      Tensors out = arriving[index].unbind(), sent(ranks_, x_c);
      out[rank_] = sent[rank_] = x.narrow(0, 0, 0);  // nothing is copied
      start(index, [&] { return group_->alltoall(out, sent); });
    } else {
      at::Tensor buffer = arriving[index].flatten(0, 1);
      start(index, [&] { return ((*group_).*kAllGather)(buffer, x_c, {}); });
      if (!places.empty()) {
        chunk.finishes = true;
        chunk.steps.push_back([place = places[index], from = arriving[index]] { place.copy_(from); });
      }
    }
  }
  if (w.has_value()) multiply(x, *w, y->select(0, rank_), row_tile);
  if (in_place && keep_gathered) gathered.select(0, rank_).copy_(x);
  if (w.has_value()) {
    const Tensors products = batched ? batches(*y, rank_) : of_peers(*y, rank_);
    std::vector<Tensors> outputs;
    for (const at::Tensor& product : products) outputs.push_back(product.split_with_sizes(sizes, -2));
    for (size_t index = 0; index < count; ++index) {
      const Tensors blocks = batched ? batches(arriving[index], rank_) : of_peers(arriving[index], rank_);
      for (size_t block = 0; block < blocks.size(); ++block) {
        chunks_[index].steps.push_back([x_b = blocks[block], y_b = outputs[block][index], w_b = *w, row_tile] {
          multiply_block(x_b, w_b, y_b, row_tile);
        });
      }
    }
  }
  return keep_gathered ? gathered : at::Tensor();
}

at::Tensor ChunkLoop::start_all_reduce(
    const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile) {
  const at::Tensor x_m = rows_of(x);
  at::Tensor y_m = x_m.new_empty({x_m.size(0), w.size(1)});
  all_reduce(x_m, w, y_m, sizes, row_tile);
  return y_m;
}

at::Tensor ChunkLoop::start_reduce_scatter(
    const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile, bool own_scatter, bool by_rank,
    bool batched, int tag) {
  const at::Tensor x_m = rows_of(x);
  const at::Tensor partial = x_m.new_empty({x_m.size(0), w.size(1)});
  at::Tensor y_m = x_m.new_empty({x_m.size(0) / ranks_, w.size(1)});
  reduce_scatter(x_m, w, partial, y_m, sizes, row_tile, own_scatter, by_rank, batched, tag);
  return y_m;
}

at::Tensor ChunkLoop::run_all_reduce(
    const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile, Limit limit) {
  const BelowAutograd below;
  const at::Tensor y_m = start_all_reduce(x, w, sizes, row_tile);
  wait(0, chunks_.size(), limit);
  return shaped(y_m, x, x.size(0));
}

at::Tensor ChunkLoop::run_reduce_scatter(
    const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, int64_t row_tile, bool own_scatter, bool by_rank,
    bool batched, int tag, Limit limit) {
  const BelowAutograd below;
  const at::Tensor y_m = start_reduce_scatter(x, w, sizes, row_tile, own_scatter, by_rank, batched, tag);
  wait(0, chunks_.size(), limit);
  return shaped(y_m, x, x.size(0) / ranks_);
}

std::pair<at::Tensor, at::Tensor> ChunkLoop::run_all_gather(
    const at::Tensor& x, const at::Tensor& w, const Sizes& sizes, Way way, int tag, bool keep_gathered,
    int64_t row_tile, bool batched, Limit limit) {
  const BelowAutograd below;
  const at::Tensor x_m = rows_of(x).contiguous();
  const at::Tensor y_r_m = x_m.new_empty({ranks_, x_m.size(0), w.size(1)});
  at::Tensor gathered = all_gather(x_m, sizes, way, tag, keep_gathered, w, y_r_m, row_tile, batched);
  wait(0, chunks_.size(), limit);
  if (gathered.defined()) gathered = gathered.flatten(0, 1);
  return {shaped(y_r_m.flatten(0, 1), x, x.size(0) * ranks_), gathered};
}

std::pair<at::Tensor, at::Tensor> ChunkLoop::run_row_sequence_gradients(
    const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x, const Sizes& sizes, Way way, int tag,
    int64_t row_tile, bool batched, Limit limit) {
  const BelowAutograd below;
  const auto [dx, dy_r_m] = run_all_gather(dy, w, sizes, way, tag, true, row_tile, batched, limit);
  return {dx, weight_gradient(x, dy_r_m)};
}

Gradients ChunkLoop::run_column_gradients(
    const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x, bool bias, const Sizes& sizes, int64_t row_tile,
    Limit limit) {
  const BelowAutograd below;
  const at::Tensor dx_m = start_all_reduce(dy, w, sizes, row_tile);
  const at::Tensor dw = weight_gradient(x, dy);
  wait(0, chunks_.size(), limit);
  return {dx_m.view(x.sizes()), dw, bias_gradient(dy, bias)};
}

Gradients ChunkLoop::run_column_sequence_gradients(
    ChunkLoop& gather, const Sizes& gather_sizes, Way way, int gather_tag, const at::Tensor& dy, const at::Tensor& w,
    const at::Tensor& x, bool bias, const Sizes& sizes, int64_t row_tile, bool own_scatter, bool by_rank, bool batched,
    int tag, Limit limit) {
  const BelowAutograd below;
  const at::Tensor x_r_m =
      gather.all_gather(rows_of(x), gather_sizes, way, gather_tag, true, std::nullopt, std::nullopt, 0, false);
  const at::Tensor dx_m = start_reduce_scatter(dy, w, sizes, row_tile, own_scatter, by_rank, batched, tag);
  gather.wait(0, gather.size(), limit);
  const at::Tensor dw = weight_gradient(x_r_m.flatten(0, 1), dy);
  wait(0, chunks_.size(), limit);
  return {dx_m.view(x.sizes()), dw, bias_gradient(dy, bias)};
}

std::optional<at::Tensor> local_product(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  const bool fit = x.dim() > 0 && w.dim() == 2 && x.size(-1) == w.size(1) && x.device() == w.device() &&
                   x.scalar_type() == w.scalar_type() && x.is_floating_point();
  if (!fit || (bias && bias->scalar_type() != x.scalar_type())) return std::nullopt;
  const BelowAutograd below;
  at::Tensor y = at::matmul(x, w.t());
  if (bias) y.add_(*bias);
  return y;
}

std::pair<at::Tensor, at::Tensor> local_gradients(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x) {
  const BelowAutograd below;
  const at::Tensor dx = at::matmul(dy, w);
  return {dx, weight_gradient(x, dy)};
}

void ChunkLoop::wait(size_t first, size_t stop, Limit limit) {
  for (size_t index = first; index < stop; ++index) {
    Chunk& chunk = chunks_.at(index);
    if (chunk.done) continue;
    waiting_ = static_cast<int>(index);
    for (; chunk.waited < chunk.works.size(); ++chunk.waited) {
      chunk.works[chunk.waited]->wait(limit.value_or(kNoTimeout));
    }
    waiting_ = -1;
    chunk.done = true;
    for (const Step& step : std::exchange(chunk.steps, {})) step();
    chunk.works.clear();  // what they hold is freed
    chunk.waited = 0;
  }
}

void ChunkLoop::drain(Limit limit) {
  for (Chunk& chunk : chunks_) {
    for (; chunk.started && chunk.waited < chunk.works.size(); ++chunk.waited) {
      try {
        chunk.works[chunk.waited]->wait(limit.value_or(kNoTimeout));
      } catch (const std::exception&) {  // the first error is raised
      }
    }
    chunk.done = true;
  }
}

bool ChunkLoop::is_completed(size_t index) const {
  const Chunk& chunk = chunks_.at(index);
  if (chunk.done || chunk.finishes) return chunk.done;
  return chunk.works.empty() || chunk.works.front()->isCompleted();
}

}  // namespace ascend_parallel
