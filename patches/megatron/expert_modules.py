"""Megatron-core's modules of experts, and how a group of the experts of each runs.

The patched forward of a module, called with `GroupTokens` in place of the counts of all local experts, runs the
module's own forward on a view of the module that has the group's experts only:

    SequentialMLP    local_experts               those of the group
    GroupedMLP       weight1 [H, E * F]          the group's parts, tensors that the caller gives and that get its
                     weight2 [E * F, H]          gradients: a part that was read from the parameter would send the
                                                 parameter a gradient, and call its hooks, once for each group
    TEGroupedMLP     linear_fc1, linear_fc2      views of both with weight0, weight1, ... of the group. Each weight is
                     of weight0 to weight{E-1}   a parameter, and gets its gradient, or its main_grad, once

MindSpeed's MindSpeedGmmExperts has GroupedMLP's weights, and its grouped layers those of TransformerEngine's, beside a
list of them.

A view is an object of the module's class: methods, hooks and configuration are the module's own, attributes that its
forward sets are not. Written against megatron-core 0.12 to 0.19, transformer/moe/experts.py, TransformerEngine's
module/grouped_linear.py, and MindSpeed 26.1.0_core_r0.12.1 and core_r0.16.0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.megatron.conflicts import arguments

EXPERTS = "megatron.core.transformer.moe.experts"
TE_EXTENSION = "megatron.core.extensions.transformer_engine"
# MindSpeed's classes of experts, and its layers in place of TransformerEngine's.
MINDSPEED_EXPERTS = "mindspeed.core.transformer.moe.moe_feature.adaptor"
MINDSPEED_LINEARS = "mindspeed.te.pytorch.module.grouped_linear"

PARAMETERS = ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
# Parameters of TEGroupedMLP's forward since this version, of its fused operation alone.
BUFFERS, TAKES_BUFFERS = ("output_buffer", "grad_input_buffer"), (0, 19)
# The last version with GroupedMLP.
LAST_GROUPED = (0, 16)
# Before this version a recomputed activation reads gradients of what saved-tensor hooks return, which get none.
RECOMPUTES_ACTIVATION = (0, 16)

# A layer of TEGroupedMLP has one parameter of these names for each expert.
NUMBERED = re.compile(r"(weight|bias)(\d+)")
# MindSpeed's layers have the weights in a list, too.
WEIGHTS = "total_weight"


class GroupTokens(NamedTuple):
    """The rows of each expert of a group, in place of those of all local experts.

    counts
        The rows of each expert of the group.
    experts
        The experts' numbers on the rank.
    weights
        The group's parts of the module's `weights_of`.
    last
        Whether the module keeps the state that it has after this group, as after a call.
    """

    counts: list[int]
    experts: range
    weights: Sequence[torch.Tensor]
    last: bool

    def tolist(self) -> list[int]:
        """Return the counts, as Megatron-core asks for them."""
        return self.counts


Named = list[tuple[str, torch.Tensor]]
"""Tensors that get a gradient, with their names."""


def tensors_of(module: Any, prefix: str, without: str = "") -> Named:
    """Return the tensors of a module that get a gradient, but those of its child `without`.

    Flat parameters of torch's FSDP leave views of them in a module, as attributes.
    """
    found = []
    for name, part in module.named_modules(prefix=prefix):
        if without and (name + ".").startswith(f"{prefix}.{without}."):
            continue
        kept = {**{key: x for key in ("weight", "weight0", "weight1") if (x := vars(part).get(key)) is not None}}
        for key, x in {**part._parameters, **kept}.items():
            if isinstance(x, torch.Tensor) and x.requires_grad:
                found.append((f"{name}.{key}", x))
    return found


@dataclass(frozen=True)
class ExpertModule:
    """How the experts of a class are run in groups.

    view
        ``view(module, tokens)`` returns the module with the experts of `tokens` only.
    weights
        ``weights(module)`` returns the weights of all experts, [E, ...]; empty: each expert has parameters of its own.
    uncovered
        ``uncovered(module)`` returns the reason why its experts cannot be run in groups, or None.
    apart
        ``apart(module)`` returns the tensors that each expert reads for itself, and those that all may read.
    """

    view: Callable[[Any, GroupTokens], Any]
    apart: Callable[[Any], tuple[list[Named], Named]]
    weights: Callable[[Any], list[torch.Tensor]] = lambda module: []
    uncovered: Callable[[Any], str | None] = lambda module: None


def _view(module: Any, parameters: Mapping[str, Any], modules: Mapping[str, Any], **attributes: Any) -> Any:
    """Return an object of the module's class with the same attributes but these."""
    view = object.__new__(type(module))
    vars(view).update(vars(module), _parameters=dict(parameters), _modules=dict(modules), **attributes)
    return view


def _sequential(module: Any, tokens: GroupTokens) -> Any:
    experts = torch.nn.ModuleList(module.local_experts[index] for index in tokens.experts)
    modules = {**module._modules, "local_experts": experts}
    return _view(module, module._parameters, modules, num_local_experts=len(experts))


def _sequential_apart(module: Any) -> tuple[list[Named], Named]:
    each = [tensors_of(expert, f"local_experts.{index}") for index, expert in enumerate(module.local_experts)]
    return each, tensors_of(module, "experts", without="local_experts")


def _grouped_apart(module: Any) -> tuple[list[Named], Named]:
    """Return no tensors of an expert: the weights get their gradients as one."""
    own = ("experts.weight1", "experts.weight2")
    return [], [(name, x) for name, x in tensors_of(module, "experts") if name not in own]


def _te_grouped_apart(module: Any) -> tuple[list[Named], Named]:
    each: list[Named] = [[] for _ in range(module.num_local_experts)]
    common: Named = []
    for name, x in tensors_of(module, "experts"):
        layer, _, last = name.rpartition(".")
        number = NUMBERED.fullmatch(last) if layer in ("experts.linear_fc1", "experts.linear_fc2") else None
        (common if number is None else each[int(number[2])]).append((name, x))
    return each, common


def _grouped(module: Any, tokens: GroupTokens) -> Any:
    weight1, weight2 = tokens.weights
    width = module.config.hidden_size
    parts = {"weight1": weight1.view(width, -1), "weight2": weight2.view(-1, width)}
    return _view(module, parts, module._modules, num_local_experts=len(tokens.experts))


def _grouped_weights(module: Any) -> list[torch.Tensor]:
    """Return the weights of GroupedMLP as its forward views them."""
    experts, width = module.num_local_experts, module.config.hidden_size
    return [module.weight1.view(experts, width, -1), module.weight2.view(experts, -1, width)]


def _te_grouped(module: Any, tokens: GroupTokens) -> Any:
    linears = {name: _te_linear(module._modules[name], tokens.experts) for name in ("linear_fc1", "linear_fc2")}
    return _view(module, module._parameters, {**module._modules, **linears}, num_local_experts=len(tokens.experts))


def _te_linear(linear: Any, experts: range) -> Any:
    """Return a layer with the weights and biases of `experts` only, numbered from 0."""
    parameters = {}
    for name, parameter in linear._parameters.items():
        kind, number = NUMBERED.fullmatch(name).groups()  # type: ignore[union-attr]  # uncovered: other names
        if int(number) in experts:
            parameters[f"{kind}{int(number) - experts.start}"] = parameter
    own = {WEIGHTS: [parameters[f"weight{index}"] for index in range(len(experts))]} if WEIGHTS in vars(linear) else {}
    return _view(linear, parameters, linear._modules, num_gemms=len(experts), **own)


def _other_te_linears(module: Any) -> str | None:
    """Name a difference of TEGroupedMLP from grouped layers with one weight for each expert; None: there is none."""
    for name, kind in (("linear_fc1", "Column"), ("linear_fc2", "Row")):
        linear = module._modules[name]
        wanted = f"TE{kind}ParallelGroupedLinear"
        known = {(TE_EXTENSION, wanted), (MINDSPEED_LINEARS, wanted), (MINDSPEED_LINEARS, f"MindSpeed{wanted}")}
        if (type(linear).__module__, type(linear).__name__) not in known:
            return f"its {name} is {type(linear).__name__}, not {wanted}"
        others = [other for other in linear._parameters if NUMBERED.fullmatch(other) is None]
        if others:
            return f"its {name} has a parameter of all experts: {others[0]}"
    return None


def _other_gmm(module: Any) -> str | None:
    """Name a feature of MindSpeed's grouped experts that a group cannot have; None: there is none."""
    if getattr(module.config, "gemm_gradient_accumulation_fusion", False):
        return (
            "MindSpeed's kernel adds the weight gradients of all experts to one main_grad "
            "(--gemm-gradient-accumulation-fusion)"
        )
    if getattr(arguments(), "recompute_activation_function", False):
        return "MindSpeed recomputes its experts' activation (--recompute-activation-function)"
    if getattr(module.config, "qat_scheme", None):
        return "its experts' weights are quantised in training (--qat-scheme)"
    return None


MODULES = {
    (EXPERTS, "SequentialMLP"): ExpertModule(_sequential, _sequential_apart),
    (EXPERTS, "GroupedMLP"): ExpertModule(_grouped, _grouped_apart, _grouped_weights),
    (EXPERTS, "TEGroupedMLP"): ExpertModule(_te_grouped, _te_grouped_apart, uncovered=_other_te_linears),
    (MINDSPEED_EXPERTS, "MindSpeedGmmExperts"): ExpertModule(
        _grouped, _grouped_apart, _grouped_weights, uncovered=_other_gmm
    ),
}


def uncovered_module(module: Any) -> str | None:
    """Return the reason why a module's experts cannot be run in groups, or None."""
    found = MODULES.get((type(module).__module__, type(module).__name__))
    if found is None:
        *names, last = (name for _, name in MODULES)
        return f"its experts are {type(module).__name__}, not {', '.join(names)} or {last}"
    return found.uncovered(module)


def common_tensor(layer: Any) -> str | None:
    """Return which tensor of a layer's experts has several readers of which each is to send it a gradient, or None.

    Its hooks, and those by which DDP and FSDP learn that its gradient is complete, would run for each of them. What
    was computed before the layer, such as the parts of a flat parameter of torch's FSDP, leads to such a tensor.
    """
    experts = layer.experts
    each, common = MODULES[type(experts).__module__, type(experts).__name__].apart(experts)
    if common:
        return f"its experts share {common[0][0]}"
    shared = [] if layer.shared_experts is None else tensors_of(layer.shared_experts, "shared_experts")
    readers: dict[int, str] = {}
    for tensors in (*each, shared):
        for name, x in tensors:
            if not x.is_leaf:
                return f"its {name} is computed before the layer, as by torch's FSDP with flat parameters"
            if id(x) in readers:
                return f"its {name} is {readers[id(x)]} too"
        readers |= {id(x): name for name, x in tensors}
    for name, x in tensors_of(layer.router, "router") if readers else ():
        if id(x) in readers:
            return f"its {name} is {readers[id(x)]} too"
    return None


def weights_of(module: Any) -> list[torch.Tensor]:
    """Return the weights [E, ...] of a covered module whose groups get their parts; empty: it has one per expert."""
    return MODULES[type(module).__module__, type(module).__name__].weights(module)


def with_all_experts(module: Any, rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments of a call of all experts, for other parameters than the module's (`functional_call`).

    MindSpeed's layers read their weights from a list of the module's: a view has a list of the present ones.
    """
    if any(WEIGHTS in vars(linear) for linear in module.children()):
        counts = GroupTokens(counts.tolist(), range(module.num_local_experts), (), last=False)
    return rows, counts, probs


def make_experts_forward(original: Function, view: Callable[[Any, GroupTokens], Any]) -> Function:
    """Make the method that replaces a module's forward: called with `GroupTokens`, it runs these experts."""

    @functools.wraps(original)
    def forward(
        self: Any, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(tokens_per_expert, GroupTokens):
            return original(self, permuted_local_hidden_states, tokens_per_expert, *args, **kwargs)
        group = view(self, tokens_per_expert)
        counts = torch.tensor(tokens_per_expert.counts)  # on the host, as the dispatcher's
        returned = original(group, permuted_local_hidden_states, counts, *args, **kwargs)
        if tokens_per_expert.last:
            _keep_state(self, group)
        return returned

    return forward


def _keep_state(module: Any, group: Any) -> None:
    """Copy the micro-batch flags of TransformerEngine's layers from a group; every group of a call has the same flags.

    The first micro-batch writes main_grad, the others add to it.
    """
    for name, linear in module._modules.items():
        if hasattr(linear, "is_first_microbatch"):
            linear.is_first_microbatch = group._modules[name].is_first_microbatch
