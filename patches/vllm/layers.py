"""The replacements of vLLM's RowParallelLinear.forward and of the all-reduce of its tensor-parallel group.

Written against vllm/model_executor/layers/linear.py and vllm/distributed/parallel_state.py of vLLM 0.11 to 0.32. A row
layer multiplies with `quant_method.apply` alone: its weight may be packed, quantised, emptied or replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ascend_parallel.devices import device_type
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.module_weight import ModuleWeight
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.record import RECORDING, recorded_pass
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import finished, given_away, unfinished
from ascend_parallel.overlap.known import region_chunks
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.overlap.layer_shape import ROW
from ascend_parallel.overlap.linear import run_module_row, run_row
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.check import CheckedCall, output_of
from ascend_parallel.patches.compiled import Compiled
from ascend_parallel.patches.covered_call import CoveredCall, Run, run_covered
from ascend_parallel.patches.framework import ONE_RANK, Framework
from ascend_parallel.patches.vllm.auto import WHOLE, MeasuredCounts, PlannedCounts, StepVariant, Sum
from ascend_parallel.patches.vllm.bits import RowBits
from ascend_parallel.patches.vllm.chunks import LEAST_TOKENS, ladder_of, token_chunks
from ascend_parallel.patches.vllm.fused import fused_weight
from ascend_parallel.patches.vllm.operators import (
    LAYER_NAME,
    PARALLEL_STATE,
    is_captured,
    leave_graphs,
    run_operators_by,
    running_engine,
    traced,
)
from ascend_parallel.patches.vllm.row_wise import method_of, multiplies_by_rows
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import Plan

Counts = MeasuredCounts | PlannedCounts

# The all-reduce without a matmul of ours, as counts and timelines name it.
ALONE = "all_reduce"


class Vllm(Framework):
    """The installed vLLM, and the settings of its patched layers."""

    by = "vLLM's own"

    def __init__(self, settings: Settings, version: str) -> None:
        """Hold the settings; ranks compare `version`.

        Nothing is tuned inside a request: "auto" times dummy steps before the first (patches/vllm/auto.py). Rows are
        left unfinished unless COC_REGION=0, since no backward follows.
        """
        self.in_one = settings.effective_mode == 1
        """Whether each call runs here in one chunk, for a timeline of what chunks are compared with (COC_MODE=1)."""
        leaves_rows = settings.region is not False and not self.in_one and not settings.deterministic
        super().__init__(settings, region=leaves_rows, tunes=False)
        self.version = version
        self.in_request = Known(number=region_chunks(settings))
        """How a step is cut of which nothing was measured or planned: nothing is measured inside a request."""
        self.adapted: WeakSet[torch.nn.Module] = WeakSet()
        """The layers inside another that adds adapters."""
        self.operators = 0  # the layers that run as an operator in compiled graphs
        self.own_graphs = False
        """Whether a compiled model has vLLM's own graphs, without operators; "auto" may leave them in large steps."""
        self.bits: RowBits | None = None  # once a worker has loaded its model
        self.least_rows = 0
        """The least rows of a chunk with which the matmuls of every model loaded here keep their bits; 0: not asked."""
        self._planned = PlannedCounts(settings.plan) if isinstance(settings.plan, Plan) else None
        # With "auto" and COC_TUNE once they are known, before the first request: by the key of an engine.
        self._counts: dict[int, Counts] = {}
        self._latest: Counts | None = self._planned  # outside a forward, as in an encoder
        self.tried: StepVariant | None = None  # of a dummy step
        self.row_forward: Function | None = None  # the replacement of the row layer's forward
        # Compiled models whose steps may leave their graphs, with what was timed, and the hooks by which they do.
        self._leaving: WeakKeyDictionary[torch.nn.Module, MeasuredCounts | None] = WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []
        self._weights: WeakKeyDictionary[Any, ModuleWeight] = WeakKeyDictionary()

    def forget_model(self, engine: int) -> None:
        """Forget what is known of a model: a worker of `engine`, a key, has loaded another.

        What an engine that is still in use depends on stays: its counts, its hook, its way out of the graphs, and the
        least rows.
        """
        self.operators, self.own_graphs, self.bits = 0, False, None
        self._counts.pop(engine, None)  # of one that is gone, whose key came free
        self._latest = self._planned  # whether a key came free differs between ranks

    def keep_counts(self, engine: int, counts: Counts) -> None:
        """Take counts for the steps of an engine, by its key."""
        self._counts[engine] = self._latest = counts

    @property
    def counts(self) -> Counts | None:
        """The counts of the engine whose forward runs, outside one of the model loaded last; None: there are none."""
        engine = running_engine()
        if engine is None:
            return self._latest
        return self._counts.get(engine, self._planned)

    def without_effect(self, device: str) -> list[str]:
        """Return the variables that are set and act on no layer of vLLM on devices of this type."""
        asked = self.settings
        named = {
            "USE_COC_FUSED_KERNEL": asked.fused and device != "npu",
            "customized_coc": asked.customized_coc,
        }
        return [name for name, value in named.items() if value]

    def group_of(self, layer: Any) -> dist.ProcessGroup:
        """Return the tensor-parallel group of a layer."""
        group: dist.ProcessGroup = _state().get_tp_group().device_group
        return group

    def name_of(self, layer: Any) -> str:
        """Return the name in its model that vLLM gives a layer: vLLM hides its modules from Python's collector."""
        return str(layer.prefix)

    def uncovered(self, layer: Any) -> str | None:
        """Return the reason why vLLM's own forward of `layer` must run, or None."""
        if layer.tp_size == 1:
            return ONE_RANK
        if not layer.reduce_results:
            return "its sum over ranks is left to the caller (reduce_results=False)"
        if not layer.input_is_parallel:
            return "it cuts its input itself (input_is_parallel=False)"
        if getattr(layer, "custom_op", None) is not None:
            return f"vllm-ascend runs it with an operator of its own ({type(layer.custom_op).__name__})"
        if getattr(layer, "out_dtype", None) not in (None, layer.params_dtype):
            return f"its result has another dtype (out_dtype={layer.out_dtype})"
        if layer in self.adapted:
            return "its adapters belong to the first tokens of a step (LoRA); its all-reduce runs in chunks"
        if not multiplies_by_rows(layer):
            return f"its rows may share a scale ({method_of(layer)}); its all-reduce runs in chunks"
        return self.uncovered_sum(_state().get_tp_group())

    def compiled_away(self, layer: Any, how: Compiled, *, original: bool | None = None) -> bool:
        """Tell whether vLLM's own code of `layer` alone runs in its graphs, in every step."""
        inside = how in (Compiled.IN_GRAPHS, Compiled.IN_ONE_GRAPH)
        return inside and not hasattr(layer, LAYER_NAME) and not self._leaves_graphs(layer)

    def _leaves_graphs(self, layer: Any) -> bool:
        """Tell whether the model of a layer leaves its graphs in some steps."""
        leaving = [model for model, timed in self._leaving.items() if timed is not None and timed.leave_graphs]
        return any(module is layer for model in leaving for module in model.modules())

    def uncovered_call(self, layer: Any, x: torch.Tensor) -> str | None:
        """Return the reason why vLLM's own forward of `layer` must run for an input x, or None."""
        return self.uncovered(layer) if x.dim() == 2 else f"its input has {x.dim()} dimensions, as in a vision encoder"

    def uncovered_everywhere(self) -> str | None:
        """Return the reason why vLLM's own code runs in every layer, or None."""
        if self.settings.deterministic:
            return "COC_DETERMINISTIC multiplies in tiles, which vLLM's kernels do not know"
        try:
            invariant = getattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", False)  # 0.11 has no such variable
        except ValueError as error:
            return f"VLLM_BATCH_INVARIANT cannot be read: {error}"
        if invariant:
            return "VLLM_BATCH_INVARIANT fixes kernels and the order of sums"
        return None

    def uncovered_sum(self, coordinator: Any) -> str | None:
        """Return the reason why vLLM's own all-reduce of a group must run, or None."""
        if (reason := self.uncovered_everywhere()) is not None:
            return reason
        if _shares_memory(coordinator):
            return "its ranks share memory, where vLLM's own all-reduce is the faster one"
        return None

    def refuse_conflicts(self, layer: Any) -> None:
        """No feature of vLLM excludes overlap: what it does itself is not covered."""

    def compared(self) -> Mapping[str, Any]:
        """Return the values that ranks compare: the version, and the user's settings."""
        return {"version of vllm": self.version, **self.settings.shared()}

    def known(self) -> Known:
        """Return the number of chunks inside a request; the module's weight, or the step, says how a call is cut."""
        return self.in_request

    @contextmanager
    def trying(self, variant: StepVariant) -> Iterator[None]:
        """Run steps this way inside this context, and check nothing."""
        before = self.tried, self.verifier
        self.tried, self.verifier = variant, None
        try:
            yield
        finally:
            self.tried, self.verifier = before

    def beside_run(self) -> AbstractContextManager[None]:
        """Return a context in which vLLM's own code runs, with its own all-reduces."""
        return self.trying(WHOLE)

    def may_leave_graphs(self, model: torch.nn.Module, timed: MeasuredCounts | None = None) -> None:
        """Let steps of a compiled model leave its graphs, as was timed; None: while dummy steps try it."""
        self._leaving[model] = timed
        self._hook()

    def leaves_graphs(self, model: torch.nn.Module, tokens: int, device: str) -> bool:
        """Tell whether a step of a compiled model runs outside its graphs, where rows stay unfinished past a layer.

        A step that is too small to be cut stays in them.
        """
        if tokens < LEAST_TOKENS or is_captured():
            return False
        variant, timed = self.tried, self._leaving.get(model)
        if variant is None and timed is not None:
            variant = timed.variant(tokens)
        return (
            variant is not None
            and variant.eager
            and len(token_chunks(tokens, variant.chunks, device, self.least_rows)) > 1
        )

    def put_in_force(self) -> None:
        """Have operators run these layers, and let compiled models leave their graphs: again, after an error."""
        super().put_in_force()
        run_operators_by(self.row_forward)
        self._hook()

    def put_out_of_force(self) -> None:
        """Have operators run vLLM's own code, and let compiled models stay in their graphs."""
        super().put_out_of_force()
        run_operators_by(None)
        self._unhook()

    def _hook(self) -> None:
        self._unhook()
        self._hooks = [leave_graphs(model, self.leaves_graphs) for model in self._leaving]

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def chunks(self, tokens: int, device: str, summed: Sum) -> Sizes:
        """Return the rows of each chunk of a sum over ranks; a single one: the original runs."""
        return token_chunks(tokens, self.count(tokens, summed), device, self.least_rows)

    def covered_chunks(self, tokens: int, device: str, summed: Sum) -> Sizes:
        """Return the rows of each chunk of a call with so many tokens; empty: it runs vLLM's own code."""
        if is_captured():
            return ()
        sizes = self.chunks(tokens, device, summed)
        return sizes if len(sizes) > 1 or (self.in_one and self.tried is None) else ()

    def count(self, tokens: int, summed: Sum) -> int:
        """Return about how many chunks a sum over ranks is cut into."""
        if self.tried is not None:
            return self.tried.chunks
        if self.in_one:
            return 1
        counts = self.counts
        known = None if counts is None else counts.count(tokens, summed)
        return self.in_request.number if known is None else known

    def asked_bits(self, bits: RowBits) -> None:
        """Keep what a model's matmuls were asked; a model before it may be in use, and keeps its least rows."""
        self.bits, self.least_rows = bits, max(self.least_rows, bits.least)

    def ladder(self, device: str) -> Sizes:
        """Return the allowed rows of a chunk."""
        return ladder_of(device, self.least_rows)

    def fused_weight(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Return the weight [N, K / R] of a call that runs as one operator of torch_npu, or None."""
        weight, reason = fused_weight(layer, x, self.group_of(layer), self.settings, self.in_request)
        if reason:
            self.note(f"USE_COC_FUSED_KERNEL=1: {type(layer).__name__} is not fused: {reason}")
        return weight

    def weight_of(self, layer: Any, x: torch.Tensor) -> ModuleWeight:
        """Return the kernel of a row layer."""
        weight = self._weights.get(layer)
        if weight is None or (weight.dtype, weight.device) != (x.dtype, x.device):
            shape = layer.input_size_per_partition, layer.output_size
            self._weights[layer] = weight = ModuleWeight(shape, x.dtype, x.device, row_kernel(layer))
        return weight


def make_row_forward(original: Function, vllm: Vllm) -> Function:
    """Make the method that replaces ``RowParallelLinear.forward``."""

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            y = traced(self, input_)
            return original(self, input_) if y is None else _with_bias(self, y)
        tokens = input_.shape[0] if input_.dim() == 2 else input_.shape[:-1].numel()
        if tokens < LEAST_TOKENS:
            return original(self, input_)
        sizes = vllm.covered_chunks(tokens, input_.device.type, sum_of(self, input_))
        if torch.is_grad_enabled() or not (sizes or vllm.settings.fused):
            return original(self, input_)
        reason = vllm.uncovered_call(self, input_)
        if reason is not None:
            vllm.log_uncovered(self, reason)
            return original(self, input_)
        fused = vllm.fused_weight(self, input_) if vllm.settings.fused else None
        if fused is None and not sizes:
            return original(self, input_)
        weight, group = vllm.weight_of(self, input_) if fused is None else fused, vllm.group_of(self)
        call = CoveredCall(
            layer=self,
            group=group,
            device=input_.device,
            agreeing=group,
            decide=vllm.known,
            ours=functools.partial(_run_row, vllm, self, input_, weight, group, sizes),
            theirs=None,  # a call that is not to be cut never comes here
            checked=functools.partial(_checked_row, original, self, input_, weight, group, vllm, sizes),
        )
        return _with_bias(self, run_covered(vllm, call))

    vars(forward)["ascend_parallel"] = vllm
    vllm.row_forward = forward
    return forward


def _run_row(
    vllm: Vllm,
    layer: Any,
    x: torch.Tensor,
    weight: ModuleWeight | torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    known: Known,
    _: object,
) -> torch.Tensor:
    """Return the output [M, N] of a row layer for x [M, K / R].

    weight: the layer's own kernel, which adds this rank's part of the bias, and multiplies in chunks of `sizes` rows;
    or [N, K / R], of a fused operator.
    """
    vllm.used = True
    settings = vllm.settings
    parallel = ParallelLinear(
        kind=ROW,
        group=group,
        settings=settings,
        known=known,
        arithmetic=settings.arithmetic,
        leaves_rows=vllm.leaves_rows,
    )
    if isinstance(weight, ModuleWeight):
        return run_module_row(x, weight, parallel, sizes)
    return run_row(x, weight, parallel, None if layer.skip_bias_add else layer.bias)


def _checked_row(
    original: Function,
    layer: Any,
    x: torch.Tensor,
    weight: ModuleWeight | torch.Tensor,
    group: dist.ProcessGroup,
    vllm: Vllm,
    sizes: Sizes,
    _: Known,
    run: Run,
) -> CheckedCall:
    """Return the call beside vLLM's own forward, whole: nobody but the layer reads its weight."""

    def operators(direction: str) -> str:
        if not isinstance(weight, ModuleWeight):
            return f"Its {direction} ran as one operator of torch_npu"
        return f"Its {direction} multiplied and reduced in chunks of rows {list(sizes)}, with the module's own kernel"

    return CheckedCall(
        layer=layer,
        path="row",
        group=group,
        operands={"input": x},
        run=run,
        results=output_of,
        original=lambda operands: output_of(original(layer, operands["input"])),
        operators=lambda: operators,
        name=vllm.name_of(layer),
    )


def _with_bias(layer: Any, y: torch.Tensor) -> Any:
    """Return a row layer's output, and beside it a bias that callers add, unless the layer says no."""
    return (y, layer.bias if layer.skip_bias_add else None) if layer.return_bias else y


def all_reduce(original: Function, vllm: Vllm) -> Function:
    """Make the method that replaces ``GroupCoordinator.all_reduce``."""

    @functools.wraps(original)
    def reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or input_.dim() != 2 or input_.shape[0] < LEAST_TOKENS:
            return original(self, input_)  # type: ignore[no-any-return]
        if self.world_size == 1 or torch.is_grad_enabled():
            return original(self, input_)  # type: ignore[no-any-return]
        device = input_.device.type
        sizes = vllm.covered_chunks(input_.shape[0], device, Sum(0, input_.shape[1], input_.dtype))
        if not sizes or not _may_be_cut(self, input_, vllm):
            return original(self, input_)  # type: ignore[no-any-return]

        def ours(*_: object) -> torch.Tensor:
            y = given_away(input_) if device_type(device).vllm_reduces_in_place else finished(input_).clone()
            with recorded_pass(SimpleNamespace(), ALONE, "forward", device):
                pending = start_all_reduce(y, self.device_group, sizes)
                return unfinished(pending, vllm.leaves_rows, "region")

        call = CoveredCall(
            layer=self,
            group=self.device_group,
            device=input_.device,
            agreeing=self.device_group,
            decide=vllm.known,
            ours=ours,
            theirs=None,
            checked=None,  # who sums has no layer, and its input may be given away
        )
        output: torch.Tensor = run_covered(vllm, call)
        return output

    return reduce


def start_all_reduce(y: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """Start the sum over ranks of y [M, N], in place, in chunks of rows."""
    with _in_timeline(y, group, sizes):
        pending = Pending(y, ALONE, group, len(sizes), sizes)
        with pending.launching():
            for y_c in torch.split_with_sizes(y, sizes):
                pending.launch(dist.all_reduce, y_c, group=group, async_op=True)
    COUNTS.add(ALONE, len(sizes), len(sizes))
    return pending


def _in_timeline(y: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> AbstractContextManager[object]:
    """Return a context that records the sum over ranks of y [M, N], if a recorder is active."""
    if RECORDING.recorder is None:
        return nullcontext()
    dtype = str(y.dtype).removeprefix("torch.")
    call = {"operator": ALONE, "m": y.shape[0], "k": 0, "n": y.shape[1], "dtype": dtype, "kernel": "chunked"}
    return RECORDING.recorder.call({**call, "chunks": len(sizes)}, y.device.type, group, fused=False)


def _may_be_cut(coordinator: Any, x: torch.Tensor, vllm: Vllm) -> bool:
    """Tell whether a sum over ranks may be left unfinished; the same on every rank."""
    if not (vllm.leaves_rows or vllm.in_one) or not x.is_floating_point() or not x.is_contiguous():
        return False
    return str(coordinator.unique_name).startswith("tp") and vllm.uncovered_sum(coordinator) is None


def sum_of(layer: Any, x: torch.Tensor) -> Sum:
    """Return the sum over ranks of a row layer's call with an input x."""
    return Sum(x.shape[-1], layer.output_size, x.dtype)


def row_kernel(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the matmul of a row layer on one rank, with its part of the bias; does not keep the layer alive."""
    own = ref(layer)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        layer = own()
        assert layer is not None
        bias = None if layer.tp_rank > 0 or layer.skip_bias_add else layer.bias
        y: torch.Tensor = layer.quant_method.apply(layer, x, bias)
        return y

    return multiply


def _state() -> Any:
    return sys.modules[PARALLEL_STATE]


def _shares_memory(coordinator: Any) -> bool:
    """Tell whether a group of CPUs reduces in vLLM's shared memory."""
    communicator = coordinator.device_communicator
    return type(getattr(communicator, "dist_module", None)).__name__ == "_CPUSHMDistributed"
