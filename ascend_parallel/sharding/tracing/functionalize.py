"""Maps in-place operators of an exported program to out-of-place operators.

A graph's values are immutable. Where all aliases of the written tensor are known, the in-place operator can be
replaced, and the program keeps its order and names. What a write to a view wrote, as in ``x[:, 0] = 1``, is put back
into the tensor; other views that are read later are made again. All other cases need torch's functionalization
(run_decompositions).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
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
# Views of all elements in another shape.
SHAPES = frozenset(
    (
        torch.ops.aten.view.default,
        torch.ops.aten.view_as.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.flatten.using_ints,
        torch.ops.aten.unflatten.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.default,
        torch.ops.aten.squeeze.dim,
    )
)
# Views that are their own inverse.
EXCHANGES = frozenset((torch.ops.aten.transpose.int, torch.ops.aten.t.default))
# Returns its input if nothing is dropped, and the trace makes it a tensor of its own: (x, p, train).
DROPOUTS = frozenset((torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default))
# What returns its input where the input is as asked for.
UNCHANGED = frozenset(
    (
        torch.ops.aten.to.dtype,
        torch.ops.aten.to.dtype_layout,
        torch.ops.aten.to.device,
        torch.ops.aten.to.other,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.type_as.default,
    )
)


@dataclass(frozen=True)
class View:
    """A node that views a part of another, and the node that is the other at present."""

    node: torch.fx.Node
    owner: torch.fx.Node


@dataclass(frozen=True)
class Path:
    """A node that views a part of `root`, by `views` in order."""

    node: torch.fx.Node
    root: torch.fx.Node
    views: tuple[View, ...]


@dataclass(frozen=True)
class FunctionalOp:
    """An out-of-place operator that replaces an in-place operator.

    value
        Its outputs, as fake tensors.
    updates
        {buffer name: index of the output that is the buffer's new value}.
    written
        The views through which it wrote, from the outermost: its output is put back into their tensors.
    renewed
        The other nodes that are read later and are the written tensor: {node name: index of the output}.
    made_again
        The other views that are read later, each with the node that owns the memory and the way there.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    updates: Mapping[str, int] = field(default_factory=dict)
    written: tuple[View, ...] = ()
    renewed: Mapping[str, int] = field(default_factory=dict)
    made_again: tuple[Path, ...] = ()


def changes_others(operation: FunctionalOp) -> bool:
    """Tell whether a write changes other nodes than the one that it returns."""
    return bool(operation.written or operation.renewed or operation.made_again)


def is_in_place(node: torch.fx.Node) -> bool:
    """Tell whether an operator's schema says that it writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def updates_statistics(node: torch.fx.Node) -> bool:
    """Tell whether a node is a batch norm that updates its running statistics, which its schema does not say."""
    return node.target is BATCH_NORM and bool(node.args[5]) and node.args[3] is not None


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
        elif updates_statistics(node):
            replacement = aliases.batch_norm(node)
        else:
            continue
        if replacement is None:
            return node
        replacements[node.name] = replacement
    return replacements


@dataclass(frozen=True)
class ViewCall:
    """An operator that makes a view, or its inverse, with its arguments after the tensors.

    reads_owner
        Whether the tensor that the view is a part of comes first.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reads_owner: bool = False


def view_call(view: View) -> ViewCall:
    """Return the call that makes a view of its owner."""
    if view.node.target in SHAPES:
        return _reshaped(view.node)
    return ViewCall(view.node.target, tuple(view.node.args[1:]), view.node.kwargs)


def inverse(view: View) -> ViewCall:
    """Return the call that puts a changed view back into its owner."""
    if view.node.target in SHAPES:
        return _reshaped(view.owner)
    target = SCATTERS.get(view.node.target, view.node.target)
    return ViewCall(target, tuple(view.node.args[1:]), view.node.kwargs, reads_owner=target in SCATTERS.values())


def _reshaped(like: torch.fx.Node) -> ViewCall:
    return ViewCall(torch.ops.aten.reshape.default, (list(like.meta["val"].shape),))


class _Aliases:
    """The nodes that share memory, and the order of all nodes."""

    def __init__(self, program: ExportedProgram) -> None:
        self._buffers = program.graph_signature.inputs_to_buffers
        self._order = {node: place for place, node in enumerate(program.graph.nodes)}
        self._dead = set[torch.fx.Node]()  # views that nobody reads; autograd makes written views again
        for node in reversed(program.graph.nodes):
            if (_is_view(node) or node.target is operator.getitem) and self._dead.issuperset(node.users):
                self._dead.add(node)
        self._memory: dict[torch.fx.Node, int] = {}
        self._sharing: dict[int, list[torch.fx.Node]] = defaultdict(list)
        same: dict[int, int] = {}  # the memory of the input of a dropout that drops nothing, by the output's
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and node not in self._dead:
                memory = memory_of(value)
                if _drops_nothing(node):
                    same[memory] = self._memory[node.args[0]]
                self._memory[node] = same.get(memory, memory)
                self._sharing[self._memory[node]].append(node)
        self._writes_by_memory: dict[int, dict[torch.fx.Node, _Write] | None] = {}

    def out_of_place(self, node: torch.fx.Node) -> FunctionalOp | None:
        """Return the replacement of an operator that writes to one argument and returns that argument."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        functional, written = _functional_overload(target), _written_argument(node)
        if functional is None or written is None:
            return None
        write = (self._writes(self._memory[written]) or {}).get(node)
        if write is None:
            return None
        kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
        value = functional(*pytree.tree_map_only(torch.fx.Node, _fake, tuple(node.args)), **_fakes(kwargs))
        kept = node.meta["val"]
        if (value.shape, value.dtype) != (kept.shape, kept.dtype):
            return None  # the written tensor keeps its dtype
        updates = {self._buffers[write.root.name]: 0} if write.root.name in self._buffers and not write.path else {}
        renewed = dict.fromkeys(write.renewed, 0)
        return FunctionalOp(
            functional, tuple(node.args), kwargs, kept, updates, write.written, renewed, write.made_again
        )

    def batch_norm(self, node: torch.fx.Node) -> FunctionalOp | None:
        """Return the replacement of a batch norm that updates its running statistics."""
        x, weight, bias, mean, variance, training, momentum, eps, _ = node.args
        updates, renewed = dict[str, int](), dict[str, int]()
        for index, statistic in ((3, mean), (4, variance)):
            assert isinstance(statistic, torch.fx.Node)
            write = (self._writes(self._memory[statistic]) or {}).get(node)
            if write is None or write.root.name not in self._buffers or write.path:
                return None
            updates[self._buffers[write.root.name]] = index
            renewed |= dict.fromkeys(write.renewed, index)
        args = (x, weight, bias, mean, variance, training, momentum, eps)
        value = FUNCTIONAL_BATCH_NORM(*pytree.tree_map_only(torch.fx.Node, _fake, args))
        return FunctionalOp(FUNCTIONAL_BATCH_NORM, args, {}, value, updates, renewed=renewed)

    def _writes(self, memory: int) -> dict[torch.fx.Node, _Write] | None:
        """Return the writes to a memory; None if an alias is not understood."""
        if memory not in self._writes_by_memory:
            self._writes_by_memory[memory] = self._found_writes(memory)
        return self._writes_by_memory[memory]

    def _found_writes(self, memory: int) -> dict[torch.fx.Node, _Write] | None:
        sharing = self._sharing[memory]
        root, *others = sharing
        if not self._owns_memory(root):
            return None
        statistics = [user for node in sharing for user in node.users if _writes_statistic(user, node)]
        nodes = sorted({*others, *statistics}, key=self._order.__getitem__)
        last = max(self._order[node] for node in nodes if is_in_place(node) or node in statistics)
        writes: dict[torch.fx.Node, _Write] = {}
        paths: dict[torch.fx.Node, tuple[View, ...]] = {root: ()}  # what each node is a part of, from the outermost
        for node in nodes:
            if self._order[node] > last:
                break
            source = _statistic(node, sharing) if node in statistics else _written_argument(node) or node.args[0]
            if source not in paths:
                return None
            assert isinstance(source, torch.fx.Node)
            if node in statistics or is_in_place(node):
                writes[node] = self._write(node, root, paths, paths[source])
                if node not in statistics:
                    paths[node] = paths[source]
            elif _is_unchanged(node, source):
                paths[node] = paths[source]
            elif node.target in SCATTERS or node.target in SHAPES or node.target in EXCHANGES:
                paths[node] = (*paths[source], View(node, source))
            else:
                return None
        known = {*sharing, *self._dead, *writes}
        return writes if all(self._only_read(node, known, last) for node in paths) else None

    def _owns_memory(self, root: torch.fx.Node) -> bool:
        if root.op == "placeholder":
            return root.name in self._buffers
        return _never_aliases(root.args[0] if root.target is operator.getitem else root)  # type: ignore[arg-type]

    def _write(
        self,
        node: torch.fx.Node,
        root: torch.fx.Node,
        paths: Mapping[torch.fx.Node, tuple[View, ...]],
        path: tuple[View, ...],
    ) -> _Write:
        """Return a write to the part at `path`, with the tensors read later that it changes."""
        read = [other for other in paths if self._read_after(other, node)]
        same = [other for other, way in paths.items() if _steps(way) == _steps(path)]
        owners = [view.owner for view in path]
        again = [other for other in read if other not in same and other not in owners]
        is_buffer = root.op == "placeholder"
        first = next((place for place, owner in enumerate(owners) if owner in read), len(path))
        written = path if again or is_buffer else path[first:]
        renewed = tuple(other.name for other in same if other in read)
        return _Write(root, path, written, renewed, tuple(Path(other, root, paths[other]) for other in again))

    def _only_read(self, node: torch.fx.Node, known: Set[torch.fx.Node], last: int) -> bool:
        """Tell whether nothing but the views of the same memory can alias a node before the last write."""
        others = [user for user in node.users if user not in known and self._order[user] < last]
        return all(_never_aliases(user) or (is_in_place(user) and user.args[0] is not node) for user in others)

    def _read_after(self, value: torch.fx.Node, node: torch.fx.Node) -> bool:
        return any(self._order[user] > self._order[node] for user in value.users if user not in self._dead)


@dataclass(frozen=True)
class _Write:
    """A write to the part of `root`'s memory at `path`; see `FunctionalOp`."""

    root: torch.fx.Node
    path: tuple[View, ...]
    written: tuple[View, ...]
    renewed: tuple[str, ...]
    made_again: tuple[Path, ...]


def _steps(path: Sequence[View]) -> list[Any]:
    """Return a key of a path; two paths to the same part have the same key."""
    return [(view.node.target, view.node.args[1:], view.node.kwargs) for view in path]


def _fake(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def _fakes(arguments: Any) -> Any:
    return pytree.tree_map_only(torch.fx.Node, _fake, arguments)


def _writes_statistic(node: torch.fx.Node, statistic: torch.fx.Node) -> bool:
    return updates_statistics(node) and statistic in node.args[3:5]


def _statistic(node: torch.fx.Node, sharing: Sequence[torch.fx.Node]) -> Any:
    return next(statistic for statistic in node.args[3:5] if statistic in sharing)


def _is_unchanged(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Tell whether a node is its input: the same elements in the same order."""
    if _drops_nothing(node):
        return True
    if node.target not in UNCHANGED:
        return False
    same = [(value.shape, value.stride(), value.storage_offset(), value.dtype) for value in map(_fake, (node, source))]
    return bool(same[0] == same[1])


def _drops_nothing(node: torch.fx.Node) -> bool:
    return node.target in DROPOUTS and bool(node.args[1] == 0 or not node.args[2])


def _written_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument that an operator writes to, the first or `out`; None if it is another, or several."""
    if not is_in_place(node):
        return None
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    written = [place for place, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    if written == [0]:
        first = node.args[0]
    elif len(written) == 1 and arguments[written[0]].name == "out":
        first = node.kwargs.get("out")
    else:
        return None
    return first if isinstance(first, torch.fx.Node) else None


def _functional_overload(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that returns a new tensor and whose arguments, but for `out`, have the same names."""
    packet = getattr(getattr(torch.ops, target.namespace), target._opname.removesuffix("_"), None)
    names = [argument.name for argument in target._schema.arguments if argument.name != "out"]
    overloads = [target._overloadname] if target._opname.endswith("_") else packet.overloads() if packet else []
    for name in overloads:
        functional = getattr(packet, name, None)
        if functional is None or functional is target or functional._schema.is_mutable:
            continue
        if [argument.name for argument in functional._schema.arguments] == names and _same_types(functional, target):
            return functional  # type: ignore[no-any-return]
    return None


def _same_types(functional: torch._ops.OpOverload, target: torch._ops.OpOverload) -> bool:
    given = [argument for argument in target._schema.arguments if argument.name != "out"]
    pairs = zip(functional._schema.arguments, given, strict=True)
    return all(str(own.type) == str(other.type) for own, other in pairs)


def _never_aliases(node: torch.fx.Node) -> bool:
    """Tell whether an operator's outputs certainly do not alias its inputs."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "ascend_parallel_trace":
        return False  # a block's stub stands for operators that may
    name = str(node.target.name())  # type: ignore[no-untyped-call]
    if any(output.alias_info is not None for output in node.target._schema.returns):
        return False
    # a composite operator may return its input, which neither its schema nor the trace says: dropout in evaluation
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd") or _makes_new(node)


def _makes_new(node: torch.fx.Node) -> bool:
    """Tell, by running an operator on its fake arguments, whether its outputs are no views of its inputs."""
    args, kwargs = _fakes((tuple(node.args), dict(node.kwargs)))
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except RuntimeError:
        return False  # it needs more than fake tensors: not known
    memories = set(map(memory_of, given))
    return all(memory_of(leaf) not in memories for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor))


def _is_view(node: torch.fx.Node) -> bool:
    """Tell whether an operator's output is a view of its input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(output.alias_info is not None for output in target._schema.returns)


def _is_vmap(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__module__", "").startswith("torch._functorch")


def memory_of(tensor: torch.Tensor) -> int:
    """Return a key that tensors share if they share memory; fake tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
