"""Layers whose weight is in int8: the function, its input gradient, and Megatron-core's own layer."""

import copy
import itertools
import logging

import pytest
import torch
from int8 import DTYPES, GRAINS, N, exact, operands, steps
from layers import Layers, same
from logged import logged
from pool import on_ranks
from tolerances import close

import ascend_parallel
from ascend_parallel import Settings, quantise_row_parallel, quantised_row_linear
from ascend_parallel.overlap.quantised import int8_weight


def whole_row_layer(group, shape, dtype, grain):
    x, _, weights = operands(group, shape, grain, False, dtype)
    dy = (
        torch.randn((*shape[:-1], N), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        .to(dtype)
        .double()
    )
    y = sum(a @ exact(w) for a, w in zip(x, weights, strict=True))
    rank = group.rank()
    return x[rank].to(dtype).requires_grad_(), weights[rank], y, dy, dy @ exact(weights[rank]).t()


def layers(group, dtype):
    """Output and input gradient, with and without sequence parallelism; there is no other gradient."""
    ranks, rank = group.size(), group.rank()
    cases = itertools.product([(12 * ranks, 70), (16 * ranks, 3, 70)], GRAINS, (1, 3), (False, True))
    for shape, grain, chunks, sequence_parallel in cases:
        x, w, y, dy, dx = whole_row_layer(group, shape, dtype, grain)
        settings = Settings(num_chunks=chunks, mode=2)
        y_r = quantised_row_linear(x, w, group=group, settings=settings, sequence_parallel=sequence_parallel)
        own = (lambda t: t.chunk(ranks)[rank]) if sequence_parallel else (lambda t: t)
        close(y_r, own(y), dtype)
        y_r.backward(own(dy).to(dtype))
        close(x.grad, dx, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_r = quantised_row_linear(x.float(), w, group=group, settings=Settings(num_chunks=2))
    close(y_r, y, torch.bfloat16)
    assert not quantised_row_linear(x.detach(), w, group=group, settings=Settings(num_chunks=2)).requires_grad


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_the_layer_and_its_input_gradient(ranks, count, dtype):
    ranks(count).run(layers, dtype)


def logged_once(group):
    log = logging.getLogger("ascend_parallel")
    level = log.level
    log.setLevel(logging.INFO)
    ascend_parallel.overlap.quantised._log_dequantised.cache_clear()
    x, w, *_ = whole_row_layer(group, (12, 70), torch.float32, "channel")
    with logged() as lines:
        for _ in range(2):
            quantised_row_linear(x, w, group=group, settings=Settings(num_chunks=2), sequence_parallel=True)
    log.setLevel(level)
    return [line for line in lines if "sequence parallelism is dequantised" in line]


def test_dequantising_for_sequence_parallelism_is_logged_once(ranks):
    first, second = ranks(2).run(logged_once)
    assert (len(first), len(second)) == (1, 0)


def x_bound(x, w, group, parallel, sequence_parallel):
    """Return the bound of the output's error from the rounding of the weight, summed over ranks."""
    own = x if parallel else x.chunk(group.size(), -1)[group.rank()]
    part = (own.double().abs() @ (steps(w) * 0.5001)).float()
    torch.distributed.all_reduce(part, group=group)
    return part.chunk(group.size())[group.rank()] if sequence_parallel else part


@on_ranks(2)
def test_megatrons_row_layer_in_int8(group):
    wrong = {}
    with Layers(group.size()) as layers:
        cases = itertools.product(GRAINS, (True, False), (False, True), (False, True), (True, False))
        for grain, symmetric, sequence_parallel, skip_bias_add, parallel in cases:
            if sequence_parallel and not parallel:
                continue
            layer = layers.make(
                "RowParallelLinear", (140, N), skip_bias_add=skip_bias_add, input_is_parallel=parallel,
                config={"sequence_parallel": sequence_parallel},
            )  # fmt: skip
            original = layer.weight.detach().clone()
            quantise_row_parallel(layer, grain, group_size=GRAINS[grain], symmetric=symmetric)
            w = int8_weight(layer)
            plain = layers.make(
                "RowParallelLinear", (140, N), skip_bias_add=skip_bias_add, input_is_parallel=parallel,
                config={"sequence_parallel": sequence_parallel},
            )  # fmt: skip
            torch.manual_seed(group.rank() if parallel else 0)
            x = torch.randn(48, 2, 70 if parallel else 140)
            results = {}
            for name, used, chunks in (("plain", plain, 1), ("off", layer, 1), ("on", layer, 4)):
                ascend_parallel.configure(num_chunks=chunks)
                ascend_parallel.ops.COUNTS.clear()
                leaf = x.clone().requires_grad_()
                y, bias = used(leaf)
                y.square().sum().backward()
                counts = ascend_parallel.ops.COUNTS.as_dict()
                results[name] = y.detach(), bias, leaf.grad, counts
            slack = x_bound(x, w, group, parallel, sequence_parallel)
            case = (grain, symmetric, sequence_parallel, skip_bias_add, parallel)
            checks = {
                "bound": ((results["on"][0] - results["plain"][0]).abs() <= slack + 1e-4).all(),
                "quantised": not torch.equal(results["on"][0], results["plain"][0]),
                "off and on": torch.allclose(results["on"][0], results["off"][0], rtol=1e-5, atol=1e-4),
                "gradients": torch.allclose(results["on"][2], results["off"][2], rtol=1e-4, atol=1e-2),
                "bias": (results["on"][1] is None) == (not skip_bias_add),
                "overlapped": bool(results["on"][3]) and not results["off"][3],
                "frozen": not layer.weight.requires_grad and (layer.bias.grad is None) == skip_bias_add,
                "weight": ((layer.weight - original).abs() <= steps(w).t() * 0.5001).all(),
            }
            failed = [name for name, passed in checks.items() if not passed]
            if failed:
                wrong[case] = failed
    assert wrong == {}


@on_ranks(2)
def test_a_quantised_layer_is_an_ordinary_module(group):
    """state_dict, deepcopy, casts, moves and refusals."""
    with Layers(group.size()) as layers:
        layer = layers.make("RowParallelLinear", (140, N))
        notes = dict(vars(layer.weight))
        try:
            copy.deepcopy(layer)
            copies = True
        except (TypeError, RuntimeError):
            copies = False  # a layer that holds its group cannot be copied, quantised or not
        assert quantise_row_parallel(layer, "group", group_size=32, symmetric=False) is layer
        values = layer.parametrizations.weight.original
        assert (values.dtype, values.shape, values.requires_grad) == (torch.int8, (N, 70), False)
        assert {name: getattr(values, name) for name in notes} == notes
        state = layer.state_dict()
        stored = {key: tensor for key, tensor in state.items() if key.startswith("parametrizations.weight.")}
        dtypes = {key.rpartition(".")[2]: tensor.dtype for key, tensor in stored.items()}
        assert dtypes == {"original": torch.int8, "scale": torch.float32, "offset": torch.float32}
        other = quantise_row_parallel(
            layers.make("RowParallelLinear", (140, N), seed=5), "group", group_size=32, symmetric=False
        )
        assert not torch.equal(other.weight, layer.weight)
        other.load_state_dict(state)
        assert torch.equal(other.weight, layer.weight)
        if copies:
            copied = copy.deepcopy(layer)
            assert torch.equal(copied.weight, layer.weight)
            assert copied.parametrizations.weight.original is not values
        before = int8_weight(layer)
        layer.bfloat16()
        after = int8_weight(layer)
        assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
        assert same(before.scale, after.scale) and same(before.offset, after.offset)
        layer.to("meta")
        assert layer.weight.is_meta and int8_weight(layer).scale.is_meta
        with pytest.raises(ValueError, match="RowParallelLinear has no parameter `weight` to quantise, or it is"):
            quantise_row_parallel(layer, "channel")
        with pytest.raises(ValueError, match="has no parameter"):
            quantise_row_parallel(torch.nn.ReLU(), "channel")
        with pytest.raises(RuntimeError, match=r"has no sharded_state_dict .its scales differ from rank to rank"):
            other.sharded_state_dict()
        with pytest.raises(RuntimeError, match=r"Missing key.s. in state_dict: .*weight.original"):
            other.load_state_dict(layers.make("RowParallelLinear", (140, N)).state_dict())
        plain = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        assert int8_weight(plain) is int8_weight(torch.nn.Linear(4, 4)) is None
    return copies


@on_ranks(2)
def test_a_quantised_layer_can_be_copied(group):
    """deepcopy of a layer that holds no group: a torch Linear."""
    layer = quantise_row_parallel(torch.nn.Linear(70, N), "channel")
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.weight, layer.weight)
    copied.parametrizations.weight[0].scale.mul_(2)
    assert torch.equal(copied.weight, 2 * layer.weight)
    x = torch.randn(5, 70)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
