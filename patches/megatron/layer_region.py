"""Regions of whole transformer layers: the replacement of TransformerLayer.forward, and the patches of regions.

The region begins in the attention: its row-parallel layer leaves its all-reduces running, and bias, addition and norm
take its rows as they arrive, pulled by the MLP chunk by chunk.

A layer's region stands in for four of the layer's parts while the layer's own forward runs: `linear_proj`,
`self_attn_bda`, `pre_mlp_layernorm` and `mlp`. All supported versions call these four in this order, and hand what one
returns to the next.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.operators import rows_of
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.overlap.linear import row_linear
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.rows import PendingRows
from ascend_parallel.overlap.region.tail import Tail
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import Output
from ascend_parallel.patches.megatron.region_checks import LAYER, MLP, layer_reason, mlp_reason, proj_reason
from ascend_parallel.patches.megatron.regions import Regions, mlp_forward

log = logging.getLogger("ascend_parallel")

# Arguments of a layer's call that exclude a region: inference has few rows, and caches.
EXCLUDED = ("context", "inference_params", "inference_context")


def region_patch_set(megatron: Megatron) -> PatchSet:
    """Return the patches that run regions with the settings of `megatron`; none if regions are off."""
    if megatron.settings.region == "auto" and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning("COC_REGION=auto: the layers run one by one, because nothing measures regions yet; COC_REGION=1")
    if megatron.settings.region is not True:
        return PatchSet("megatron-core", ">=0.10,<0.17", [])
    regions = Regions(megatron)
    scaled = ("per_token_scale",) if megatron.version >= (0, 12) else ()
    more = ("kwargs",) if megatron.version >= (0, 16) else ()
    bound = ("args", "kwargs") if megatron.version >= (0, 12) else _monolithic(megatron.version)
    return PatchSet(
        "megatron-core",
        ">=0.10,<0.17",
        [
            Patch(
                module=MLP,
                owner="MLP",
                method="forward",
                replacement=lambda original: mlp_forward(original, regions),
                parameters=("self", "hidden_states", *scaled, *more),
                reason="runs fc1, activation and fc2 chunk by chunk, collectives under all of them",
            ),
            Patch(
                module=LAYER,
                owner="TransformerLayer",
                method="forward",
                replacement=lambda original: layer_forward(original, regions),
                parameters=("self", *bound),
                reason="starts the MLP's chunks under the attention's all-reduce",
            ),
        ],
    )


def _monolithic(version: tuple[int, ...]) -> tuple[str, ...]:
    """Return the parameters of the layer's forward before 0.12."""
    rotary = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
    last = ("attention_bias", "inference_params", "packed_seq_params")
    offset = ("sequence_len_offset",) if version >= (0, 11) else ()
    return ("hidden_states", "attention_mask", "context", "context_mask", *rotary, *last, *offset)


def layer_forward(original: Function, regions: Regions) -> Function:
    """Make the method that replaces ``TransformerLayer.forward``."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        called_with = _arguments(getattr(type(self), "_forward_attention", original), self, args, kwargs)
        reason = layer_reason(self, {name: called_with.get(name) for name in EXCLUDED})
        if reason is not None:
            regions.skip(self, f"{reason}; its MLP may still run in chunks")
        elif mlp_reason(regions.megatron, self.mlp, called_with["hidden_states"], None) is None:
            proj, sequence_parallel = self.self_attention.linear_proj, self.mlp.linear_fc2.sequence_parallel
            reason = proj_reason(regions.megatron, proj, sequence_parallel)
            if reason is None:
                with LayerRegion(self, regions).in_place():
                    return original(self, *args, **kwargs)
            regions.skip(self, reason)
        return original(self, *args, **kwargs)

    vars(forward)["ascend_parallel"] = regions
    return forward


@functools.lru_cache(maxsize=16)
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def _arguments(function: Function, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer's call by name; `function` names its parameters."""
    signature = _signature(function)
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    return dict(signature.bind_partial(layer, *args, **known).arguments)


class LayerRegion:
    """One call of a transformer layer, whose rows are pulled by its MLP."""

    def __init__(self, layer: Any, regions: Regions) -> None:
        """Prepare the call of `layer`, a TransformerLayer."""
        self._layer, self._regions = layer, regions
        self._proj_layer, self._norm_layer, self._mlp_layer = (
            layer.self_attention.linear_proj,
            layer.pre_mlp_layernorm,
            layer.mlp,
        )
        self._own_add: Function = layer.self_attn_bda
        self._stack = ExitStack()
        self._name = ""  # in a timeline
        self._cut: RegionCut | None = None
        self._pending: PendingRows | None = None
        self._tail: Tail | None = None
        self._y: torch.Tensor | None = None  # of linear_proj; its rows are unfinished, and so are those of the next two
        self._sum: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in for the layer's parts inside this context; on exit all rows are finished, also after an error."""
        recorder = RECORDING.recorder
        self._name = recorder.modules[-1] if recorder is not None and recorder.modules else ""
        with self._stack as stack:
            for owner, name, value in (
                (self._proj_layer, "forward", self._proj),
                (self._layer, "self_attn_bda", self._add),
                (self._norm_layer, "forward", self._norm),
                (self._mlp_layer, "forward", self._mlp),
            ):
                stack.enter_context(_replaced(owner, name, value))
            yield
            self._finish()

    def _finish(self) -> None:
        """Finish all rows, for a reader that does not ask for them."""
        for lazy in (self._pending, self._tail):
            if lazy is not None and lazy.rows is not None:
                lazy.rows.finish()

    def _proj(self, input_: torch.Tensor) -> Output:
        """Stand in for the attention's row-parallel layer: start its all-reduces."""
        layer, megatron = self._proj_layer, self._regions.megatron
        weight = layer.weight
        ranks = megatron.group_of(layer).size() if layer.sequence_parallel else 1
        self._cut = self._regions.cut(self._mlp_layer, input_, rows_of(input_).shape[0] // ranks, weight)
        if len(self._cut.sizes) == 1:
            self._regions.skip(self._layer, f"one chunk: {self._cut.reason}")
            output: Output = type(layer).forward(layer, input_)
            return output
        group = megatron.group_of(layer)
        if (recorder := RECORDING.recorder) is not None:
            self._stack.enter_context(recorder.layer("region", "forward", self._name, input_.device.type))
        self._pending = self._stack.enter_context(PendingRows(self._cut.sizes))
        self._y = row_linear(
            input_,
            weight,
            group=group,
            settings=self._cut.settings,
            sequence_parallel=layer.sequence_parallel,
            before_communicating=megatron.confirm(group),
            weight_gradient=megatron.weight_gradient(layer, weight, None, deferrable=False),
            finish=self._pending.take,
        )
        return self._y, layer.bias

    def _add(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Stand in for the layer's bias_dropout_add."""
        add = self._own_add(training, fused)

        def run(output: Output, residual: torch.Tensor, prob: float) -> torch.Tensor:
            y, bias = output
            if self._pending is None or y is not self._y or not _fits(y, residual):
                self._finish()
                plain: torch.Tensor = add(output, residual, prob)
                return plain
            assert self._cut is not None
            assert self._pending.rows is not None
            self._tail = Tail(
                lambda y_c, bias, residual_c: add((y_c, bias), residual_c, prob),
                functools.partial(type(self._norm_layer).forward, self._norm_layer),
                list(self._norm_layer.parameters()),
                self._pending.rows,
                self._cut.sizes,
            )
            self._sum, self._normed = self._tail.apply(y, bias, residual)
            return self._sum

        return run

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Stand in for the norm before the MLP: the tail has computed it."""
        if self._normed is not None and hidden is self._sum:
            return self._normed
        self._finish()
        normed: torch.Tensor = type(self._norm_layer).forward(self._norm_layer, hidden)
        return normed

    def _mlp(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Output:
        """Stand in for the MLP: pull the rows."""
        own, cut = type(self._mlp_layer).forward.original, self._cut
        if cut is None or len(cut.sizes) == 1:
            output: Output = own(self._mlp_layer, hidden, *args, **kwargs)
            return output
        rows = None if self._tail is None else self._tail.rows
        if hidden is not self._normed:
            self._finish()
            rows = None
        return self._regions.run_mlp(self._mlp_layer, own, hidden, cut, rows)


def _fits(y: torch.Tensor, residual: torch.Tensor) -> bool:
    """Tell whether the sum of both has the dtype, shape and device of each."""
    return (y.dtype, y.shape, y.device) == (residual.dtype, residual.shape, residual.device)


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give one object another attribute inside this context, without its class's say."""
    held = vars(owner)
    before = {name: held[name]} if name in held else {}
    held[name] = value
    try:
        yield
    finally:
        del held[name]
        held.update(before)
