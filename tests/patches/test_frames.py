"""What the host runs in a warm call of a layer: functions of this package, counted without a clock.

On an accelerator the host has to stay ahead of the device; every function that it calls is some tenths of a
microsecond of a small layer.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import weakref
from unittest import mock

import pytest
import torch
from counted_functions import functions_of, in_words
from fused_gradients import install
from layers import Layers
from loops import LOOPS, NATIVE, PYTHON, REASON, loop_of
from planted_clocks import auto_cuts_in_two, one_chunk_wins, planted
from pool import on_ranks
from torch.nn.utils import parametrizations

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
    ("RowParallelLinear", False): {NATIVE: (26, 9), PYTHON: (40, 20)},
    ("ColumnParallelLinear", False): {NATIVE: (16, 18), PYTHON: (20, 43)},
    ("RowParallelLinear", True): {NATIVE: (28, 20), PYTHON: (58, 65)},
    ("ColumnParallelLinear", True): {NATIVE: (28, 27), PYTHON: (64, 93)},
}
OF_AUTO = 5  # more of a call that auto or a plan has cut: what is measured of it, and the plan of each pass
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


@on_ranks(2)
def test_a_warm_call_that_auto_or_a_plan_has_cut_runs_few_more(group):
    """A plan has no sizes for the gather of a column layer's input in backward: the loop gathers it whole."""
    with Layers(group.size()) as layers, auto_cuts_in_two():
        for (kind, sequence_parallel), most in MOST.items():
            most_forward, most_backward = most[PYTHON if REASON else NATIVE]
            layer, x = made(layers, kind, sequence_parallel)
            settings = {"auto": True}
            for by in ("auto", "a plan"):
                ascend_parallel.configure(**settings)
                warm(layer, x)
                ascend_parallel.ops.COUNTS.clear()
                (y, _), forward = functions_of(lambda layer=layer, x=x: layer(x))
                _, backward = functions_of(lambda y=y: y.backward(torch.ones_like(y)))
                assert any(count["chunks"] > count["calls"] for count in ascend_parallel.ops.COUNTS.as_dict().values())
                call = by, kind, sequence_parallel
                assert sum(forward.values()) <= most_forward + OF_AUTO, (call, in_words(forward))
                assert sum(backward.values()) <= most_backward + OF_AUTO, (call, in_words(backward))
                settings = {"plan": decided_plan(layer)} if by == "auto" else {}


def decided_plan(layer):
    """Return the plan that auto has made of the passes of a layer's group."""
    megatron = type(layer).forward.ascend_parallel
    return megatron.decider.groups[megatron.group_of(layer)].plan


@on_ranks(2)
def test_a_call_that_adds_to_main_grad_is_warm(group):
    install()
    with Layers(group.size()) as layers, auto_cuts_in_two():
        for settings in ({"num_chunks": 4}, {"auto": True}):
            for kind, sequence_parallel in MOST:
                ascend_parallel.configure(**settings)
                config = {"sequence_parallel": sequence_parallel, "gradient_accumulation_fusion": True}
                layer, (_, x) = layers.make(kind, (64, 96), config=config), made(layers, kind, sequence_parallel)
                layer.weight.main_grad = torch.zeros_like(layer.weight)
                warm(layer, x)
                (y, _), called = functions_of(lambda layer=layer, x=x: layer(x))
                assert not called[DECIDES], (settings, kind, sequence_parallel)
                before = layer.weight.main_grad.clone()
                y.sum().backward()
                torch.testing.assert_close(layer.weight.main_grad, before * 4 / 3)


DECIDES = "ascend_parallel.patches.covered_call.run_covered"


def tied(layer):
    """Give the layer the weight of another, as a model that ties its output to its embedding."""
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone().bfloat16().float())


def replaced_matmul(layers_module):
    name = "linear_with_grad_accumulation_and_async_allreduce"
    own = getattr(layers_module, name)
    return mock.patch.object(
        layers_module, name, functools.update_wrapper(lambda *args, **more: own(*args, **more), own)
    )


# What a program may do between two calls -> whether the second is decided anew; of a row layer with a bias.
BETWEEN = {
    "nothing": (lambda layer: None, False),
    "another weight of the shape": (tied, False),
    "frozen": (lambda layer: layer.requires_grad_(False), False),
    "no bias": (lambda layer: layer.register_parameter("bias", None), True),
    "a parametrised weight": (lambda layer: parametrizations.weight_norm(layer), True),
    "a weight norm of hooks": (lambda layer: torch.nn.utils.weight_norm(layer), True),
    "a subclass": (lambda layer: setattr(layer, "__class__", type("Own", (type(layer),), {})), True),
    "skip_bias_add": (lambda layer: setattr(layer, "skip_bias_add", True), True),
    "input_is_parallel": (lambda layer: setattr(layer, "input_is_parallel", False), True),
    "deterministic_mode": (lambda layer: setattr(layer.config, "deterministic_mode", True), True),
}


@on_ranks(2)
def test_a_warm_call_notices_what_the_program_has_changed(group):
    with Layers(group.size()) as layers:
        for what, (change, anew) in BETWEEN.items():
            ascend_parallel.configure(num_chunks=4)
            layer, x = made(layers, "RowParallelLinear", False)
            warm(layer, x)
            assert not functions_of(lambda layer=layer, x=x: layer(x))[1][DECIDES], what
            change(layer)
            given = torch.cat([x, x], -1) if what == "input_is_parallel" else x
            (y, bias), called = functions_of(lambda layer=layer, given=given: layer(given))
            assert bool(called[DECIDES]) == anew, what
            ascend_parallel.configure(num_chunks=1)
            (true_y, true_bias) = layer(given)
            assert y.equal(true_y) and (bias is None) == (true_bias is None), what


def passed(row, column, x):
    """Return the output of a column layer behind a row layer, and the gradients of x and of both weights."""
    y, _ = column(torch.relu(row(x)[0]))
    return [y, *torch.autograd.grad(y.square().sum(), [x, row.weight, column.weight])]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_calls_of_a_region_are_warm(group, sequence_parallel):
    """The column layer's input has rows to come, where sequence parallelism does not gather them."""
    with Layers(group.size()) as layers:
        row, x = made(layers, "RowParallelLinear", sequence_parallel)
        column = layers.make("ColumnParallelLinear", (96, 64), config={"sequence_parallel": sequence_parallel})
        ascend_parallel.configure(num_chunks=1)
        plain = passed(row, column, x)
        for region in (True, False, True):
            ascend_parallel.configure(num_chunks=4, region=region, region_rows=1)
            ascend_parallel.ops.COUNTS.clear()
            warm_calls = [passed(row, column, x) for _ in range(2)][1]
            assert ("region" in ascend_parallel.ops.COUNTS.as_dict()) == region
            found, called = functions_of(lambda: passed(row, column, x))
            assert not called[DECIDES]
            for one, other, right in zip(found, warm_calls, plain, strict=True):
                assert torch.equal(one, right) and torch.equal(other, right)


def doubled(name):
    return property(lambda layer: 2 * layer._parameters[name])


# What a program may put before a parameter, or where no parameter was, and an option that no key can hold.
BEFORE_PARAMETERS = {
    "its class's weight": lambda layer: setattr(type(layer), "weight", doubled("weight")),
    "its class's bias": lambda layer: setattr(type(layer), "bias", doubled("bias")),
    "an attribute": lambda layer: vars(layer).update(bias=2 * layer.bias.detach()),
    "a buffer": lambda layer: (delattr(layer, "bias"), layer.register_buffer("bias", torch.ones(48))),
    "an option": lambda layer: setattr(layer.config, "tp_2d", []),
}


@on_ranks(2)
def test_a_warm_call_reads_a_weight_and_a_bias_where_the_layer_has_them(group):
    with Layers(group.size()) as layers:
        for what, change in BEFORE_PARAMETERS.items():
            ascend_parallel.configure(num_chunks=4)
            layer, x = made(layers, "ColumnParallelLinear", True)
            layer.__class__ = type("Own", (type(layer),), {})
            if what == "a buffer":
                layer.register_parameter("bias", None)
            warm(layer, x)
            assert not functions_of(lambda layer=layer, x=x: layer(x))[1][DECIDES], what
            change(layer)
            y, _ = layer(x)
            ascend_parallel.configure(num_chunks=1)
            assert y.equal(layer(x)[0]), what


@on_ranks(2)
def test_a_warm_call_notices_replaced_functions_and_conflicts(group):
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        layer, x = made(layers, "RowParallelLinear", False)
        warm(layer, x)
        with replaced_matmul(importlib.import_module(type(layer).__module__)):
            assert functions_of(lambda: layer(x))[1][DECIDES]
        assert not functions_of(lambda: layer(x))[1][DECIDES]
        layer.config.tp_comm_overlap = True
        with pytest.raises(ascend_parallel.ConflictError, match="tp_comm_overlap"):
            layer(x)
        layer.config.tp_comm_overlap = False
        layer.explicit_expert_comm = layer.skip_bias_add = True
        ascend_parallel.ops.COUNTS.clear()
        layer(x)
        assert not ascend_parallel.ops.COUNTS.as_dict()


@on_ranks(2)
def test_a_kept_call_holds_neither_layers_nor_groups(group):
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        layer, x = made(layers, "RowParallelLinear", False)
        warm(layer, x)
        weight, holder = weakref.ref(layer.weight), weakref.ref(layer)
        del layer
        gc.collect()
        assert holder() is None and weight() is None
        groups = weakref.ref(importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group())
    gc.collect()
    assert groups() is None


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
def test_another_call_than_the_one_that_auto_has_cut_is_decided_anew(group):
    with Layers(group.size()) as layers, auto_cuts_in_two():
        for kind, sequence_parallel in (("RowParallelLinear", False), ("ColumnParallelLinear", True)):
            for what, changed in CHANGES.items():
                ascend_parallel.configure(auto=True)
                layer, x = made(layers, kind, sequence_parallel)
                warm(layer, x)
                layer, x = changed(layer, x)
                y, first = functions_of(lambda layer=layer, x=x: layer(x)[0])
                assert first[DECIDES], (kind, sequence_parallel, what)
                again, second = functions_of(lambda layer=layer, x=x: layer(x)[0])
                assert not second[DECIDES] and again.equal(y), (kind, sequence_parallel, what)


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
