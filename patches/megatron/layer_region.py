"""The region of a transformer layer: from its attention's row-parallel layer into the next layer.

The attention's row-parallel layer leaves its collectives running, and bias, addition and norm take its rows as they
arrive, pulled by the MLP chunk by chunk. So does the MLP's row-parallel layer, if the next layer is known to pull: its
rows are then pulled by the next layer's linear_qkv (`handover`).

A layer's region stands in for some of the layer's parts while the layer's own forward runs: `linear_proj`,
`self_attn_bda`, `pre_mlp_layernorm`, `mlp` and `mlp_bda`. All supported versions call them in this order, and hand what
one returns to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ascend_parallel.ops.operators import rows_of
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.overlap.linear import row_linear
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.row import send_rows_on_demand
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.megatron.handover import Handover, LeftRows, replaced, successor_of
from ascend_parallel.patches.megatron.original import Output
from ascend_parallel.patches.megatron.regions import Regions, region_call
from ascend_parallel.patches.megatron.tail_verification import LinearCall


class LayerRegion:
    """One call of a transformer layer, whose rows are pulled by its MLP."""

    def __init__(self, layer: Any, regions: Regions) -> None:
        """Prepare the call of `layer`, a TransformerLayer."""
        self._layer, self._regions = layer, regions
        self._proj_layer, self._mlp_layer = layer.self_attention.linear_proj, layer.mlp
        self._adds: tuple[Function, Function] = layer.self_attn_bda, layer.mlp_bda
        self._successor = successor_of(layer, regions.megatron)
        self._stack, self._kept, self._recording = ExitStack(), ExitStack(), ExitStack()
        self._name = ""  # in a timeline
        self._cut: RegionCut | None = None
        self._proj_rows: LeftRows | None = None
        self._mlp_rows: LeftRows | None = None

    def run(self, original: Callable[[], Any]) -> Any:
        """Return the layer's own results; its rows are finished, also after an error, or handed to the next layer."""
        recorder = RECORDING.recorder
        self._name = recorder.modules[-1] if recorder is not None and recorder.modules else ""
        with self._stack as stack:
            stack.enter_context(self._kept)
            stack.enter_context(self._recording)
            stack.enter_context(self._regions.running(self._layer))
            for owner, name, value in (
                (self._proj_layer, "forward", self._proj),
                (self._layer, "self_attn_bda", self._add_proj),
                (self._layer.pre_mlp_layernorm, "forward", self._norm),
                (self._mlp_layer, "forward", self._mlp),
                (self._layer, "mlp_bda", self._add_mlp),
            ):
                stack.enter_context(replaced(owner, name, value))
            results = original()
            if self._proj_rows is not None:
                self._proj_rows.finish()
                self._recording.close()
                self._proj_rows.compare()
            if self._mlp_rows is not None:
                self._hand_over(self._mlp_rows, results[0])
        return results

    def _hand_over(self, rows: LeftRows, output: torch.Tensor) -> None:
        """Leave the rows to the next layer if it will get them; else finish them."""
        if rows.sum is None or output is not rows.sum:
            rows.finish()
        else:
            self._regions.hand_over(Handover(self._successor, rows, self._kept.pop_all(), self._regions.megatron))

    def _proj(self, input_: torch.Tensor) -> Output:
        """Stand in for the attention's row-parallel layer: start its collectives."""
        layer, megatron = self._proj_layer, self._regions.megatron
        weight, group = layer.weight, megatron.group_of(layer)
        more = [weight] if self._successor is None else [weight, self._successor.self_attention.linear_qkv.weight]
        rows = rows_of(input_).shape[0] // (group.size() if layer.sequence_parallel else 1)
        self._cut = cut = self._regions.cut(self._mlp_layer, input_, rows, more)
        output: Output
        if len(cut.sizes) == 1:
            self._regions.skip(self._layer, f"one chunk: {cut.reason}")
            output = type(layer).forward(layer, input_)
            return output
        if (recorder := RECORDING.recorder) is not None:
            self._recording.enter_context(recorder.layer("region", "forward", self._name, input_.device.type))
        self._proj_rows = LeftRows(layer, cut, self._stack, megatron.verifier)
        call = LinearCall(
            layer=layer,
            path="row",
            x=input_,
            weight=weight,
            patched=lambda begin: self._send_proj(input_, begin),
            original=lambda stand_in, x, _: type(layer).forward.__wrapped__(stand_in, x),
            settings=lambda: cut.settings,
            sequence_parallel=layer.sequence_parallel,
            cut=cut,
        )
        output = self._proj_rows.checked(call)
        return output

    def _send_proj(self, input_: torch.Tensor, begin: Begin | None) -> Output:
        """Run the attention's row-parallel layer, whose rows are left to the tail."""
        layer, megatron, cut, rows = self._proj_layer, self._regions.megatron, self._cut, self._proj_rows
        assert cut is not None and rows is not None
        weight, group, pending = layer.weight, megatron.group_of(layer), rows.pending
        on_demand: dict[str, Any] = {}
        if layer.sequence_parallel:
            x, w = input_.detach(), weight.detach()
            on_demand["forward_wrapper"] = lambda _: send_rows_on_demand(x, w, group, cut, pending)
        rows.y = row_linear(
            input_,
            weight,
            group=group,
            settings=cut.settings,
            sequence_parallel=layer.sequence_parallel,
            before_communicating=megatron.confirm(group),
            weight_gradient=megatron.weight_gradient(layer, weight, begin, deferrable=False),
            finish=pending.take,
            **on_demand,
        )
        return rows.y, layer.bias

    def _add_proj(self, training: bool, fused: bool) -> Function:
        """Stand in for the bias_dropout_add behind the attention."""
        add: Function = self._adds[0](training, fused)
        return add if self._proj_rows is None else self._proj_rows.adding(add, self._layer.pre_mlp_layernorm)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Stand in for the norm before the MLP."""
        norm = self._layer.pre_mlp_layernorm
        if self._proj_rows is not None:
            return self._proj_rows.norm(norm, hidden)
        normed: torch.Tensor = type(norm).forward(norm, hidden)
        return normed

    def _mlp(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Output:
        """Stand in for the MLP: pull the rows of proj, and leave its own if the next layer pulls them."""
        own, cut, source = type(self._mlp_layer).forward.original, self._cut, self._proj_rows
        if cut is None or source is None:
            output: Output = own(self._mlp_layer, hidden, *args, **kwargs)
            return output
        if hidden is not source.normed:
            source.finish()
        options: dict[str, Any] = {}
        if self._successor is not None:
            self._mlp_rows = LeftRows(self._mlp_layer.linear_fc2, cut, self._kept, self._regions.megatron.verifier)
            options["finish"] = self._mlp_rows.pending.take
        call = region_call(self._mlp_layer, own, hidden, cut, self._regions, source.rows, **options)
        y, bias = (self._mlp_rows or source).checked(call)
        if self._mlp_rows is not None:
            self._mlp_rows.y = y
        return y, bias

    def _add_mlp(self, training: bool, fused: bool) -> Function:
        """Stand in for the bias_dropout_add behind the MLP."""
        add: Function = self._adds[1](training, fused)
        if self._mlp_rows is None or self._successor is None:
            return add
        return self._mlp_rows.adding(add, self._successor.input_layernorm)
