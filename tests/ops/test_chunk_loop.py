"""The loop of chunks in C++: the calls of Python's loop in its order, its bits and its errors; where Python's runs."""

import contextlib
import shutil
import sys
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import LOOPS, NATIVE, PYTHON, REASON, loop_of
from marks import promise
from pool import on_ranks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops import chunk_loop, chunked, loop_operators, pending
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import OF_GROUPS, Decision, Known, because
from ascend_parallel.process_groups import backend

HERE = ("gloo", "cpu")
WAYS = {"gloo": backend.GLOO, "hccl": backend.HCCL}
VIEWS = ("view", "split", "split_with_sizes", "slice", "select", "unbind", "expand", "narrow", "t", "detach", "flatten")
needs_loop = pytest.mark.skipif(bool(REASON), reason=REASON)


def test_the_loop_is_there_where_a_compiler_is():
    """Without it the tests of this file that compare would be skipped silently."""
    if not sys.platform.startswith("linux") or not shutil.which("c++"):
        pytest.skip("the extension needs Linux and a C++ compiler, and there is none here")
    assert REASON == ""


class Launched(TorchDispatchMode):
    """Names the calls of torch in this thread, without views."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        if name.removeprefix("aten::").removeprefix("_unsafe_") not in VIEWS:
            self.names.append((name, *shapes))
        return function(*args, **(kwargs or {}))


class Planned(NamedTuple):
    """Knows 3 chunks of each operator, as a plan does: none of the gather of a column layer's input in backward."""

    def find(self, call):
        return (32, 32, call.cut - 64), because("tried")

    def of(self, run):
        return self


def pass_of(group, kind, sequence_parallel, loop, dtype, misaligned=False, deterministic=False, planned=False):
    """Return results, launches and counts of a layer's forward and backward in 3 chunks, the last odd."""
    ranks, generator = group.size(), torch.Generator().manual_seed(group.rank())
    rows = (70 if kind == "column" else 70 * ranks) if sequence_parallel else 140

    def drawn(*shape):
        whole = torch.randn(shape[0] + misaligned, *shape[1:], generator=generator, dtype=torch.float32).to(dtype)
        return whole[misaligned:].detach().requires_grad_()

    x, weight = drawn(rows, 9 if misaligned else 16), drawn(24, 9 if misaligned else 16)
    bias = [drawn(24)] if kind == "column" else []
    run = column_linear if kind == "column" else row_linear
    settings = Settings(num_chunks=1 if planned else 3, mode=2, deterministic=deterministic)
    known = Known(plan=Planned(), because=because("tried")) if planned else None
    for warm in (False, True):
        for operand in (x, weight, *bias):
            operand.grad = None
        COUNTS.clear()
        with loop_of(loop) as made, Launched() if warm else contextlib.nullcontext() as launched:
            y = run(x, weight, *bias, group=group, settings=settings, known=known, sequence_parallel=sequence_parallel)
            y.backward(torch.ones_like(y))
    results = [tensor.detach().clone() for tensor in (y, *(operand.grad for operand in (x, weight, *bias)))]
    return results, launched.names, COUNTS.as_dict(), len(made)


@promise("loop-calls")
@needs_loop
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_both_loops_make_the_same_calls_and_keep_the_same_bits(group, way):
    OF_GROUPS.pop(group, None)
    with mock.patch.dict(backend.ROWS, {HERE: WAYS[way]}):
        for kind, sequence_parallel in (("row", False), ("row", True), ("column", False), ("column", True)):
            for options in (
                {},
                {"misaligned": True},
                {"dtype": torch.bfloat16},
                {"deterministic": True},
                {"planned": True},
            ):
                call = group, kind, sequence_parallel
                options = {"dtype": torch.float32, **options}
                results, launches, counts, made = pass_of(*call, NATIVE, **options)
                of_python = pass_of(*call, PYTHON, **options)
                for ours, theirs in zip(results, of_python[0], strict=True):
                    assert torch.equal(ours, theirs), (call, options)
                assert launches == of_python[1], (call, options)
                assert (counts, of_python[3]) == (of_python[2], 0)
                assert made or options.get("deterministic"), (call, options)
                if options.get("planned") and (kind, sequence_parallel) == ("column", True):
                    assert made == 3  # the gather of forward, that of backward, and the sum
    OF_GROUPS.pop(group, None)


@promise("loop-calls")
@needs_loop
@on_ranks(2)
def test_grouped_sends_of_a_device_are_the_same_calls_too(group):
    """torch's pretended backend takes an all_to_all of any sizes; its results are not looked at."""
    fake = dist.new_group([0, 1], backend="fake")
    x, w = torch.randn(96, 16), torch.randn(16, 24)
    names = {}
    with mock.patch.dict(backend.ROWS, {("fake", "cpu"): backend.NCCL}):
        for loop in (NATIVE, PYTHON):
            with loop_of(loop) as made, Launched() as launched:
                chunked.all_gather_matmul(x, w, fake, (32, 48, 16))
                chunked.all_gather_matmul(x, w, fake, (0, 96), keep_gathered=False)
                chunked.matmul_reduce_scatter(x, w, fake, (32, 16)).wait()
            assert len(made) == (3 if loop == NATIVE else 0)
            names[loop] = launched.names
    assert names[NATIVE] == names[PYTHON]
    assert sum(name == "c10d::alltoall_" for name, *_ in names[NATIVE]) == 5
    dist.destroy_process_group(fake)


OPERATORS = {
    "matmul_all_reduce": lambda x, w, group: chunked.matmul_all_reduce(x, w, group, (32, 32)).wait(),
    "matmul_reduce_scatter": lambda x, w, group: chunked.matmul_reduce_scatter(x, w, group, (16, 16)).wait(),
    "all_gather_matmul": lambda x, w, group: chunked.all_gather_matmul(x, w, group, (32, 32)),
}


def in_chunks(*sizes):
    return Decision(None, "chunked", sizes, None, ())


# The same operators whole, in one call of the loop.
WHOLE = {
    "matmul_all_reduce": lambda x, w, group: loop_operators.run_all_reduce(x, w, group, in_chunks(32, 32)),
    "matmul_reduce_scatter": lambda x, w, group: loop_operators.run_reduce_scatter(x, w, group, in_chunks(16, 16)),
    "all_gather_matmul": lambda x, w, group: loop_operators.run_all_gather(x, w, group, in_chunks(32, 32), True),
}


@needs_loop
@pytest.mark.parametrize("operator", list(OPERATORS))
@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_alike(group, operator):
    named_alike(group, operator, OPERATORS[operator], OPERATORS[operator])


@needs_loop
@pytest.mark.parametrize("operator", list(OPERATORS))
@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_alike_by_a_whole_operator(group, operator):
    named_alike(group, operator, WHOLE[operator], OPERATORS[operator])


@needs_loop
@on_ranks(2)
def test_the_collective_of_two_loops_that_failed_is_named(group):
    """The gather is waited for first; the reduce-scatter that has started is waited for, too, before the error."""
    dy, w, x = torch.randn(64, 8), torch.randn(8, 4), torch.randn(32, 4)
    with group_alone() as own:
        if group.rank() == 0:
            with pytest.raises(pending.CollectiveError) as error:
                loop_operators.run_column_sequence_gradients(dy, w, x, own, in_chunks(16, 16), (16, 16), bias=False)
            assert str(error.value).startswith("all_gather, collective 1 of 2, on group")
            assert "no sign of rank 1" in str(error.value)


@contextlib.contextmanager
def group_alone():
    """A group with a limit of a minute, whose store has less: its waits end by this package's limit, not by gloo's."""
    own = dist.new_group([0, 1], timeout=timedelta(seconds=60), group_desc="alone")
    store = dist.distributed_c10d._get_process_group_store(own)
    usual = store.timeout
    store.set_timeout(timedelta(seconds=0.5))
    try:
        with mock.patch.object(pending, "ROLL_CALL", 0.5):
            yield own
    finally:
        store.set_timeout(usual)
    dist.barrier()
    dist.destroy_process_group(own)


def named_alike(group, operator, natively, in_python):
    x, w = torch.randn(64, 8), torch.randn(8, 8)
    texts = []
    for loop in (NATIVE, PYTHON):
        with group_alone() as own:
            if group.rank() == 0:
                with loop_of(loop) as made, pytest.raises(pending.CollectiveError) as error:
                    (natively if loop == NATIVE else in_python)(x, w, own)
                assert bool(made) == (loop == NATIVE)
                texts.append(str(error.value))
    if texts:
        assert texts[0] == texts[1]
        assert texts[0].startswith(f"{operator}, collective 1 of 2, on group")
        assert "no sign of rank 1 within 0.5 s" in texts[0]


class Fails(TorchDispatchMode):
    """Raises an error of the user's at the third product: in the second chunk of two ranks' rows."""

    products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function._schema.name == "aten::mm"
        if self.products == 3:
            raise RuntimeError("an error of the user's")
        return function(*args, **(kwargs or {}))


def sums(group):
    """A row layer's call with sequence parallelism, in 4 chunks."""
    x, w = torch.ones(256, 16), torch.ones(24, 16)
    return row_linear(x, w, group=group, settings=Settings(num_chunks=4, mode=2), sequence_parallel=True)


@contextlib.contextmanager
def group_with_limit(seconds):
    own = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    try:
        with mock.patch.object(pending, "ROLL_CALL", 0.5):
            yield own
    finally:
        dist.barrier()
        dist.destroy_process_group(own)


@promise("rank-error")
@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_after_an_error_on_every_rank_between_the_chunks_of_a_sum_the_group_runs_on(group, loop):
    """Receives of chunks that nobody sends are not waited for: that would take the limit, and gloo's connection."""
    with group_with_limit(3) as own, loop_of(loop):
        right = sums(own)
        for _ in range(2):
            with Fails(), pytest.raises(RuntimeError, match="an error of the user's"):
                sums(own)
            assert torch.equal(sums(own), right)
        dist.all_reduce(right, group=own)


@promise("rank-error")
@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_after_an_error_on_one_rank_between_the_chunks_of_a_sum_the_other_names_it(group, loop):
    """The next collective on that group is an error on both: gloo has closed the connection at the limit."""
    with group_with_limit(3) as own, loop_of(loop):
        sums(own)
        with Fails() if group.rank() else contextlib.nullcontext(), pytest.raises(RuntimeError) as error:
            sums(own)
        if group.rank():
            assert str(error.value) == "an error of the user's"
        else:
            assert "matmul_reduce_scatter, collective 2 of 4, on group" in str(error.value)
        with pytest.raises(pending.CollectiveError, match="matmul_reduce_scatter, collective 1 of 4"):
            sums(own)
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=own)


class Counted(torch.Tensor):
    """A subclass, whose functions Python's loop calls."""


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def renamed(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


@needs_loop
@on_ranks(2)
def test_what_the_loop_does_not_cover_runs_in_python(group):
    x, w = torch.randn(64, 8), torch.randn(8, 8)
    calls = {
        "a subclass": (x.as_subclass(Counted), contextlib.nullcontext()),
        "complex numbers": (x.to(torch.complex64), contextlib.nullcontext()),
        "a function mode": (x, Watching()),
        "a replaced collective": (x, mock.patch.object(dist, "all_reduce", renamed(dist.all_reduce))),
        "a replaced matmul": (x, mock.patch.object(torch, "mm", renamed(torch.mm))),
    }
    assert chunk_loop.chunk_loop(group, x, w) is not None
    assert loop_operators.run_all_reduce(x, w, group, in_chunks(32, 32)) is not None
    for what, (given, inside) in calls.items():
        with loop_of(NATIVE) as made, inside:
            y = chunked.matmul_all_reduce(given, w.to(given.dtype), group, (32, 32)).wait()
            assert loop_operators.run_all_reduce(given, w.to(given.dtype), group, in_chunks(32, 32)) is None, what
        assert not made, what
        assert torch.allclose(y.as_subclass(torch.Tensor).real, expected(x, w, group), atol=1e-5), what


def expected(x, w, group):
    y = x @ w
    dist.all_reduce(y, group=group)
    return y
