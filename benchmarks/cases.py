"""The calls that are timed and compared, for one layer and shape.

Each rank computes ``x [M, K] @ w [K, N]``; M counts the rows of all ranks.

    mode               forward                        backward
    row-all-reduce     matmul, all-reduce [M, N]      2 matmuls
    row-sequence       matmul, reduce-scatter [M, N]  all-gather [M, N], 2 matmuls
    column-all-reduce  matmul                         matmul, all-reduce [M, K], matmul
    column-sequence    all-gather [M, K], matmul      all-gather [M, K], matmul, reduce-scatter [M, K], matmul
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, start

from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.settings import Settings

# Collectives of forward and of backward, each with its operand: x [M, K] or y [M, N].
COLLECTIVES: dict[str, tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = {
    "row-all-reduce": (((ALL_REDUCE, "y"),), ()),
    "row-sequence": (((REDUCE_SCATTER, "y"),), ((ALL_GATHER, "y"),)),
    "column-all-reduce": ((), ((ALL_REDUCE, "x"),)),
    "column-sequence": (((ALL_GATHER, "x"),), ((ALL_GATHER, "x"), (REDUCE_SCATTER, "x"))),
}
MODES = tuple(COLLECTIVES)
SERIAL = Settings(num_chunks=1, mode=1)

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layer and shape."""

    mode: str
    m: int
    k: int
    n: int

    @property
    def row(self) -> bool:
        """Whether the layer is row-parallel."""
        return self.mode.startswith("row")

    @property
    def sequence(self) -> bool:
        """Whether the layer runs sequence-parallel."""
        return self.mode.endswith("sequence")


class Cases:
    """The calls of one cell on a group; all ranks have the same operands, except w and the row layer's x."""

    def __init__(self, cell: Cell, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        """Make the operands and Megatron's layer; all calls use its weight."""
        self.cell, self.group = cell, group
        ranks, own = group.size(), torch.Generator().manual_seed(group.rank())
        both = own if cell.row else torch.Generator().manual_seed(99)
        rows_in = cell.m // ranks if cell.sequence and not cell.row else cell.m
        rows_out = cell.m // ranks if cell.sequence and cell.row else cell.m
        draw_x = own if cell.sequence else both
        self.x = torch.randn(rows_in, cell.k, generator=draw_x).to(dtype).requires_grad_()
        draw_dy = torch.Generator().manual_seed(7) if cell.row and not cell.sequence else own
        self.dy = torch.randn(rows_out, cell.n, generator=draw_dy).to(dtype)
        self.plain = megatron_layer(cell, dtype, ranks)
        assert isinstance(self.plain.weight, torch.nn.Parameter)
        self.weight = self.plain.weight
        self.x_m = torch.randn(cell.m, cell.k).to(dtype)
        self.dy_m = torch.randn(cell.m, cell.n).to(dtype)
        # Zeros, because repeated sums of other values overflow; zero_() touches the pages.
        self.moved = {"x": torch.empty_like(self.x_m).zero_(), "y": torch.empty_like(self.dy_m).zero_()}

    def passes(self, chunks: list[int]) -> dict[str, dict[str, Call]]:
        """Return the calls by pass and name; only the parts for a forward without a collective."""
        forward, backward = COLLECTIVES[self.cell.mode]
        parts = {"matmul", "comm", "comm in pieces"}
        first = self._calls(chunks, False, [*forward])
        return {
            "forward": {name: call for name, call in first.items() if forward or name in parts},
            "both": self._calls(chunks, True, [*forward, *backward]),
        }

    def forget_gradients(self) -> None:
        """Delete the gradients of the last call."""
        self.x.grad = self.weight.grad = None

    def check(self, chunks: list[int]) -> None:
        """Raise unless outputs and gradients equal those of Megatron's layer."""
        expected = self._results(lambda: self.plain(self.x[:, None])[0][:, 0])
        for settings in (SERIAL, *(_overlapped(count) for count in chunks)):
            for name, actual, expected_value in zip(
                ["y", "dx", "dw"], self._results(self._layer(settings)), expected, strict=True
            ):
                error = (actual - expected_value).abs().max() / expected_value.abs().max()
                if not error < max(1e-4, 8 * torch.finfo(actual.dtype).eps):
                    raise RuntimeError(f"{self.cell}, {settings.num_chunks} chunks: {name} is off by {error:.2g}")

    def _results(self, forward: Call) -> list[torch.Tensor]:
        self.forget_gradients()
        y = forward()
        y.backward(self.dy)
        assert self.x.grad is not None and self.weight.grad is not None
        return [value.detach().clone() for value in (y, self.x.grad, self.weight.grad)]

    def _calls(self, chunks: list[int], backward: bool, collectives: list[tuple[str, str]]) -> dict[str, Call]:
        def whole(forward: Call) -> Call:
            return (lambda: forward().backward(self.dy)) if backward else forward

        calls: dict[str, Call] = {
            "matmul": self._matmuls(backward),
            "comm": lambda: self._communicate(collectives, 1),
            "comm in pieces": lambda: self._communicate(collectives, max(chunks)),
            "serial": whole(self._layer(SERIAL)),
            "megatron": whole(lambda: self.plain(self.x[:, None])[0][:, 0]),
        }
        return calls | {f"overlapped {count}": whole(self._layer(_overlapped(count))) for count in chunks}

    def _layer(self, settings: Settings) -> Call:
        layer: Callable[..., torch.Tensor] = row_linear if self.cell.row else column_linear
        options = {"group": self.group, "settings": settings, "sequence_parallel": self.cell.sequence}
        return lambda: layer(self.x, self.weight, **options)

    def _matmuls(self, backward: bool) -> Call:
        x_m, dy_m, weight = self.x_m, self.dy_m, self.weight.detach()

        def run() -> None:
            torch.mm(x_m, weight.t())
            if backward:
                torch.mm(dy_m, weight)
                torch.mm(dy_m.t(), x_m)

        return run

    def _communicate(self, collectives: list[tuple[str, str]], pieces: int) -> None:
        """Run the layers' collectives one after the other."""
        for kind, operand in collectives:
            start(kind, self.moved[operand], pieces, self.group)()


def megatron_layer(cell: Cell, dtype: torch.dtype, ranks: int) -> torch.nn.Module:
    """Build Megatron-core's own layer for a cell, without bias; call it inside `megatron_on_cpu`."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=ranks,
        sequence_parallel=cell.sequence,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
    layer: torch.nn.Module
    if cell.row:
        layer = RowParallelLinear(cell.k * ranks, cell.n, input_is_parallel=True, **options)
    else:
        layer = ColumnParallelLinear(cell.k, cell.n * ranks, gather_output=False, **options)
    return layer


def _overlapped(count: int) -> Settings:
    return Settings(num_chunks=count, mode=2)
