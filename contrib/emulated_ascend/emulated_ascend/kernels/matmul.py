"""Products of matrices."""

import torch

from .table import inplace, kernel, result

for name in ("Mm", "Matmul", "BatchMatMul"):
    kernel(name, "ttti", lambda a, b, out, precision: out.copy_(a @ b))
kernel("Mv", "ttti", lambda a, b, out, precision: out.copy_(a @ b))
result("Dot", "ttt", torch.dot)
kernel(
    "Addmm", "tttssti",
    lambda x, a, b, beta, alpha, out, precision: out.copy_(torch.addmm(x, a, b, beta=beta, alpha=alpha)),
)  # fmt: skip
inplace("InplaceAddmm", "tttssi", lambda x, a, b, beta, alpha, precision: torch.addmm(x, a, b, beta=beta, alpha=alpha))
kernel(
    "Baddbmm", "tttssti",
    lambda x, a, b, beta, alpha, out, precision: out.copy_(torch.baddbmm(x, a, b, beta=beta, alpha=alpha)),
)  # fmt: skip
kernel(
    "Addmv", "tttssti",
    lambda x, a, b, alpha, beta, out, precision: out.copy_(torch.addmv(x, a, b, beta=beta, alpha=alpha)),
)  # fmt: skip
