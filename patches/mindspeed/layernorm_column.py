"""The replacement of MindSpeedTELayerNormColumnParallelLinear.forward: MindSpeed's norm, then `column_linear`.

Megatron's transformer_engine specs build this layer for the query-key-value projection and the first MLP layer. Its
forward runs the norm, and hands the rows to Megatron's linear function, its attribute `_linear_forward_impl`. The
replacement runs the same forward with an overlapped function in its place, so norms, their recomputation and their
gradients stay MindSpeed's. With fp8 or MC2 the layer calls other functions, and the original runs.
Source: mindspeed/te/pytorch/module/layernorm_column_parallel_linear.py, 2.2.0_core_r0.12.1 to core_r0.16.0.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ascend_parallel.ops.decision import Known
from ascend_parallel.overlap.linear import column_linear
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.check import CheckedCall, CheckedLinear
from ascend_parallel.patches.covered_call import CoveredCall, Run, run_covered
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.megatron.check import beside_original
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import AttributeOverlay
from ascend_parallel.patches.mindspeed import version_note

MODULE = "mindspeed.te.pytorch.module.layernorm_column_parallel_linear"
NAMES = ("MindSpeedTELayerNormColumnParallelLinear", "TELayerNormColumnParallelLinear")


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patch of the layer, whose module has been imported; the layer has had two names."""
    names = [name for name in NAMES if hasattr(sys.modules[MODULE], name)]
    patch = Patch(
        target=f"{MODULE}.{(names or NAMES)[0]}.forward",
        replacement=lambda original: forward_with_norm(original, megatron),
        parameters=("self", "inp", "is_first_microbatch", "fp8_output"),
        reason="gathers under the matmul after MindSpeed's norm, reduces under the backward's matmuls",
    )
    return PatchSet("MindSpeed", None, [patch])


ON_TOP = OnTop(MODULE, patch_set, version_note)


def forward_with_norm(original: Function, megatron: Megatron) -> Function:
    """Make the method that replaces the layer's forward."""

    @functools.wraps(original)
    def forward(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        no_tree = megatron.settings.arithmetic.forbids("the matmul beside MindSpeed's norm has no tree")
        reason = no_tree or uncovered(self, megatron)
        if reason is not None:
            megatron.log_uncovered(self, reason)
            return original(self, inp, is_first_microbatch, fp8_output)
        linear = functools.partial(_linear, self, megatron)
        return original(AttributeOverlay(self, _linear_forward_impl=linear), inp, is_first_microbatch, fp8_output)

    vars(forward).update(ascend_parallel=megatron, uncovered=uncovered)
    return forward


def uncovered(layer: Any, megatron: Megatron) -> str | None:
    """Return the reason why the original forward of `layer` must run, or None."""
    if layer.config.fp8:
        return "fp8 is on, which has MindSpeed's own functions"
    if getattr(layer.config, "use_ascend_mc2", False):
        return "MindSpeed's MC2 (--use-ascend-mc2) runs this layer"
    if layer._linear_forward_impl is not megatron.layers.linear_with_grad_accumulation_and_async_allreduce:
        return f"what it computes was replaced: its _linear_forward_impl is {layer._linear_forward_impl!r}"
    return megatron.uncovered(layer)


def _linear(layer: Any, megatron: Megatron, **call: Any) -> torch.Tensor:
    """Stand in for Megatron's linear function, with its arguments: run `column_linear`."""
    x, weight, group = call["input"], call["weight"], megatron.group_of(layer)
    reduces = bool(call["allreduce_dgrad"] or call["sequence_parallel"])
    options = {"sequence_parallel": call["sequence_parallel"], "reduce_input_grad": reduces}

    def ours(known: Known, begin: Begin | None) -> torch.Tensor:
        return column_linear(
            x,
            weight,
            call["bias"],
            group=group,
            settings=megatron.settings,
            known=known,
            **options,
            before_communicating=megatron.confirm(group),
            weight_gradient=megatron.weight_gradient(layer, weight, begin, deferrable=False),
        )

    def original(stand_in: Any, aliased_x: torch.Tensor, aliased_weight: torch.Tensor) -> tuple[torch.Tensor, None]:
        bias = None if call["bias"] is None else stand_in.bias
        aliased = {"input": aliased_x, "weight": aliased_weight, "bias": bias, "gradient_accumulation_fusion": False}
        return layer._linear_forward_impl(**(call | aliased | {"grad_output_buffer": None})), None

    def checked(known: Known, run: Run) -> CheckedCall:
        linear = CheckedLinear(
            layer=layer,
            kind="column",
            x=x,
            weight=weight,
            group=group,
            settings=megatron.settings,
            known=known,
            sequence_parallel=call["sequence_parallel"],
            reduces=not getattr(layer, "disable_grad_reduce", False),
        )
        return beside_original(linear, run, original)

    covered = CoveredCall(
        layer=layer,
        group=group,
        device=x.device,
        agreeing=None,
        decide=functools.partial(megatron.prepare, layer, "column", x, weight, group, **options),
        ours=ours,
        theirs=lambda: layer._linear_forward_impl(**call),
        checked=checked,
    )
    y: torch.Tensor = run_covered(megatron, covered)
    return y
