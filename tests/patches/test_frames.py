"""What the host runs in a warm call of a layer: functions of this package, counted without a clock.

On an accelerator the host has to stay ahead of the device; every function that it calls is some tenths of a
microsecond of a small layer.
"""

import contextlib
import inspect

import pytest
import torch
from counted_functions import functions_of, in_words
from layers import Layers
from loops import LOOPS, NATIVE, PYTHON, REASON, loop_of
from planted_clocks import one_chunk_wins, planted
from pool import on_ranks

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

VERSION = version_tuple(installed_version())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 13), reason="a layer has to be asked for its group, which it does not hold"
)

# Kind and sequence parallelism -> the most functions of this package in forward and in backward, with 4 chunks, where
# the C++ extension loops over them, and where Python does.
MOST = {
    ("RowParallelLinear", False): {NATIVE: (46, 18), PYTHON: (48, 18)},
    ("ColumnParallelLinear", False): {NATIVE: (37, 37), PYTHON: (37, 39)},
    ("RowParallelLinear", True): {NATIVE: (48, 37), PYTHON: (66, 60)},
    ("ColumnParallelLinear", True): {NATIVE: (60, 58), PYTHON: (80, 90)},
}
MOST_LEFT_WHOLE = 6  # with the questions whether torch.compile is at work


def warm(layer, x):
    for _ in range(3):
        layer(x)[0].sum().backward()


def made(layers, kind, sequence_parallel):
    layer = layers.make(kind, (64, 96), config={"sequence_parallel": sequence_parallel})
    rows = 64 if kind == "ColumnParallelLinear" and sequence_parallel else 128
    return layer, torch.randn(rows, 2, 64 if kind == "ColumnParallelLinear" else 32, requires_grad=True)


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_a_warm_call_runs_few_functions_of_this_package(group, loop):
    with Layers(group.size()) as layers, with_loop(loop):
        for (kind, sequence_parallel), most in MOST.items():
            most_forward, most_backward = most[PYTHON if REASON else loop]
            ascend_parallel.configure(num_chunks=4)
            layer, x = made(layers, kind, sequence_parallel)
            warm(layer, x)
            (y, _), forward = functions_of(lambda layer=layer, x=x: layer(x))
            dy = torch.ones_like(y)
            _, backward = functions_of(lambda y=y, dy=dy: y.backward(dy))
            assert 0 < sum(forward.values()) <= most_forward, (kind, sequence_parallel, in_words(forward))
            assert 0 < sum(backward.values()) <= most_backward, (kind, sequence_parallel, in_words(backward))


def with_loop(loop):
    return loop_of(loop) if loop == PYTHON else contextlib.nullcontext()  # nothing is counted of the tests' own


@on_ranks(2)
def test_a_layer_that_is_left_whole_runs_fewer(group):
    with Layers(group.size()) as layers, planted(one_chunk_wins):
        for kind, sequence_parallel in MOST:
            ascend_parallel.configure(auto=True)
            layer, x = made(layers, kind, sequence_parallel)
            warm(layer, x)
            ascend_parallel.ops.COUNTS.clear()
            _, called = functions_of(lambda layer=layer, x=x: layer(x))
            assert not ascend_parallel.ops.COUNTS.as_dict()
            assert 0 < sum(called.values()) <= MOST_LEFT_WHOLE, (kind, sequence_parallel, in_words(called))


CHANGES = {
    "rows": lambda layer, x: (layer, torch.randn(32, *x.shape[1:], requires_grad=True)),
    "gradient of x": lambda layer, x: (layer, x.detach()),
    "frozen weight": lambda layer, x: (layer.requires_grad_(False), x),
    "dtype": lambda layer, x: (layer.bfloat16(), x.detach().bfloat16().requires_grad_()),
    "settings": lambda layer, x: (ascend_parallel.configure(auto=True), (layer, x))[1],
}


@on_ranks(2)
def test_another_call_than_the_one_that_was_left_whole_is_decided_anew(group):
    """The second call of either kind is one look-up."""
    with Layers(group.size()) as layers, planted(one_chunk_wins):
        for kind, sequence_parallel in (("RowParallelLinear", False), ("ColumnParallelLinear", True)):
            for what, changed in CHANGES.items():
                ascend_parallel.configure(auto=True)
                layer, x = made(layers, kind, sequence_parallel)
                warm(layer, x)
                layer, x = changed(layer, x)
                _, first = functions_of(lambda layer=layer, x=x: layer(x))
                assert sum(first.values()) > 3 * MOST_LEFT_WHOLE, (kind, sequence_parallel, what)
                _, second = functions_of(lambda layer=layer, x=x: layer(x))
                again = what == "frozen weight" and kind == "ColumnParallelLinear"  # ours, which has the bias' gradient
                assert (sum(second.values()) > MOST_LEFT_WHOLE) == again, (kind, sequence_parallel, what)


@on_ranks(2)
def test_modes_and_options_of_a_layer_are_part_of_what_was_decided(group):
    with Layers(group.size()) as layers, planted(one_chunk_wins):
        ascend_parallel.configure(auto=True)
        layer, x = made(layers, "RowParallelLinear", False)
        warm(layer, x)
        with torch.autocast("cpu", torch.bfloat16):
            _, called = functions_of(lambda: layer(x))
        assert sum(called.values()) > 3 * MOST_LEFT_WHOLE
        with torch.no_grad():
            _, called = functions_of(lambda: layer(x))
        assert sum(called.values()) > 3 * MOST_LEFT_WHOLE
        layer.sequence_parallel = True
        _, called = functions_of(lambda: layer(x))
        assert sum(called.values()) > 3 * MOST_LEFT_WHOLE
        _, called = functions_of(lambda: layer(x))
        assert sum(called.values()) <= MOST_LEFT_WHOLE


def test_functions_of_this_package_are_counted():
    _, called = functions_of(lambda: inspect.unwrap(ascend_parallel.Settings)(num_chunks=2).enabled)
    assert called
