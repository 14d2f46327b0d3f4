#include "products.h"

#include <ATen/ops/mm.h>

#include <algorithm>

namespace ascend_parallel {

namespace {

bool is_aligned(const at::Tensor& tensor) {
  return !tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64 == 0;
}

at::Tensor aligned(const at::Tensor& operand) { return is_aligned(operand) ? operand : operand.clone(); }

void multiply_aligned(const at::Tensor& x, const at::Tensor& w, at::Tensor y) {
  if (is_aligned(y)) {
    at::mm_out(y, aligned(x), w);
  } else {
    y.copy_(at::mm(aligned(x), w));
  }
}

}  // namespace

void multiply(const at::Tensor& x, const at::Tensor& w_given, const at::Tensor& y, int64_t row_tile) {
  const at::Tensor w = aligned(w_given);
  const int64_t rows = x.size(0);
  if (row_tile == 0 || rows <= row_tile) return multiply_aligned(x, w, y);
  for (int64_t begin = 0; begin < rows; begin += row_tile) {
    const int64_t length = std::min(row_tile, rows - begin);
    multiply_aligned(x.narrow(0, begin, length), w, y.narrow(0, begin, length));
  }
}

}  // namespace ascend_parallel
