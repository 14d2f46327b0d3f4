"""Linear layers whose weight is a DTensor, and whose forward is installed on the module: which of them are covered.

transformers and torch put forwards on modules when a model is parallelised. No revert reaches these, so an installed
forward asks `ActivePatch` at each call whether its patch is still in force.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ascend_parallel.ops.call import ALL_REDUCE, Matmul
from ascend_parallel.ops.deferred import DeferredProduct
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.unfinished import in_backward
from ascend_parallel.overlap.layer_shape import COLUMN, LayerShape
from ascend_parallel.overlap.selective_checkpoint import checkpoint_frame
from ascend_parallel.patches.base import WatchedNames, defined_in, full_name
from ascend_parallel.patches.base_forward import BaseForward, calls_forward_of
from ascend_parallel.patches.compiled import Compiled, at_tracing
from ascend_parallel.patches.dtensor_norm import install_norms, refuse_loss_parallel, remove_norms
from ascend_parallel.patches.dtensor_sums import install_refusals, remove_refusals
from ascend_parallel.patches.framework import ONE_RANK, Framework, models_with
from ascend_parallel.settings import Settings

# Of a configuration of transformers: probabilities with which functions drop elements of attention.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
# The attribute of a module that holds what was installed on it: a program may put another forward on top.
INSTALLED = "_ascend_parallel_installed"
# torch's own functions, for which an overlapped layer stands; None: replaced before this package was imported.
_FORWARD = torch.nn.Linear.forward if defined_in(torch.nn.Linear.forward, torch.nn.modules.linear) else None
_LINEAR = torch._C._nn.linear
COMPILED = "it is being compiled, and a process group cannot be"


class ActivePatch:
    """The settings that installed forwards run with at present: None after a revert, and before patches are applied."""

    def __init__(self) -> None:
        """No patch is in force, and no forward is installed."""
        self.framework: InstalledLayers | None = None
        self._count = 0
        self._digest = hashlib.sha256()
        # What was around or below modules in forwards: in their last ones, by themselves, and by checkpointed call.
        self.replacements: WeakKeyDictionary[Any, WeakKeyDictionary[Any, str]] = WeakKeyDictionary()

    def add(self, module: Any, installed: Installation) -> None:
        """Count a layer, and note on the module what is installed on it."""
        vars(module)[INSTALLED] = installed
        self.add_text(f"{type(module).__name__} {module.in_features} {module.out_features} {installed.kind}")

    def add_text(self, text: str) -> None:
        """Count a layer in words."""
        self._count += 1
        self._digest.update(text.encode())

    @property
    def between_graphs(self) -> bool:
        """Whether layers that get their forward now are overlapped in compiled code."""
        return self.framework is not None and not self.framework.compiles_original

    @property
    def layers(self) -> str:
        """The number and a digest of the layers in the order of their installation."""
        return f"{self._count} ({self._digest.hexdigest()[:8]})"

    def sums_shared_rows(self) -> bool:
        """Tell whether the gradients of norms that act on shared rows are summed here, in blocks of rows."""
        return self.framework is not None and self.framework.settings.arithmetic.sums_shared_rows


def framework_of_call(active_patch: ActivePatch, module: Any, note: Callable[[], None]) -> InstalledLayers | None:
    """Return the framework whose forward runs a call; None: the patch is not in force, or the call is being compiled.

    A compiled call is an error with COC_DETERMINISTIC=tp and COC_STRICT=1, and otherwise noted by `note`, the module's
    `compiled_note`; but for one that would communicate nothing.
    """
    framework = active_patch.framework
    if framework is None:
        return None
    if not torch.compiler.is_compiling():
        framework.uncompiled.add(module)
        return framework
    if vars(module)[INSTALLED].communicates_nothing():
        return None
    if framework.settings.insists:
        framework.refuse_if_asked(module, COMPILED)
    note()
    return None


def compiled_note(active_patch: ActivePatch, module: Any) -> Callable[[], None]:
    """Return a function that notes, while torch.compile traces it, that the original of `module` is compiled."""
    noted = ref(module)

    @at_tracing
    def note() -> None:
        layer = noted()
        if active_patch.framework is not None and layer is not None:
            active_patch.framework.note_compiled(type(layer).__name__, layer)

    return note


class InstalledLayers(Framework):
    """A framework that installs forwards on modules, and the settings of its patched layers."""

    def __init__(self, settings: Settings, title: str, version: str, active_patch: ActivePatch) -> None:
        """Hold the settings; ranks compare the version and the layers of `active_patch`."""
        super().__init__(settings)
        self._title, self._version, self._active_patch = title, version, active_patch
        self._without_dropout: WeakSet[Any] = WeakSet()
        self.uncompiled: WeakSet[Any] = WeakSet()  # modules whose forward has run outside of graphs
        self._loss_checks = settings.arithmetic.tree_needs(refuse_loss_parallel)

    def put_in_force(self) -> None:
        """Have installed forwards run with these settings, and DTensor its norms in the tree if they have to be.

        Forwards that were installed under earlier patches are overlapped again.
        """
        super().put_in_force()
        self._active_patch.framework = self
        for install in self.settings.arithmetic.tree_needs(install_norms, install_refusals):
            install()

    def put_out_of_force(self) -> None:
        """Have installed forwards run the framework's own, and DTensor its own norms."""
        super().put_out_of_force()
        self._active_patch.framework = None
        remove_norms()
        remove_refusals()

    def confirm(self, group: dist.ProcessGroup) -> Callable[[], None]:
        """Return the check of settings before ranks communicate, which refuses torch's parallel loss if it has to."""
        compare = super().confirm(group)
        if not self._loss_checks:
            return compare

        def confirm() -> None:
            for check in self._loss_checks:
                check()
            compare()

        return confirm

    def unconfirmed(self, group: dist.ProcessGroup) -> Callable[[], None] | None:
        """Return the check to call before ranks communicate, or None; torch's loss may become parallel later."""
        return self.confirm(group) if self._loss_checks else super().unconfirmed(group)

    def group_of(self, layer: Any) -> dist.ProcessGroup:
        """Return the tensor-parallel group of a module with an installed forward."""
        return installed_on(layer).group

    def uncovered(self, layer: Any) -> str | None:
        """Return the reason why the framework's own forward of `layer` must run, or None."""
        return installed_on(layer).uncovered(layer)

    def compiled_away(self, layer: Any, how: Compiled, *, original: bool | None = None) -> bool:
        """Tell whether the original of `layer` is compiled, as `Framework.compiled_away` does."""
        if how is Compiled.BY_FUNCTION and layer not in self.uncompiled:
            return True
        return super().compiled_away(layer, how, original=original)

    def note_compiled(self, name: str, layer: Any = None) -> None:
        """Note a compiled original, as `Framework.note_compiled` does.

        Layers of its class that ran outside of graphs before may run in this graph from now on: torch.compile does not
        trace blocks that are alike again. One that does not is known at its next call.
        """
        if layer is not None:
            for other in [each for each in self.uncompiled if type(each) is type(layer)]:
                self.uncompiled.discard(other)
        super().note_compiled(name, layer)

    def shape_ahead(self, layer: Any, group: dist.ProcessGroup, matmul: Matmul) -> LayerShape | None:
        """Return the shape that a call of `layer` will have beside `matmul`, or None.

        A row layer shares its rows as the layer of `matmul` does; how a column layer gathers its rows is known in its
        call alone.
        """
        installed: Installation | None = vars(layer).get(INSTALLED)
        if installed is None or installed.active_patch.framework is not self or installed.left_alone(layer):
            return None
        shares_rows, ranks = matmul.operator != ALL_REDUCE, group.size()
        if installed.group is not group or (shares_rows and installed.kind == COLUMN):
            return None
        k, n = layer.in_features, layer.out_features
        k, n = (k, n // ranks) if installed.kind == COLUMN else (k // ranks, n)
        return LayerShape.beside(matmul, installed.kind or "", k, n, shares_rows)

    def refuse_conflicts(self, layer: Any) -> None:
        """No feature of these frameworks overlaps the same layers eagerly."""

    def refuse_without_tree(self, layer: Any, kind: str, weight: Any, group: dist.ProcessGroup) -> None:
        """Raise `DegreeError` for a call that has no sum in the tree, or whose model trains with dropout."""
        if layer.training and torch.is_grad_enabled() and layer not in self._without_dropout:
            for model in models_with(layer):
                refuse_dropout(model)
                self._without_dropout.update(model.modules())
        super().refuse_without_tree(layer, kind, weight, group)

    def compared(self) -> Mapping[str, Any]:
        """Return the values that all ranks must share: the version, and the layers that are overlapped."""
        title = self._title
        return {
            f"version of {title}": self._version,
            f"parallel layers of {title}": self._active_patch.layers,
        }


def refuse_dropout(model: torch.nn.Module) -> None:
    """Raise `DegreeError` if a model drops elements: each rank draws masks of its own features."""
    config = getattr(model, "config", None)
    asked = [f"config {name}={getattr(config, name)}" for name in ATTENTION_DROPOUT if getattr(config, name, 0)]
    asked += [
        f"{path} has p={module.p}"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p
    ]
    if asked:
        raise DegreeError(
            f"{type(model).__name__} trains with dropout ({asked[0]}), whose masks each rank draws for its own "
            "features: set it to 0"
        )


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What was installed on a module.

    active_patch
        Whether its patch is still in force.
    kind
        "column" or "row"; None: a style that is left as it is.
    mesh
        The device mesh of the style.
    reason
        Why the layer is left as it is, known from the style and the module's class alone.

    between_graphs
        Whether it was installed to be overlapped in compiled code.

    What may differ between ranks, such as a mode, decides only what multiplies (`replaced`), never which collectives
    run (`left_alone`). A deep copy of a module shares it.
    """

    active_patch: ActivePatch
    kind: str | None
    mesh: Any
    reason: str | None
    between_graphs: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note which calls are overlapped."""
        object.__setattr__(self, "between_graphs", self.active_patch.between_graphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Installation:
        """Return itself: its mesh is the copy's, too."""
        return self

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        group: dist.ProcessGroup = self.mesh.get_group() if self.mesh.ndim == 1 else self.mesh.get_group("tp")
        return group

    def communicates_nothing(self) -> bool:
        """Tell whether a call is the framework's own because its group has one rank."""
        framework = self.active_patch.framework
        alone = framework is None or not framework.settings.arithmetic.forms_every_product
        return alone and self.group.size() == 1

    def uncovered(self, module: Any) -> str | None:
        """Return the reason why the module is not overlapped on this rank, or None."""
        return self.left_alone(module) or self.replaced(module)

    def compiled_away(self, module: Any, how: Compiled) -> bool:
        """Tell whether the original of the module is compiled, as `Framework.compiled_away` does."""
        framework = self.active_patch.framework
        return framework is not None and framework.compiled_away(module, how, original=not self.between_graphs)

    def left_alone(self, module: Any) -> str | None:
        """Return the reason why the module's own forward must run, the same on all ranks, or None."""
        if self.reason is not None or self.active_patch.framework is None:
            return self.reason or "overlap is switched off"
        if torch.compiler.is_compiling():
            return COMPILED
        if self.group.size() == 1 and not self.active_patch.framework.settings.arithmetic.forms_every_product:
            return ONE_RANK
        cut, ranks = module.out_features if self.kind == "column" else module.in_features, self.group.size()
        if cut % ranks:
            return f"its {cut} features are shared unevenly among {ranks} ranks"
        return self._otherwise_sharded(module)

    def replaced(self, module: Any) -> str | None:
        """Return what multiplies in place of torch's linear function, on this rank at least, or None."""
        framework, kind = self.active_patch.framework, type(module)
        if not is_linear(kind):
            reason = f"its class is {full_name(kind)} now"
            if not calls_linear(kind) or (framework is not None and framework.settings.arithmetic.forbids(reason)):
                return reason
        return self.replaced_below(module)

    def replaced_below(self, module: Any) -> str | None:
        """Return what is around or below torch.nn.Linear that would not see an overlapped layer, or None.

        A checkpoint has to compute again what forward has computed, and torch takes a mode off where backward runs: so
        in backward the answer is that of the same checkpointed call's forward, or of the module's last one.
        """
        again, replacements = in_backward(), self.active_patch.replacements
        reason = _FUNCTIONS.look() or (None if again else mode_around())
        if not replacements and reason is None:
            return None
        frame = checkpoint_frame(again=again)
        if again and frame is not None:
            return replacements.get(frame, {}).get(module)
        if again:
            return reason or replacements.get(module, {}).get(module)
        for call in (module,) if frame is None else (module, frame):
            if reason is not None:
                replacements.setdefault(call, WeakKeyDictionary())[module] = reason
            elif call in replacements:
                replacements[call].pop(module, None)
        return reason

    def own_matmul(self, module: Any, forward: Callable[[DTensor], Any], beside_others: bool = False) -> dict[str, Any]:
        """Return as fields of a `LinearCall` what multiplies in place of torch's linear function.

        forward
            That of the module's class, which takes and gives DTensors. If it calls torch.nn.Linear's, the product is
            left to the layer's collectives.
        beside_others
            Whether torch.nn.Linear's own forward runs so too, beside layers of other classes.
        """
        framework, replaced = self.active_patch.framework, self.replaced(module)
        assert framework is not None
        if replaced is not None:
            framework.log_replaced(module, replaced)
        elif (is_linear(type(module)) or getattr(forward, "__func__", None) is _FORWARD) and not beside_others:
            return {}
        watches = replaced is None
        return {"own_matmul": matmul_by(forward, self, module if watches else None), "takes_product": watches}

    def _otherwise_sharded(self, module: Any) -> str | None:
        """Return how its weight and bias differ from the shards that the style makes, or None."""
        expected: dict[str, Any] = {"weight": Shard(0), "bias": Shard(0)}
        if self.kind == "row":
            expected = {"weight": Shard(1), "bias": Replicate()}
        for name, placement in expected.items():
            parameter = getattr(module, name)
            if parameter is not None and not isinstance(parameter, DTensor):
                return f"its {name} is no DTensor"
            # Between calls FSDP has it sharded on dimensions before that of the style.
            if parameter is not None and positive(parameter.placements, parameter.ndim)[-1] != placement:
                return f"its {name} is placed as {parameter.placements}, not as ({placement},)"
        return None

    def sharded_twice(self, module: Any) -> str | None:
        """Return the reason why a call must run the framework's own forward: FSDP has not gathered the weight."""
        return None if module.weight.device_mesh.ndim == 1 else "its weight is sharded by more than its style"


def calls_linear(kind: type) -> bool:
    """Tell whether a class is torch.nn.Linear, or one whose forward calls that of torch.nn.Linear."""
    return is_linear(kind) or (issubclass(kind, torch.nn.Linear) and calls_forward_of(kind, torch.nn.Linear))


def is_linear(kind: type) -> bool:
    """Tell whether a class is torch.nn.Linear, or what `fully_shard` makes of it."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # torch may be importing it
    return kind is torch.nn.Linear or kind.__bases__ == (sharded, torch.nn.Linear)


def installed_on(module: Any) -> Installation:
    """Return the installation on a module."""
    found: Installation = vars(module)[INSTALLED]
    return found


def _replaced_functions() -> str | None:
    """Return, in words, the replacement of torch's linear functions, or None."""
    if torch.nn.Linear.forward is not _FORWARD:
        return f"torch.nn.Linear.forward was replaced by {full_name(torch.nn.Linear.forward)}"
    if torch.nn.functional.linear is not _LINEAR:
        return f"torch.nn.functional.linear was replaced by {full_name(torch.nn.functional.linear)}"
    return None


_FUNCTIONS = WatchedNames(
    [(vars(torch.nn.Linear), "forward"), (vars(torch.nn.functional), "linear")], _replaced_functions
)


def mode_around() -> str | None:
    """Return which mode would not see the functions of an overlapped layer, or None."""
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            if type(mode) not in (DeviceContext, BaseForward):  # of torch.set_default_device, and of a layer around
                return f"it is called under {full_name(type(mode))}, a TorchFunctionMode"
    return None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Any) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[torch.Tensor, None]:
        return _part(gradient), None


def _part(whole: DTensor) -> torch.Tensor:
    """Return this rank's part of the sum that a DTensor is."""
    (placement,), local = whole.placements, whole.to_local()
    if isinstance(placement, Partial):
        return local
    rank, ranks = whole.device_mesh.get_local_rank(), whole.device_mesh.size()
    if placement == Replicate():
        return local if rank == 0 else torch.zeros_like(local)
    assert type(placement) is Shard
    padded = local.new_zeros(whole.shape)
    rows = -(-whole.shape[placement.dim] // ranks)
    padded.narrow(placement.dim, min(rank * rows, whole.shape[placement.dim]), local.shape[placement.dim]).copy_(local)
    return padded


def replicated(x: torch.Tensor, mesh: Any) -> DTensor:
    """Return x as a DTensor that is whole on every rank; the gradient of x is this rank's part of a sum."""
    with torch._C.DisableTorchFunction():
        whole: DTensor = _Replicated.apply(x, mesh)  # type: ignore[no-untyped-call]
    return whole


def matmul_by(
    forward: Callable[[DTensor], Any], installed: Installation, watched: Any = None
) -> Callable[..., torch.Tensor]:
    """Return a function that multiplies by a forward of a layer that takes and gives DTensors, without its collectives.

    watched: the module, if its forward may leave the product with its weight to the collectives; the function then
    takes, after its input, the product of that and the weight, if it has been multiplied.
    """
    mesh, column = installed.mesh, installed.kind == "column"

    def own_matmul(x: torch.Tensor, product: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, DTensor):
            given = x
        elif column:
            given = replicated(x, mesh)
        else:
            given = DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False)
        with nullcontext() if watched is None else BaseForward(watched, installed.kind or "", given, product):
            y: Any = forward(given)
        if not isinstance(y, DTensor):
            return torch.as_tensor(y)
        with torch._C.DisableTorchFunction():
            if column:
                local: torch.Tensor = y.redistribute(placements=[Shard(y.ndim - 1)]).to_local()
                return local
            local = y.to_local(grad_placements=[Replicate()])
            # Of a sum that the program has made itself one rank keeps the values, and every rank the gradient.
            if y.placements == (Replicate(),) and mesh.get_local_rank() > 0:
                return local - local.detach()
            if isinstance(local, DeferredProduct):
                output, own = ref(y), (y._local_tensor, local._base)
                del y
                kept = local.multiply_kept(*(own if output() is None else ()))
                return local.clone() if kept and local.multiplied else local  # the sum is not in what is kept
            return local

    return own_matmul


def positive(placements: Any, ndim: int) -> tuple[Any, ...]:
    """Return placements of a tensor of `ndim` dimensions with their dimensions counted from the first."""
    return tuple(Shard(p.dim % ndim) if type(p) is Shard else p for p in placements)
