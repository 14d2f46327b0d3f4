"""What the patched layers of one framework share: settings, the ranks' agreement, the tuner, checks, and logs."""

from __future__ import annotations

import functools
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.ops import DegreeError, UnmetRequestError
from ascend_parallel.ops.bits import AHEAD
from ascend_parallel.ops.blocks import BlockedFeatures
from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.decision import Decision, Known
from ascend_parallel.ops.pending import run_collective
from ascend_parallel.ops.unfinished import UnfinishedTensor
from ascend_parallel.overlap.known import decisions_ahead, known_of
from ascend_parallel.overlap.layer_shape import ROW, LayerShape
from ascend_parallel.overlap.selective_checkpoint import hidden_from_selective_checkpoint
from ascend_parallel.patches.check import CheckRules, Verifier
from ascend_parallel.patches.compiled import COMPILED_AWAY, Compiled
from ascend_parallel.patches.coverage import announce, running_model
from ascend_parallel.patches.region_choice import RegionChoice
from ascend_parallel.patches.tuned import decider_of, refusal_of_plan
from ascend_parallel.process_groups.consistency import SettingsAgreement
from ascend_parallel.settings import Settings, option_name
from ascend_parallel.tuning.measured.chunk_plan import PlanError

log = logging.getLogger("ascend_parallel")

ONE_RANK = "its tensor-parallel group has one rank, so nothing is communicated"


def models_with(layer: Any) -> list[torch.nn.Module]:
    """Return the modules of this process that contain `layer`: slow.

    Models that were dropped are collected first: when that happens differs between ranks, and errors depend on these.
    """
    gc.collect()
    models = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    return [model for model in models if any(module is layer for module in model.modules())]


def described(layer: Any) -> str:
    """Return the path of a module in its model, and its class, for an error: looks at all modules of the process.

    It runs as Python also in a model that is being compiled: torch's tracer cannot list a process's objects. The mark
    is made here, because it imports torch's tracer, which an import of this package must not.
    """
    text: str = torch.compiler.disable(_described)(layer)  # type: ignore[no-untyped-call]
    return text


def _described(layer: Any) -> str:
    paths = [path for model in models_with(layer) for path, module in model.named_modules() if module is layer]
    path, kind = max(paths, key=len, default=""), type(layer).__name__
    return f"{path} ({kind})" if path else kind


class Framework(ABC):
    """A framework whose layers are patched with the same settings; each framework derives its own class.

    A replaced forward asks `uncovered` whether the original must run, and otherwise hands its call to `run_covered`
    (patches/covered_call.py). A linear layer's call is decided by `prepare`: `Known.original` tells where the original
    is as fast.

    by
        Whose the original layers are, in words.
    breaks_graphs
        Whether torch.compile breaks its graph at the original layers too.
    """

    by = "the framework's own"
    breaks_graphs = False

    def __init__(self, settings: Settings, *, region: bool | str | None = None, tunes: bool = True) -> None:
        """Hold the settings of all patched layers.

        region: in place of that of the settings; None: that counts. tunes: whether chunks are measured at a layer's
        first call, if the settings ask for it.
        """
        self.settings = settings
        self._agreement = SettingsAgreement(lambda: {**settings.shared(), **self.compared()})
        self.decider = decider_of(settings, measures=tunes)
        self._unmeasured = known_of(settings)
        self._checked: WeakSet[dist.ProcessGroup] = WeakSet()  # groups for which the plan was measured
        self._refusals: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()  # of the plan
        self._tree_checks = settings.arithmetic.tree_needs(self.refuse_without_tree)
        rules = CheckRules(settings.verify_limit, self.by, self.beside_run)
        self.verifier = Verifier(settings.verify_every, self.confirm, rules) if settings.verify_every else None
        self.region_choice = RegionChoice(settings.region if region is None else region)
        # Whether calls that tuning left to the original are noted: errors that a request must raise, and checks, need
        # every call.
        self.notes_left_whole = self.decider.measures and self.verifier is None and not settings.strict
        self._logged: set[str] = set()
        self.used = False  # whether a layer has been overlapped
        self.compiles_original = settings.compiles_original(breaks_graphs=self.breaks_graphs)
        self._compiled: WeakSet[Any] = WeakSet()  # layers that torch.compile has traced as the originals

    @abstractmethod
    def group_of(self, layer: Any) -> dist.ProcessGroup:
        """Return the tensor-parallel group of `layer`."""

    @abstractmethod
    def uncovered(self, layer: Any) -> str | None:
        """Return the reason why the original forward of `layer` must run, or None."""

    def uncovered_everywhere(self) -> str | None:
        """Return the reason why the original forward of every layer must run, or None."""
        return None

    def name_of(self, layer: Any) -> str:
        """Return the name in its model that the framework gives a layer; empty: it gives none."""
        return ""

    def shape_of(self, layer: Any, kind: str, x: torch.Tensor, weight: Any, **options: Any) -> LayerShape | None:
        """Return the shape of a call of `layer`; None: it is of experts, or its weight is not tuned."""
        return None if kind == "experts" else LayerShape.of(kind, x, weight, self.group_of(layer).size(), **options)

    def shape_ahead(self, layer: Any, group: dist.ProcessGroup, matmul: Matmul) -> LayerShape | None:
        """Return the shape that a call of `layer` will have in a model in which `matmul` is multiplied on `group`.

        None: the layer is not overlapped on this group, or its shape is not known before its call.
        """
        return None

    def calls_ahead(self, group: dist.ProcessGroup, matmul: Matmul) -> list[tuple[Decision, str]]:
        """Return the operators of the running model's layers on `group`, of as many rows as `matmul` has.

        Each with the memory layout of its right operand; for the probe of bits (ops/bits.py).
        """
        model = running_model()
        if model is None:
            return []
        # Grad mode does not tell: autograd switches it off in a forward of its own, a checkpoint in a first forward.
        trains = model.training and any(parameter.requires_grad for parameter in model.parameters())
        calls: list[tuple[Decision, str]] = []
        for layer in model.modules():
            try:
                shape = self.shape_ahead(layer, group, matmul)
            except AttributeError:  # of a subclass that does not call the constructor of its base
                continue
            if shape is not None:
                known, leaves_rows = self.with_options(layer, self._unmeasured), bool(self.leaves_rows)
                calls += decisions_ahead(self.settings, known, shape, backward=trains, leaves_rows=leaves_rows)
        return calls

    def compared(self) -> Mapping[str, Any]:
        """Return the values that ranks compare beside the settings, by the user's names."""
        return {}

    def equals_original(self, layer: Any, kind: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Tell whether the framework's own layer computes what ours does for this call, gradients included."""
        return True

    @abstractmethod
    def refuse_conflicts(self, layer: Any) -> None:
        """Raise `ConflictError` for features that exclude overlap."""

    def refuse_without_tree(self, layer: Any, kind: str, weight: Any, group: dist.ProcessGroup) -> None:
        """Raise `DegreeError` for a call that has no sum in the tree; called if it has to have one.

        Here for features that ranks share, and that cannot be cut into the blocks of every degree.
        """
        if kind == "experts":
            raise DegreeError(f"{described(layer)}: experts and their router have no tree")
        features = BlockedFeatures((weight.shape[0 if kind == "column" else 1],), group.size())
        if features.refusal:
            raise DegreeError(f"{described(layer)}: {features.refusal}")

    def put_in_force(self) -> None:
        """Have the layers of this process run with these settings: its patches have been applied."""
        AHEAD.add(self)

    def put_out_of_force(self) -> None:
        """Have the layers run the framework's own: its patches have been reverted."""
        AHEAD.discard(self)

    def beside_run(self) -> AbstractContextManager[None]:
        """Return a context in which an original layer leaves no trace in the framework's state."""
        return nullcontext()

    def with_options(self, layer: Any, known: Known) -> Known:
        """Add to `known` the requests of the framework's own configuration of `layer`."""
        return known

    def prepare(
        self, layer: Any, kind: str, x: torch.Tensor, weight: Any, group: dist.ProcessGroup, **options: Any
    ) -> Known:
        """Raise an error for features that exclude overlap; return what is known of a call on the layer's `group`.

        That is its plan, or what tuning chose for its shapes, beside the settings.
        """
        self.refuse_conflicts(layer)
        for check in self._tree_checks:
            check(layer, kind, weight, group)
        if self.settings.plan is not None:
            self.confirm_plan(group, x.device)
        if not self.used:
            self.used = True
            shape = self.shape_of(layer, kind, x, weight, **options)
            announce(self.settings, layer, group, shape, tuned=self.decider.measures)
        measures = self.decider.measures
        known = self._measured(layer, kind, x, weight, group, **options) if measures else self._unmeasured
        known = self.with_options(layer, known)
        if kind == ROW and known.original and self.leaves_rows_of(layer):
            known = known._replace(original=False)  # a layer alone is as fast whole; its rows stay unfinished here
        return known

    def enter(self, layer: Any, x: torch.Tensor, *, communicates: bool) -> None:
        """Begin a call of `layer` while whole steps are timed; communicates: whether its forward has a collective."""
        if not dist.is_initialized() or torch.compiler.is_compiling():
            return
        if not (layer.training or torch.is_grad_enabled()):
            self.decider.evaluations += 1
            return
        group = self.group_of(layer)
        if group.size() > 1:
            self.decider.enter(layer, x, group, communicates=communicates)

    def agree(self, group: dist.ProcessGroup, device: torch.device, agreeing: dist.ProcessGroup | None = None) -> None:
        """Compare settings, and the plan on the ranks of `group`, which all call this; else raise on every rank.

        agreeing: the ranks that compare settings; None: those of `group`. The plan comes first: a rank that refuses it
        says so when settings are compared.
        """
        if self.settings.plan is not None:
            self.confirm_plan(group, device)
        self.confirm(group if agreeing is None else agreeing)()

    def confirm_plan(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Return if every rank of `group` can use the plan in force, or there is none; else raise on every rank."""
        if self.settings.plan is not None and group not in self._checked:
            self._agree_on_plan(self.settings.plan, group, device)

    @hidden_from_selective_checkpoint
    def _agree_on_plan(self, plan: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Return if every rank of `group` can use its plan; else raise on every rank, with each rank's reason.

        Raises `DisagreementError` if ranks differ, and `PlanError` if all refuse the plan for the same reason.
        """
        refusal = refusal_of_plan(plan, group, device)
        if refusal:
            self._refusals[group] = {option_name("plan"): f"refused: {refusal}"}
        self.confirm(group)()
        if refusal:
            raise PlanError(refusal)
        self._checked.add(group)

    @property
    def leaves_rows(self) -> int:
        """The least number of rows in a chunk of a result that stays unfinished; 0: every layer finishes its rows."""
        return self.settings.region_rows if self.region_choice.on else 0

    def leaves_rows_of(self, layer: Any) -> int:
        """Return `leaves_rows` for a result of `layer`: 0 as well where the framework has it in a graph of its own."""
        return self.settings.region_rows if self.region_choice.on else 0

    def timed(self, layer: Any, x: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Return ``run()``, a call of `layer` with `x`; COC_REGION=auto times the first ones, and decides."""
        choice = self.region_choice
        if not choice.undecided:
            return run()
        output = choice.call(layer, x, run, "COC_VERIFY takes time of its own" if self.verifier else None)
        if isinstance(output[0] if isinstance(output, tuple) else output, UnfinishedTensor):
            choice.ran(self.group_of(layer))
        return output

    @hidden_from_selective_checkpoint
    def _measured(
        self, layer: Any, kind: str, x: torch.Tensor, weight: Any, group: dist.ProcessGroup, **options: Any
    ) -> Known:
        """Return the measured sizes; `original` only if the framework's own layer computes the same."""
        shape = self.shape_of(layer, kind, x, weight, **options)
        if shape is None:
            return self._unmeasured
        backward = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        agree = functools.partial(self._confirmed, group)
        if self.decider.begin_steps(shape, group):
            self.enter(layer, x, communicates=True)
        known = self.decider.known_of_layer(shape, group, backward=backward, agree=agree)
        if known.original and not self.equals_original(layer, kind, x, weight):
            return known._replace(original=False)
        return known

    def confirm(self, group: dist.ProcessGroup) -> Callable[[], None]:
        """Return a function that compares settings on the group's ranks; call it before they communicate."""
        return functools.partial(self._agreement.confirm, group, self._refusals.get(group, {}))

    def _confirmed(self, group: dist.ProcessGroup) -> None:
        self.confirm(group)()

    def unconfirmed(self, group: dist.ProcessGroup) -> Callable[[], None] | None:
        """Return `confirm` of a group whose ranks have not compared settings yet; None: they have."""
        return None if group in self._agreement.confirmed else self.confirm(group)

    def reason_of_any(self, group: dist.ProcessGroup, reason: str | None, device: torch.device) -> str | None:
        """Return why the original must run on all ranks of `group` in this call, or None: one small all-reduce.

        For calls that wait for all ranks anyway, such as those of experts.
        """
        rank = torch.tensor([0 if reason is None else dist.get_rank() + 1], device=device)
        run_collective("the reasons of all ranks", dist.all_reduce, rank, group=group, op=dist.ReduceOp.MAX)
        number = int(rank.item())
        if reason is None and number:
            return f"on rank {number - 1} what it computes was replaced, or has tensors in common"
        return reason

    def log_replaced(self, layer: Any, reason: str) -> None:
        """Log once, on this rank, what multiplies in place of layers of this type, whose collectives stay in chunks.

        Raises `UnmetRequestError` with strict settings, and `DegreeError` as `log_uncovered` does.
        """
        self.refuse_if_asked(layer, reason)
        self._log_once(f"on rank {dist.get_rank()} {type(layer).__name__} runs without overlap: {reason}", here=True)

    def log_uncovered(self, layer: Any, reason: str) -> None:
        """Log once, on rank 0, that layers of this type run without overlap; with strict settings raise instead.

        Raises `DegreeError` if the bits are to be the same at every degree.
        """
        self.refuse_if_asked(layer, reason)
        text = f"{type(layer).__name__} runs without overlap: {reason}"
        self._log_once(text, here=not dist.is_initialized() or dist.get_rank() == 0)

    def refuse_if_asked(self, layer: Any, reason: str) -> None:
        """Raise the error of a layer that runs without overlap, if the settings make that an error."""
        self.settings.arithmetic.refuse(lambda: f"{described(layer)} cannot run in the tree: {reason}")
        if self.settings.strict and reason != ONE_RANK:
            raise UnmetRequestError(f"COC_STRICT=1: {type(layer).__name__} runs without overlap: {reason}")

    def note_compiled(self, name: str, layer: Any = None) -> None:
        """Note that torch.compile traces the original of a layer of the class `name`: log it once, on rank 0."""
        if layer is not None:
            self._compiled.add(layer)
        self._log_once(
            f"{name} runs without overlap: {COMPILED_AWAY}", here=not dist.is_initialized() or dist.get_rank() == 0
        )

    def compiled_away(self, layer: Any, how: Compiled, *, original: bool | None = None) -> bool:
        """Tell whether the original of `layer` is compiled.

        original: whether a graph that may break has the original of this layer; None: as the settings say.
        """
        if layer in self._compiled or how is Compiled.IN_ONE_GRAPH:
            return True
        return how is Compiled.IN_GRAPHS and (self.compiles_original if original is None else original)

    def note(self, text: str) -> None:
        """Log a text once, on rank 0."""
        self._log_once(text, here=dist.get_rank() == 0)

    def note_here(self, text: str) -> None:
        """Log a text once, on this rank: others may have another."""
        self._log_once(text, here=True)

    def _log_once(self, text: str, *, here: bool) -> None:
        """Note a text for the checks and, if `here`, log it; once."""
        if text not in self._logged:
            self._logged.add(text)
            if self.verifier is not None:
                LEDGER.note(text)
            if here:
                log.warning("%s", text)
