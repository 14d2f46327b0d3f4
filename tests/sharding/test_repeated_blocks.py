"""A model whose repeated blocks are copied has the graph of a model that is traced block by block, node by node."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import GPT, Llama
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.tracing import repeated_blocks, replay, replayed_nodes
from ascend_parallel.sharding.tracing import trace as tracing
from ascend_parallel.sharding.tracing.strategy_marks import KEY
from ascend_parallel.sharding.tracing.trace import TraceError, trace

TOKENS = torch.zeros(2, 16, dtype=torch.long)
COUNT = 5


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Graph, Graph, int]]:
    """Trace a model with and without copies; return both graphs and the number of copies; programs must be equal."""
    programs: list[ExportedProgram] = []
    copies = []
    functional, copied = tracing.functional_ops, replay.NodeRecorder.replay

    def seen(program: ExportedProgram) -> Any:
        programs.append(program)
        return functional(program)

    def counted(self: replay.NodeRecorder, record: Any, call: Any) -> Any:
        copies.append(call.path)
        return copied(self, record, call)

    monkeypatch.setattr(tracing, "functional_ops", seen)
    monkeypatch.setattr(replay.NodeRecorder, "replay", counted)

    def traced(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Graph, Graph, int]:
        graph, count = trace(model, args, kwargs), len(copies)
        with monkeypatch.context() as patch:
            patch.setattr(repeated_blocks, "repeated_blocks", lambda _model: [])
            plain = trace(model, args, kwargs)
        assert len(copies) == count
        assert _nodes(programs[-2]) == _nodes(programs[-1])
        assert graph.calls == plain.calls
        assert graph.nodes == plain.nodes
        assert (graph.outputs, graph.updates) == (plain.outputs, plain.updates)
        assert graph.only_in_python == plain.only_in_python
        return graph, plain, count

    return traced


def _nodes(program: ExportedProgram) -> list[Any]:
    """Return all that a program's nodes say, and which of them share memory."""
    memories: dict[int, int] = {}

    def shared(node: torch.fx.Node) -> Any:
        values = node.meta.get("val")
        values = values if isinstance(values, (list, tuple)) else [values]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        numbers = [memories.setdefault(value.untyped_storage()._cdata, len(memories)) for value in tensors]
        layouts = [(value.stride(), value.storage_offset(), value.dtype, value.device) for value in tensors]
        return numbers, layouts

    return [
        (
            (node.op, node.name, str(node.target), str(node.args), str(node.kwargs), shared(node)),
            {key: str(value) for key, value in node.meta.items() if key not in ("seq_nr", "custom")},
            (node.meta.get("custom") or {}).get(KEY),
        )
        for node in program.graph.nodes
    ]


class Block(nn.Module):
    """A block with a branch for most of what may differ between blocks."""

    def __init__(self, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.linear(x)) * self.mask * self.scale


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x * 2


def stack_of(kind: Callable[[], nn.Module] = Block, count: int = COUNT) -> Stack:
    """Return a stack of equal blocks."""
    return Stack(*(kind() for _ in range(count)))


X = torch.zeros(4, 8)
COUNTED = replayed_nodes._counted


@pytest.mark.parametrize("model", [Llama(COUNT), GPT(COUNT, dropout=0.1), GPT(COUNT).eval()], ids=lambda m: str(m)[:5])
def test_models_of_the_examples(both: Any, model: nn.Module) -> None:
    graph, plain, copies = both(model, TOKENS, TOKENS)
    assert copies == COUNT - 2
    mesh = ProcessMesh(torch.arange(4).view(2, 2), ["dp", "mp"])
    plans = [propagate(one, mesh, {}, objective="time") for one in (graph, plain)]
    assert plans[0].cost == plans[1].cost
    assert plans[0].layouts == plans[1].layouts


def test_equal_blocks(both: Any) -> None:
    assert both(stack_of(), X)[2] == COUNT - 2


_collections = 0


def _count_collections(_phase: str, _info: dict[str, int]) -> None:
    global _collections  # noqa: PLW0603
    _collections += 1


def test_what_the_garbage_collector_runs_is_not_of_a_block(both: Any) -> None:
    """Hypothesis times collections by such a callback, for as long as the process lives."""
    gc.callbacks.append(_count_collections)
    try:
        _, _, copies = both(stack_of(), torch.zeros(2, 8))
    finally:
        gc.callbacks.remove(_count_collections)
    assert _collections > 0
    assert copies == COUNT - 2


def test_blocks_in_a_sequential(both: Any) -> None:
    assert both(nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(COUNT))), X)[2] == COUNT - 2


def _another_attribute(stack: Stack) -> None:
    stack.blocks[3].scale = 2.0


def _another_shape(stack: Stack) -> None:
    stack.blocks[3].register_buffer("mask", torch.ones(1))


def _a_hook(stack: Stack) -> None:
    stack.blocks[3].linear.register_forward_hook(lambda _module, _args, out: out * 3)


def _a_hook_of_the_block(stack: Stack) -> None:
    stack.blocks[3].register_forward_pre_hook(lambda _module, args: (args[0] - 1,))


def _frozen(stack: Stack) -> None:
    stack.blocks[3].linear.weight.requires_grad_(False)


def _evaluated(stack: Stack) -> None:
    stack.blocks[3].eval()


def _another_class(stack: Stack) -> None:
    class Squared(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) ** 2

    stack.blocks[3] = Squared()


def _another_forward(stack: Stack) -> None:
    stack.blocks[3].forward = lambda x: x - 1  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        _another_attribute,
        _another_shape,
        _a_hook,
        _a_hook_of_the_block,
        _frozen,
        _evaluated,
        _another_class,
        _another_forward,
    ],
)
def test_a_block_that_differs_is_traced(both: Any, change: Callable[[Stack], None]) -> None:
    stack = stack_of()
    change(stack)
    assert both(stack, X)[2] == COUNT - 3


def test_tied_weights_are_traced(both: Any) -> None:
    stack = stack_of(count=6)
    stack.blocks[1].linear.weight = stack.blocks[4].linear.weight
    assert both(stack, X)[2] == 2


class Mutating(Block):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return super().forward(x) * self.steps


class Norm(Block):
    """Updates running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Counting(Block):
    """Behaves by a counter that all blocks of the class share."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.count = (Counting.count + 1) % COUNT
        return super().forward(x) * Counting.count


LAYERS = {"count": 0}


class Global(Block):
    """Behaves by a global variable, which the model changes at the third block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + LAYERS["count"])


class SettingGlobal(Stack):
    """Sets a global variable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            LAYERS["count"] = number // 3
            x = block(x)
        return x


def draws(x: torch.Tensor) -> torch.Tensor:
    """Return random numbers."""
    return torch.rand_like(x)


class Drawing(Block):
    """Draws random numbers and drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x) + draws(x), 0.1, self.training)


def _closure() -> Block:
    class Captured(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + constant

    constant = nn.Parameter(torch.ones(8))
    return Captured()


@pytest.mark.parametrize(
    ("model", "copies"),
    [
        (stack_of(Mutating), 0),
        (stack_of(Norm), 0),
        (stack_of(Counting), 0),
        (SettingGlobal(*(Global() for _ in range(2 * 3))), 1),
        (stack_of(Drawing), COUNT - 2),
    ],
    ids=lambda value: type(getattr(value, "blocks", [value])[0]).__name__,
)
def test_state_outside_of_the_arguments(both: Any, model: nn.Module, copies: int) -> None:
    assert both(model, X)[2] == copies


def _of_a_closure() -> Stack:
    """The blocks scale by a variable of this function, which the model raises at the fourth block."""
    scale = 1

    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * scale

    class Raising(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal scale
            for number, block in enumerate(self.blocks):
                scale = 1 + number // 3
                x = block(x)
            return x

    return Raising(*(Scaled() for _ in range(6)))


def _of_a_default_argument() -> Stack:
    """The blocks scale by what a default argument holds, which the model fills at the fourth block."""

    class Filled(Block):
        def forward(self, x: torch.Tensor, factors: list[int] = []) -> torch.Tensor:  # noqa: B006
            return self.linear(x) * (1 + sum(factors))

    class Filling(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = Filled.forward.__defaults__[0]  # type: ignore[index]
            for number, block in enumerate(self.blocks):
                factors[:] = [number // 3]
                x = block(x)
            return x

    return Filling(*(Filled() for _ in range(6)))


@pytest.mark.parametrize("make", [_of_a_closure, _of_a_default_argument])
def test_what_the_functions_of_a_block_keep_is_compared(both: Any, make: Callable[[], Stack]) -> None:
    assert both(make(), X)[2] < 6 - 2


class Views(Block):
    """Returns a view of a new tensor, and passes an argument on."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        a, b = self.linear(x).unsqueeze(0).chunk(2, dim=-1)
        bias = x.mean(0) if bias is None else bias
        return {"x": torch.cat([b, a], -1)[0].float() + bias, "bias": bias, "constant": 3}


class Passing(Stack):
    """Passes the first block's second result to the others; gradients are off in the last; writes in place at last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.first(x), None
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number != len(self.blocks) - 1):
                out = block(x, bias=bias)
            x, bias = out["x"], out["bias"]
        x += 1
        return x.float()


def test_nested_results_and_grad_mode(both: Any) -> None:
    assert both(Passing(*(Views() for _ in range(7))), X)[2] == 7 - 1 - 2 - 1


def test_an_error_names_the_line_of_the_block() -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.scale < 3 or x.sum() > 0 else x

    stack = stack_of(Branching)
    stack.blocks[4].scale = 3.0
    with pytest.raises(TraceError, match=r"test_repeated_blocks.py:\d+"):
        trace(stack, (X,))


def test_a_forward_that_changes_in_a_late_block_is_refused() -> None:
    stack = stack_of()
    scales = iter(range(1000))

    class Changing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * next(scales)

    stack.blocks[4] = Changing()
    with pytest.raises(TraceError, match="differs from run to run"):
        trace(stack, (X,))


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (replayed_nodes.Memory, "like", lambda _self, tensor: tensor),
        (replayed_nodes, "_counted", lambda name, then, now: COUNTED(name, then, now if now is None else then)),
        (replayed_nodes.Surroundings, "advance", lambda _self, _tracer, _counts, _recorded: None),
        (replay, "_moved", lambda entry, _origins: entry),
    ],
)
def test_a_planted_fault_is_caught(
    both: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, fault)
    with pytest.raises((AssertionError, TraceError)):
        both(stack_of(), X)
