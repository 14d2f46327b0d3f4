// The matmuls of the kernels, with the calls of ops/multiply.py, which explains why operands are aligned.
#pragma once

#include <ATen/core/Tensor.h>

namespace ascend_parallel {

// y = x w, x [m, K], w [K, N]; if `row_tile` is not 0, in tiles of `row_tile` rows.
void multiply(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, int64_t row_tile);

}  // namespace ascend_parallel
