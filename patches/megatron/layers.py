"""The replacements of Megatron-core's ColumnParallelLinear.forward and RowParallelLinear.forward.

If a replacement does not cover the layer or the call, the original runs, and rank 0 logs the reason once. Otherwise the
replacement describes the call as a `LinearCall`: the original's steps before and after the layer, where the weight
gradient goes, and what the check compares. `run_linear` runs it.
Written against megatron-core 0.10 to 0.19; the methods of `Megatron` hide the differences between versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.decision import Known
from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.layer_shape import COLUMN, ROW, LayerShape
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.overlap.projected import ProjectedTensor
from ascend_parallel.overlap.quantised import int8_weight
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.base import ConflictError, Function
from ascend_parallel.patches.compiled import at_tracing, between_graphs, skip_frame, within_graphs
from ascend_parallel.patches.framework import ONE_RANK, Framework
from ascend_parallel.patches.linear_call import LinearCall, run_linear
from ascend_parallel.patches.megatron.built_classes import flag_of
from ascend_parallel.patches.megatron.check import beside_original
from ascend_parallel.patches.megatron.conflicts import Originals, refuse_conflicts
from ascend_parallel.patches.megatron.every_degree import (
    KnownLayouts,
    parts_of,
    refuse_what_depends_on_the_degree,
    row_blocks,
)
from ascend_parallel.patches.megatron.original import AttributeOverlay, Output, lent_buffer
from ascend_parallel.patches.megatron.uncovered import captures_each_layer, uncovered_column, uncovered_layer
from ascend_parallel.patches.megatron.warm import WarmCalls, measured_key
from ascend_parallel.patches.megatron.wgrad import MegatronWeightGradient
from ascend_parallel.settings import Settings

OriginalForward = Callable[..., Output]


class Megatron(Framework):
    """The installed Megatron-core: its layers' module, its version, and the settings of its patched layers."""

    by = "megatron-core's own"
    breaks_graphs = True

    def __init__(self, layers: ModuleType, version: tuple[int, ...], settings: Settings) -> None:
        """Hold `layers`, the module megatron.core.tensor_parallel.layers of `version`."""
        super().__init__(settings)
        self.layers = layers
        self.version = version
        self._originals = Originals(layers)
        self._layouts = KnownLayouts(settings.arithmetic.fixed_tiles)
        self._compared: WeakKeyDictionary[dist.ProcessGroup, str | None] = WeakKeyDictionary()
        self._compared_as_replaced = False  # whether ranks of any group have what communicates replaced
        # Since 0.13 layers hold their group, mappings take a group, and forward reads main_grad.
        self.groups_handed_down = version >= (0, 13)
        own_groups = ("ep_group", "tp_group", "parallel_group")
        self._group_names = own_groups if self.groups_handed_down else ("parallel_group",)
        self.warm = WarmCalls(self, version, any_replaced=self._any_replaced, weight_gradient=self.weight_gradient)

    def group_of(self, layer: Any) -> dist.ProcessGroup:
        """Return the tensor-parallel group of `layer`, or the expert-parallel group of a mixture of experts.

        A layer of MindSpeed holds it under another name.
        """
        held, group = vars(layer), None
        for name in self._group_names:
            if (group := held.get(name)) is not None:
                break
        if group is None:
            groups = (getattr(layer, name, None) for name in self._group_names)
            group = next((group for group in groups if group is not None), None)
        if group is None and (dispatcher := held.get("token_dispatcher")) is not None:  # of experts, in 0.12
            group = dispatcher.ep_group
        own: dist.ProcessGroup = self.layers.get_tensor_model_parallel_group() if group is None else group
        return own

    def region(self, name: str, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Call the mapping `name` of Megatron; mappings take their group as an argument since 0.13."""
        mapping = getattr(self.layers, name)
        y: torch.Tensor = mapping(x, group=group) if self.groups_handed_down else mapping(x)
        return y

    def weight_gradient(
        self, layer: Any, weight: torch.Tensor, begin: Begin | None, *, deferrable: bool = False
    ) -> MegatronWeightGradient:
        """Return where the layer's configuration sends its weight gradient."""
        defers = deferrable and layer.config.defer_embedding_wgrad_compute
        return MegatronWeightGradient(
            weight,
            fused=layer.gradient_accumulation_fusion,
            layers=self.layers,
            main_grad_at_forward=self.groups_handed_down,
            postponed=(layer.grad_output_buffer, layer.config.wgrad_deferral_limit) if defers else None,
            begin=begin,
        )

    def leaves_rows_of(self, layer: Any) -> int:
        """Return the least rows of a chunk that stays unfinished; 0 where each transformer layer is a CUDA graph.

        Behind the graph nothing would wait for its collectives: a replay runs no Python.
        """
        if not self.region_choice.on:
            return 0
        if option := captures_each_layer(layer.config):
            self.note(f"regions are off: each layer is a CUDA graph of its own ({option}), which ends with its rows")
            return 0
        return self.settings.region_rows

    def uncovered(self, layer: Any) -> str | None:
        """Return the reason why `layer` is not overlapped on this rank, or None."""
        return self.left_alone(layer) or self.replaced(layer)

    def left_alone(self, layer: Any) -> str | None:
        """Return the reason why the original forward of `layer` must run, the same on all ranks, or None."""
        if torch.compiler.is_compiling():
            return "it is being compiled, and a process group cannot be"
        if type(layer).__module__ != self.layers.__name__ and (flag := flag_of(type(layer))):
            return f"the layer is MindSpeed's {type(layer).__name__} ({flag})"
        if vars(layer).get("explicit_expert_comm", False):
            return "expert layers communicate outside the layer"
        if not dist.is_initialized():
            return ONE_RANK
        if self.group_of(layer).size() == 1 and not self.settings.arithmetic.forms_every_product:
            return ONE_RANK
        return uncovered_layer(layer, self.version)

    def replaced(self, layer: Any) -> str | None:
        """Name a function behind `layer` that was replaced, on this rank at least; None: there is none."""
        text = self._originals.look().function or self._originals.replaced_impl(layer)
        return f"what it computes was replaced: {text}" if text else None

    def _any_replaced(self, layer: Any) -> bool:
        """Tell whether a function behind `layer` is not Megatron-core's own, or one that communicates was not."""
        replaced = self._originals.look()
        if replaced.function is not None or replaced.collective is not None or self._compared_as_replaced:
            return True
        return self._originals.replaced_impl(layer) is not None

    def compared(self) -> Mapping[str, Any]:
        """Return the functions that communicate: they must be the same on all ranks."""
        return {"what communicates behind megatron-core's layers": self._communicates() or "its own"}

    def _communicates(self) -> str | None:
        """Name a replaced function that communicates, or may: below 0.13 functions know their group by themselves."""
        replaced = self._originals.look()
        return replaced.collective if self.groups_handed_down else replaced.function

    def confirm(self, group: dist.ProcessGroup) -> Callable[[], None]:
        """Return a function that compares settings, and the functions that communicate; call it before they do."""
        compare = super().confirm(group)

        def confirm() -> None:
            compare()
            text = self._compared.setdefault(group, self._communicates())
            self._compared_as_replaced |= text is not None

        return confirm if group not in self._compared else compare

    def replacement(self, layer: Any) -> tuple[str | None, str | None]:
        """Name the function that communicates in place of Megatron-core's own, and the one that multiplies.

        Because of the first, on all ranks alike, the original runs; the second, on this rank maybe alone, runs inside
        the collectives of the overlapped layer. Raises `DisagreementError` if ranks differ, and `ConflictError` for
        what has changed since they were compared.
        """
        replaced, handed_down = self._originals.look(), self.groups_handed_down
        communicates = replaced.collective if handed_down else replaced.function
        if communicates is not None or self._compared_as_replaced:  # as in the groups whose ranks were compared
            self._refuse_changed(self.group_of(layer), communicates)
        multiplies = replaced.function or self._originals.replaced_impl(layer)
        if communicates is None and multiplies is None:
            return None, None
        text = f"what it computes was replaced: {communicates or multiplies}"
        return (text, None) if communicates is not None or not handed_down else (None, text)

    def _refuse_changed(self, group: dist.ProcessGroup, communicates: str | None) -> None:
        """Raise `ConflictError` if what communicates on a group has changed; ranks compare it at the first time."""
        if group in self._compared and self._compared[group] != communicates:
            own = "all functions are megatron-core's own"
            raise ConflictError(
                f"on rank {dist.get_rank()} {communicates or own} since the ranks were compared, "
                f"when {self._compared[group] or own}: replace what communicates before the first step, or call "
                "ascend_parallel.configure() on every rank afterwards"
            )
        if communicates is not None:
            self.confirm(group)()

    def refuse_conflicts(self, layer: Any) -> None:
        """Raise `ConflictError` for features of Megatron-core that exclude overlap."""
        refuse_conflicts(layer.config, self.settings)

    def refuse_without_tree(self, layer: Any, kind: str, weight: Any, group: dist.ProcessGroup) -> None:
        """Raise `DegreeError` for a call, a configuration or a layout of weights that has no sum in the tree."""
        refuse_what_depends_on_the_degree(layer, group.size(), self.version)
        self._layouts.refuse_others(layer)
        super().refuse_without_tree(layer, kind, weight, group)

    def shape_of(self, layer: Any, kind: str, x: torch.Tensor, weight: Any, **options: Any) -> LayerShape | None:
        """Return the shape of a call; an int8 weight is not tuned."""
        return super().shape_of(layer, kind, x, weight, **options) if isinstance(weight, torch.Tensor) else None

    def shape_ahead(self, layer: Any, group: dist.ProcessGroup, matmul: Matmul) -> LayerShape | None:
        """Return the shape that a call of `layer` will have beside `matmul`, or None.

        Read from its features: the weight of an output layer may be the embedding's, which the model gives it.
        """
        column = isinstance(layer, self.layers.ColumnParallelLinear)
        if not (column or isinstance(layer, self.layers.RowParallelLinear)) or self.left_alone(layer):
            return None
        if self.group_of(layer) is not group:
            return None
        if not column:
            features = layer.input_size_per_partition, layer.output_size
            return LayerShape.beside(matmul, ROW, *features, layer.sequence_parallel)
        features = layer.input_size, layer.output_size_per_partition
        return LayerShape.beside(
            matmul, COLUMN, *features, layer.sequence_parallel, reduce_input_grad=_sums_input_grad(layer)
        )

    def equals_original(self, layer: Any, kind: str, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Tell whether Megatron-core's own layer computes what ours does for this call, gradients included.

        It differs for a frozen column weight (Megatron-core gives the bias no gradient), a row weight that is no
        parameter (Megatron-core would read a parametrised weight a second time), and CPU autocast (Megatron-core's
        backward multiplies unlike dtypes). Without its CUDA extension it cannot add to main_grad.
        """
        if kind == "column" and not weight.requires_grad:
            return False
        if kind == "row" and weight is not layer._parameters.get("weight"):
            return False
        if x.device.type == "cpu" and operand_dtype(weight) != weight.dtype:
            return False
        return x.device.type == "cuda" or not layer.gradient_accumulation_fusion

    def beside_run(self) -> AbstractContextManager[None]:
        """Return a context in which an original layer uses another global buffer than the run."""
        return lent_buffer()

    def with_options(self, layer: Any, known: Known) -> Known:
        """Add deterministic_mode to `known`: it has the effect of COC_DETERMINISTIC=1 at least."""
        asked = layer.config.deterministic_mode and not self.settings.deterministic
        return known._replace(deterministic=True) if asked else known


def make_column_forward(original: OriginalForward, megatron: Megatron) -> Function:
    """Make the method that replaces ``ColumnParallelLinear.forward``."""

    def forward(
        self: Any,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Output:
        if megatron.decider.undecided:
            shared = self.sequence_parallel and not getattr(self, "explicit_expert_comm", False)
            megatron.enter(self, input_, communicates=shared)
        warm = megatron.warm.find(self, "column", input_, weight, runtime_gather_output)
        if warm is True:
            return original(self, input_, weight, runtime_gather_output)
        if warm:
            used = self._parameters["weight"] if weight is None else weight
            bias = self._parameters["bias"]
            y = run_column(input_, used, None if self.skip_bias_add else bias, warm)
            return y, bias if self.skip_bias_add else None
        gathers = bool(self.gather_output if runtime_gather_output is None else runtime_gather_output)
        used, reason, multiplies = weight, megatron.left_alone(self), None
        if reason is None:  # a parametrised weight is recomputed at each read: it is read once
            used, given, version = self.weight if weight is None else weight, weight is not None, megatron.version
            reason = uncovered_column(self, used, given=given, gathers_output=gathers, version=version)
        if reason is None:
            reason, multiplies = megatron.replacement(self)
        if reason is not None:
            megatron.log_uncovered(self, reason)
            return original(self, input_, weight, runtime_gather_output)
        assert used is not None
        if multiplies is not None:
            megatron.log_replaced(self, multiplies)
        own = (
            functools.partial(_left_whole, megatron, "column", weight, original)
            if megatron.notes_left_whole
            else original
        )
        call = LinearCall(
            layer=self,
            kind="column",
            x=input_,
            weight=used,
            bias=None if self.skip_bias_add else self.bias,
            parameter=used,
            original=functools.partial(own, self, weight=used, runtime_gather_output=runtime_gather_output),
            added=True,
            sequence_dim=0 if self.sequence_parallel else None,
            finish=functools.partial(_column_output, megatron, self, gathers),
            own_matmul=None if multiplies is None else functools.partial(_own_column, original, self, used),
            reduce_input_grad=_sums_input_grad(self),
            parts=parts_of(self, used),
            weight_gradient=functools.partial(
                _column_gradient, megatron, self, used, input_ if multiplies is None else None
            ),
        )
        if megatron.verifier is not None:
            by_original = functools.partial(original, runtime_gather_output=runtime_gather_output)
            call.beside = functools.partial(beside_original, original=by_original)
        output: Output = run_linear(megatron, call)
        megatron.warm.keep(call, weight, runtime_gather_output)
        return output

    return _installed(forward, original, megatron, lambda layer: layer.output_size_per_partition == layer.output_size)


def _sums_input_grad(layer: Any) -> bool:
    """Tell whether the input gradient of a column layer is summed over the ranks."""
    return bool(layer.allreduce_dgrad or not (layer.sequence_parallel or layer.disable_grad_reduce))


def make_row_forward(original: OriginalForward, megatron: Megatron) -> Function:
    """Make the method that replaces ``RowParallelLinear.forward``."""

    def forward(self: Any, input_: torch.Tensor) -> Output:
        if megatron.decider.undecided:
            megatron.enter(self, input_, communicates=not getattr(self, "explicit_expert_comm", False))
        warm = megatron.warm.find(self, "row", input_, None)
        if warm is True:
            return original(self, input_)
        if warm:
            return _row_output(megatron, self, run_row(input_, self._parameters["weight"], warm))
        reason, multiplies = megatron.left_alone(self), None
        if reason is None:
            reason, multiplies = megatron.replacement(self)
        if reason is not None:
            if type(input_) is ProjectedTensor:  # attention's, which has exchanged heads (output_projection.py)
                if (y := input_.product_of(self._parameters.get("weight"), None)) is not None:
                    return _row_output(megatron, self, y)
                input_ = input_.as_subclass(torch.Tensor)
            megatron.log_uncovered(self, reason)
            return original(self, input_)
        int8 = int8_weight(self) if "parametrizations" in self._modules else None
        if multiplies is not None:
            megatron.log_replaced(self, multiplies)
        weight: Any = self.weight if int8 is None or megatron.verifier is not None else None
        own = original
        if megatron.notes_left_whole:
            own = functools.partial(_left_whole, megatron, "row", None, original)
        call = LinearCall(
            layer=self,
            kind="row",
            x=input_,
            weight=weight if int8 is None else int8,
            bias=None,
            parameter=weight,
            original=functools.partial(own, self),
            sequence_dim=0 if self.sequence_parallel else None,
            enter=None if self.input_is_parallel else functools.partial(_scattered, megatron, self),
            finish=functools.partial(_row_output, megatron, self),
            own_matmul=None if multiplies is None or int8 is not None else functools.partial(_own_row, original, self),
            weight_gradient=functools.partial(megatron.weight_gradient, self, weight) if int8 is None else None,
        )
        if megatron.verifier is not None:
            by_original: OriginalForward = lambda layer, x, _: original(layer, x)  # noqa: E731
            call.beside = functools.partial(beside_original, original=by_original)
        output: Output = run_linear(megatron, call)
        megatron.warm.keep(call, None)
        return output

    return _installed(forward, original, megatron, lambda layer: layer.input_size_per_partition == layer.input_size)


def _installed(
    run: Function, original: OriginalForward, megatron: Megatron, on_one_rank: Callable[[Any], bool]
) -> Function:
    """Return `run` as the method that replaces `original`.

    Megatron-core's own layer breaks the graph of torch.compile at its collectives, so that the overlapped one may too.
    A layer that communicates nothing stays part of a graph.
    """
    in_tree = megatron.settings.arithmetic.forms_every_product

    def communicates_nothing(layer: Any) -> bool:
        return not in_tree and (on_one_rank(layer) or getattr(layer, "explicit_expert_comm", False))

    def refused(layer: Any, *args: Any, **kwargs: Any) -> Output:
        output: Output = (original if communicates_nothing(layer) else run)(layer, *args, **kwargs)  # `run` raises
        return output

    @at_tracing
    def note() -> None:
        megatron.note_compiled(original.__qualname__.partition(".")[0])

    def noted(layer: Any, *args: Any, **kwargs: Any) -> Output:
        if not communicates_nothing(layer):
            note()
        return original(layer, *args, **kwargs)

    traced = refused if megatron.settings.insists else noted
    for each in (on_one_rank, communicates_nothing, note, noted):
        skip_frame(each)
    if megatron.compiles_original:
        own = within_graphs(run, traced)
    else:
        own = between_graphs(run, traced, communicates_nothing)
    forward: Function = functools.wraps(original)(own)
    vars(forward)["ascend_parallel"] = megatron
    return forward


def _left_whole(
    megatron: Megatron,
    kind: str,
    given: torch.Tensor | None,
    original: OriginalForward,
    layer: Any,
    x: torch.Tensor,
    **options: Any,
) -> Output:
    """Run Megatron-core's own forward, and note that such calls are left to it; given: a column layer's weight."""
    if (key := measured_key(layer, kind, x, given)) is not None:
        megatron.decider.note_left_whole(megatron.group_of(layer), key)
    return original(layer, x, **options)


def _column_output(megatron: Megatron, layer: Any, gathers: bool, y: torch.Tensor) -> Output:
    """Return the output of a column layer, its features gathered if asked to, and the bias that others add."""
    if gathers:
        y = megatron.region("gather_from_tensor_model_parallel_region", y, megatron.group_of(layer))
    return y, layer.bias if layer.skip_bias_add else None


def _row_output(megatron: Megatron, layer: Any, y: torch.Tensor) -> Output:
    """Return the output of a row layer: the sum with the bias, or beside it."""
    bias = layer.bias
    if bias is not None and megatron.settings.arithmetic.sums_shared_rows:
        bias = row_blocks(layer, megatron.group_of(layer)).expand(bias, y)
    if layer.skip_bias_add:
        return y, bias
    return (y if bias is None else y + bias), None


def _scattered(megatron: Megatron, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's features of a row layer's input."""
    assert not layer.sequence_parallel, "Megatron-core's constructor refuses this"
    return megatron.region("scatter_to_tensor_model_parallel_region", x, megatron.group_of(layer))


def _column_gradient(
    megatron: Megatron, layer: Any, weight: torch.Tensor, x: torch.Tensor | None, begin: Begin | None
) -> MegatronWeightGradient:
    """Return where the weight gradient goes; if it is deferred, keep x for it, as Megatron-core does. None: it does."""
    config = layer.config
    if config.defer_embedding_wgrad_compute and x is not None:
        limit = config.wgrad_deferral_limit
        if limit == 0 or len(layer.embedding_activation_buffer) < limit:
            layer.embedding_activation_buffer.append(x)
    return megatron.weight_gradient(layer, weight, begin, deferrable=True)


def _own_column(original: OriginalForward, layer: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product of a column layer's whole input by Megatron-core's own forward, or what replaced its parts."""
    return original(_alone(layer), x, weight, runtime_gather_output=False)[0]


def _own_row(original: OriginalForward, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the product of a row layer's own features; as `_own_column`."""
    return original(_alone(layer, bias=None, input_is_parallel=True), x)[0]


class _OneRank:
    """Stands for a group of one rank, with which Megatron-core's functions communicate nothing."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


def _alone(layer: Any, **changed: Any) -> AttributeOverlay:
    """Return an overlay of a layer whose original forward communicates nothing."""
    parts = {"tp_group": _OneRank(), "sequence_parallel": False, "allreduce_dgrad": False, "disable_grad_reduce": True}
    config = AttributeOverlay(layer.config, defer_embedding_wgrad_compute=False)
    return AttributeOverlay(layer, config=config, **parts, **changed)
