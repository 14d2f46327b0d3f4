"""The replacement of Megatron-core's MoELayer.forward: dispatch, experts and combine, overlapped in groups of experts.

The original forward runs on an overlay of the layer, whose parts between the all-to-alls are those of `OverlappedCall`.
Router, permutation, losses, recomputation and the shared expert stay Megatron's; the order in which gradients are
summed too, so that every bit stays.

    router, permute       Megatron's
    dispatch              waits for the counts on the host, as Megatron's does, and sends nothing
    experts               `run_experts`: rows to the experts' ranks and back; the shared expert under them
    combine               unpermutes and adds the shared expert's result, as Megatron's does

Written against megatron-core 0.13 to 0.19, transformer/moe/moe_layer.py, token_dispatcher.py, shared_experts.py and
experts.py. Older versions have no such parts: their layers run the original.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.func import functional_call

from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts, exchange_choice
from ascend_parallel.ops.problem import experts_problem
from ascend_parallel.ops.registry import name_of
from ascend_parallel.overlap.experts import LocalExperts, SharedExpert, run_experts
from ascend_parallel.patches.base import Function, Patch, PatchSet, WatchedNames, defined_in, names_of_method
from ascend_parallel.patches.check import CheckedCall, Tensors
from ascend_parallel.patches.coverage import EXPERTS as COVERAGE
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
    make_experts_forward,
    uncovered_module,
    weights_of,
)
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import AttributeOverlay
from ascend_parallel.patches.seam import OnTop
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.part_groups import pass_on_copies

MODULE = "megatron.core.transformer.moe.moe_layer"
DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
SHARED = "megatron.core.transformer.moe.shared_experts"
FIRST = (0, 13)

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
            reason = megatron.reason_of_any(self.ep_group, _replaced_methods(self), hidden_states.device)
        if reason is None and (args[0] if args else kwargs.get("intermediate_tensors")) is not None:
            reason = "it is called for a part of its work (intermediate_tensors)"
        if reason is not None:
            megatron.log_uncovered(self, reason)
            return original(self, hidden_states, *args, **kwargs)
        group, chunks = megatron.prepare(self, "experts", hidden_states, None)
        if chunks.original or _measured_as_fast(self, megatron, hidden_states):
            return original(self, hidden_states, *args, **kwargs)
        return original(OverlappedCall(self, megatron, group, chunks.settings).overlay, hidden_states, *args, **kwargs)

    setattr(forward, COVERAGE, SimpleNamespace(uncovered=functools.partial(uncovered, megatron=megatron)))
    return forward


def uncovered(layer: Any, megatron: Megatron) -> str | None:
    """Return the reason why the original forward of `layer` must run, or None, as far as this rank knows."""
    return _uncovered_on_all_ranks(layer, megatron) or _replaced_methods(layer)


def _uncovered_on_all_ranks(layer: Any, megatron: Megatron) -> str | None:
    """Return the reason, or None, from what is the same on all ranks."""
    if megatron.version < FIRST:
        return "megatron-core below 0.13 has its dispatch, experts and combine in one piece"
    if torch.compiler.is_compiling():
        return "it is being compiled, and a process group cannot be"
    kind = type(layer)
    if (kind.__module__, kind.__name__) != (MODULE, "MoELayer"):
        return "it is a class of its own"
    if not dist.is_initialized() or layer.ep_group.size() == 1:
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
    problem = experts_problem(x, layer.num_local_experts, layer.ep_group)
    return megatron.part_groups.keeps_original(problem, layer.ep_group)


def _other_dispatcher(layer: Any) -> str | None:
    dispatcher = layer.token_dispatcher
    if (type(dispatcher).__module__, type(dispatcher).__name__) != (DISPATCHERS, "MoEAlltoAllTokenDispatcher"):
        return f"its dispatcher is {type(dispatcher).__name__}, not MoEAlltoAllTokenDispatcher"
    if dispatcher.tp_size > 1:
        return f"its experts are split among {dispatcher.tp_size} tensor-parallel ranks (expert_tensor_parallel_size)"
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
    """Return what names the first of a class's repeated methods that is another package's; None: there is none."""

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

    def __init__(self, layer: Any, megatron: Megatron, group: dist.ProcessGroup, settings: Settings) -> None:
        """Prepare a call of `layer`, whose experts are on the ranks of `group`."""
        self._layer, self._megatron, self._group, self._settings = layer, megatron, group, settings
        self._shared_x: torch.Tensor | None = None
        self._shared_output: torch.Tensor | None = None
        parts: dict[str, Any] = {"dispatch": self._dispatch, "combine": self._combine, "postprocess": self._postprocess}
        if hasattr(layer, "experts_compute"):  # to 0.14 it runs the shared expert, too
            parts["experts_compute"] = self._all_experts
        else:
            parts |= {"shared_experts_compute": self._shared_expert, "routed_experts_compute": self._routed_experts}
        self.overlay = AttributeOverlay(layer, **parts)

    def _dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, probs

    def _shared_expert(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return what stands for the shared expert's result until the experts run, or the result."""
        layer = self._layer
        if not _hides_shared_expert(layer):
            result: torch.Tensor | None = _shared_experts_compute(layer)(hidden_states)
            return result
        # The gradient of this view reaches hidden_states when that of Megatron's shared expert does.
        self._shared_x = hidden_states.view_as(hidden_states)
        return self._shared_x

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
        counts = row_counts(layer.token_dispatcher)
        megatron.confirm(self._group)()
        settings = self._measured(rows, probs, counts)
        if megatron.verifier is None:
            return self._exchange(rows, probs, counts, settings)
        checked = self._checked(rows, probs, counts, settings, state)
        output: torch.Tensor = megatron.verifier.run(checked)
        return output

    def _exchange(self, rows: torch.Tensor, probs: torch.Tensor, counts: RowCounts, settings: Settings) -> torch.Tensor:
        layer = self._layer
        shared = None
        if self._shared_x is not None:
            compute = _shared_experts_compute(layer)
            shared = SharedExpert(x=self._shared_x, parts=[compute], parameters=[*layer.shared_experts.parameters()])
        elif layer.shared_expert_overlap:
            shared = _shared_expert_in_parts(layer.shared_experts)
        out, self._shared_output = run_experts(
            rows, counts, self._local(), group=self._group, settings=settings, probs=probs, shared=shared
        )
        if layer.shared_expert_overlap:
            layer.shared_experts.cached_fc2_output = self._shared_output
            layer.shared_experts.post_forward_comm()
        return out

    def _measured(self, rows: torch.Tensor, probs: torch.Tensor, counts: RowCounts) -> Settings:
        """Return the settings of the exchange; with COC_PARALLEL_NUM=auto those that were measured."""
        if _writes_main_grad(self._layer):  # copies have none
            return self._settings
        problem = experts_problem(rows, counts.experts, self._group)
        copies = functools.partial(self._local, copied=True)
        trial = functools.partial(pass_on_copies, rows, counts, copies, self._group, probs=probs)
        in_turn = functools.partial(trial, None)
        chunks = self._megatron.part_groups.chunks_for(problem, self._group, trial, in_turn, rows.device)
        return chunks.settings if chunks.reason else self._settings  # without a reason nothing was measured

    def _local(self, *, copied: bool = False) -> LocalExperts:
        """Return the layer's experts; copied: with weights of the same values that get gradients of their own."""
        experts = self._layer.experts
        if weights := weights_of(experts):
            weights = [_copy(weight) for weight in weights] if copied else weights
            return LocalExperts(run=self._run_group, weights=weights, whole_backward=True)
        if not copied:
            return LocalExperts(run=self._run_group, parameters=[*experts.parameters()])
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
        experts = self._layer.experts
        assert probs is not None, "the exchange sends probabilities with the rows"
        last = parameters is None and group.experts.stop == self._layer.num_local_experts
        tokens = GroupTokens(group.expert_sizes, group.experts, weights, last)
        arguments = group.by_expert(rows), tokens, group.by_expert(probs)
        y, bias = experts(*arguments) if parameters is None else functional_call(experts, dict(parameters), arguments)
        assert bias is None, "uncovered() leaves experts with a bias to the original"
        return group.by_source(y)

    def _checked(
        self, rows: torch.Tensor, probs: torch.Tensor, counts: RowCounts, settings: Settings, state: Mapping[str, Any]
    ) -> CheckedCall:
        """Return the exchange beside Megatron-core's own, on the dispatcher's `state` of this call."""
        layer, dispatcher = self._layer, self._layer.token_dispatcher
        choice = exchange_choice(rows, counts.experts, self._group, settings)

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
            made, _ = functional_call(layer.experts, weights, arguments)
            return {"output": kind.token_combine(own, kind.combine_preprocess(own, made))}

        return CheckedCall(
            layer=layer,
            path="experts",
            group=self._group,
            operands={"input": rows, "probabilities": probs, **compared},
            inside=frozenset() if weights_of(layer.experts) else frozenset(compared),
            run=lambda _: self._exchange(rows, probs, counts, settings),
            results=lambda output: {"output": output},
            original=original,
            operators=lambda: lambda direction: f"Its {direction} ran {name_of(choice.problem)} in {choice.sizes}",
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
        return self._shared_output if shared is not None and shared is self._shared_x else shared

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
        ran = AttributeOverlay(shared, linear_fc2_forward=lambda *_: None, post_forward_comm=lambda *_: None)
        dispatcher = AttributeOverlay(dispatcher, shared_experts=ran)
    result: torch.Tensor = own(dispatcher, output)
    return result


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


def row_counts(dispatcher: Any) -> RowCounts:
    """Return the counts of a dispatcher that has permuted its rows; the host waits where Megatron-core's dispatch does.

    Megatron-core's stream for counts has waited for the routing, not for the permutation.
    """
    ranks, experts = dispatcher.ep_size, dispatcher.num_local_experts
    if dispatcher.drop_and_pad:
        padded = [[int(dispatcher.capacity)] * experts for _ in range(ranks)]
        return RowCounts(sent=padded, received=padded)
    received = dispatcher.num_global_tokens_per_local_expert if experts > 1 else None
    with torch.cuda.stream(dispatcher.cuda_dtoh_stream):
        sent = dispatcher.routing_map.sum(dim=0).to("cpu", non_blocking=True)
        if received is not None:
            received = received.to("cpu", non_blocking=True)
    dispatcher.cuda_dtoh_stream.record_event().synchronize()
    dispatcher._maybe_dtoh_and_synchronize("before_ep_alltoall", dispatcher.tokens_per_expert)
    dispatcher.tokens_per_expert = None
    if received is None:
        received = torch.tensor([int(count) for count in dispatcher.output_splits])
    return RowCounts(sent=sent.reshape(ranks, experts).tolist(), received=received.reshape(ranks, experts).tolist())
