"""Maps in-place operators of an exported program to out-of-place operators.

A graph's values are immutable. Where nothing else aliases the written tensor, the in-place operator can be replaced,
and the program keeps its order and names. So can a write to a view, as in ``x[:, 0] = 1``: what was written is
scattered into the tensor. All other cases need torch's functionalization (run_decompositions).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

BATCH_NORM = torch.ops.aten.batch_norm.default
FUNCTIONAL_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
# Views, and the operators that put a changed view back: ``scatter(whole, view, *arguments)``.
SCATTERS: Mapping[Any, Any] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
# Composite operators whose output never aliases an input.
NEVER_ALIASING = [
    "linear",
    "matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "max_pool2d",
    "lift_fresh_copy",
]


@dataclass(frozen=True)
class View:
    """A node that views a part of another, and the node that is the other at present."""

    node: torch.fx.Node
    owner: torch.fx.Node


@dataclass(frozen=True)
class FunctionalOp:
    """An out-of-place operator that replaces an in-place operator.

    value
        Its outputs, as fake tensors.
    updates
        {buffer name: index of the output that is the buffer's new value}.
    written
        The views through which it wrote, from the outermost: its output is scattered into their tensors.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    updates: Mapping[str, int] = field(default_factory=dict)
    written: tuple[View, ...] = ()


def is_in_place(node: torch.fx.Node) -> bool:
    """Tell whether an operator writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functional_ops(program: ExportedProgram) -> dict[str, FunctionalOp] | torch.fx.Node:
    """Return the replacement of each in-place operator, by node name.

    Returns the first node for which only torch's functionalization works: its aliasing is ambiguous, or it enters
    torch.vmap, which torch's functionalization writes out.
    """
    nodes: list[torch.fx.Node] = list(program.graph.nodes)
    for node in filter(_is_vmap, nodes):
        return node
    replacements = {}
    aliases = _Aliases(program)
    for node in nodes:
        if is_in_place(node):
            replacement = aliases.out_of_place(node)
        elif node.target is BATCH_NORM and node.args[5] and node.args[3] is not None:
            replacement = aliases.batch_norm(node)
        else:
            continue
        if replacement is None:
            return node
        replacements[node.name] = replacement
    return replacements


class _Aliases:
    """The nodes that share memory, and the order of all nodes."""

    def __init__(self, program: ExportedProgram) -> None:
        self._buffers = program.graph_signature.inputs_to_buffers
        self._order = {node: place for place, node in enumerate(program.graph.nodes)}
        self._dead = set[torch.fx.Node]()  # views that nobody reads; autograd makes written views again
        for node in reversed(program.graph.nodes):
            if _is_view(node) and self._dead.issuperset(node.users):
                self._dead.add(node)
        self._sharing: dict[int, list[torch.fx.Node]] = defaultdict(list)
        for node in program.graph.nodes:
            if node.target is not operator.getitem and node not in self._dead:
                leaves = pytree.tree_leaves(node.meta.get("val"))
                for key in dict.fromkeys(memory_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
                    self._sharing[key].append(node)

    def out_of_place(self, node: torch.fx.Node) -> FunctionalOp | None:
        """Return the replacement of an operator that writes to its first argument and returns that argument."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        arguments = target._schema.arguments
        written = [arg for arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
        functional = _functional_overload(target)
        if functional is None or len(written) != 1 or written[0] != arguments[0]:
            return None
        root, writes = self._memory_of(node)[0], self._writes(self._memory_of(node))
        if writes is None:
            return None
        updates = {self._buffers[root.name]: 0} if root.name in self._buffers else {}
        return FunctionalOp(functional, tuple(node.args), node.kwargs, node.meta["val"], updates, writes[node])

    def batch_norm(self, node: torch.fx.Node) -> FunctionalOp | None:
        """Return the replacement of a batch norm that updates its running statistics."""
        x, weight, bias, mean, variance, training, momentum, eps, _ = node.args
        for statistic in (mean, variance):
            assert isinstance(statistic, torch.fx.Node)
            alone = self._sharing[memory_of(statistic.meta["val"])] == [statistic]
            if statistic.name not in self._buffers or not alone or self._read_after(statistic, node):
                return None
        args = (x, weight, bias, mean, variance, training, momentum, eps)
        fakes = pytree.tree_map_only(torch.fx.Node, lambda argument: argument.meta["val"], args)
        value = FUNCTIONAL_BATCH_NORM(*fakes)
        updates = {self._buffers[str(statistic)]: index for index, statistic in ((3, mean), (4, variance))}
        return FunctionalOp(FUNCTIONAL_BATCH_NORM, args, {}, value, updates)

    def _memory_of(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        return self._sharing[memory_of(node.meta["val"])]

    def _writes(self, sharing: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, tuple[View, ...]] | None:
        """Return each write to a memory with the views through which it writes; None if other views may be read later.

        A tensor and views that are nested in it have one value after a write; any other view would be of an old value.
        """
        last = max(place for place, alias in enumerate(sharing) if is_in_place(alias))
        root = sharing[0]
        if root.name not in self._buffers if root.op == "placeholder" else not _never_aliases(root):
            return None
        writes: dict[torch.fx.Node, tuple[View, ...]] = {}
        views: dict[torch.fx.Node, tuple[View, ...]] = {root: ()}  # what each node is a part of, from the outermost
        for node in sharing[1 : last + 1]:
            viewed = node.args[0]
            if viewed not in views:
                return None
            assert isinstance(viewed, torch.fx.Node)
            if not is_in_place(node):
                if node.target not in SCATTERS:
                    return None
                views[node] = (*views[viewed], View(node, viewed))
                continue
            if views[viewed] and root.op == "placeholder":
                return None  # the new value of a buffer is that of an output of the operator
            views[node] = views[viewed]
            owners = [view.owner for view in views[node]]
            if any(self._read_after(other, node) for other in views if other is not node and other not in owners):
                return None
            read = [self._read_after(owner, node) for owner in owners]
            writes[node] = views[node][read.index(True) :] if any(read) else ()
        return writes if all(self._only_read(node, sharing[last]) for node in sharing[:last]) else None

    def _only_read(self, node: torch.fx.Node, last: torch.fx.Node) -> bool:
        """Tell whether nothing but the views of the same memory can alias a node before the last write."""
        known = {*self._memory_of(node), *self._dead}
        others = [user for user in node.users if user not in known and self._order[user] < self._order[last]]
        return all(_never_aliases(user) or (is_in_place(user) and user.args[0] is not node) for user in others)

    def _read_after(self, value: torch.fx.Node, node: torch.fx.Node) -> bool:
        return any(self._order[user] > self._order[node] for user in value.users if user not in self._dead)


def _functional_overload(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload of the same name without the underscore, if its arguments have the same names."""
    packet = getattr(getattr(torch.ops, target.namespace), target._opname.removesuffix("_"), None)
    functional = getattr(packet, target._overloadname, None)
    if functional is None or functional is target or functional._schema.is_mutable:
        return None
    names = [[argument.name for argument in overload._schema.arguments] for overload in (target, functional)]
    return functional if names[0] == names[1] else None


def _never_aliases(node: torch.fx.Node) -> bool:
    """Tell whether an operator's outputs certainly do not alias its inputs."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "ascend_parallel_trace":
        return False  # a block's stub stands for operators that may
    name = str(node.target.name())  # type: ignore[no-untyped-call]
    if any(output.alias_info is not None for output in node.target._schema.returns):
        return False
    # a composite operator may return its input, which its schema does not say: dropout in evaluation
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return node.target._overloadpacket.__name__ in NEVER_ALIASING or not composite


def _is_view(node: torch.fx.Node) -> bool:
    """Tell whether an operator's output is a view of its input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(output.alias_info is not None for output in target._schema.returns)


def _is_vmap(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__module__", "").startswith("torch._functorch")


def memory_of(tensor: torch.Tensor) -> int:
    """Return what tensors have in common that share memory; fake tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
