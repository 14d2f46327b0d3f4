// The Python bindings, on tensors. Calls run without the interpreter's lock.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <pybind11/chrono.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "chunk_loop.h"
#include "communicator.h"
#include "products.h"

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

ap::Pieces pieces_of(const std::vector<int64_t>& sizes, int64_t rows) {
  const ap::Pieces pieces(sizes);
  TORCH_CHECK(pieces.count() > 0 && pieces.end(pieces.count() - 1) == rows, "pieces ", sizes, " of ", rows, " rows");
  return pieces;
}

ap::Communicator::Put rows_of_product(const at::Tensor& x, const at::Tensor& w, int64_t row_tile) {
  return [&x, &w, row_tile](int64_t begin, int64_t end, char* out) {
    ap::multiply(x.narrow(0, begin, end - begin), w, rows_at(out, end - begin, x, w.size(1)), row_tile);
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
    if (!together) ap::multiply(part, w, y.narrow(0, rank * rows + begin, end - begin), row_tile);
  };
  prefer_large_pages(y);
  if (gathered.defined()) prefer_large_pages(gathered);
  const size_t needed = self.all_gather(pieces_of(sizes, rows), k, dtype_of(x), put, take, time_limit);
  if (needed == 0 && together) ap::multiply(gathered, w, y, 0);
  return needed;
}

// A way by the words of process_groups/backend.py.
ap::ChunkLoop::Way way_of(const std::string& words) {
  using Way = ap::ChunkLoop::Way;
  TORCH_CHECK(words == "sends" || words == "all_to_all" || words == "chunk-major", "a gather by ", words);
  return words == "sends" ? Way::kSends : words == "all_to_all" ? Way::kAllToAll : Way::kChunkMajor;
}

// None for rows that nobody keeps.
std::optional<at::Tensor> kept(const at::Tensor& gathered) {
  return gathered.defined() ? std::optional<at::Tensor>(gathered) : std::nullopt;
}

std::optional<at::Tensor> gather(
    ap::ChunkLoop& self, const at::Tensor& x, const std::vector<int64_t>& sizes, const std::string& words, int tag,
    bool keep, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& y, int64_t row_tile, bool batched) {
  return kept(self.all_gather(x, sizes, way_of(words), tag, keep, w, y, row_tile, batched));
}

std::pair<at::Tensor, std::optional<at::Tensor>> run_gather(
    ap::ChunkLoop& self, const at::Tensor& x, const at::Tensor& w, const std::vector<int64_t>& sizes,
    const std::string& words, int tag, bool keep, int64_t row_tile, bool batched, ap::ChunkLoop::Limit limit) {
  const auto [y, gathered] = self.run_all_gather(x, w, sizes, way_of(words), tag, keep, row_tile, batched, limit);
  return {y, kept(gathered)};
}

std::pair<at::Tensor, at::Tensor> run_row_sequence_gradients(
    ap::ChunkLoop& self, const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x,
    const std::vector<int64_t>& sizes, const std::string& words, int tag, int64_t row_tile, bool batched,
    ap::ChunkLoop::Limit limit) {
  return self.run_row_sequence_gradients(dy, w, x, sizes, way_of(words), tag, row_tile, batched, limit);
}

ap::Gradients run_column_sequence_gradients(
    ap::ChunkLoop& self, ap::ChunkLoop& gather, const std::vector<int64_t>& gather_sizes, const std::string& words,
    int gather_tag, const at::Tensor& dy, const at::Tensor& w, const at::Tensor& x, bool bias,
    const std::vector<int64_t>& sizes, int64_t row_tile, bool own_scatter, bool by_rank, bool batched, int tag,
    ap::ChunkLoop::Limit limit) {
  return self.run_column_sequence_gradients(gather, gather_sizes, way_of(words), gather_tag, dy, w, x, bias, sizes,
                                            row_tile, own_scatter, by_rank, batched, tag, limit);
}

// Whether all operands that are not None are torch's own tensors, of real numbers and without autocast, and no function
// mode watches.
bool covers(const py::args& operands) {
  for (const py::handle operand : operands) {
    if (operand.is_none()) continue;
    if (!THPVariable_CheckExact(operand.ptr())) return false;
    const at::Tensor& tensor = THPVariable_Unpack(operand.ptr());
    const c10::DeviceType device = tensor.device().type();
    const bool casts = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
    if (casts || tensor.is_complex()) return false;
  }
  return at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

// Names in namespaces and the objects that they had: `same` tells in one call whether they still have them.
class Watched {
 public:
  explicit Watched(std::vector<std::tuple<py::object, py::str, py::object>> seen) : seen_(std::move(seen)) {}

  bool same() const {
    for (const auto& [space, name, object] : seen_) {
      if (PyDict_CheckExact(space.ptr())) {
        const PyObject* now = PyDict_GetItemWithError(space.ptr(), name.ptr());
        if ((now == nullptr ? Py_None : now) != object.ptr()) return false;
      } else if (!space.attr("get")(name, py::none()).is(object)) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<std::tuple<py::object, py::str, py::object>> seen_;
};

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
  py::class_<Watched>(module, "Watched")
      .def(py::init<std::vector<std::tuple<py::object, py::str, py::object>>>())
      .def("same", &Watched::same);
  module.attr("LOOP_INTERFACE") = 3;  // as in ops/chunk_loop.py
  module.def("covers", &covers);
  module.def("local_product", &ap::local_product, free_interpreter());
  module.def("local_gradients", &ap::local_gradients, free_interpreter());
  py::class_<ap::ChunkLoop>(module, "ChunkLoop")
      .def(py::init([](c10d::ProcessGroup& group) {
        return std::make_unique<ap::ChunkLoop>(c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group));
      }))
      .def("all_reduce", &ap::ChunkLoop::all_reduce, free_interpreter())
      .def("reduce_scatter", &ap::ChunkLoop::reduce_scatter, free_interpreter())
      .def("all_gather", &gather, free_interpreter())
      .def("run_all_reduce", &ap::ChunkLoop::run_all_reduce, free_interpreter())
      .def("run_reduce_scatter", &ap::ChunkLoop::run_reduce_scatter, free_interpreter())
      .def("run_all_gather", &run_gather, free_interpreter())
      .def("run_row_sequence_gradients", &run_row_sequence_gradients, free_interpreter())
      .def("run_column_gradients", &ap::ChunkLoop::run_column_gradients, free_interpreter())
      .def("run_column_sequence_gradients", &run_column_sequence_gradients, free_interpreter())
      .def("wait", &ap::ChunkLoop::wait, free_interpreter())
      .def("drain", &ap::ChunkLoop::drain, free_interpreter())
      .def("is_completed", &ap::ChunkLoop::is_completed, free_interpreter())
      .def("tells_completion", &ap::ChunkLoop::tells_completion)
      .def("__len__", &ap::ChunkLoop::size)
      .def_property_readonly("starting", &ap::ChunkLoop::starting)
      .def_property_readonly("waiting", &ap::ChunkLoop::waiting)
      .def_property_readonly("failed", &ap::ChunkLoop::failed);
}
