"""Traces a model's forward into a `Graph`, by torch.export with fake tensors: computes nothing."""

from __future__ import annotations

import itertools
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from traceback import extract_tb
from types import TracebackType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import (
    BUFFER,
    CALL,
    CONSTANT,
    INPUT,
    PARAMETER,
    Graph,
    Node,
    OpCall,
    Ref,
    TensorMeta,
    Value,
    bind,
    collector_paused,
    first_names,
    tied_names,
)
from ascend_parallel.sharding.tracing.block_stubs import CannotExpandError, Stubs
from ascend_parallel.sharding.tracing.determinism import (
    CheckedForward,
    ForwardChangesError,
    checked_forward,
    random_states_kept,
)
from ascend_parallel.sharding.tracing.function_calls import Recording, calls_of
from ascend_parallel.sharding.tracing.functionalize import (
    FunctionalOp,
    Path,
    View,
    ViewCall,
    changes_others,
    functional_ops,
    inverse,
    view_call,
)
from ascend_parallel.sharding.tracing.marked_tensors import placements_of, plain_tensors
from ascend_parallel.sharding.tracing.model_files import is_model_file
from ascend_parallel.sharding.tracing.same_blocks import ForwardNotes
from ascend_parallel.sharding.tracing.strategy_marks import check_marks, mark_of

VALUES = (
    "the value of a tensor decides what runs next (if, while, .item(), .tolist(), a loop over a tensor). A graph runs "
    "the same operators for all values: choose by torch.where or multiply by a mask, or make the number an argument of "
    "the forward"
)
EXPERTS = '(transformers: experts_implementation="batched_mm" or "grouped_mm")'
SHAPES = (
    "the shape of a tensor depends on its values (nonzero, a boolean index, unique), and shapes have to be fixed: keep "
    "the shape, and choose by torch.where or multiply by a mask. Experts compute all tokens and are weighted, with 0 "
    f"for those not chosen {EXPERTS}"
)
NUMPY = "numpy computes outside of torch: compute with tensors, or give the number as an argument of the forward"
CONTAINER = (
    "return tensors in tuples, lists, dicts or dataclasses known to torch.utils._pytree (transformers: "
    "config.use_cache = False, so that no cache is returned)"
)
CONTROL_FLOW = "write out both branches and choose by torch.where"
# What the first line of an exception's name and message matches, and what to do; the first match counts.
ADVICE = (
    (r"DynamicOutputShape|nonzero|unbacked.*u\d+ \(", SHAPES),
    (r"data-dependent|DataDependent|_local_scalar_dense|Cannot (cast|convert).*Sym", VALUES),
    (r"numpy", NUMPY),
    (r"not a known type|pytree", CONTAINER),
    (r"higher order operator|HigherOrderOp", CONTROL_FLOW),
)
FRAME = re.compile(r'File "(.+?)", line (\d+)')


def reason(error: BaseException) -> str:
    """Return why torch.export failed, beginning with the line of the model, such as "model.py:12: ...; ..."."""
    lines = str(error).strip().splitlines()
    message = lines[0].partition(". See https://")[0].rstrip() if lines else type(error).__name__
    place, found = _place(error), _advice(error, message)
    if found in (VALUES, SHAPES):
        message, found = found, ""  # torch's message has names of symbols; it remains as the cause
    return (f"{place}: " if place else "") + message + (f"; {found}" if found else "")


def place_of(node: torch.fx.Node) -> str:
    """Return "file:line: " of the model's line that ran a traced node, or "" if that is unknown."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    places = [f"{file}:{line}: " for file, line in frames if is_model_file(file)]
    return places[-1] if places else ""


def _advice(error: BaseException, message: str) -> str:
    text = f"{type(error).__name__}: {message}"
    if re.search("data-dependent", text) and re.search(r"Size-like symbols: u", text):
        return SHAPES
    return next((advice for pattern, advice in ADVICE if re.search(pattern, text)), "")


def _place(error: BaseException) -> str:
    """Return the innermost line of the model in the traceback of an exception or of one that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        place = _innermost(seen.__traceback__)
        if place:
            return place
        seen = seen.__cause__ or seen.__context__
    return ""


def _innermost(traceback: TracebackType | None) -> str:
    frames = [frame for frame in extract_tb(traceback) if is_model_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


log = logging.getLogger("ascend_parallel")

KINDS = {
    InputKind.USER_INPUT: INPUT,
    InputKind.PARAMETER: PARAMETER,
    InputKind.BUFFER: BUFFER,
    InputKind.CONSTANT_TENSOR: CONSTANT,
}
HELD = (PARAMETER, BUFFER, CONSTANT)
# Assertions that torch.export inserts; they compute nothing.
CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default")


class TraceError(ValueError):
    """The model cannot be traced, or does something that a sharded graph cannot do."""


def trace(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, twice: bool = True
) -> Graph:
    """Return the graph of the operators that ``model(*args, **kwargs)`` runs.

    twice
        Run the forward a second time, to find out whether it does the same.

    The shapes are those of `args`; the tensors may be on the meta device. DTensors among the parameters, buffers and
    arguments count as whole tensors, and the graph keeps the placements of parameters and buffers (`Graph.placed`);
    `shard_tensor` and `reshard` inside the forward leave their placements as the strategy of a node. Raises
    `TraceError` for a model that torch.export cannot trace, for scopes (autocast that is on, control flow) inside the
    forward, and for a forward that differs from run to run (`determinism.py`). The error names the line of the model
    and what to write instead.
    """
    if isinstance(args, torch.Tensor):
        raise TypeError("args is a tensor: give the arguments as a tuple, such as (x,)")
    placed = placements_of(model)
    arguments = (tuple(args), dict(kwargs or {}))
    with collector_paused(), plain_tensors(model, arguments) as (plain, (plain_args, plain_kwargs)):
        try:
            graph = _traced(plain, plain_args, plain_kwargs, twice)
        except TraceError as error:
            raise TraceError(_without_what_is_set(str(error), model)) from error
    return replace(graph, placed=placed, tied=tied_names(model))


def _without_what_is_set(message: str, model: torch.nn.Module) -> str:
    """Return a message that does not advise an option of transformers that the model has and these experts ignore."""
    configs = (getattr(module, "config", None) for module in model.modules())
    chosen = {getattr(config, "_experts_implementation", None) for config in configs}
    for name in ("batched_mm", "grouped_mm"):
        if name in chosen:
            ignored = f"(these do not read experts_implementation, which is {name!r}: write them so)"
            return message.replace(EXPERTS, ignored)
    return message


def _traced(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], twice: bool) -> Graph:
    given = (args, kwargs)
    args, kwargs = _without_shared_tensors(args, kwargs)
    # where gradients are off is the model's own choice, not the caller's
    with torch.enable_grad(), _quiet(), random_states_kept():
        try:
            checked = checked_forward(model, args, kwargs) if twice else CheckedForward()
        except ForwardChangesError as error:
            raise TraceError(str(error)) from error
        try:
            graph = _exported(model, args, kwargs, checked.notes)
        except CannotExpandError:
            graph = _exported(model, args, kwargs, None)
    if checked.failure:
        name = type(model).__name__
        log.warning("whether the forward of %s does the same every time was not checked: %s", name, checked.failure)
    training = any(module.training for module in model.modules())
    binding, blocks = bind(model, *given), checked.notes.same_blocks() if checked.notes is not None else {}
    return replace(graph, binding=binding, training=training, only_in_python=checked.only_in_python, blocks=blocks)


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], notes: ForwardNotes | None
) -> Graph:
    """Return the graph of one torch.export, with stubs for the blocks that did the same by the notes of a run."""
    recording = Recording()
    same = notes.repeatable_blocks(model) if notes is not None else {}
    stubs = Stubs(same, notes, recording) if same and notes is not None else None
    try:
        # node metadata carries the marks
        with preserve_node_meta(), stubs.stubbing(model) if stubs else nullcontext(), recording.noting(model):
            program = torch.export.export(model, args, kwargs, strict=False)
        replacements = functional_ops(program)
        if isinstance(replacements, torch.fx.Node):
            if stubs is not None:
                raise CannotExpandError
            program = program.run_decompositions({})  # ambiguous aliasing: torch's own functionalization
            recording.refuse(
                f"{place_of(replacements)}{replacements.target} writes to a tensor with aliases: write it out of place"
            )
            replacements = {}
        if stubs is not None and any(map(changes_others, replacements.values())):
            raise CannotExpandError
    except Exception as error:  # torch.export passes on any exception
        if stubs is not None:
            raise CannotExpandError from error  # what the stubs leave out may be missing
        raise TraceError(f"{type(model).__name__} cannot be traced by torch.export: {reason(error)}") from error
    builder = _Builder(program, replacements)
    graph, values, rewritten = builder.build(), builder.values, builder.rewritten
    if stubs is not None:
        expansion = stubs.expanded(graph, values, first_names(model))
        graph, values, recording.calls = expansion.graph, expansion.values, expansion.calls
    check_marks(graph)
    return replace(graph, calls=calls_of(recording, graph, values, rewritten))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of an exception that is raised anyway, and from warning of its own code."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            # run_decompositions copies its own LeafSpecs, which torch 2.13 deprecates
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
            yield
    finally:
        logger.disabled = before


def _without_shared_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clone tensors that are passed twice: torch.export would make a single input of both arguments."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, own, (args, kwargs))  # type: ignore[no-any-return]


class _Builder:
    """Turns an exported program into a graph."""

    def __init__(self, program: ExportedProgram, replacements: Mapping[str, FunctionalOp]) -> None:
        self._program, self._replacements = program, replacements
        self._input_specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self._nodes: dict[str, Node] = {}
        self._written: dict[str, Value] = {}
        self.values: dict[str, Any] = {}  # a Value or a list of Values, by the name of the program's node
        # {name of an operator that writes: the other nodes that it changed, by name, with their new values}
        self.rewritten: dict[str, dict[str, Value]] = {}
        self._now: dict[str, Value] = {}  # the values of nodes that were written to

    def build(self) -> Graph:
        returned: Sequence[Any] = ()
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._add_placeholder(node)
            elif node.op == "output":
                returned = node.args[0]
            elif node.target is operator.getitem:
                self.values[node.name] = self._value(node.args[0])[node.args[1]]
            elif str(node.target) not in CHECKS:
                self._add_call(node)
        graph = Graph(
            self._nodes,
            self._outputs(returned),
            dict(self._program.constants),
            self._updates(returned),
            frozenset(node.name for node in self._program.graph.nodes if _requires_gradient(node, self._nodes)),
        )
        used = {value.node for node in self._nodes.values() for value in node.inputs}
        used |= {value.node for value in graph.kept}
        # A tied parameter has several names, of which only one is read.
        nodes = {name: node for name, node in self._nodes.items() if node.kind not in HELD or name in used}
        return replace(graph, nodes=nodes)

    def _add_placeholder(self, node: torch.fx.Node) -> None:
        spec = self._input_specs[node.name]
        if spec.kind not in KINDS:
            raise TraceError(f"the model has an input of kind {spec.kind.name}, which a sharded graph does not know")
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            return  # a number: torch.export has inlined it
        source = spec.target or node.name
        self._nodes[node.name] = Node(node.name, KINDS[spec.kind], (_meta(meta, node),), source=source)
        self.values[node.name] = Value(node.name)

    def _add_call(self, node: torch.fx.Node) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise TraceError(
                f"{place_of(node)}{_module(node) or 'the model'} runs {node.target}, a graph of its own; move control "
                f"flow and inference_mode out of the forward: {CONTROL_FLOW}"
            )
        inputs: list[Value] = []

        def reference(argument: torch.fx.Node) -> Ref:
            inputs.append(self._value(argument))
            return Ref(len(inputs) - 1)

        own = FunctionalOp(node.target, tuple(node.args), node.kwargs, node.meta.get("val"))
        operation = self._replacements.get(node.name) or own
        arguments = (operation.args, dict(operation.kwargs))
        args, kwargs = pytree.tree_map_only(torch.fx.Node, reference, arguments)
        value: Any = operation.value
        fakes = value if isinstance(value, (list, tuple)) else [value]
        outputs = tuple(_meta(fake, node) for fake in fakes if isinstance(fake, torch.Tensor))
        if not outputs:
            raise TraceError(
                f"{place_of(node)}{_module(node) or 'the model'} runs {node.target}, which returns no tensor; {VALUES}"
            )
        metas = tuple(map(self._meta_of, inputs))
        call = OpCall(operation.target, args, kwargs, metas, outputs)
        self._nodes[node.name] = Node(node.name, CALL, outputs, call, tuple(inputs), _module(node), mark=mark_of(node))
        several = isinstance(node.meta.get("val"), (list, tuple))
        self.values[node.name] = _places(node.name, value) if several else Value(node.name)
        self._written |= {buffer: Value(node.name, index) for buffer, index in operation.updates.items()}
        self._renew(node, {name: Value(node.name, index) for name, index in operation.renewed.items()})
        self._put_back(node, operation.written)
        self._make_again(node, operation.made_again)

    def _value(self, node: torch.fx.Node) -> Any:
        return self._now.get(node.name, self.values[node.name])

    def _renew(self, write: torch.fx.Node, values: Mapping[str, Value]) -> None:
        """Note that nodes, by name, have new values after `write`."""
        self._now |= values
        if values:
            self.rewritten.setdefault(write.name, {}).update(values)

    def _put_back(self, write: torch.fx.Node, views: Sequence[View]) -> None:
        """Put what `write` wrote to the last of `views` into the tensors that it is a part of."""
        if not views:
            return
        parts = [self._value(views[0].owner)]
        for view, inner in pairwise(views):
            name = f"{write.name}_{view.node.name}"
            parts.append(self._add_view(name, view_call(view), parts[-1:], inner.owner, write))
        new = Value(write.name)
        for view, part in zip(reversed(views), reversed(parts), strict=True):
            back = inverse(view)
            inputs = [part, new] if back.reads_owner else [new]
            new = self._add_view(f"{write.name}_{view.node.name}_scatter", back, inputs, view.owner, write)
            self._renew(write, {view.owner.name: new})
        buffer = self._program.graph_signature.inputs_to_buffers.get(views[0].owner.name)
        if buffer is not None:
            self._written[buffer] = new

    def _make_again(self, write: torch.fx.Node, paths: Sequence[Path]) -> None:
        """Make the views anew that are read after `write`."""
        for path in paths:
            value = self._value(path.root)
            for view in path.views:
                name = f"{write.name}_{view.node.name}_again"
                if name not in self._nodes:
                    self._add_view(name, view_call(view), [value], view.node, write)
                value = Value(name)
            self._renew(write, {path.node.name: value})

    def _add_view(
        self, name: str, call: ViewCall, inputs: Sequence[Value], like: torch.fx.Node, write: torch.fx.Node
    ) -> Value:
        """Add a view, or its inverse, whose result has the shape of `like`."""
        metas, meta = tuple(map(self._meta_of, inputs)), _meta(like.meta["val"], like)
        args = (*map(Ref, range(len(inputs))), *call.args)
        operation = OpCall(call.target, args, dict(call.kwargs), metas, (meta,))
        self._nodes[name] = Node(name, CALL, (meta,), operation, tuple(inputs), _module(write))
        return Value(name)

    def _meta_of(self, value: Value) -> TensorMeta:
        return self._nodes[value.node].outputs[value.index]

    def _updates(self, returned: Sequence[Any]) -> dict[str, Value]:
        """Return the new values of the buffers that the forward writes; raise `TraceError` if it writes to an input."""
        updates = dict(self._written)
        for output, spec in zip(returned, self._program.graph_signature.output_specs, strict=True):
            if spec.kind.name == "BUFFER_MUTATION":
                updates[str(spec.target)] = self._value(output)
            elif spec.kind.name != "USER_OUTPUT":
                raise TraceError(f"the forward writes to its input {spec.target!r}: write to a copy")
        return updates

    def _outputs(self, returned: Sequence[Any]) -> Any:
        """Return the user outputs in the model's nesting; the program returns updated buffers before them."""
        specs = self._program.graph_signature.output_specs
        leaves = [
            self._value(output) if isinstance(output, torch.fx.Node) else output
            for output, spec in zip(returned, specs, strict=True)
            if spec.kind.name == "USER_OUTPUT"
        ]
        assert self._program.call_spec.out_spec is not None
        return pytree.tree_unflatten(leaves, self._program.call_spec.out_spec)


def _requires_gradient(node: torch.fx.Node, nodes: Mapping[str, Node]) -> bool:
    value = node.meta.get("val")
    is_input = node.name in nodes and nodes[node.name].kind == INPUT
    return is_input and isinstance(value, torch.Tensor) and value.requires_grad


def _places(name: str, value: Sequence[Any]) -> list[Value | None]:
    """Return the values by getitem's index: a Value for each tensor, None for other outputs, which are not counted."""
    count = itertools.count()
    return [Value(name, next(count)) if isinstance(output, torch.Tensor) else None for output in value]


def _meta(tensor: torch.Tensor, node: torch.fx.Node) -> TensorMeta:
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        raise TraceError(f"{place_of(node)}{_module(node) or 'the model'} runs {node.target}: {SHAPES}")
    return TensorMeta(tuple(int(size) for size in tensor.shape), tensor.dtype)


def _module(node: torch.fx.Node) -> str:
    """Return the path of the innermost module that runs the node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.removeprefix("L['self'].").removeprefix("L['self']")
