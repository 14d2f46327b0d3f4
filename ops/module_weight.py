"""A weight inside a module that multiplies with a kernel of its own, such as a packed or a quantised one."""

from __future__ import annotations

from collections.abc import Callable

import torch


class ModuleWeight:
    """A weight [K, N] that nobody but its module reads; the module multiplies any number of rows with it.

    shape, dtype, device
        Of the weight as the module multiplies: K and N, the dtype of input and product, and where they are.
    kernel
        Returns the product [m, N], with what the module adds to it, of rows [m, K]; each row's product depends on
        that row alone.
    """

    requires_grad = False

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        kernel: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Hold the kernel; nothing runs."""
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._kernel = kernel

    def multiply(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Write the product of x_m [m, K] to y_m [m, N]."""
        product = self._kernel(x_m)
        if (product.shape, product.dtype) != (y_m.shape, y_m.dtype):
            raise RuntimeError(
                f"the module's kernel was expected to return {list(y_m.shape)} in {y_m.dtype}, and returned "
                f"{list(product.shape)} in {product.dtype}"
            )
        y_m.copy_(product)
