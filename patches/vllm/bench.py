"""The part of ``bench --framework vllm`` that runs on the ranks: vLLM's row layer as it is, and in chunks of tokens.

The layer is vLLM's own, with drawn weights, its kernel for CPUs (`quant_method.apply`) and its all-reduce over gloo, as
ranks of two machines have it: in one machine's shared memory vLLM's own code runs. "serial" is its own forward; chunks
have the sizes with which a step of so many tokens runs. Rows are finished at the layer's end: what stays unfinished
past it, benchmarks/serving.py measures with engines.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.layer_shape import LayerOperator, LayerShape
from ascend_parallel.patches.vllm import VLLM
from ascend_parallel.patches.vllm.auto import StepVariant
from ascend_parallel.patches.vllm.bits import ask
from ascend_parallel.patches.vllm.chunks import ladder_of, token_chunks
from ascend_parallel.patches.vllm.layers import Vllm, row_kernel
from ascend_parallel.patches.vllm.operators import LINEAR, PARALLEL_STATE
from ascend_parallel.patches.vllm.start import matmuls_of
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.bench import passes
from ascend_parallel.tuning.measured.pass_parts import Calls
from ascend_parallel.tuning.measured.pass_times import TRIED, TimedLinear, Variant

# Rows are finished at the layer's end; each variant has a count of its own.
SETTINGS = Settings(num_chunks=2, region=False, frameworks=("vllm",))


@contextmanager
def _started(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Patch vLLM, start it on the ranks of `group`, and give its tensor-parallel group of all of them."""
    config, platforms, state = (
        importlib.import_module(name) for name in ("vllm.config", "vllm.platforms", PARALLEL_STATE)
    )
    platform = platforms.current_platform
    if not platform.is_cpu():
        raise RuntimeError(f"--framework vllm: its layer is timed on CPUs, and this vLLM is for {platform.device_type}")
    importlib.import_module(LINEAR)
    VLLM.make(SETTINGS).apply()
    # A part of the name of the shared memory that vLLM opens, and does not use here.
    os.environ.setdefault("VLLM_DIST_IDENT", os.environ["PARENT_PID"])
    with config.set_current_vllm_config(config.VllmConfig()):
        state.init_distributed_environment(backend="gloo")
        state.initialize_model_parallel(group.size())
        coordinator = state.get_tp_group()
        coordinator.device_communicator.dist_module = dist
        yield coordinator.device_group


class TimedRowLayer(TimedLinear):
    """vLLM's row layer of a shape, with random operands, on which its forward is timed."""

    def __init__(self, shape: LayerShape, group: dist.ProcessGroup, settings: Settings) -> None:
        """Make the layer, and ask which chunks keep the bits of its matmul; every rank of `group` calls this."""
        super().__init__(shape, group, settings)
        kind = sys.modules[LINEAR].RowParallelLinear
        self._vllm: Vllm = kind.forward.ascend_parallel
        self._layer = kind(
            shape.k * shape.ranks, shape.n, bias=False, params_dtype=shape.dtype, prefix=f"{shape.k} x {shape.n}"
        )
        self._layer.weight.data.copy_(self.weight.detach())
        self._layer.quant_method.process_weights_after_loading(self._layer)
        if (reason := self._vllm.uncovered(self._layer)) is not None:
            raise RuntimeError(f"--framework vllm: its row layer runs without overlap: {reason}")
        bits = ask(matmuls_of([self._layer]), ladder_of(shape.device), shape.rows, group, self.x.device)
        self._vllm.least_rows = bits.least
        self._counts: dict[Sizes, int] = {(shape.rows,): 1}

    def calls(self, operator: LayerOperator) -> Calls:
        """Return the parts of the forward: the matmul is that of vLLM's kernel."""
        calls, multiply, x = super().calls(operator), row_kernel(self._layer), self.x.detach()
        piece = partial(multiply, x[: max(calls.rows // calls.count, 1)])
        return replace(calls, timed={**calls.timed, "matmul": partial(multiply, x), "matmul_piece": piece}, piece=piece)

    def sizes_as_run(self, operator: LayerOperator, sizes: Sizes) -> Sizes:
        """Return the chunks in which a step of so many tokens runs when it is cut into as many as `sizes` are."""
        cut = token_chunks(self.shape.rows, len(sizes), self.shape.device, self._vllm.least_rows)
        self._counts.setdefault(cut, len(sizes))
        return cut

    def with_sizes(self, operator: LayerOperator, sizes: Sizes) -> Variant:
        """Return the variant whose count cuts a step into these chunks."""
        return Variant(self._settings, Known(number=self._counts[sizes], because=TRIED))

    def _timed(self, operator: LayerOperator, variant: Variant) -> float:
        x, known = self.x.detach(), variant.known
        assert known is not None
        with torch.inference_mode(), self._vllm.trying(StepVariant(known.number)):
            return self._clock.seconds(lambda: self._layer(x))


def measure(group: dist.ProcessGroup, timed: type[TimedRowLayer] = TimedRowLayer, **asked: Any) -> dict[str, Any]:
    """Return the times of vLLM's row layers, as `passes.measure` does of this package's own; asked: its arguments."""
    with _started(group) as own:
        measured = passes.measure(own, **asked, timed=timed)
    return {**measured, "framework": f"vllm {sys.modules['vllm'].__version__}"}
