"""Layers, regions and experts while a graph is captured: what a capture forbids does not run, or is an error."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from backends import as_backend
from captured import READS, ForbiddenInCaptureError, captured
from pool import on_ranks
from torch.nn.functional import gelu, layer_norm

from ascend_parallel import CollectiveError, Settings, column_linear, row_linear
from ascend_parallel.ops.expert_exchange import RowCounts
from ascend_parallel.overlap.experts import LocalExperts, run_experts
from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.patches.region_choice import RegionChoice
from ascend_parallel.process_groups import consistency
from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.tuning.measured.decider import Decider

CHUNKS, ROWS, WIDTH, INNER = 4, 128, 32, 48


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).div_(4).requires_grad_()


class Block:
    """A column layer, a row layer, a norm and a column layer, in `chunks`; `leaves_rows`: as a region."""

    def __init__(self, group, sequence_parallel, chunks, leaves_rows=0):
        ranks, rank = group.size(), group.rank()
        self.x = drawn(ROWS // (ranks if sequence_parallel else 1), WIDTH, seed=rank if sequence_parallel else 0)
        self.weights = [drawn(INNER, WIDTH, seed=10 + rank), drawn(WIDTH, INNER, seed=20 + rank)]
        self.weights += [drawn(INNER, WIDTH, seed=30 + rank), drawn(WIDTH, seed=3)]
        options = {"settings": Settings(num_chunks=chunks, chunk_rows=8), "leaves_rows": leaves_rows}
        options |= {"group": group, "sequence_parallel": sequence_parallel}
        self.column, self.row = partial(column_linear, **options), partial(row_linear, **options)

    def step(self):
        """Return the output and every gradient."""
        up, down, last, norm = self.weights
        y = self.row(gelu(self.column(self.x, up)), down)
        y = self.column(layer_norm(y + self.x, (WIDTH,), norm), last)
        found = torch.autograd.grad(y, [self.x, *self.weights], torch.ones_like(y))
        return [y.detach(), *found]


class Experts:
    """Two experts on each rank, which get as many rows from every rank: a fixed capacity."""

    def __init__(self, group):
        ranks, capacity, each = group.size(), 8, 2
        counts = [[capacity] * each for _ in range(ranks)]
        self.x = drawn(ranks * each * capacity, WIDTH, seed=group.rank())
        self.weight = drawn(each, WIDTH, WIDTH, seed=9)

        def run(expert_group, rows, probs, weights):
            return (rows.view(ranks, -1, capacity, WIDTH) @ weights[0]).view_as(rows)

        options = {"group": group, "settings": Settings(num_chunks=each)}
        counted = RowCounts(sent=counts, received=counts)
        experts = LocalExperts(run=run, weights=(self.weight,))
        self.run = partial(run_experts, self.x, counted, experts, **options)

    def step(self):
        """Return the output and every gradient."""
        y, _ = self.run()
        return [y.detach(), *torch.autograd.grad(y, [self.x, self.weight], torch.ones_like(y))]


def same(ours, theirs):
    return [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)]


@on_ranks(2)
def test_a_captured_step_runs_nothing_that_a_capture_forbids(group):
    for sequence_parallel in (False, True):
        plain = Block(group, sequence_parallel, 1).step()
        for leaves_rows in (0, 8):
            block = Block(group, sequence_parallel, CHUNKS, leaves_rows)
            with as_backend("nccl", group):
                block.step()  # a warm-up: ranks ask each other and their machines
                with captured():
                    found = block.step()
            assert all(same(found, plain)), (sequence_parallel, leaves_rows)


@on_ranks(2)
def test_captured_experts_of_a_fixed_capacity_run_nothing_that_a_capture_forbids(group):
    experts = Experts(group)
    with as_backend("nccl", group):
        warm = experts.step()
        with captured():
            found = experts.step()
    assert all(same(found, warm))


@on_ranks(2)
def test_a_capture_before_the_warm_up_is_an_error_that_says_so(group):
    with as_backend("nccl", group), captured():
        for sequence_parallel in (False, True):
            with pytest.raises(CollectiveError, match=r"keep the bits of .* while a graph is captured.* warm-up"):
                Block(group, sequence_parallel, CHUNKS).step()
        shape = LayerShape("row", ROWS, INNER, WIDTH, 2, False, torch.float32, "cpu")
        with pytest.raises(DisagreementError, match=r"the tuning of .* while a graph is captured.* warm-up"):
            Decider(Settings(auto=True)).known_of_layer(shape, group, backward=False)
        choice, x = RegionChoice("auto"), torch.ones(1)
        with pytest.raises(DisagreementError, match=r"COC_REGION=auto while a graph is captured.* warm-up"):
            choice.call(torch.nn.Identity(), x, lambda: x)


@on_ranks(2)
def test_the_stand_in_of_a_capture_notices_what_is_forbidden(group):
    x = torch.ones(4)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    reads = [lambda name=name: getattr(x.sum(), name)() for name in READS]
    others = [lambda: torch.equal(x, x), lambda: torch.accelerator.synchronize(), lambda: work.is_completed()]
    with captured():
        for read in reads + others:
            with pytest.raises(ForbiddenInCaptureError):
                read()
    assert x.sum().item() == 4 * group.size()


@pytest.mark.parametrize(
    ("begun", "answer", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_device_tells_whether_a_graph_is_captured(monkeypatch, begun, answer, expected):
    """By the names that torch.cuda and torch.npu share; a device that nothing was run on is not asked."""
    device = SimpleNamespace(is_initialized=lambda: begun, is_current_stream_capturing=lambda: answer)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    assert consistency.is_capturing() is expected
