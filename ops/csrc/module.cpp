// What Python sees: one class and one function. Calls run without the interpreter's lock.
#include <torch/extension.h>

#include "communicator.h"

namespace ap = ascend_parallel;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using free_interpreter = py::call_guard<py::gil_scoped_release>;
  module.attr("max_ranks") = ap::kMaxRanks;
  module.def("unlink", &ap::Segment::unlink);
  py::class_<ap::Communicator>(module, "Communicator")
      .def(py::init<const std::string&, int64_t, int64_t, int64_t, double>())
      .def_property_readonly("half_bytes", &ap::Communicator::half_bytes)
      .def("matmul_all_reduce", &ap::Communicator::matmul_all_reduce, free_interpreter())
      .def("matmul_reduce_scatter", &ap::Communicator::matmul_reduce_scatter, free_interpreter())
      .def(
          "all_gather_matmul",
          [](ap::Communicator& self, const at::Tensor& x, const at::Tensor& w, const at::Tensor& y,
             const std::optional<at::Tensor>& gathered) {
            self.all_gather_matmul(x, w, y, gathered.value_or(at::Tensor()));
          },
          free_interpreter());
}
