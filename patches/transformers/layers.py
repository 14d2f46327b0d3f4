"""The forward that is installed on linear layers of a Hugging Face `tp_plan`, styles "colwise" and "rowwise".

transformers puts a forward on each module. The patch calls transformers' own installation, and wraps the forward that
it has installed. The wrapper runs transformers' own where it does not cover the layer or the call, and after a revert.
Written against transformers 5.16 to 5.23, transformers/distributed/tensor_parallel.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.patches.base import Function, full_name
from ascend_parallel.patches.compiled import between_graphs
from ascend_parallel.patches.dtensor_linear import (
    ActivePatch,
    Installation,
    InstalledLayers,
    calls_linear,
    compiled_note,
    framework_of_call,
    is_linear,
)
from ascend_parallel.patches.framework import described
from ascend_parallel.patches.linear_call import LinearCall, begin_call, run_linear
from ascend_parallel.patches.norms import install_norm, run_norm

KINDS = {"ColwiseParallel": "column", "RowwiseParallel": "row"}
# Styles whose sums over ranks COC_DETERMINISTIC=tp knows: of layers that are covered, none, or exact ones.
IN_TREE = (*KINDS, "EmbeddingParallel", "TensorParallelLayer")
# Norms of the heads of a rank: they are called with [B, S, heads / R, head_dim].
HEAD_NORMS = ("Qwen3RMSNorm",)
ACTIVE_PATCH = ActivePatch()


@dataclass(frozen=True, kw_only=True)
class InstallationByPlan(Installation):
    """What a `tp_plan` installed on a module.

    gathers
        Whether a column layer's style gathers the features of its output.
    splits
        Whether a row layer's style takes this rank's part of an input that is whole on every rank.

    The style calls the forward that the module had when it was installed: that of its class of then.
    """

    gathers: bool = False
    splits: bool = False

    def left_alone(self, module: Any) -> str | None:
        """Return the reason why the module's own forward must run, or None."""
        if getattr(module, "_hf_quantized_needs_local_tp", False):
            return "it is quantised"
        return super().left_alone(module)

    def replaced(self, module: Any) -> str | None:
        """Return what multiplies in place of torch's linear function, on this rank at least, or None."""
        return self.replaced_below(module)


def install_forward(original: Function) -> Function:
    """Make the method that replaces ``TensorParallelLayer.install_forward``."""

    @functools.wraps(original)
    def install(self: Any, module: Any, mesh: Any) -> Any:
        below = module.forward
        returned = original(self, module, mesh)
        if hasattr(module, "in_features") and "forward" in vars(module):
            _install_linear(module, _installed(self, module, mesh), below)
        if (name := type(self).__name__) not in IN_TREE:
            _refuse_in_tree(module, f"sums over ranks, or packed weights, of the style {name} have no tree")
        return returned

    return install


def _install_linear(module: Any, installed: InstallationByPlan, below: Function) -> None:
    """Put the forward on a linear layer, over transformers'; `below`: the one below that."""
    inner, note = module.forward, compiled_note(ACTIVE_PATCH, module)
    ACTIVE_PATCH.add(module, installed)

    def run(*args: Any, **kwargs: Any) -> Any:
        framework = framework_of_call(ACTIVE_PATCH, module, note)
        if framework is None:
            return inner(*args, **kwargs)
        return _run(framework, module, installed, (inner, below), args, kwargs)

    forward = between_graphs(run, run, lambda *_: ACTIVE_PATCH.framework is None) if installed.between_graphs else run
    forward.ascend_parallel = installed  # type: ignore[attr-defined]
    module.forward = forward


def install_head_norm(original: Function) -> Function:
    """Make the method that replaces ``ReplicatedWithGradAllReduce.install_forward``.

    transformers adds the gradients of all ranks in a hook on the parameter. The norm runs below the forward that sees
    to the hook.
    """

    @functools.wraps(original)
    def install(self: Any, module: Any, mesh: Any) -> Any:
        kind = type(module).__name__
        if kind in HEAD_NORMS:
            install_norm(module, functools.partial(_head_norm, mesh), ACTIVE_PATCH.sums_shared_rows)
        returned = original(self, module, mesh)
        if kind not in HEAD_NORMS:
            _refuse_in_tree(module, f"the gradients of {kind}, summed over ranks, have no tree")
        return returned

    return install


def _refuse_in_tree(module: Any, reason: str) -> None:
    """Have calls of a module raise `DegreeError` with COC_DETERMINISTIC=tp: all ranks run it, so all of them raise."""
    own = module.forward

    @functools.wraps(own)  # coverage reads its attribute
    def forward(*args: Any, **kwargs: Any) -> Any:
        framework = ACTIVE_PATCH.framework
        if framework is not None:
            framework.settings.arithmetic.refuse(lambda: f"{described(module)} cannot run in the tree: {reason}")
        return own(*args, **kwargs)

    module.forward = forward


def _head_norm(mesh: Any, module: Any, own: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    blocks = RowBlocks(group=mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp"), dim=-2, summed_later=True)
    return run_norm(module, own, x, dict(module.named_parameters()), blocks)


def _installed(style: Any, module: Any, mesh: Any) -> InstallationByPlan:
    """Return what `style` installs: exactly one of the two plain styles, with features that are whole or cut."""
    kind, reason = type(style), None
    name = kind.__name__
    if kind is not getattr(sys.modules[kind.__module__], name, None) or name not in KINDS:
        return InstallationByPlan(
            active_patch=ACTIVE_PATCH, kind=None, mesh=mesh, reason=f"its style {name} is left as it is"
        )
    given, made, column = style.input_layouts, style.output_layouts, KINDS[name] == "column"
    uncut = given if column else made
    if uncut != Replicate() or not {given, made} <= {Replicate(), Shard(-1)} or not style.use_local_output:
        reason = f"its style {name} makes {made} of {given} in its forward"
    if reason is None and not calls_linear(type(module)):
        reason = "its class does not call torch.nn.Linear's forward"
    return InstallationByPlan(
        active_patch=ACTIVE_PATCH,
        kind=KINDS[name],
        mesh=mesh,
        reason=reason,
        gathers=column and made == Replicate(),
        splits=not column and given == Replicate(),
    )


def _run(
    framework: InstalledLayers,
    module: Any,
    installed: InstallationByPlan,
    forwards: tuple[Function, Function],
    args: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a call; `forwards`: transformers' own, which communicates, and the one below it."""
    inner, below = forwards
    reason = installed.left_alone(module) or installed.sharded_twice(module)
    x = args[0] if len(args) == 1 and not kwargs else None
    if reason is None and (not isinstance(x, torch.Tensor) or isinstance(x, DTensor)):
        reason = "it is called with something else than one plain tensor"
    if reason is not None or not isinstance(x, torch.Tensor):
        framework.log_uncovered(module, reason or "")
        return inner(*args, **kwargs)
    if getattr(below, "__func__", None) is not type(module).forward and not is_linear(type(module)):
        name = full_name(type(module))
        framework.note(
            f"the tp_plan calls torch.nn.Linear's forward of layers that are {name} now, and not {name}'s own"
        )
    call = LinearCall(
        layer=module,
        kind=installed.kind or "",
        x=_moved(x, installed, Replicate(), Shard(-1)) if installed.splits else x,
        weight=module.weight.to_local(),
        bias=None if module.bias is None else module.bias.to_local(),
        parameter=module.weight,
        original=inner if not installed.splits else lambda part: inner(_placed(part, installed, Shard(-1))),
        finish=(lambda y: _moved(y, installed, Shard(-1), Replicate())) if installed.gathers else None,
        **installed.own_matmul(module, below),
    )
    return run_linear(framework, call) if begin_call(framework, call) else inner(x)


def _placed(x: torch.Tensor, installed: Installation, placement: Any) -> DTensor:
    return DTensor.from_local(x, installed.mesh, [placement], run_check=False)


def _moved(x: torch.Tensor, installed: Installation, before: Any, after: Any) -> torch.Tensor:
    """Return this rank's part of x, redistributed from the placement `before` to `after`."""
    moved: torch.Tensor = _placed(x, installed, before).redistribute(placements=[after]).to_local()
    return moved
