"""The forward that is installed on linear layers of a Hugging Face `tp_plan`, styles "colwise" and "rowwise".

transformers puts a forward on each module. The patch calls transformers' own installation, and wraps the forward that
it has installed. The wrapper runs transformers' own where it does not cover the layer or the call, and after a revert.
Written against transformers 5.16 to 5.23, transformers/distributed/tensor_parallel.py.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.framework import ONE_RANK, Framework
from ascend_parallel.patches.linear_call import LinearCall, run_linear, too_few_rows
from ascend_parallel.patches.tuned import case_of
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.pass_times import Case

KINDS = {"ColwiseParallel": "column", "RowwiseParallel": "row"}


class Transformers(Framework):
    """The installed transformers, and the settings of its patched layers."""

    def __init__(self, settings: Settings, version: str) -> None:
        """Hold the settings; ranks compare `version`."""
        super().__init__(settings)
        self.version = version

    def group_of(self, layer: Any) -> dist.ProcessGroup:
        """Return the tensor-parallel group of a module with an installed forward."""
        group: dist.ProcessGroup = installed_on(layer).group
        return group

    def uncovered(self, layer: Any) -> str | None:
        """Return the reason why transformers' own forward of `layer` must run, or None."""
        return installed_on(layer).uncovered(layer)

    def case_of(self, layer: Any, kind: str, x: torch.Tensor, weight: Any, **options: Any) -> Case | None:
        """Return the tuner's description of a call of `layer`."""
        return case_of(kind, x, weight, **options)

    def refuse_conflicts(self, layer: Any) -> None:
        """No feature of transformers overlaps the same layers."""

    def compared(self) -> Mapping[str, Any]:
        """Return what must be the same on all ranks: the version, and the layers that are overlapped."""
        return {
            "version of transformers": self.version,
            "tensor-parallel linear layers of transformers": IN_FORCE.layers,
        }


class InForce:
    """The settings that installed forwards run with at present: None after a revert, and before patches are applied."""

    def __init__(self) -> None:
        """No patch is in force, and no forward is installed."""
        self.framework: Transformers | None = None
        self._count = 0
        self._digest = hashlib.sha256()

    def add(self, what: str) -> None:
        """Count a layer in words."""
        self._count += 1
        self._digest.update(what.encode())

    @property
    def layers(self) -> str:
        """The number and a digest of the layers in the order of their installation."""
        return f"{self._count} ({self._digest.hexdigest()[:8]})"


IN_FORCE = InForce()


@dataclass(frozen=True)
class Installed:
    """What was installed on a module.

    kind
        "column" or "row"; None: a style that is left as it is.
    reason
        Why the layer is left as it is, known from the style alone.
    """

    kind: str | None
    mesh: Any
    reason: str | None

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        group: dist.ProcessGroup = self.mesh.get_group() if self.mesh.ndim == 1 else self.mesh.get_group("tp")
        return group

    def uncovered(self, module: Any) -> str | None:
        """Return the reason why the module's own forward must run, or None."""
        if self.reason is not None or IN_FORCE.framework is None:
            return self.reason or "overlap is switched off"
        if torch.compiler.is_compiling():
            return "it is being compiled, and a process group cannot be"
        if type(module) is not torch.nn.Linear:
            return "it is no torch.nn.Linear, but a class of its own"
        if getattr(module, "_hf_quantized_needs_local_tp", False):
            return "it is quantised"
        if self.group.size() == 1:
            return ONE_RANK
        return self._uneven(module) or self._sharded(module)

    def _uneven(self, module: Any) -> str | None:
        cut = module.out_features if self.kind == "column" else module.in_features
        ranks = self.group.size()
        return None if cut % ranks == 0 else f"its {cut} features are shared unevenly among {ranks} ranks"

    def _sharded(self, module: Any) -> str | None:
        """Return how its weight and bias differ from the shards that the style makes, or None."""
        expected: dict[str, Any] = {"weight": Shard(0), "bias": Shard(0)}
        if self.kind == "row":
            expected = {"weight": Shard(1), "bias": Replicate()}
        for name, placement in expected.items():
            parameter = getattr(module, name)
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor):
                return f"its {name} is no DTensor"
            placed = [_positive(each, parameter.ndim) for each in parameter.placements]
            if placed != [placement]:
                return f"its {name} is placed as {parameter.placements}, not as ({placement},)"
        return None


def installed_on(module: Any) -> Installed:
    """Return what was installed on a module."""
    found: Installed = vars(module)["forward"].ascend_parallel
    return found


def install_forward(original: Function) -> Function:
    """Make the method that replaces ``TensorParallelLayer.install_forward``."""

    @functools.wraps(original)
    def install(self: Any, module: Any, mesh: Any) -> Any:
        returned = original(self, module, mesh)
        if not hasattr(module, "in_features") or "forward" not in vars(module):
            return returned
        inner, placed = module.forward, _placed(self, mesh)
        IN_FORCE.add(
            f"{type(module).__name__} {module.in_features} {module.out_features} {placed.kind} {placed.reason}"
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            if IN_FORCE.framework is None:
                return inner(*args, **kwargs)
            return _run(IN_FORCE.framework, module, placed, inner, args, kwargs)

        forward.ascend_parallel = placed  # type: ignore[attr-defined]
        module.forward = forward
        return returned

    return install


def _placed(style: Any, mesh: Any) -> Installed:
    """Return what `style` installs: exactly one of the two plain styles, with the layouts that they have by default."""
    kind = type(style)
    name = kind.__name__
    if kind is not getattr(sys.modules[f"{kind.__module__}"], name, None) or name not in KINDS:
        return Installed(None, mesh, f"its style {name} is left as it is")
    layouts = (Replicate(), Shard(-1)) if KINDS[name] == "column" else (Shard(-1), Replicate())
    if (style.input_layouts, style.output_layouts) != layouts or not style.use_local_output:
        return Installed(None, mesh, f"its style makes {style.output_layouts} of {style.input_layouts} in its forward")
    return Installed(KINDS[name], mesh, None)


def _run(
    framework: Transformers, module: Any, placed: Installed, inner: Function, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    reason = placed.uncovered(module)
    x = args[0] if len(args) == 1 and not kwargs else None
    if reason is None and (not isinstance(x, torch.Tensor) or isinstance(x, DTensor)):
        reason = "it is called with something else than one plain tensor"
    if reason is not None or not isinstance(x, torch.Tensor):
        framework.log_uncovered(module, reason or "")
        return inner(*args, **kwargs)
    call = LinearCall(
        layer=module,
        kind=placed.kind or "",
        x=x,
        weight=module.weight.to_local(),
        bias=None if module.bias is None else module.bias.to_local(),
        parameter=module.weight,
        original=inner,
    )
    return inner(x) if too_few_rows(call) else run_linear(framework, call)


def _positive(placement: Any, ndim: int) -> Any:
    return Shard(placement.dim % ndim) if type(placement) is Shard else placement
