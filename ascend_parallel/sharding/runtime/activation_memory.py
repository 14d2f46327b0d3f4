"""The bytes of activations that a rank keeps for backward, estimated from the plan before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER, Node, OpCall, Ref, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, forward, with_placement
from ascend_parallel.sharding.planner.operator_cost import ATTENTION, VIEWS
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.sharding.rules import attention, experts
from ascend_parallel.sharding.runtime.checkpointed_blocks import CheckpointedBlock, checkpointed_blocks
from ascend_parallel.sharding.runtime.rank_plan import RankPlan
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.tracing.functionalize import memory_of


@dataclass(frozen=True)
class AutogradSaves:
    """What the backward of a call reads.

    inputs, outputs
        Indices of `OpCall.inputs` and `OpCall.outputs` that are saved, or views of them.
    inside
        Bytes of the tensors that the operator makes for its backward alone: the steps of an LSTM, the statistics of a
        norm, a mask. Of the whole tensors, before sharding.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]
    inside: int


def attention_saves(call: OpCall) -> AutogradSaves:
    """Return the saved tensors of a device's fused attention: queries, keys, values, the result, and its sums.

    torch's own choice of a kernel depends on the device, and its unfused one saves the scores too.
    """
    (result,) = call.outputs
    return AutogradSaves(frozenset({0, 1, 2}), frozenset({0}), 4 * prod(result.shape[:-1]))


def autograd_saves(call: OpCall, requires_grad: Sequence[bool]) -> AutogradSaves | None:
    """Return the tensors that autograd saves of a call; None for an operator that cannot run on fake tensors.

    requires_grad: of each tensor of `call.inputs`. Not counted: the workspace of oneDNN's LSTM and GRU, fp32 on CPUs.
    """
    key = call.target, repr((call.args, call.kwargs)), call.inputs, tuple(requires_grad)
    if key not in _KNOWN:
        try:
            _KNOWN[key] = _ask(call, requires_grad)
        except Exception:  # noqa: BLE001 - any operator's own: it has no fake kernel, or reads values
            _KNOWN[key] = None
    return _KNOWN[key]


_KNOWN: dict[Any, AutogradSaves | None] = {}


def _ask(call: OpCall, requires_grad: Sequence[bool]) -> AutogradSaves:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[memory_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with _torch_kernels(), FakeTensorMode(), torch.enable_grad():
        inputs = [
            torch.empty(meta.shape, dtype=meta.dtype).requires_grad_(needs)
            for meta, needs in zip(call.inputs, requires_grad, strict=True)
        ]

        def filled(leaf: Any) -> Any:
            return inputs[leaf.index] if isinstance(leaf, Ref) else leaf

        args, kwargs = pytree.tree_map(filled, (tuple(call.args), dict(call.kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call.target(*args, **kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        read = frozenset(place for place, tensor in enumerate(inputs) if memory_of(tensor) in saved)
        made = frozenset(place for place, tensor in enumerate(outputs) if memory_of(tensor) in saved)
        known = {memory_of(tensor) for tensor in (*inputs, *outputs)}
        inside = sum(nbytes for storage, nbytes in saved.items() if storage not in known)
    return AutogradSaves(read, made, inside)


@contextmanager
def _torch_kernels() -> Iterator[None]:
    """Inside, torch's own kernels run: the workspace of oneDNN's LSTM is empty among fake tensors."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


# The key's layout for what an operator saves beside its inputs and outputs. No tensor has an empty layout.
INSIDE: Layout = ()
HELD = (PARAMETER, BUFFER)
_Tensors = dict[tuple[Value, Layout], float]


def saved_bytes(rank_plan: RankPlan, recompute: Recompute, *, part: bool = False) -> float:
    """Estimate the bytes of activations that a rank keeps from forward to backward.

    The estimate counts what autograd saves of each operator (`autograd_saves`), as laid out on a rank, once. For a
    checkpointed block it counts the tensors that the block reads and its kept results. It leaves out views, parameters
    and the model's inputs. `part` and errors: see `checkpointed_blocks`.
    """
    found = checkpointed_blocks(rank_plan.plan, rank_plan.fused_plan, recompute, part=part)
    return sum(SavedTensors(rank_plan).kept(found.values()).values())


class SavedTensors:
    """The tensors that autograd saves, with their bytes on a rank."""

    def __init__(self, rank_plan: RankPlan) -> None:
        """Take what a rank runs."""
        self._plan, self._graph, self._fused_plan = rank_plan.plan, rank_plan.plan.graph, rank_plan.fused_plan
        self._gathering = {
            (name, matmul.x): kernel.fused
            for kernel in rank_plan.kernels.values()
            if kernel.keeps_gathered
            for name, matmul in zip(kernel.fused.nodes, kernel.fused.matmuls, strict=True)
        }

    def kept(self, found: Iterable[CheckpointedBlock]) -> _Tensors:
        """Return the tensors kept from forward to backward."""
        found = list(found)
        inside = {name for block in found for name in block.nodes}
        kept = self.by_all(node for node in self._graph.of_kind(CALL) if node.name not in inside)
        for block in found:
            kept |= self.by_block(block)
        return kept

    def by_all(self, nodes: Iterable[Node]) -> _Tensors:
        """Return the tensors that these operators save."""
        found: _Tensors = {}
        for node in nodes:
            found |= self.by_operator(node)
        return found

    def by_operator(self, node: Node) -> _Tensors:
        """Return the tensors that an operator saves."""
        if node.call is None or self._plan.differentiable.isdisjoint(node.values):
            return {}
        if node.call.name == experts.CALL:
            return self._by_experts(node, node.call)
        if attention.exchange_dims(node.call, self._fused_plan.inputs[node.name]):
            return self._by_shared_attention(node, node.call)
        saves, found = self._saves(node, node.call), dict[tuple[Value, Layout], float]()
        for place in saves.inputs:
            read = self._fused_plan.inputs[node.name][place]
            found |= self._gathered(node, place) or self._tensor(node.inputs[place], read)
        for value in (node.values[place] for place in saves.outputs):
            found |= self._tensor(value, self._fused_plan.layouts[value])
        if saves.inside:
            found[Value(node.name), INSIDE] = saves.inside * self._share(node)
        return found

    def _gathered(self, node: Node, place: int) -> _Tensors:
        """Return the rows of an input that the operator's kernel has gathered and keeps, in place of the input."""
        kernel = self._gathering.get((node.name, place))
        if kernel is None:
            return {}
        layout = with_placement(self._fused_plan.inputs[node.name][place], kernel.mesh_dim, REPLICATE)
        return {(Value(kernel.nodes[0]), INSIDE): self._bytes(node.inputs[place], layout)}

    def _by_experts(self, node: Node, call: OpCall) -> _Tensors:
        """Return the tensors that a mixture saves: the routing weights, and its experts' results of a rank's rows."""
        layouts, shape = self._fused_plan.inputs[node.name], self._plan.mesh.shape
        found = self._tensor(node.inputs[experts.WEIGHT], layouts[experts.WEIGHT])
        found[Value(node.name), INSIDE] = experts.saved_bytes(call, layouts, shape)
        return found

    def _by_shared_attention(self, node: Node, call: OpCall) -> _Tensors:
        """Return the tensors that attention on a shared sequence saves: those of whole sequences, and its sums."""
        layouts, shape = self._fused_plan.inputs[node.name], self._plan.mesh.shape
        sums = attention_saves(call).inside * self._share(node)
        return {(Value(node.name), INSIDE): attention.saved_bytes(call, layouts, shape) + sums}

    def by_block(self, block: CheckpointedBlock) -> _Tensors:
        """Return the tensors that a checkpointed block keeps."""
        found: _Tensors = {}
        for value in block.reads:
            found |= self._tensor(value, self._fused_plan.layouts[value])
        for value in block.read_shared:
            found |= self._tensor(value, self._fused_plan.shared_layouts[value])
        for name in block.nodes:
            node, kernel = self._graph.nodes[name], self._fused_plan.kernels.get(name)
            communicates = kernel is not None and kernel.communicates and not block.recompute_collectives
            if name in block.kept or (communicates and name in block.read_inside):
                for value in node.values:
                    found |= self._tensor(value, self._fused_plan.layouts[value])
            if block.recompute_collectives:
                continue
            for value, layout in zip(node.inputs, self._fused_plan.inputs[name], strict=True):
                if self._is_sent(value, layout):
                    found |= self._tensor(value, layout)
            if self._gathering and node.call is not None:
                for place in self._saves(node, node.call).inputs:
                    found |= self._gathered(node, place)
        return found

    def _saves(self, node: Node, call: OpCall) -> AutogradSaves:
        """Return the tensors that autograd saves; all inputs of an operator that cannot be asked."""
        if operator_name(node) == ATTENTION:
            return attention_saves(call)
        saves = autograd_saves(call, [value in self._plan.differentiable for value in node.inputs])
        return saves or AutogradSaves(frozenset(range(len(call.inputs))), frozenset(), 0)

    def _share(self, node: Node) -> float:
        """Return the share of an operator's work that a rank has: that of its largest activation."""
        read = zip(node.inputs, self._fused_plan.inputs[node.name], strict=True)
        tensors = [(value, layout) for value, layout in read if self._graph.nodes[value.node].kind not in HELD]
        tensors += [(value, self._fused_plan.layouts[value]) for value in node.values]
        value, layout = max(tensors, key=lambda tensor: self._graph.meta(tensor[0]).nbytes)
        return self._bytes(value, layout) / (self._graph.meta(value).nbytes or 1)

    def _tensor(self, value: Value, layout: Layout) -> _Tensors:
        """Return a tensor in the layout of its reader, or the base of a view; nothing for inputs and parameters."""
        node = self._graph.nodes[value.node]
        while node.kind == CALL and operator_name(node) in VIEWS.split() and layout == self._fused_plan.layouts[value]:
            value, layout = node.inputs[0], self._fused_plan.inputs[node.name][0]
            node = self._graph.nodes[value.node]
        return {(value, forward(layout)): self._bytes(value, layout)} if node.kind == CALL else {}

    def _is_sent(self, value: Value, target: Layout) -> bool:
        """Tell whether the redistribution of a tensor to `target` communicates in forward."""
        source = self._fused_plan.shared_layouts.get(value, self._fused_plan.layouts[value])
        return self._plan.redistribution(value, source, target).nbytes > 0

    def _bytes(self, value: Value, layout: Layout) -> float:
        return self._graph.meta(value).local_bytes(layout, self._plan.mesh.shape)
