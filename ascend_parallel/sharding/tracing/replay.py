"""Repeats the nodes of a traced block for another block of its kind, instead of tracing the other block's forward.

The new nodes are those that tracing would make: names, arguments, module paths, lines, shapes and shared memory; only
autograd's sequence numbers (`seq_nr`) are the old ones. So are the recorded calls of torch's functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor

from ascend_parallel.sharding.graph import ParameterRef, Ref, UntracedTensor
from ascend_parallel.sharding.tracing.block_keys import UnknownValueError, flattened, key_of_tensor, rebuilt
from ascend_parallel.sharding.tracing.block_results import Memory, Output, outputs_of
from ascend_parallel.sharding.tracing.function_calls import RecordedCall, Recording
from ascend_parallel.sharding.tracing.repeated_blocks import BlockCall
from ascend_parallel.sharding.tracing.replayed_nodes import (
    Counts,
    Surroundings,
    check_nodes,
    copied,
    form_of,
)

ORIGINS = (ParameterRef, Ref, UntracedTensor)


@dataclass(frozen=True, eq=False)
class _Record:
    """What a block's call did.

    numbers
        {node of a parameter, buffer or argument: its number}.
    moved
        The nodes of parameters, buffers and arguments after the block, by number, where an operator returned its input.
    returned, outputs
        The result, and where each of its leaves comes from.
    calls, origins
        The recorded calls of functions, and {origin of a parameter, buffer or argument in them: its number}.
    counts
        How often the tracer met each torch function and module in the block.
    form
        What two blocks that did the same have in common.
    """

    nodes: tuple[Node, ...]
    numbers: Mapping[Node, int]
    moved: Mapping[int, Node]
    returned: Any
    outputs: tuple[Output, ...]
    calls: tuple[RecordedCall, ...]
    origins: Mapping[Any, int]
    around: Surroundings
    counts: Counts
    last_function: Any
    form: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and bool(self.form == other.form)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class NodeRecorder:
    """Records and repeats the nodes of torch.export's tracer; see `repeated_blocks.BlockRecorder`."""

    recording: Recording

    def key_of(self, call: BlockCall) -> Any:
        """Return which tensors have a node or origin in common; raise `UnknownValueError` for one without a node."""
        tracer = _tracer()
        prefix = Surroundings.of(tracer).prefix
        if prefix.partition(".")[2] != call.path or tracer.num_calls[prefix] != 1:
            raise UnknownValueError("a block that runs twice, or is not called as a module")
        origins = [self._origin(tensor) for tensor in call.tensors]
        if any(isinstance(origin, ParameterRef) for origin in origins[call.own :]):
            raise UnknownValueError("a parameter among the arguments")
        nodes: dict[Node, int] = {}
        return tuple(nodes.setdefault(_node(tensor), len(nodes)) for tensor in call.tensors), tuple(map(type, origins))

    def begin(self, call: BlockCall) -> Any:
        """Return the number of the tracer's nodes, calls and so on, and the nodes of the block's tensors."""
        tracer = _tracer()
        origins = {self._origin(tensor): number for number, tensor in reversed(list(enumerate(call.tensors)))}
        own = tuple(map(_node, call.tensors))
        return (len(tracer.graph.nodes), len(self.recording.calls), Counts.of(tracer)), own, origins

    def end(self, begun: Any, call: BlockCall, returned: Any) -> _Record:
        """Return the record; raise `UnknownValueError` for a block that cannot be repeated."""
        tracer, ((before, first_call, counts_before), own, origins) = _tracer(), begun
        around, counts = Surroundings.of(tracer, counts_before), Counts.of(tracer).since(counts_before)
        nodes = tuple(islice(reversed(tracer.graph.nodes), len(tracer.graph.nodes) - before))[::-1]
        numbers: dict[Node, int] = {}
        for number, node in enumerate(own):
            numbers.setdefault(node, number)
        check_nodes(nodes, numbers, around, counts)
        leaves: list[Any] = []
        structure = flattened(returned, leaves)
        made = {node: number for number, node in enumerate(nodes)}
        outputs = outputs_of(leaves, call.tensors, lambda leaf: made.get(_node(leaf)))
        calls = tuple(self.recording.calls[first_call:])
        moved = {
            number: _node(tensor) for number, tensor in enumerate(call.tensors) if _node(tensor) is not own[number]
        }
        metas = tuple(key_of_tensor(leaf, {}) for leaf in leaves if isinstance(leaf, torch.Tensor))
        form = (
            form_of(nodes, numbers, around),
            [_form_of_call(entry, origins, nodes) for entry in calls],
            (
                {number: made.get(node) for number, node in moved.items()},
                structure,
                outputs,
                metas,
                counts.functions,
                counts.below(around.prefix),
            ),
        )
        last = tracer.torch_fn_metadata
        return _Record(nodes, numbers, moved, returned, outputs, calls, origins, around, counts, last, form)

    def replay(self, record: _Record, call: BlockCall) -> Any:
        """Add the nodes and calls of a block to the tracer's graph and the recording; return the block's result."""
        tracer = _tracer()
        memory = Memory(
            [node.meta["val"] for node in record.numbers], [_value(call, n) for n in record.numbers.values()]
        )
        live: dict[int, torch.Tensor] = {}
        for output in record.outputs:
            if output.is_made and output.number not in live:
                live[output.number] = memory.live(record.nodes[output.number].meta["val"], output)
        around = Surroundings.of(tracer, Counts.of(tracer))
        nodes = {node: _node(call.tensors[number]) for node, number in record.numbers.items()}
        for node in record.nodes:
            nodes[node] = copied(node, nodes, tracer, memory, (record.around, around))
        around.advance(tracer, record.counts, record.around)
        tracer.torch_fn_metadata = record.last_function
        origins = {origin: self._origin(call.tensors[number]) for origin, number in record.origins.items()}
        live_nodes = [(live[number], record.nodes[number]) for number in live]
        for tensor, node in (*live_nodes, *((call.tensors[number], node) for number, node in record.moved.items())):
            track_tensor(tensor, Proxy(nodes[node], tracer), constant=None, tracer=tracer)
        origins |= {UntracedTensor(node.name): UntracedTensor(nodes[node].name) for node in record.nodes}
        self.recording.calls.extend(_moved(entry, origins) for entry in record.calls)
        leaves = [live[output.number] if output.is_made else output.leaf(call.tensors) for output in record.outputs]
        return rebuilt(record.returned, iter(leaves))

    def _origin(self, tensor: torch.Tensor) -> Any:
        return self.recording.origins.get(id(tensor)) or UntracedTensor(str(_node(tensor).name))


def _tracer() -> Any:
    mode = get_proxy_mode()
    if mode is None:
        raise UnknownValueError("no tracer")
    return mode.tracer


def _node(tensor: torch.Tensor) -> Node:
    slot = get_proxy_slot(tensor, _tracer(), None)
    if slot is None or slot.constant is not None:
        raise UnknownValueError("a tensor without a node, or a constant")
    node: Node = slot.proxy.node
    return node


def _value(call: BlockCall, number: int) -> torch.Tensor:
    value: torch.Tensor = _node(call.tensors[number]).meta["val"]
    return value


def _form_of_call(entry: RecordedCall, origins: Mapping[Any, int], nodes: Sequence[Node]) -> Any:
    places = {node.name: place for place, node in enumerate(nodes)}

    def number(leaf: Any) -> Any:
        if leaf in origins:
            return ("input", origins[leaf])
        if leaf.name not in places:
            raise UnknownValueError("a call that reads a tensor from outside of the block")
        return ("node", places[leaf.name])

    function, arguments, spec, results, results_spec, changed = entry
    leaves = [number(leaf) if isinstance(leaf, ORIGINS) else repr(leaf) for leaf in (*arguments, *results)]
    return function, leaves, spec, results_spec, changed


def _moved(entry: RecordedCall, origins: Mapping[Any, Any]) -> RecordedCall:
    """Return a recorded call with the tensors of another block."""
    function, arguments, spec, results, results_spec, changed = entry
    moved = [
        [origins[leaf] if isinstance(leaf, ORIGINS) else leaf for leaf in leaves] for leaves in (arguments, results)
    ]
    return function, moved[0], spec, moved[1], results_spec, changed
