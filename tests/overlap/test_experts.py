"""Experts of a mixture, exchanged in groups: against all experts in one process in float64, and bit for bit."""

import functools
from dataclasses import dataclass

import pytest
import torch
from marks import promise
from pool import on_ranks
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from ascend_parallel import Settings
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.expert_exchange import RowCounts
from ascend_parallel.overlap.experts import LocalExperts, SharedExpert, experts_in_turn, run_experts
from ascend_parallel.overlap.inner_graph import MOST_READERS, ReadersApart

WIDTH, INNER = 48, 40
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows and experts of all ranks.

    loads: rows of a rank for each expert of all ranks, by rank.
    """

    loads: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    probs: bool = True
    shared: int = 0  # parts of the shared expert
    by_parameters: bool = False  # the experts read their parameters by themselves
    frozen: str = ""
    wrapped: str = ""  # how the call is wrapped


def drawn(*shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / 4).to(dtype).double()


class World:
    """The operands of all ranks in float64."""

    def __init__(self, case):
        self.case, self.ranks = case, len(case.loads)
        experts, dtype = len(case.loads[0]), case.dtype
        self.rows = [drawn(sum(loads), WIDTH, seed=rank, dtype=dtype) for rank, loads in enumerate(case.loads)]
        self.probs = [drawn(sum(loads), seed=9 + rank, dtype=dtype) for rank, loads in enumerate(case.loads)]
        self.up = drawn(experts, INNER, WIDTH, seed=20, dtype=dtype)
        self.down = drawn(experts, WIDTH, INNER, seed=21, dtype=dtype)
        self.shared = [drawn(WIDTH, WIDTH, seed=22 + part, dtype=dtype) for part in range(case.shared)]
        self.dy = [drawn(*rows.shape, seed=40 + rank, dtype=dtype) for rank, rows in enumerate(self.rows)]

    def truth(self):
        """Return each rank's gradients and outputs, of experts that all stand in one process."""
        leaves = [self.rows, self.probs, [self.up, self.down], self.shared]
        rows, probs, (up, down), shared = [[x.clone().requires_grad_() for x in each] for each in leaves]
        outputs, shared_outputs = [], []
        for x, p, loads in zip(rows, probs, self.case.loads, strict=True):
            parts = zip(x.split(loads), p.split(loads), up, down, strict=True)
            outputs.append(torch.cat([expert(x_e, p_e if self.case.probs else None, u, d) for x_e, p_e, u, d in parts]))
            y = x * 1
            for w in shared:
                y = silu(y @ w)
            shared_outputs.append(y)
        loss = sum((y * dy).sum() for y, dy in zip(outputs, self.dy, strict=True))
        loss = loss + sum((y * dy).sum() for y, dy in zip(shared_outputs, self.dy, strict=True) if shared)
        loss.backward()
        each = len(up) // self.ranks
        return [
            {
                "output": outputs[rank].detach(),
                "rows": rows[rank].grad + 1,  # of `Before`
                "probs": probs[rank].grad,
                "up": up.grad[rank * each : (rank + 1) * each],
                "down": down.grad[rank * each : (rank + 1) * each],
                **({"shared output": shared_outputs[rank].detach()} if shared else {}),
            }
            for rank in range(self.ranks)
        ]


def expert(x, p, up, down):
    y = silu(x @ up.t()) @ down.t()
    return y if p is None else y * p.unsqueeze(-1)


def by_expert(group, rows):
    """Return the rows of each expert, source by source, of rows in the order [source][expert]."""
    parts = iter(rows.split([count for counts in group.received for count in counts]))
    table = [[next(parts) for _ in counts] for counts in group.received]
    return [torch.cat(column) for column in zip(*table, strict=True)]


def run_group(group, rows, probs, weights):
    split = zip(by_expert(group, rows), by_expert(group, rows[:, 0] if probs is None else probs), *weights, strict=True)
    made = [expert(x, None if probs is None else p, up, down) for x, p, up, down in split]
    sizes = [[counts[e] for counts in group.received] for e in range(len(group.experts))]
    columns = [y.split(size) for y, size in zip(made, sizes, strict=True)]
    return torch.cat([part for row in zip(*columns, strict=True) for part in row])


class Before(torch.autograd.Function):
    """What stands before the layer: its backward adds a gradient of its own, as an auxiliary loss does."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx + 1


def step(group, case, groups):
    """Run a forward and backward; return the outputs and gradients of this rank."""
    world, rank = World(case), group.rank()
    experts = len(case.loads[0]) // group.size()
    own = slice(rank * experts, (rank + 1) * experts)

    def leaf(name, x):
        return x.to(case.dtype).clone().requires_grad_(name != case.frozen)

    rows, probs = leaf("rows", world.rows[rank]), leaf("probs", world.probs[rank])
    up, down = leaf("weights", world.up[own]), leaf("weights", world.down[own])
    shared_w = [leaf("", w) for w in world.shared]
    sent = [case.loads[rank][other * experts : (other + 1) * experts] for other in range(group.size())]
    counts = RowCounts(sent=sent, received=[loads[own] for loads in case.loads])
    if case.by_parameters:
        modules = [[torch.nn.Parameter(w.detach().clone(), w.requires_grad) for w in each] for each in (up, down)]

        def run(expert_group, x, p, _):
            return run_group(expert_group, x, p, [[part[e] for e in expert_group.experts] for part in modules])

        local = LocalExperts(run=run, parameters=[w for each in modules for w in each])
    else:
        local = LocalExperts(run=run_group, weights=[up, down])
    settings = Settings(num_chunks=groups, mode=2)
    before = COUNTS.as_dict().get("expert_exchange", {"chunks": 0})["chunks"]

    def layer(x, p):
        x = Before.apply(x)
        parts = [lambda y, w=w: silu(y @ w) for w in shared_w]
        shared = SharedExpert(x=x, parts=parts, parameters=shared_w) if parts else None
        y, shared_y = run_experts(
            x, counts, local, group=group, settings=settings, probs=p if case.probs else None, shared=shared
        )
        return (y * 1, shared_y * 1) if parts else (y * 1, None)

    if case.wrapped == "checkpoint":
        y, shared_y = checkpoint(layer, rows, probs, use_reentrant=False)
    elif case.wrapped == "reentrant checkpoint":
        y, shared_y = checkpoint(layer, rows, probs, use_reentrant=True)
    elif case.wrapped == "saved on the host":
        with torch.autograd.graph.save_on_cpu():
            y, shared_y = layer(rows, probs)
    else:
        y, shared_y = layer(rows, probs)
    ran = COUNTS.as_dict()["expert_exchange"]["chunks"] - before
    dy = world.dy[rank].to(case.dtype)
    results = [y] if shared_y is None else [y, shared_y]
    if case.wrapped == "retained":
        torch.autograd.backward(results, [dy] * len(results), retain_graph=True)
        for x in (rows, probs, up, down, *shared_w, *local.parameters):
            x.grad = None
    torch.autograd.backward(results, [dy] * len(results))
    found = {"output": y.detach(), "rows": rows.grad, "probs": probs.grad, "up": up.grad, "down": down.grad}
    if case.by_parameters:
        found |= {
            name: torch.stack([w.grad for w in each]) if each[0].requires_grad else None
            for name, each in zip(("up", "down"), modules, strict=True)
        }
    if shared_y is not None:
        found |= {"shared output": shared_y.detach()}
        found |= {f"shared {index}": w.grad for index, w in enumerate(shared_w)}
    return {name: x for name, x in found.items() if x is not None}, ran


def compared(group, case, group_counts):
    """Return the names that differ from one group, the worst error, and how many groups ran."""
    truth = World(case).truth()[group.rank()]
    plain, _ = step(group, case, 1)
    worst, different, ran = 0.0, [], []
    for count in group_counts:
        found, groups = step(group, case, count)
        different += [name for name in plain if not torch.equal(found[name], plain[name])]
        ran.append(groups)
    for name in truth.keys() & plain.keys():
        if plain[name].numel():
            scale = truth[name].abs().max().clamp(min=1e-3)
            worst = max(worst, float((plain[name].double() - truth[name]).abs().max() / scale))
    return different, worst, ran, sorted(plain)


EVEN = ((4, 7, 3, 5, 2, 6, 1, 9), (5, 5, 4, 8, 3, 2, 7, 6))
SKEWED = ((40, 0, 1, 0, 0, 3, 0, 0), (25, 0, 0, 2, 0, 0, 0, 0))  # experts without rows
ONE_SIDED = ((0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 9, 8, 0, 7))  # nothing sent by rank 0, nothing received by it
FOUR = tuple(tuple((3 * r + 5 * e) % 7 for e in range(8)) for r in range(4))


@promise("experts-bits")
@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "case",
    [
        Case(loads=EVEN),
        Case(loads=SKEWED, shared=2),
        Case(loads=ONE_SIDED, by_parameters=True),
        Case(loads=EVEN, dtype=torch.bfloat16, shared=1),
        Case(loads=SKEWED, probs=False, by_parameters=True, shared=2),
        Case(loads=EVEN, frozen="rows"),
        Case(loads=EVEN, frozen="weights", shared=1),
        Case(loads=EVEN, frozen="probs", by_parameters=True),
        Case(loads=SKEWED, wrapped="checkpoint", shared=2),
        Case(loads=SKEWED, wrapped="checkpoint", by_parameters=True),
        Case(loads=EVEN, wrapped="reentrant checkpoint"),
        Case(loads=EVEN, wrapped="saved on the host"),
        Case(loads=EVEN, wrapped="retained", shared=2),
        Case(loads=FOUR),
        Case(loads=FOUR, by_parameters=True, shared=2),
        Case(loads=FOUR, dtype=torch.bfloat16, wrapped="checkpoint"),
        Case(loads=ONE_SIDED, dtype=torch.float64, shared=2),
    ],
    ids=str,
)
def test_groups_keep_bits_and_equal_the_truth(ranks, case):
    counts = [1, 2, 4] if len(case.loads) == 2 else [2]
    for different, worst, ran, names in ranks(len(case.loads)).run(compared, case, counts):
        assert different == []
        assert worst < TOLERANCE[case.dtype]
        assert ran == counts
        expected = {"rows", "up", "down", "output"} | ({"probs"} if case.probs else set())
        frozen = {"weights": {"up", "down"}, "": set()}.get(case.frozen, {case.frozen})
        assert expected - frozen <= set(names)


@on_ranks(2)
def test_a_parameter_that_is_no_weight_gets_its_gradient_once(group):
    """Of all groups that read it, in the order of autograd, and its hooks run once."""
    world, rank = World(Case(loads=EVEN)), group.rank()
    own = slice(4 * rank, 4 * rank + 4)
    counts = RowCounts(sent=[EVEN[rank][:4], EVEN[rank][4:]], received=[loads[own] for loads in EVEN])
    gradients, calls = [], []
    for run in (experts_in_turn, functools.partial(run_experts, settings=Settings(num_chunks=4, mode=2))):
        up, down = (w[own].float().requires_grad_() for w in (world.up, world.down))
        rows, scale = world.rows[rank].float().requires_grad_(), torch.ones(WIDTH, requires_grad=True)
        scale.register_hook(lambda gradient: calls.append(gradient))

        def scaled(expert_group, x, p, weights, scale=scale):
            return run_group(expert_group, x * scale, p, weights)

        y = run(rows, counts, LocalExperts(run=scaled, weights=[up, down]), group=group)
        y = y if isinstance(y, torch.Tensor) else y[0]
        (y * world.dy[rank].float()).sum().backward()
        gradients.append([scale.grad, rows.grad, up.grad, down.grad])
    assert len(calls) == 2
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, MOST_READERS + 3])
def test_gradients_of_readers_are_added_one_by_one(count):
    torch.manual_seed(count)
    factors, x = torch.randn(count + 1, 40, dtype=torch.float32), torch.randn(40, requires_grad=True)
    base = x * 1
    (plain,) = torch.autograd.grad(sum(base * factor for factor in factors), x, torch.ones(40))

    base = x * 1
    readers = ReadersApart(base)
    y = readers.x * 1
    y.register_hook(lambda _: readers.gradients.extend(factors[1:].flip(0)))
    (found,) = torch.autograd.grad(base * factors[0] + y, x, torch.ones(40))
    if count < MOST_READERS:
        expected = functools.reduce(torch.add, [factors[0], *factors[1:].flip(0)])
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert readers.gradients == []
