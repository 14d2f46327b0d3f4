// The Python bindings, on tensors. Calls run without the interpreter's lock.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "communicator.h"

namespace ap = ascend_parallel;

namespace {

ap::Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return ap::Dtype::kFloat32;
    case at::kBFloat16: return ap::Dtype::kBFloat16;
    case at::kHalf: return ap::Dtype::kFloat16;
    default: TORCH_CHECK(false, "shared memory: float32, bfloat16 and float16, not ", tensor.scalar_type());
  }
}

// A tensor on memory that torch does not own.
at::Tensor rows_at(char* memory, int64_t rows, const at::Tensor& like, int64_t columns) {
  return at::from_blob(memory, {rows, columns}, like.options());
}

// Requests large pages for a result of 32 MB or more. malloc maps such blocks anew each time, and touching
// them page by page costs more than the sum; it reuses smaller blocks.
void prefer_large_pages(const at::Tensor& y) {
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(y.data_ptr()), end = begin + y.nbytes();
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  if (y.nbytes() < 16 * kPage) return;
  ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint; the system may ignore it
}

ap::Product product_of(const at::Tensor& x, const at::Tensor& w, int64_t row_tile) {
  return {x.size(0), x.size(1), w.size(1), dtype_of(x), row_tile};
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64 == 0;
}

at::Tensor aligned(const at::Tensor& operand) {
  return is_aligned(operand) ? operand : operand.clone();
}

// y = x w; if `row_tile` is not 0, in tiles of `row_tile` rows. Makes the same calls as ops/multiply.py, which explains
// why operands are aligned.
void multiply(const at::Tensor& x, const at::Tensor& w_given, at::Tensor y, int64_t row_tile) {
  const int64_t rows = x.size(0), step = row_tile > 0 ? row_tile : std::max<int64_t>(rows, 1);
  const at::Tensor w = aligned(w_given);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t length = std::min(step, rows - begin);
    at::Tensor part = y.narrow(0, begin, length);
    const at::Tensor x_part = aligned(x.narrow(0, begin, length));
    if (is_aligned(part)) {
      at::mm_out(part, x_part, w);
    } else {
      part.copy_(at::mm(x_part, w));
    }
  }
}

ap::Pieces pieces_of(const std::vector<int64_t>& sizes, int64_t rows) {
  const ap::Pieces pieces(sizes);
  TORCH_CHECK(pieces.count() > 0 && pieces.end(pieces.count() - 1) == rows, "pieces ", sizes, " of ", rows, " rows");
  return pieces;
}

ap::Communicator::Put rows_of_product(const at::Tensor& x, const at::Tensor& w, int64_t row_tile) {
  return [&x, &w, row_tile](int64_t begin, int64_t end, char* out) {
    multiply(x.narrow(0, begin, end - begin), w, rows_at(out, end - begin, x, w.size(1)), row_tile);
  };
}

size_t matmul_all_reduce(
    ap::Communicator& self, const at::Tensor& x, const at::Tensor& w, const at::Tensor& y,
    const std::vector<int64_t>& sizes, int64_t row_tile, double time_limit) {
  prefer_large_pages(y);
  return self.all_reduce(product_of(x, w, row_tile), pieces_of(sizes, y.size(0)), rows_of_product(x, w, row_tile),
                         static_cast<char*>(y.data_ptr()), time_limit);
}

size_t matmul_reduce_scatter(
    ap::Communicator& self, const at::Tensor& x, const at::Tensor& w, const at::Tensor& y,
    const std::vector<int64_t>& sizes, int64_t row_tile, double time_limit) {
  prefer_large_pages(y);
  return self.reduce_scatter(product_of(x, w, row_tile), pieces_of(sizes, y.size(0)), rows_of_product(x, w, row_tile),
                             static_cast<char*>(y.data_ptr()), time_limit);
}

// Multiplies the rows in place, rank by rank; with `together`, gathers them first and multiplies them in a single call.
size_t all_gather_matmul(
    ap::Communicator& self, const at::Tensor& x, const at::Tensor& w, const at::Tensor& y,
    const std::optional<at::Tensor>& kept, bool together, const std::vector<int64_t>& sizes, int64_t row_tile,
    double time_limit) {
  const int64_t rows = x.size(0), k = x.size(1);
  const ap::Communicator::Put put = [&](int64_t begin, int64_t end, char* out) {
    rows_at(out, end - begin, x, k).copy_(x.narrow(0, begin, end - begin));
  };
  at::Tensor gathered = kept.value_or(together ? at::empty({y.size(0), k}, x.options()) : at::Tensor());
  const ap::Communicator::Take take = [&](int rank, int64_t begin, int64_t end, char* memory) {
    const at::Tensor part = rows_at(memory, end - begin, x, k);
    if (gathered.defined()) gathered.narrow(0, rank * rows + begin, end - begin).copy_(part);
    if (!together) multiply(part, w, y.narrow(0, rank * rows + begin, end - begin), row_tile);
  };
  prefer_large_pages(y);
  if (gathered.defined()) prefer_large_pages(gathered);
  const size_t needed = self.all_gather(pieces_of(sizes, rows), k, dtype_of(x), put, take, time_limit);
  if (needed == 0 && together) multiply(gathered, w, y, 0);
  return needed;
}

void parallel(int64_t count, int64_t grain, const ap::Host::Body& body) { at::parallel_for(0, count, grain, body); }

// Lets Ctrl-C end a wait.
void interrupt() {
  const py::gil_scoped_acquire hold;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using free_interpreter = py::call_guard<py::gil_scoped_release>;
  module.attr("MAX_RANKS") = ap::kMaxRanks;
  module.def("unlink", &ap::Segment::unlink);
  py::class_<ap::Communicator>(module, "Communicator")
      .def(py::init([](const std::string& name, int rank, const std::vector<int64_t>& global_ranks, size_t half_bytes) {
        return std::make_unique<ap::Communicator>(
            name, rank, global_ranks, half_bytes, ap::Host{parallel, interrupt});
      }))
      .def_property_readonly("half_bytes", &ap::Communicator::half_bytes)
      .def("matmul_all_reduce", &matmul_all_reduce, free_interpreter())
      .def("matmul_reduce_scatter", &matmul_reduce_scatter, free_interpreter())
      .def("all_gather_matmul", &all_gather_matmul, free_interpreter());
}
