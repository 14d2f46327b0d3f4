"""A model whose repeated blocks are stubs has the graph of a model that is traced block by block, node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import GPT, Llama
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.annotate import shard
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.tracing import block_stubs
from ascend_parallel.sharding.tracing.same_blocks import ForwardNotes
from ascend_parallel.sharding.tracing.trace import TraceError, trace

TOKENS = torch.zeros(2, 16, dtype=torch.long)
COUNT = 5


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Graph, Graph, int]]:
    """Trace a model with and without stubs; return both graphs, which must be equal, and the number of stubs."""
    programs: list[ExportedProgram] = []
    export = torch.export.export

    def seen(*args: Any, **kwargs: Any) -> ExportedProgram:
        programs.append(export(*args, **kwargs))
        return programs[-1]

    monkeypatch.setattr(torch.export, "export", seen)

    def stubs() -> int:
        targets = [str(node.target) for node in programs[-1].graph.nodes]
        return targets.count("ascend_parallel_trace.block.default")

    def traced(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Graph, Graph, int]:
        graph, count = trace(model, args, kwargs), stubs()
        with monkeypatch.context() as patch:
            patch.setattr(ForwardNotes, "repeatable_blocks", lambda *_: {})
            plain = trace(model, args, kwargs)
        assert stubs() == 0
        assert list(graph.nodes) == list(plain.nodes)
        assert [(node.mark is None) for node in graph.nodes.values()] == [
            (node.mark is None) for node in plain.nodes.values()
        ]
        assert _unmarked(graph) == _unmarked(plain)
        assert (graph.only_in_python, graph.blocks) == (plain.only_in_python, plain.blocks)
        return graph, plain, count

    return traced


def _unmarked(graph: Graph) -> Any:
    """Return all that a graph says but its marks, each of which is equal only to itself."""
    nodes = {name: replace(node, mark=None) for name, node in graph.nodes.items()}
    calls = graph.calls
    if not isinstance(calls, str):
        calls = tuple(replace(call, nodes=tuple(nodes[node.name] for node in call.nodes)) for call in calls)
    return nodes, graph.outputs, graph.updates, calls, graph.with_gradient


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [Llama(COUNT), GPT(COUNT, dropout=0.1), GPT(COUNT).eval()], ids=lambda m: str(m)[:5])
def test_models_of_the_examples(both: Any, model: nn.Module) -> None:
    graph, plain, stubs = both(model, TOKENS, TOKENS)
    assert stubs == COUNT - 1
    mesh = ProcessMesh(torch.arange(4).view(2, 2), ["dp", "mp"])
    plans = [propagate(one, mesh, {}, objective="time") for one in (graph, plain)]
    assert plans[0].cost == plans[1].cost
    assert plans[0].layouts == plans[1].layouts


def test_equal_blocks(both: Any) -> None:
    assert both(stack_of(), X)[2] == COUNT - 1


def test_blocks_in_a_sequential(both: Any) -> None:
    assert both(nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(COUNT))), X)[2] == COUNT - 1


class Squared(Block):
    """Does otherwise than its class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


# Of one block, and how many blocks beside the first are traced: hooks of a block itself run outside of its stub, and
# nothing in the block asks whether it is in training.
CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "attribute": (lambda block: setattr(block, "scale", 2.0), 1),
    "shape": (lambda block: block.register_buffer("mask", torch.ones(1)), 1),
    "hook": (lambda block: block.linear.register_forward_hook(lambda _module, _args, out: out * 3), 1),
    "hook of the block": (lambda block: block.register_forward_pre_hook(lambda _module, args: (args[0] - 1,)), 0),
    "frozen": (lambda block: block.linear.weight.requires_grad_(False), 1),
    "evaluated": (lambda block: block.eval(), 0),
    "class": (lambda block: setattr(block, "__class__", Squared), 1),
    "forward": (lambda block: setattr(block, "forward", lambda x: x - 1), 1),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_differs_is_traced(both: Any, change: str) -> None:
    stack, (apply, traced) = stack_of(), CHANGES[change]
    apply(stack.blocks[3])
    assert both(stack, X)[2] == COUNT - 1 - traced


def test_tied_weights_are_traced(both: Any) -> None:
    stack = stack_of(count=6)
    stack.blocks[1].linear.weight = stack.blocks[4].linear.weight
    assert both(stack, X)[2] == 3


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


def _of_a_captured_parameter() -> Stack:
    class Captured(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + stack.first.bias

    stack = stack_of(Captured)
    return stack


class Leaky(Block):
    """Leaves a tensor and a number where the model finds them, beside its result."""

    left: dict[str, Any] = {}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        Leaky.left["last"] = hidden
        Leaky.left["all"].append(hidden)
        return x + hidden


class Finding(Stack):
    """Uses what its blocks have left: ``uses(x, left)``."""

    def __init__(self, uses: Callable[..., torch.Tensor]) -> None:
        super().__init__(*(Leaky() for _ in range(COUNT)))
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Leaky.left = {"all": []}
        return self.uses(super().forward(x), Leaky.left, x)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "stubs"),
    [
        (stack_of(Mutating), 0),
        (stack_of(Norm), 0),
        (stack_of(Counting), 0),
        (SettingGlobal(*(Global() for _ in range(2 * 3))), 4),
        (stack_of(Drawing), COUNT - 1),
        (_of_a_closure(), 1 + 2),
        (_of_a_default_argument(), 1 + 2),
        (_of_a_captured_parameter(), 0),
        (Finding(lambda x, _left, _y: x), COUNT - 1),
        (Finding(lambda x, left, _y: x + left["last"]), COUNT - 2),
        (Finding(lambda x, left, _y: x + sum(left["all"])), 0),
        # nothing but the calls after the blocks tells that their stubs do less
        (Finding(lambda x, left, _y: x * len(left["all"])), 0),
        (Finding(lambda x, left, _y: x + left["all"][COUNT - 1]), 0),
        (Finding(lambda x, left, y: x + (y if len(left["all"]) == COUNT else x)), 0),
    ],
    ids=lambda value: type(getattr(value, "blocks", [value])[0]).__name__,
)
def test_state_outside_of_the_arguments(both: Any, model: nn.Module, stubs: int) -> None:
    assert both(model, X)[2] == stubs


class Views(Block):
    """Returns a view of a new tensor, and passes an argument on."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        a, b = self.linear(x).unsqueeze(0).chunk(2, dim=-1)
        bias = x.mean(0) if bias is None else bias
        return {"x": torch.cat([b, a], -1)[0].float() + bias, "bias": bias, "constant": 3}


class Passing(Stack):
    """Passes the first block's second result to the others; gradients are off in the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.first(x), None
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number != len(self.blocks) - 1):
                out = block(x, bias=bias)
            x, bias = out["x"], out["bias"]
        return x.float()


class WritingToResults(Stack):
    """Writes in place to what a block gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


class WritingInside(Block):
    """Writes in place to a tensor of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        hidden += x
        return F.relu_(hidden * 2)


class WritingToArguments(Block):
    """Writes in place to its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.linear(x)


class ViewOfArgument(Block):
    """Returns a view of its argument beside a new tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + 1, x.view(-1))


class First(Stack):
    """Goes on with the first result of each block; returns other results of the second last."""

    def forward(self, x: torch.Tensor) -> Any:
        others: Any = ()
        for block in self.blocks:
            x, *others = block(x)
        return x, others


class Constant(Block):
    """Makes a tensor of a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.tensor([1.0] * 8)


class Detached(Block):
    """Returns a detached tensor, of which only the last block's is read."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        return x + hidden, hidden.detach(), hidden.mean().detach()


class Casting(Block):
    """Converts its argument to the dtype that it has, which gives the argument."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * scale.to(x.dtype).contiguous() + x.float()


class Scaling(Stack):
    """Hands one tensor to all blocks."""

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale = add if scale is None else scale
        assert scale is not None
        for block in self.blocks:
            x = x + block(x, scale)
        return x * scale


class Dropping(Block):
    """Calls a module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(self.drop(x)))


class OneOf(Block):
    """Calls one of its activations: the operators are the same, the module is another."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.kinds = number, nn.ModuleList([nn.GELU(), nn.GELU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.kinds[self.number % 2](x))


class Experts(Block):
    """Has experts in a list, each of which reads a tensor of the layer."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(Block() for _ in range(count)), nn.Linear(8, count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        parts = [expert(x) * weights[:, number : number + 1] for number, expert in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0)


class Marked(Block):
    """Calls a function with a strategy."""

    strategies = (None, [("mp",)])

    def __init__(self, out: Any = (None, "mp")) -> None:
        super().__init__()
        self.linear_of = shard(F.linear, None, [out])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear_of(x, self.linear.weight)


class InTwoPasses(Stack):
    """Runs the first blocks twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return x


def _twice() -> Stack:
    """A block that stands twice among others."""
    stack = stack_of()
    stack.blocks[3] = stack.blocks[1]
    return stack


@pytest.mark.parametrize(
    ("model", "stubs"),
    [
        pytest.param(Passing(*(Views() for _ in range(7))), 7 - 1 - 1 - 1, id="nested results and grad mode"),
        pytest.param(WritingToResults(*(Block() for _ in range(COUNT))), 0, id="all results written"),
        pytest.param(stack_of(WritingInside), COUNT - 1, id="written inside"),
        pytest.param(stack_of(WritingToArguments), 0, id="written arguments"),
        pytest.param(First(*(ViewOfArgument() for _ in range(COUNT))), 0, id="view of an argument"),
        pytest.param(stack_of(Constant), 0, id="constant tensor"),
        pytest.param(First(*(Detached() for _ in range(COUNT))), 0, id="results that only the last gives to others"),
        pytest.param(stack_of(Dropping), COUNT - 1, id="module called twice in a block"),
        pytest.param(Stack(*map(OneOf, range(6))), 4 + 1, id="another module with the same operators"),
        pytest.param(Stack(*map(Experts, (3, 3, 2, 3))), 2 + 1 + 2 + 1, id="experts in lists"),
        pytest.param(_twice(), 0, id="block under two names"),
        pytest.param(InTwoPasses(*(Block() for _ in range(COUNT))), 0, id="blocks called twice"),
        pytest.param(nn.Sequential(stack_of(count=3), stack_of(count=2)), 4, id="stacks in a list"),
        pytest.param(stack_of(Marked), COUNT - 1, id="marks"),
        pytest.param(Stack(Marked(), Marked(), Marked(("mp", None)), Marked()), 2, id="another mark"),
    ],
)
def test_blocks_of_many_kinds(both: Any, model: nn.Module, stubs: int) -> None:
    assert both(model, X)[2] == stubs


@pytest.mark.parametrize(("name", "stubs"), [("scale", COUNT - 2), ("add", 0)])
def test_an_argument_that_operators_return(both: Any, name: str, stubs: int) -> None:
    """The first block gets no gradient; and torch.export renames operators if an input has the name of one."""
    assert both(Scaling(*(Casting() for _ in range(COUNT))), X, **{name: torch.ones(8)})[2] == stubs


def test_blocks_that_did_the_same_are_in_the_graph() -> None:
    graph = trace(Stack(Experts(), Block(), Experts(), Block(scale=2.0)), (X,))
    experts = {f"blocks.{layer}.experts.{number}": "blocks.0.experts.0" for layer in (0, 2) for number in range(3)}
    assert graph.blocks == {"blocks.0": "blocks.0", "blocks.2": "blocks.0", **experts, "blocks.1": "blocks.0.experts.0"}


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
    ("target", "name", "fault", "model"),
    [
        (ForwardNotes, "_constant", lambda _self, _value: None, _of_a_closure()),
        (
            ForwardNotes,
            "kind",
            property(lambda _: 0, lambda _self, _kind: None),
            Finding(lambda x, a, _: x * len(a["all"])),
        ),
        (block_stubs, "_with_origins", lambda call, _moved: call, stack_of()),
    ],
)
def test_a_planted_fault_is_caught(
    both: Any, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, fault: Any, model: nn.Module
) -> None:
    """What this file asserts is not true by chance."""
    monkeypatch.setattr(target, name, fault, raising=False)
    with pytest.raises((AssertionError, TraceError)):
        both(model, X)
