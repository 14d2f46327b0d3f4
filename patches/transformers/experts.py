"""The experts of a Hugging Face `ep_plan`, style "ep_dispatch_experts": dispatch, experts and combine, overlapped.

`AllToAllEP.__call__` is replaced: the rows are sorted, sent and weighted as transformers does, with the same operators
in the same order, and the experts' own forward computes a group of experts at a time. What it does not cover runs
transformers' own code. Written against transformers 5.23, transformers/distributed/expert_parallel.py; older versions
have no such class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ascend_parallel.ops.call import ExpertMatmuls, experts_exchange
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts, exchange_counts
from ascend_parallel.ops.fused_experts import (
    ExpertWeights,
    counts_of_all,
    decided_fused_experts,
    run_fused_experts,
    with_counts,
)
from ascend_parallel.ops.multiply import ALIGNMENT
from ascend_parallel.ops.operators import decided_exchange
from ascend_parallel.overlap.experts import LocalExperts, run_experts
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.check import CheckedCall
from ascend_parallel.patches.coverage import EXPERTS
from ascend_parallel.patches.covered_call import CoveredCall, Run, run_covered
from ascend_parallel.patches.dtensor_linear import INSTALLED, Installation, InstalledLayers
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH
from ascend_parallel.tuning.measured.part_groups import pass_on_copies

MODULE = "transformers.distributed.expert_parallel"
VERSIONS = ">=5.23,<5.24"
IMPLEMENTATIONS = ("eager", "grouped_mm")


@dataclass(frozen=True, kw_only=True)
class ExpertsInstallation(Installation):
    """What an `ep_plan` installed on a module of experts; `mesh` is that of the experts.

    implementation
        transformers' object that brings the experts their rows.
    """

    implementation: Any

    @property
    def group(self) -> dist.ProcessGroup:
        """The expert-parallel group."""
        group: dist.ProcessGroup = self.mesh.get_group()
        return group

    def uncovered(self, module: Any) -> str | None:
        """Return the reason why transformers' own code must run, or None; the same on all ranks."""
        implementation = self.implementation
        if self.active_patch.framework is None:
            return "overlap is switched off"
        if self.reason is not None:
            return self.reason
        if torch.compiler.is_compiling():
            return "it is being compiled, and a process group cannot be"
        if self.group.size() == 1:
            return "its expert-parallel group has one rank, so nothing is communicated"
        if getattr(implementation.experts_forward, "__self__", None) is not module:
            return "its forward was replaced before the ep_plan was applied"
        return _other_experts(module, implementation.num_local_experts)


def _other_experts(module: Any, experts: int) -> str | None:
    """Name a difference of a module from those whose experts can be computed in groups; None: there is none."""
    how = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(module, "is_transposed") or how not in IMPLEMENTATIONS:
        return f"its experts_implementation is {how!r}, not one of {', '.join(map(repr, IMPLEMENTATIONS))}"
    own = {name for name, _ in module.named_parameters(recurse=False)}
    others = [name for name, _ in module.named_parameters() if name not in own]
    others += [name for name, _ in module.named_buffers()]
    if others:
        return f"it has parameters or buffers that its experts share: {', '.join(others)}"
    for name, parameter in module.named_parameters():
        rows, *widths = parameter.shape
        if parameter.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            return f"its {name} is {parameter.dtype}"
        if not isinstance(parameter, DTensor) and rows != experts:
            return f"its {name} is no DTensor"
        # Experts of a group begin at other addresses than in a buffer of all experts' rows.
        if how == "grouped_mm" and any(width * parameter.itemsize % ALIGNMENT for width in widths):
            return f"its {name} {list(parameter.shape)} has rows of no multiple of {ALIGNMENT} bytes, under grouped_mm"
    return None


def install_forward(original: Function) -> Function:
    """Make the method that replaces ``EpDispatchExpertsParallel.install_forward``: it notes what was installed."""

    @functools.wraps(original)
    def install(self: Any, module: Any, ep_mesh: Any, *, tp_mesh: Any, ep_implementation: str = "auto") -> Any:
        returned = original(self, module, ep_mesh, tp_mesh=tp_mesh, ep_implementation=ep_implementation)
        implementation = _implementation(module.forward)
        own = getattr(implementation, "all_to_all", implementation)
        setattr(module.forward, EXPERTS, _installed(own, module))
        return returned

    return install


def _implementation(forward: Any) -> Any:
    """Return the object that an installed forward calls."""
    names = forward.__code__.co_freevars
    return forward.__closure__[names.index("implementation")].cell_contents if "implementation" in names else None


def _installed(implementation: Any, module: Any) -> ExpertsInstallation:
    """Return the installation of the experts of `implementation`, made at the first time."""
    noted = vars(module).get(INSTALLED)
    if isinstance(noted, ExpertsInstallation) and noted.implementation is implementation:
        return noted
    kind, reason = type(implementation), None
    if (kind.__module__, kind.__name__) != (MODULE, "AllToAllEP"):
        reason = f"its ep_implementation is {kind.__name__}, not all_to_all"
    mesh = getattr(implementation, "ep_mesh", None)
    noted = ExpertsInstallation(
        active_patch=ACTIVE_PATCH, kind="experts", mesh=mesh, reason=reason, implementation=implementation
    )
    vars(module)[INSTALLED] = noted
    shapes = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in module.named_parameters())
    ACTIVE_PATCH.add_text(f"{type(module).__name__} {shapes} {reason}")
    return noted


def call_experts(original: Function) -> Function:
    """Make the method that replaces ``AllToAllEP.__call__``."""

    @functools.wraps(original)
    def call(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        framework, module = ACTIVE_PATCH.framework, getattr(self.experts_forward, "__self__", None)
        own = functools.partial(original, self)
        if framework is None or not isinstance(module, torch.nn.Module):
            return own(hidden_states, top_k_index, top_k_weights)
        if not torch.is_grad_enabled() and not module.training:  # how few rows there are, no rank knows of another
            operands = hidden_states, top_k_index, top_k_weights
            evaluated = _evaluated(framework, module, self, *operands) if framework.settings.fused else None
            return own(*operands) if evaluated is None else evaluated
        if (reason := _installed(self, module).uncovered(module)) is not None:
            framework.log_uncovered(module, reason)
            return own(hidden_states, top_k_index, top_k_weights)
        experts = RoutedExperts(framework, module, self, hidden_states, top_k_index, top_k_weights)
        return run_covered(framework, experts.covered(own))

    return call


def _evaluated(
    framework: InstalledLayers, module: Any, implementation: Any, x: Any, index: Any, weights: Any
) -> torch.Tensor | None:
    """Return the weighted outputs of each token's experts, [T, H], by fused operators; None: transformers' own code."""
    if x.device.type != "npu" or _installed(implementation, module).uncovered(module) is not None:
        return None
    of_module = _weights_of(module)
    if of_module is None or of_module.first.dtype != x.dtype or torch.is_autocast_enabled("npu"):
        return None
    group, tp_mesh, experts = framework.group_of(module), implementation.tp_mesh, implementation.num_local_experts
    matmuls = ExpertMatmuls(of_module.inner, index.size(-1), inference=True)
    framework.agree(group, x.device, group)
    decision = decided_fused_experts(experts_exchange(x, experts, group, matmuls), framework.settings)
    if decision.original:
        return None
    hidden, choices, own_weights = (_own_rows(each, tp_mesh) for each in (x, index, weights))
    sorted_rows, order, to_send = _sorted_by_expert(hidden, choices, group, experts)
    counts = counts_of_all(to_send, group)
    if with_counts(decision, counts).original:
        return None
    made = run_fused_experts(sorted_rows, counts, of_module, group, decision)
    return _all_rows(_by_token(made, order, own_weights), tp_mesh, x.size(0))


def _weights_of(module: Any) -> ExpertWeights | None:
    """Return the weights of experts that are two products, with what stands between them; None: they are others."""
    has_gate = getattr(module, "has_gate", False)
    first = "gate_up_proj" if has_gate else "up_proj"
    parameters = {name: x for name, x in module._parameters.items() if x is not None}
    if set(parameters) != {first, "down_proj"} or getattr(module, "has_post_expert_norm", False):
        return None
    up, down = (x.to_local() if isinstance(x, DTensor) else x for x in (parameters[first], parameters["down_proj"]))
    between = module._apply_gate if has_gate else module.act_fn
    return ExpertWeights(up, down, not module.is_transposed, between)


def _sorted_by_expert(
    hidden: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows [S, H] sorted by expert, their order, and how many go to each rank and expert, [R, E]."""
    expert_ids = index.reshape(-1)
    order = torch.argsort(expert_ids)
    # Not bincount, for which the host would wait for the device.
    to_send = expert_ids.new_zeros(group.size(), experts, dtype=torch.long)
    to_send.view(-1).scatter_add_(0, expert_ids, torch.ones_like(expert_ids, dtype=torch.long))
    return hidden[order // index.size(-1)], order, to_send


def _by_token(made: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over each token's experts, [T, H], of outputs [S, H] that are sorted by expert."""
    by_token = torch.empty_like(made)
    by_token[order] = made
    output: torch.Tensor = (by_token.view(*weights.shape, made.size(-1)) * weights.unsqueeze(-1)).sum(dim=1)
    return output


class RoutedExperts:
    """A call of a module of experts: hidden_states [T, H], and for each token its top_k experts and their weights."""

    def __init__(
        self,
        framework: InstalledLayers,
        module: Any,
        implementation: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> None:
        """Hold the arguments of `implementation`, transformers' object that calls the module."""
        self._framework, self._module, self._implementation = framework, module, implementation
        self._x, self._index, self._weights = hidden_states, top_k_index, top_k_weights
        self._group, self._tp_mesh = framework.group_of(module), implementation.tp_mesh
        self._exchange = experts_exchange(hidden_states, implementation.num_local_experts, self._group)

    def covered(self, own: Callable[..., torch.Tensor]) -> CoveredCall:
        """Return the call; `own` is transformers' own code, which takes the three."""
        return CoveredCall(
            layer=self._module,
            group=self._group,
            device=self._x.device,
            agreeing=self._group,
            decide=self._decide,
            ours=self._run,
            theirs=functools.partial(own, self._x, self._index, self._weights),
            checked=functools.partial(self._checked, own),
        )

    def _decide(self) -> Known:
        """Decide the groups of the call, for which the ranks tell each other how many rows they send."""
        framework, group = self._framework, self._group
        known = framework.prepare(self._module, "experts", self._x, None, group)
        if known.original or framework.decider.keeps_original(self._exchange, group):
            return known._replace(original=True)
        hidden, index, self._own_weights = (_own_rows(x, self._tp_mesh) for x in (self._x, self._index, self._weights))
        experts = self._implementation.num_local_experts
        self._sent, self._order, to_send = _sorted_by_expert(hidden, index, group, experts)
        received, self._counts = exchange_counts(to_send, group)
        names = [name for name, parameter in self._module._parameters.items() if parameter is not None]
        run = _group_runner(self._module, self._implementation, names, received, self._counts)
        self._local = LocalExperts(run=run, weights=[self._module._parameters[name] for name in names])
        trial = functools.partial(pass_on_copies, self._sent, self._counts, self._copies, group, framework.settings)
        in_turn = functools.partial(trial, None)
        return framework.decider.known_of_exchange(self._exchange, group, trial, in_turn, self._sent.device, known)

    def _copies(self) -> LocalExperts:
        """Return the experts with weights of the same values that get gradients of their own."""
        local = self._local
        return replace(local, weights=[x.detach().requires_grad_(x.requires_grad) for x in local.weights])

    def _run(self, known: Known, _: object) -> torch.Tensor:
        """Return the weighted outputs of each token's experts, [T, H]."""
        how: dict[str, Any] = {"group": self._group, "settings": self._framework.settings, "known": known}
        made, _ = run_experts(self._sent, self._counts, self._local, **how)
        output = _by_token(made, self._order, self._own_weights)
        return _all_rows(output, self._tp_mesh, self._x.size(0))

    def _checked(self, own: Callable[..., torch.Tensor], known: Known, run: Run) -> CheckedCall:
        """Return the call beside transformers' own code."""
        module = self._module
        parameters = {name: x for name, x in module._parameters.items() if x is not None}

        def original(operands: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            with _only(module, {name: operands[name] for name in parameters}, module.num_experts):
                y = own(operands["input"], self._index, operands["routing weights"])
            return {"output": y}

        def operators(direction: str) -> str:
            decision = decided_exchange(self._exchange, self._group, self._framework.settings, known)
            return f"Its {direction} ran {decision.call.in_words} in groups of experts {list(decision.sizes)}"

        return CheckedCall(
            layer=module,
            path="experts",
            group=self._group,
            operands={"input": self._x, "routing weights": self._weights, **parameters},
            run=run,
            results=lambda y: {"output": y},
            original=original,
            operators=lambda: operators,
        )


def _group_runner(
    module: Any, implementation: Any, names: Sequence[str], received: torch.Tensor, counts: RowCounts
) -> Callable[..., torch.Tensor]:
    """Return a function that runs a group of experts as transformers' module does, on rows [source][expert].

    received: how many rows this rank's experts get from each rank, [R, E]. Backward keeps the function, so it holds
    neither the call nor its rows.
    """
    orders = _Orders(received, counts)

    def run(expert_group: ExpertGroup, rows: torch.Tensor, _: object, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not len(rows):
            return rows
        experts = expert_group.experts
        ids = torch.arange(len(experts), device=rows.device).repeat(len(received))
        their_counts = received[:, experts.start : experts.stop].reshape(-1)
        ids = ids.repeat_interleave(their_counts, output_size=len(rows)).unsqueeze(-1)
        with _only(module, dict(zip(names, parts, strict=True)), len(experts)), orders.of(expert_group):
            made: torch.Tensor = implementation.experts_forward(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
        return made

    return run


def _own_rows(x: torch.Tensor, tp_mesh: Any) -> torch.Tensor:
    """Return this rank's share of rows that all ranks of the tensor-parallel group have."""
    if tp_mesh.size() == 1:
        return x
    shared = DTensor.from_local(x, tp_mesh, [Replicate()], run_check=False)
    own: torch.Tensor = shared.redistribute(tp_mesh, [Shard(0)]).to_local()
    return own


def _all_rows(y: torch.Tensor, tp_mesh: Any, rows: int) -> torch.Tensor:
    """Return the rows of all ranks of the tensor-parallel group."""
    if tp_mesh.size() == 1:
        return y
    shape, stride = (rows, y.size(-1)), (y.size(-1), 1)
    gathered: torch.Tensor = DTensor.from_local(
        y.contiguous(), tp_mesh, [Shard(0)], shape=torch.Size(shape), stride=stride
    ).full_tensor()
    return gathered


class _Orders:
    """The order in which the experts' own sort takes rows, kept when a group is sorted by itself.

    torch.sort leaves equal numbers in any order: the sort of a group would take the rows of an expert in another order
    than the sort of all rows, and their weight gradient would be summed in another order.
    """

    def __init__(self, received: torch.Tensor, counts: RowCounts) -> None:
        """Hold how many rows this rank's experts get from each rank, [R, E], on the device and on the host."""
        self._received, self._counts = received, counts
        self._by_expert: torch.Tensor | None = None

    def of(self, group: ExpertGroup) -> AbstractContextManager[object]:
        """Return a context in which torch.sort of a group's experts gives the order of all rows' sort."""
        if len(group.experts) == self._counts.experts:
            return nullcontext()
        first, stop = group.experts.start, group.experts.stop
        before = sum(sum(counts[:first]) for counts in self._counts.received)
        own = sum(group.received_sizes)
        return _SortedAs(self._place_in(first, stop)[self._sorted()[before : before + own]])

    def _sorted(self) -> torch.Tensor:
        """Return the order of all rows, which arrive as [source][expert], by expert."""
        if self._by_expert is None:
            ranks, experts = self._received.shape
            ids = torch.arange(experts, device=self._received.device).repeat(ranks)
            total = sum(map(sum, self._counts.received))
            self._by_expert = torch.sort(ids.repeat_interleave(self._received.reshape(-1), output_size=total))[1]
        return self._by_expert

    def _place_in(self, first: int, stop: int) -> torch.Tensor:
        """Return for each row its place among the rows of the experts from `first` to `stop`; others: any number."""
        places, begin = [], 0
        for counts in self._counts.received:
            inside = sum(counts[first:stop])
            places.append(torch.arange(begin - sum(counts[:first]), begin + sum(counts[first:])))
            begin += inside
        return torch.cat(places).to(self._received.device, non_blocking=True)


class _SortedAs(TorchFunctionMode):
    """Sorts a tensor in the order that is given."""

    def __init__(self, order: torch.Tensor) -> None:
        super().__init__()
        self._order = order

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.sort:
            return args[0][self._order], self._order
        return function(*args, **(kwargs or {}))


@contextmanager
def _only(module: Any, parameters: Mapping[str, torch.Tensor], experts: int) -> Iterator[None]:
    """Let the module have only some of its experts inside this context."""
    own, number = {name: module._parameters[name] for name in parameters}, module.num_experts
    module._parameters.update(parameters)
    module.num_experts = experts
    try:
        yield
    finally:
        module._parameters.update(own)
        module.num_experts = number
