"""The order in which matmuls and collectives start, recorded at the calls."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from ascend_parallel import Settings, WeightGradient, column_linear, ops


@contextlib.contextmanager
def watched(log):
    """Log every matmul, every collective's start and every wait, in order."""
    from ascend_parallel.ops import pending

    kept = torch.mm, dist.all_reduce, dist.isend, pending.Pending.wait_for

    def logged(name, function):
        def call(*args, **kwargs):
            log.append(name)
            return function(*args, **kwargs)

        return call

    def waited(self, first, stop=0):
        log.extend("wait" for _ in range(first, stop or first + 1))
        return kept[3](self, first, stop)

    torch.mm, dist.all_reduce = logged("mm", kept[0]), logged("reduce", kept[1])
    dist.isend, pending.Pending.wait_for = logged("send", kept[2]), waited
    try:
        yield
    finally:
        torch.mm, dist.all_reduce, dist.isend, pending.Pending.wait_for = kept


class Watched(WeightGradient):
    """Logs when the weight gradient is computed."""

    def __init__(self, log):
        self._log = log

    def compute(self, x_m, dy_m, out=None):
        self._log.append("weight gradient")
        return super().compute(x_m, dy_m, out)


def operators(group):
    logs = {}
    for name in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"):
        logs[name] = []
        x, w = torch.randn(128, 8), torch.randn(8, 8)
        getattr(ops, name)(x, w, group, num_chunks=3)  # probes the bits first, by separate matmuls
        with watched(logs[name]):
            getattr(ops, name)(x, w, group, num_chunks=3)
    return logs


def test_chunks_communicate_while_the_next_is_computed(ranks):
    logs = ranks(2).run(operators)[0]
    assert logs["matmul_all_reduce"] == ["mm", "reduce"] * 3 + ["wait"] * 3
    assert logs["matmul_reduce_scatter"] == ["mm", "mm", "send"] * 3 + ["wait"] * 3
    # All gathers start before the rank's own rows, which need no gather, are multiplied.
    assert logs["all_gather_matmul"][:8] == ["send"] * 3 + ["mm"] + ["wait", "mm"] * 2


def backwards(group, sequence_parallel):
    logs = {}
    for order in ("auto", "compute_first"):
        log = logs[order] = []
        x = torch.randn(128, 8, requires_grad=True)
        weight = torch.randn(8, 8, requires_grad=True)
        y = column_linear(
            x,
            weight,
            group=group,
            sequence_parallel=sequence_parallel,
            settings=Settings(num_chunks=2, order=order),
            weight_gradient=Watched(log),
        )
        y.sum().backward(retain_graph=True)  # probes the bits first, by separate matmuls
        log.clear()
        with watched(log):
            y.sum().backward()
    return logs


def test_the_weight_gradient_runs_under_the_input_gradients_all_reduce(ranks):
    log = ranks(2).run(backwards, False)[0]["auto"]
    assert log == ["mm", "reduce", "mm", "reduce", "weight gradient", "wait", "wait"]


def test_either_step_of_the_sequence_parallel_backward_comes_first(ranks):
    logs = ranks(2).run(backwards, True)[0]
    assert logs["auto"][:3] == ["send", "send", "mm"]  # each chunk of the gather, then the product
    assert logs["compute_first"][0] == "mm"
    for log in logs.values():
        begin, end = log.index("weight gradient"), len(log)
        assert "send" in log[:begin]  # the reduce-scatter is under way
        assert "wait" in log[begin:end]  # and is waited for after


@on_ranks(2)
def test_operators_keep_their_dtype_under_autocast_and_layers_cast(group):
    """The dtype of a result must not depend on how many chunks the rows allow."""
    found = set()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for rows in (16, 128):
            x, w = torch.randn(rows, 8, requires_grad=True), torch.randn(8, 8)
            for name in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"):
                y = getattr(ops, name)(x, w, group, num_chunks=4)
                found.add((y[0] if isinstance(y, tuple) else y).dtype)
            column = column_linear(x, w.requires_grad_(), group=group, settings=Settings(num_chunks=4))
            column.float().sum().backward()  # under autocast, against advice
            found.add(column.dtype)
    assert found == {torch.float32, torch.bfloat16}


@on_ranks(2)
def test_the_gradient_of_a_single_row(group):
    x, w = torch.randn(8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    ops.matmul_all_reduce(x, w, group, num_chunks=4).sum().backward()
    assert torch.equal(w.grad, x.detach()[:, None].expand(8, 4))


@on_ranks(2)
def test_a_group_survives_a_failure_that_all_ranks_share(group):
    """All ranks fail in the same chunk; the group still works afterwards."""
    results = []
    for name in ("matmul_all_reduce", "matmul_reduce_scatter"):
        kept, calls = torch.mm, []

        def failing(*args, kept=kept, calls=calls, **kwargs):
            calls.append(1)
            if len(calls) == 4:
                raise MemoryError("out of memory in a chunk")
            return kept(*args, **kwargs)

        torch.manual_seed(group.rank())
        x, w = torch.randn(128, 8), torch.randn(8, 8)
        expected = getattr(ops, name)(x, w, group, num_chunks=1)
        torch.mm = failing
        try:
            with pytest.raises(MemoryError):
                getattr(ops, name)(x + 1, w, group, num_chunks=4)
        finally:
            torch.mm = kept
        results.append(torch.equal(getattr(ops, name)(x, w, group, num_chunks=4), expected))
    assert results == [True, True]


@on_ranks(2)
def test_dtensors_are_refused(group):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (group.size(),))
    x = DTensor.from_local(torch.randn(64, 8), mesh, [Replicate()])
    with pytest.raises(ValueError, match="DTensor"):
        column_linear(x, torch.randn(8, 8), group=group, settings=Settings(num_chunks=2))
