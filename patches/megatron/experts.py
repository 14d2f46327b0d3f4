"""The replacement of Megatron-core's MoELayer.forward: dispatch, experts and combine, overlapped in groups of experts.

The original forward runs on an overlay of the layer, whose parts between the all-to-alls are those of `OverlappedCall`.
Router, permutation, losses, recomputation and the shared expert stay Megatron's; the order in which gradients are
summed too, so that every bit stays.

    router, permute       Megatron's
    dispatch              waits for the counts on the host, as Megatron's does, and sends nothing
    experts               `run_experts`: rows to the experts' ranks and back; the shared expert under them
    combine               unpermutes and adds the shared expert's result, as Megatron's does

Megatron's forward calls these parts, so only the exchange in `experts` is a `CoveredCall`; whether the original runs
has to be decided before its router does.

Written against megatron-core 0.12 to 0.19, transformer/moe/moe_layer.py, token_dispatcher.py, shared_experts.py and
experts.py. Older versions run the original. In 0.12 the dispatcher has permutation, all-to-all and sort in one method,
and their inverse in another; it is told there that the group of the all-to-all has one rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.ops.call import experts_exchange
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts
from ascend_parallel.ops.operators import decided_exchange
from ascend_parallel.overlap.experts import LocalExperts, SharedExpert, run_experts
from ascend_parallel.overlap.inner_graph import ReadersApart
from ascend_parallel.overlap.split_experts import SplitExperts
from ascend_parallel.patches.base import Function, Patch, PatchSet, WatchedNames, defined_in, names_of_method
from ascend_parallel.patches.check import CheckedCall, Tensors
from ascend_parallel.patches.coverage import EXPERTS as COVERAGE
from ascend_parallel.patches.covered_call import CoveredCall, Run, run_covered
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.megatron.conflicts import arguments
from ascend_parallel.patches.megatron.expert_modules import (
    BUFFERS,
    EXPERTS,
    LAST_GROUPED,
    MODULES,
    PARAMETERS,
    RECOMPUTES_ACTIVATION,
    TAKES_BUFFERS,
    GroupTokens,
    common_tensor,
    make_experts_forward,
    uncovered_module,
    weights_of,
    with_all_experts,
)
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import AttributeOverlay
from ascend_parallel.tuning.measured.part_groups import pass_on_copies

MODULE = "megatron.core.transformer.moe.moe_layer"
DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
SHARED = "megatron.core.transformer.moe.shared_experts"
FIRST = (0, 12)

# Methods whose work a replacement repeats or skips, by class; a version need not have all of them.
REPEATED = {
    "MoELayer": ("dispatch", "experts_compute", "routed_experts_compute", "shared_experts_compute", "combine"),
    "MoEAlltoAllTokenDispatcher": (
        "token_dispatch",
        "dispatch_postprocess",
        "combine_preprocess",
        "token_combine",
        "combine_postprocess",
        "_maybe_dtoh_and_synchronize",
        "token_permutation",  # these two are of 0.12
        "token_unpermutation",
    ),
}

# Field of the configuration -> why the original runs if it is set.
FEATURES = {
    "use_transformer_engine_op_fuser": "its experts are one fused operation (use_transformer_engine_op_fuser)",
    "moe_single_grouped_weight": "its experts have one weight (moe_single_grouped_weight)",
    "fp8": "its experts multiply in fp8",
    "fp4": "its experts multiply in fp4",
    "moe_latent_size": "its experts work in a latent space (moe_latent_size)",
    "moe_router_padding_for_quantization": "its routing is padded (moe_router_padding_for_quantization)",
    "moe_router_padding_for_fp8": "its routing is padded (moe_router_padding_for_fp8)",
    "enable_cuda_graph": "it may be captured in a CUDA graph (enable_cuda_graph)",
    "external_cuda_graph": "it may be captured in a CUDA graph (external_cuda_graph)",
    "cpu_offloading": "its activations are offloaded (cpu_offloading)",
    "fine_grained_activation_offloading": "its activations are offloaded (fine_grained_activation_offloading)",
    "overlap_moe_expert_parallel_comm": "megatron-core overlaps it with another micro-batch "
    "(overlap_moe_expert_parallel_comm)",
    "delay_wgrad_compute": "its weight gradients are computed later (delay_wgrad_compute)",
    "overlap_dispatch_backward_with_experts_wgrad": "megatron-core overlaps its backward "
    "(overlap_dispatch_backward_with_experts_wgrad)",
}

# Argument of MindSpeed -> its flag: each puts an exchange of its own in place of Megatron-core's.
MINDSPEED = {
    "moe_alltoall_overlap_comm": "--moe-alltoall-overlap-comm",
    "moe_allgather_overlap_comm": "--moe-allgather-overlap-comm",
    "moe_fb_overlap": "--moe-fb-overlap",
    "moe_tp_extend_ep": "--moe-tp-extend-ep",
    "moe_alltoall_mc2": "--moe-alltoall-mc2",
}


class OneRank:
    """Stands for the group of an all-to-all with one rank, which sends nothing."""

    def size(self) -> int:
        """Return 1."""
        return 1


def forward_parameters(version: tuple[int, ...]) -> tuple[str, ...]:
    """Return the parameters of MoELayer.forward of a version."""
    return ("self", "hidden_states", *(("intermediate_tensors", "padding_mask") if version >= (0, 16) else ()))


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patch of the layer."""
    layer = Patch(
        target=f"{MODULE}.MoELayer.forward",
        replacement=lambda original: moe_forward(original, megatron),
        parameters=forward_parameters(megatron.version),
        reason="exchanges rows with the experts' ranks under groups of experts and the shared expert",
    )
    return PatchSet("megatron-core", None, [layer])


def experts_patch_set(megatron: Megatron) -> PatchSet:
    """Return the patches of the modules of experts."""
    names = [] if megatron.version < FIRST else modules_of(megatron)
    return PatchSet("megatron-core", None, [experts_patch(name, megatron) for name in names])


def modules_of(megatron: Megatron) -> list[str]:
    """Return the names of the classes of experts that a version has, of those that run in groups."""
    names = [name for module, name in MODULES if module == EXPERTS]
    return [name for name in names if name != "GroupedMLP" or megatron.version[:2] <= LAST_GROUPED]


def experts_patch(name: str, megatron: Megatron) -> Patch:
    """Return the patch of a module of experts."""
    takes_buffers = name == "TEGroupedMLP" and megatron.version >= TAKES_BUFFERS
    return Patch(
        target=f"{EXPERTS}.{name}.forward",
        replacement=lambda original: make_experts_forward(original, MODULES[EXPERTS, name].view),
        parameters=(*PARAMETERS, *BUFFERS) if takes_buffers else PARAMETERS,
        reason="computes a group of its experts",
    )


# The module of the experts is patched when the program imports it: `megatron.core` imports that of the layer alone.
ON_TOP = OnTop(MODULE, patch_set), OnTop(EXPERTS, experts_patch_set)


def moe_forward(original: Function, megatron: Megatron) -> Function:
    """Make the method that replaces ``MoELayer.forward``."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reason = _uncovered_on_all_ranks(self, megatron)
        if reason is None:
            reason = megatron.reason_of_any(_all_ranks(self), _reason_of_rank(self), hidden_states.device)
        if reason is None and (args[0] if args else kwargs.get("intermediate_tensors")) is not None:
            reason = "it is called for a part of its work (intermediate_tensors)"
        if reason is not None:
            megatron.log_uncovered(self, reason)
            return original(self, hidden_states, *args, **kwargs)
        group = megatron.group_of(self)
        megatron.agree(group, hidden_states.device, _all_ranks(self))  # a plan decides whether the original runs
        known = megatron.prepare(self, "experts", hidden_states, None, group)
        if known.original or _measured_as_fast(self, megatron, hidden_states):
            return original(self, hidden_states, *args, **kwargs)
        return original(OverlappedCall(self, megatron, group, known).overlay, hidden_states, *args, **kwargs)

    setattr(forward, COVERAGE, SimpleNamespace(uncovered=functools.partial(uncovered, megatron=megatron)))
    return forward


def uncovered(layer: Any, megatron: Megatron) -> str | None:
    """Return the reason why the original forward of `layer` must run, or None, as far as this rank knows."""
    return _uncovered_on_all_ranks(layer, megatron) or _reason_of_rank(layer)


def _uncovered_on_all_ranks(layer: Any, megatron: Megatron) -> str | None:
    """Return the reason, or None, from what is the same on all ranks."""
    if megatron.version < FIRST:
        return "megatron-core below 0.12 has an exchange that was not tried"
    if torch.compiler.is_compiling():
        return "it is being compiled, and a process group cannot be"
    kind = type(layer)
    if (kind.__module__, kind.__name__) != (MODULE, "MoELayer"):
        return "it is a class of its own"
    if not dist.is_initialized() or _expert_group(layer).size() == 1:
        return "its expert-parallel group has one rank, so nothing is communicated"
    if flag := next((flag for name, flag in MINDSPEED.items() if getattr(arguments(), name, None)), None):
        return f"MindSpeed runs its all-to-alls: drop {flag} to overlap them here"
    config = layer.config
    reasons = (text for name, text in FEATURES.items() if getattr(config, name, None))
    if reason := next(reasons, None):
        return reason
    if getattr(config, "cuda_graph_impl", "none") != "none" or getattr(layer, "_inference_token_dispatcher", None):
        return "it may be captured in a CUDA graph (cuda_graph_impl, transformer_impl)"
    if megatron.version < RECOMPUTES_ACTIVATION and "moe_act" in (getattr(config, "recompute_modules", None) or ()):
        return "its activation is recomputed (recompute_modules moe_act), which groups can since megatron-core 0.16"
    return _other_dispatcher(layer) or _other_experts(layer)


def _measured_as_fast(layer: Any, megatron: Megatron, x: torch.Tensor) -> bool:
    """Tell whether groups gained nothing when they were measured, and no shared expert can be hidden."""
    if layer.shared_expert_overlap or _hides_shared_expert(layer):
        return False
    exchange = experts_exchange(x, layer.num_local_experts, _expert_group(layer))
    return megatron.decider.keeps_original(exchange, _expert_group(layer))


def _all_ranks(layer: Any) -> dist.ProcessGroup:
    """Return the group of the ranks that a layer's rows pass: they decide together, and run the same collectives.

    Those of the all-to-alls, with expert tensor parallelism also those that split the same experts.
    """
    dispatcher = layer.token_dispatcher
    group: dist.ProcessGroup = dispatcher.tp_ep_group if dispatcher.tp_size > 1 else _expert_group(layer)
    return group


def _expert_group(layer: Any) -> dist.ProcessGroup:
    """Return the group of a layer's all-to-alls."""
    group: dist.ProcessGroup = layer.token_dispatcher.ep_group
    return group


def _has_parts(layer: Any) -> bool:
    """Tell whether dispatch, experts and combine are methods of a layer, as since 0.13."""
    return hasattr(type(layer), "dispatch")


def _other_dispatcher(layer: Any) -> str | None:
    dispatcher = layer.token_dispatcher
    if (type(dispatcher).__module__, type(dispatcher).__name__) != (DISPATCHERS, "MoEAlltoAllTokenDispatcher"):
        return f"its dispatcher is {type(dispatcher).__name__}, not MoEAlltoAllTokenDispatcher"
    return None


def _other_experts(layer: Any) -> str | None:
    experts, shared = layer.experts, layer.shared_experts
    if (reason := uncovered_module(experts)) is not None:
        return reason
    if getattr(experts, "add_bias", False):
        return "its experts have a bias, which megatron-core refuses"
    if any(hasattr(parameter, "__fsdp_param__") for parameter in layer.parameters()):
        return "Megatron-FSDP gathers its parameters"
    if layer.shared_expert_overlap and not _own_shared_expert(layer):
        return f"its shared expert is {type(shared).__name__}, not SharedExpertMLP"
    if layer.num_local_experts == 1 and not (layer.shared_expert_overlap or _hides_shared_expert(layer)):
        return "a rank has one expert, so there is nothing to overlap"
    return None


def _own_shared_expert(layer: Any) -> bool:
    kind = type(layer.shared_experts)
    return (kind.__module__, kind.__name__) == (SHARED, "SharedExpertMLP")


def _hides_shared_expert(layer: Any) -> bool:
    """Tell whether the shared expert can run under an all-to-all where Megatron itself does not overlap it.

    A gate reads the layer's input, too: its gradients would be summed in another order.
    """
    if not layer.use_shared_expert or layer.shared_expert_overlap or not _own_shared_expert(layer):
        return False
    return not getattr(layer.shared_experts, "use_shared_expert_gate", False)


def _reason_of_rank(layer: Any) -> str | None:
    """Return the reason why the original must run that this rank alone may have, or None."""
    return _replaced_methods(layer) or common_tensor(layer) or _unused_parameters(layer)


_SEARCHED: WeakSet[Any] = WeakSet()
"""Layers that torch's DDP has called while it looks for unused parameters: a checkpoint runs them again without it."""


def _unused_parameters(layer: Any) -> str | None:
    """Return that torch's DDP looks for unused parameters in the graph, which has none of the experts', or None."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and getattr(ddp, "find_unused_parameters", False):
        _SEARCHED.add(layer)
    return "torch's DDP looks for unused parameters (find_unused_parameters)" if layer in _SEARCHED else None


def _replaced_methods(layer: Any) -> str | None:
    """Return which method of Megatron-core another package has replaced, or None."""
    for part, home in ((layer, MODULE), (layer.token_dispatcher, DISPATCHERS)):
        kind: Any = type(part)
        own = (name for name in REPEATED[kind.__name__] if name in vars(part))
        if (name := _watched_methods(kind, home).look() or next(own, None)) is not None:
            return f"what it computes was replaced: {kind.__name__}.{name} is another package's"
    return None


@functools.cache
def _watched_methods(kind: type, home: str) -> WatchedNames[str | None]:
    """Watch the repeated methods of a class: the name of the first that another package replaced, or None."""

    def foreign() -> str | None:
        for name in REPEATED[kind.__name__]:
            function = getattr(kind, name, None)
            if function is not None and not defined_in(function, sys.modules[home], _is_of_megatron):
                return name
        return None

    methods = (names_of_method(kind, name) for name in REPEATED[kind.__name__])
    return WatchedNames([place for places in methods for place in places], foreign)


def _is_of_megatron(function: Function) -> bool:
    return str(function.__globals__.get("__name__")).startswith("megatron.core")


class OverlappedCall:
    """A call of an MoELayer: the parts that Megatron-core's own forward calls in place of the layer's."""

    def __init__(self, layer: Any, megatron: Megatron, group: dist.ProcessGroup, known: Known) -> None:
        """Prepare a call of `layer`, whose experts are on the ranks of `group`."""
        self._layer, self._megatron, self._group, self._known = layer, megatron, group, known
        self._shared_x: ReadersApart | None = None
        self._shared_output: torch.Tensor | None = None
        self._split: SplitExperts | None = None
        self._dispatcher: Any = layer.token_dispatcher  # as it is after the permutation
        self.overlay = AttributeOverlay(layer, **self._parts())

    def _parts(self) -> dict[str, Any]:
        """Return the attributes that Megatron-core's forward finds in place of the layer's, by version."""
        layer = self._layer
        if not _has_parts(layer):
            methods = {"token_permutation": self._permute, "token_unpermutation": self._unpermute}
            return {
                "token_dispatcher": AttributeOverlay(layer.token_dispatcher, **methods),
                "experts": self._permuted_experts,
                "shared_experts": self._shared_expert_after,
            }
        parts: dict[str, Any] = {"dispatch": self._dispatch, "combine": self._combine, "postprocess": self._postprocess}
        if hasattr(layer, "experts_compute"):  # to 0.14 it runs the shared expert, too
            return {**parts, "experts_compute": self._all_experts}
        return {
            **parts,
            "shared_experts_compute": self._shared_expert,
            "routed_experts_compute": self._routed_experts,
        }

    def _permute(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> tuple[Any, ...]:
        """Permute rows with 0.12's own method, which exchanges and sorts nothing among the ranks of `OneRank`."""
        layer, dispatcher = self._layer, self._layer.token_dispatcher
        shared = None if dispatcher.shared_experts is None else _run_already(dispatcher.shared_experts)
        alone = {"ep_group": OneRank(), "tp_size": 1, "num_local_experts": 1, "shared_experts": shared}
        self._dispatcher = AttributeOverlay(dispatcher, routing_map=routing_map, probs=probs)
        self._alone = AttributeOverlay(dispatcher, **alone)
        permuted: tuple[Any, ...] = type(dispatcher).token_permutation(self._alone, hidden_states, probs, routing_map)
        if _hides_shared_expert(layer):
            # Made last, so that its gradient reaches hidden_states first, as that of the shared expert in 0.12 does.
            self._shared_x = ReadersApart(hidden_states)
        return permuted

    def _permuted_experts(self, rows: torch.Tensor, _: Any, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._run(rows, probs), None

    def _unpermute(self, output: torch.Tensor, bias: None) -> tuple[Any, ...]:
        unpermuted: tuple[Any, ...] = type(self._layer.token_dispatcher).token_unpermutation(self._alone, output, bias)
        return unpermuted

    def _shared_expert_after(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the shared expert's result, which 0.12 asks for at the end."""
        if self._shared_x is not None:
            return self._shared_output
        result: torch.Tensor = self._layer.shared_experts(hidden_states)
        return result

    def _dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, probs

    def _shared_expert(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the shared expert's result, or its input if it runs under the experts' exchange."""
        layer = self._layer
        if not _hides_shared_expert(layer):
            result: torch.Tensor | None = _shared_experts_compute(layer)(hidden_states)
            return result
        # Gradients of its readers reach hidden_states when those of Megatron's shared expert do.
        self._shared_x = ReadersApart(hidden_states)
        return self._shared_x.x

    def _all_experts(self, rows: torch.Tensor, probs: torch.Tensor, residual: torch.Tensor) -> tuple[Any, ...]:
        layer = self._layer
        shared = self._shared_expert(residual) if layer.use_shared_expert and not layer.shared_expert_overlap else None
        return self._run(rows, probs), shared, None

    def _routed_experts(self, rows: torch.Tensor, probs: torch.Tensor, residual: Any = None) -> tuple[Any, ...]:
        return self._run(rows, probs), None

    def _run(self, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Exchange the permuted rows, and run the experts; the shared expert runs under the all-to-alls."""
        layer, megatron = self._layer, self._megatron
        state = dict(vars(layer.token_dispatcher))
        counts, self._split = row_counts(self._dispatcher)
        call = CoveredCall(
            layer=layer,
            group=self._group,
            device=rows.device,
            agreeing=_all_ranks(layer),
            decide=functools.partial(self._measured, rows, probs, counts),
            ours=lambda known, _: self._exchange(rows, probs, counts, known),
            theirs=None,  # that was decided before Megatron-core's forward began
            checked=functools.partial(self._checked, rows, probs, counts, state),
        )
        output: torch.Tensor = run_covered(megatron, call)
        return output

    def _exchange(self, rows: torch.Tensor, probs: torch.Tensor, counts: RowCounts, known: Known) -> torch.Tensor:
        layer = self._layer
        shared = None
        if self._shared_x is not None:
            compute = _shared_experts_compute(layer)
            shared = SharedExpert(x=self._shared_x, parts=[compute], parameters=[*layer.shared_experts.parameters()])
        elif layer.shared_expert_overlap:
            shared = _shared_expert_in_parts(layer.shared_experts)
        out, self._shared_output = run_experts(
            rows,
            counts,
            self._local(),
            group=self._group,
            settings=self._megatron.settings,
            known=known,
            probs=probs,
            shared=shared,
        )
        if layer.shared_expert_overlap:
            layer.shared_experts.cached_fc2_output = self._shared_output
            layer.shared_experts.post_forward_comm()
        return out

    def _measured(self, rows: torch.Tensor, probs: torch.Tensor, counts: RowCounts) -> Known:
        """Decide the groups of the exchange: with COC_PARALLEL_NUM=auto by measuring it."""
        if _writes_main_grad(self._layer):  # copies have none
            return self._known
        exchange = experts_exchange(rows, counts.experts, self._group)
        copies = functools.partial(self._local, copied=True)
        trial = functools.partial(
            pass_on_copies, rows, counts, copies, self._group, self._megatron.settings, probs=probs
        )
        in_turn = functools.partial(trial, None)
        together = None if self._split is None else _all_ranks(self._layer)
        decider = self._megatron.decider
        return decider.known_of_exchange(exchange, self._group, trial, in_turn, rows.device, self._known, together)

    def _local(self, *, copied: bool = False) -> LocalExperts:
        """Return the layer's experts; copied: with weights of the same values that get gradients of their own."""
        experts, fused = self._layer.experts, bool(self._layer.config.gradient_accumulation_fusion)
        if weights := weights_of(experts):
            weights = [_copy(weight) for weight in weights] if copied else weights
            return LocalExperts(run=self._run_group, weights=weights, whole_backward=True, runs_once=fused)
        if not copied:
            return LocalExperts(run=self._run_group, parameters=[*experts.parameters()], runs_once=fused)
        copies = {name: _copy(parameter) for name, parameter in experts.named_parameters()}
        run = functools.partial(self._run_group, parameters=copies)
        return LocalExperts(run=run, parameters=[*copies.values()])

    def _run_group(
        self,
        group: ExpertGroup,
        rows: torch.Tensor,
        probs: torch.Tensor | None,
        weights: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the experts of a group as Megatron-core's module of experts does, on rows [source][expert]."""
        experts, split = self._layer.experts, self._split
        assert probs is not None, "the exchange sends probabilities with the rows"
        last = parameters is None and group.experts.stop == self._layer.num_local_experts
        own = group
        if split is not None:
            group, (rows, probs) = split.gathered(own), split.gather(own, rows, probs)
        tokens = GroupTokens(group.expert_sizes, group.experts, weights, last)
        arguments = group.by_expert(rows), tokens, group.by_expert(probs)
        y, bias = experts(*arguments) if parameters is None else functional_call(experts, dict(parameters), arguments)
        assert bias is None, "uncovered() leaves experts with a bias to the original"
        y = group.by_source(y)
        return y if split is None else split.sum(own, y)

    def _checked(
        self,
        rows: torch.Tensor,
        probs: torch.Tensor,
        counts: RowCounts,
        state: Mapping[str, Any],
        known: Known,
        run: Run,
    ) -> CheckedCall | None:
        """Return the exchange beside Megatron-core's own, on the dispatcher's `state` of this call."""
        layer, dispatcher = self._layer, self._layer.token_dispatcher
        if not _has_parts(layer):
            LEDGER.note("experts of megatron-core below 0.13 are not checked: their exchange cannot run by itself")
            return None
        exchange = experts_exchange(rows, counts.experts, self._group)
        decision = decided_exchange(exchange, self._group, self._megatron.settings, known)

        parameters = dict(layer.experts.named_parameters())
        compared = {name: parameter for name, parameter in parameters.items() if not parameter._backward_hooks}
        if _writes_main_grad(layer):
            LEDGER.note("gradients of experts' weights that are added to main_grad are not checked")
            compared = {}

        def original(operands: Tensors) -> Tensors:
            own, kind = AttributeOverlay(dispatcher, **{**state, "shared_experts": None}), type(dispatcher)
            sent = kind.token_dispatch(own, operands["input"], operands["probabilities"])
            arguments = kind.dispatch_postprocess(own, *sent)
            weights = {name: operands.get(name, parameter.detach()) for name, parameter in parameters.items()}
            made, _ = functional_call(layer.experts, weights, with_all_experts(layer.experts, *arguments))
            return {"output": kind.token_combine(own, kind.combine_preprocess(own, made))}

        return CheckedCall(
            layer=layer,
            path="experts",
            group=self._group,
            operands={"input": rows, "probabilities": probs, **compared},
            inside=frozenset() if weights_of(layer.experts) else frozenset(compared),
            run=run,
            results=lambda output: {"output": output},
            original=original,
            operators=lambda: lambda direction: f"Its {direction} ran {decision.call.in_words} in {decision.sizes}",
        )

    def _combine(self, output: torch.Tensor, *shared: torch.Tensor | None) -> torch.Tensor:
        """Run Megatron-core's own combine on rows that are back."""
        result: torch.Tensor = type(self._layer).combine(self._combining(), output, *map(self._result_of, shared))
        return result

    def _postprocess(self, output: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = type(self._layer).postprocess(self._combining(), output, self._result_of(shared))
        return result

    def _result_of(self, shared: torch.Tensor | None) -> torch.Tensor | None:
        """Return the shared expert's result in place of what stood for it."""
        stands_for_it = self._shared_x is not None and shared is self._shared_x.x
        return self._shared_output if stands_for_it else shared

    def _combining(self) -> Any:
        """Return an overlay of the layer whose dispatcher sends nothing back."""
        dispatcher = self._layer.token_dispatcher
        overlay = AttributeOverlay(
            dispatcher,
            token_combine=lambda output: output,
            combine_postprocess=functools.partial(_combine_postprocess, dispatcher),
        )
        return AttributeOverlay(self._layer, token_dispatcher=overlay)


def _copy(weight: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the values of a weight, which gets a gradient of its own."""
    return weight.detach().requires_grad_(weight.requires_grad)


def _writes_main_grad(layer: Any) -> bool:
    """Tell whether the experts' backward writes gradients of weights to main_grad by itself: GroupedMLP's does not."""
    return bool(layer.config.gradient_accumulation_fusion) and not weights_of(layer.experts)


def _shared_experts_compute(layer: Any) -> Any:
    """Return the method that runs the shared expert; to 0.14 it is the module."""
    return getattr(layer, "shared_experts_compute", layer.shared_experts)


def _combine_postprocess(dispatcher: Any, output: torch.Tensor) -> torch.Tensor:
    """Unpermute rows as Megatron-core does; to 0.17 this runs the end of the shared expert, which has run."""
    own, shared = type(dispatcher).combine_postprocess, dispatcher.shared_experts
    if shared is not None:
        dispatcher = AttributeOverlay(dispatcher, shared_experts=_run_already(shared))
    result: torch.Tensor = own(dispatcher, output)
    return result


def _run_already(shared: Any) -> AttributeOverlay:
    """Return a shared expert whose parts the exchange runs: for a dispatcher that would run them too."""
    parts = ("linear_fc1_forward_and_act", "linear_fc2_forward", "post_forward_comm")
    return AttributeOverlay(shared, **dict.fromkeys(parts, lambda *_: None))


def _shared_expert_in_parts(shared: Any) -> SharedExpert:
    """Return the shared expert as Megatron-core's own overlap (moe_shared_expert_overlap) cuts it."""

    def fc1(x: torch.Tensor) -> torch.Tensor:
        shared.cached_fc1_input = x
        shared.linear_fc1_forward_and_act()
        y: torch.Tensor = shared.cached_fc2_input
        return y

    def fc2(x: torch.Tensor) -> torch.Tensor:
        shared.cached_fc2_input = x
        shared.linear_fc2_forward()
        y: torch.Tensor = shared.cached_fc2_output
        return y

    parameters = [*shared.linear_fc1.parameters(), *shared.linear_fc2.parameters()]
    return SharedExpert(x=shared.cached_fc1_input, parts=[fc1, fc2], parameters=parameters)


def row_counts(dispatcher: Any) -> tuple[RowCounts, SplitExperts | None]:
    """Return the counts of a dispatcher that has permuted its rows; the host waits where Megatron-core's dispatch does.

    With expert tensor parallelism also those of the ranks that split the same experts. Megatron-core's stream for
    counts has waited for the routing, not for the permutation.
    """
    ranks, experts, tensor_parallel = dispatcher.ep_size, dispatcher.num_local_experts, dispatcher.tp_size
    if dispatcher.drop_and_pad:
        padded = [[int(dispatcher.capacity)] * experts for _ in range(ranks)]
        return RowCounts(sent=padded, received=padded), _split_experts(dispatcher, [padded] * tensor_parallel)
    received = dispatcher.num_global_tokens_per_local_expert if experts > 1 else None
    with torch.cuda.stream(dispatcher.cuda_dtoh_stream):
        sent = dispatcher.routing_map.sum(dim=0).to("cpu", non_blocking=True)
        if received is not None:
            received = received.to("cpu", non_blocking=True)
    dispatcher.cuda_dtoh_stream.record_event().synchronize()
    dispatcher._maybe_dtoh_and_synchronize("before_ep_alltoall", getattr(dispatcher, "tokens_per_expert", None))
    dispatcher.tokens_per_expert = None
    sent = sent.reshape(ranks, experts).tolist()
    if received is not None:
        of_ranks = received.reshape(tensor_parallel, ranks, experts).tolist()
        return RowCounts(sent=sent, received=of_ranks[dispatcher.tp_rank]), _split_experts(dispatcher, of_ranks)
    own = [[int(count)] for count in dispatcher.output_splits]
    sums = [[[int(count)]] for count in dispatcher.output_splits_tp]  # of one expert the sources need not be known
    return RowCounts(sent=sent, received=own), _split_experts(dispatcher, sums)


def _split_experts(dispatcher: Any, received: Sequence[Sequence[Sequence[int]]]) -> SplitExperts | None:
    """Return the ranks that split the experts of a dispatcher's rank, from the rows of each; None: nobody else does."""
    if dispatcher.tp_size == 1:
        return None
    return SplitExperts(dispatcher.tp_group, received, dispatcher.probs.dtype)
