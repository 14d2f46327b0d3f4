"""Megatron-core's layers when other packages changed them, and unusual calls of them."""

import functools
import types
import warnings

import pytest
import torch
from layers import Layers, same
from marks import promise
from pool import on_ranks

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

VERSION = version_tuple(installed_version())


def plain_and_overlapped(layers, make, x, use=lambda layer, x: layer(x)):
    """Run a freshly made layer unpatched, then patched; return output and input gradient of both, and what ran."""
    runs = []
    for chunks in (1, 4):
        ascend_parallel.configure(num_chunks=chunks)
        ascend_parallel.ops.COUNTS.clear()
        layer, leaf = make(layers), x.clone().requires_grad_()
        y = use(layer, leaf)[0]
        y.square().sum().backward()
        runs.append((y, leaf.grad))
    return [same(a, b) for a, b in zip(*runs, strict=True)], ascend_parallel.ops.COUNTS.as_dict()


@promise("replaced-megatron")
@on_ranks(2)
def test_what_was_replaced_below_forward_stays_in_force(group):
    """Quantisers (NVIDIA ModelOpt) replace functions that forward calls; the layer must run their replacements."""
    from megatron.core.tensor_parallel import layers as module

    original = module.linear_with_grad_accumulation_and_async_allreduce

    @functools.wraps(original)
    def halved(*args, **kwargs):
        return 0.5 * original(*args, **kwargs)

    found = []
    with Layers(group.size()) as layers:
        for kind, k in (("ColumnParallelLinear", 96), ("RowParallelLinear", 96 // group.size())):
            x = torch.randn(64, 2, k)

            def global_replaced(layers, kind=kind):
                module.linear_with_grad_accumulation_and_async_allreduce = halved
                return layers.make(kind)

            def method_overridden(layers, kind=kind):
                made = layers.make(kind)
                impl = {"_forward_impl": lambda self, *args, **kwargs: halved(*args, **kwargs)}
                if not hasattr(type(made), "_forward_impl"):  # an attribute that forward sets, below 0.14
                    return made
                made.__class__ = type("Changed", (type(made),), impl)
                return made

            for make in (global_replaced, method_overridden):
                found.append(plain_and_overlapped(layers, make, x)[0])
                module.linear_with_grad_accumulation_and_async_allreduce = original
    assert found == [[True, True]] * 4


AUTOGRAD = "LinearWithGradAccumulationAndAsyncCommunication"

# Wraps both methods as MindSpeed's swap-attention and ripipe do, to keep main_grad.
KEEPS_MAIN_GRAD = """
from functools import wraps

def linear_forward_main_grad_wrapper(forward_func):
    @wraps(forward_func)
    def linear_forward_main_grad(ctx, *args):
        output = forward_func(ctx, *args)
        ctx.weight = args[1]
        return output
    return linear_forward_main_grad
"""


def replaced_in_autograd(group):
    """MindSpeed's QAT replaces the autograd function's methods; its moe-fb-overlap replaces only the backward."""
    from megatron.core.tensor_parallel import layers as module
    from megatron.core.tensor_parallel import mappings

    linear, reduce = getattr(module, AUTOGRAD), mappings._ReduceFromModelParallelRegion
    forward, backward = linear.forward, linear.backward

    def rounded(ctx, x, weight, *args):  # like a quantiser: other values, the same shapes
        return forward(ctx, x, (8 * weight).round() / 8, *args)

    def halved(ctx, dy):
        dx, *others = backward(ctx, dy)
        return 0.5 * dx, *others

    @functools.wraps(reduce.forward)
    def negative(*args):
        return -reduce_forward(*args)

    reduce_forward = reduce.forward
    mindspeed = {"__name__": "mindspeed.core.memory.common"}
    exec(KEEPS_MAIN_GRAD, mindspeed)
    changes = {
        "forward": (linear, "forward", rounded),
        "backward": (linear, "backward", halved),
        "mapping": (reduce, "forward", staticmethod(negative)),
        "collective": (module, "dist_reduce_scatter_func", lambda *_, **__: None),
        "gather": (mappings, "_gather_along_first_dim", mappings._reduce),
        "class": (module, AUTOGRAD, type(AUTOGRAD, (linear,), {})),
        "matmul": (torch, "matmul", lambda x, w, matmul=torch.matmul: 2 * matmul(x, w)),
        "gradients' matmul": (torch.Tensor, "matmul", lambda x, w, matmul=torch.Tensor.matmul: 2 * matmul(x, w)),
        "harmless": (linear, "forward", mindspeed["linear_forward_main_grad_wrapper"](forward)),
    }
    found = {}
    with Layers(group.size()) as layers:
        x = torch.randn(64, 2, 96 // group.size())
        for name, (owner, method, replacement) in changes.items():
            kept = vars(owner).get(method)

            def make(layers, owner=owner, method=method, replacement=replacement):
                setattr(owner, method, replacement)
                return layers.make("RowParallelLinear")

            try:
                alike, counts = plain_and_overlapped(layers, make, x)
                covered = str(ascend_parallel.coverage(layers.make("RowParallelLinear")))
            finally:
                if kept is None:  # its class holds none: a base does
                    delattr(owner, method)
                else:
                    setattr(owner, method, kept)
            found[name] = (alike, bool(counts), covered)
        found["none"] = str(ascend_parallel.coverage(layers.make("RowParallelLinear")))
    return found


@promise("replaced-megatron")
def test_what_was_replaced_in_the_autograd_functions_stays_in_force(ranks):
    for found in ranks(2).run(replaced_in_autograd):
        for name, what in (
            ("forward", f"layers.{AUTOGRAD}.forward is rounded of test_megatron_unusual_calls"),
            ("backward", f"layers.{AUTOGRAD}.backward is halved of test_megatron_unusual_calls"),
            ("mapping", "mappings._ReduceFromModelParallelRegion.forward is negative of test_megatron_unusual_calls"),
            ("collective", "layers.dist_reduce_scatter_func is <lambda> of test_megatron_unusual_calls"),
            ("gather", "mappings._gather_along_first_dim is _reduce of megatron.core.tensor_parallel.mappings"),
            ("class", f"layers.{AUTOGRAD} is test_megatron_unusual_calls.{AUTOGRAD}"),
            ("matmul", "torch.matmul is <lambda> of test_megatron_unusual_calls"),
            ("gradients' matmul", "torch.Tensor.matmul is <lambda> of test_megatron_unusual_calls"),
        ):
            alike, ran, covered = found[name]
            assert alike == [True, True], name
            # Between the layer's collectives, where Megatron's functions take a group.
            multiplies = name in ("forward", "backward", "class") or "matmul" in name
            assert ran == (VERSION >= (0, 13) and multiplies), name
            assert covered.startswith("0 of 1 linear layers covered"), name
            where = "" if "matmul" in name else "megatron.core.tensor_parallel."
            assert f"what it computes was replaced: {where}{what}" in covered
        assert found["harmless"] == ([True, True], True, "1 of 1 linear layers covered")
        assert found["none"] == "1 of 1 linear layers covered"


@on_ranks(2)
def test_input_gradients_that_the_mapping_reduces(group):
    """If a layer does not reduce its input gradient itself, Megatron's mapping of the input does."""
    found = []
    with Layers(group.size()) as layers:

        def without_its_own(layers):
            layer = layers.make("ColumnParallelLinear")
            layer.allreduce_dgrad = False
            return layer

        def toggled_for_inference(layers):
            layer = layers.make("ColumnParallelLinear", config={"sequence_parallel": True})
            layer.sequence_parallel = False
            return layer

        torch.manual_seed(0)
        for make in (without_its_own, toggled_for_inference):
            found.append(plain_and_overlapped(layers, make, torch.randn(128, 96)))
    for equal, counts in found:
        assert equal == [True, True]
        assert counts["matmul_all_reduce"]["chunks"] == 4


@pytest.mark.slow
@on_ranks(2)
def test_compiled_layers(group):
    """torch.compile of a patched layer breaks the graph as for an unpatched layer, and computes the same."""
    warnings.simplefilter("ignore")
    with Layers(group.size()) as layers:
        torch.manual_seed(group.rank())
        x = torch.randn(64, 2, 96 // group.size())

        def use(layer, x):
            return torch.compile(layer, backend="eager")(x)

        same_bits, _ = plain_and_overlapped(layers, lambda layers: layers.make("RowParallelLinear"), x, use)
    assert same_bits == [True, True]


@promise("settings-compared")
@on_ranks(2)
def test_what_one_rank_did_alone_is_not_compared(group):
    """A run or a configure() of a single rank leaves no settings for which the other ranks must wait."""
    with Layers(group.size()) as layers:
        column, row = layers.make("ColumnParallelLinear"), layers.make("RowParallelLinear")
        if group.rank() == 0:
            for chunks in (2, 3):
                ascend_parallel.configure(num_chunks=chunks)
                column(torch.randn(64, 96))
        for chunks in (8, 4):
            ascend_parallel.configure(num_chunks=chunks)
            row(torch.randn(64, 48))


def handed_a_group(group):
    """tp_group: two layers on two groups of two ranks each."""

    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    with Layers(2) as layers:
        if "tp_group" not in vars(layers.make("ColumnParallelLinear")):
            return None
        x = torch.randn(64, 2, 48)
        found = plain_and_overlapped(
            layers, lambda layers: layers.make("RowParallelLinear", tp_group=pairs[group.rank() // 2]), x
        )
    return found


def test_a_group_of_its_own(ranks):
    for found in ranks(4).run(handed_a_group):
        assert found is None or (found[0] == [True, True] and found[1]["matmul_all_reduce"]["chunks"] == 4)


@on_ranks(2)
def test_expert_layers(group):
    """Expert layers with and without a separate tensor-parallel group, as configured."""
    found = {}
    with Layers(group.size()) as layers:
        for kind, k in (("ColumnParallelLinear", 96), ("RowParallelLinear", 96 // group.size())):
            extra = {"skip_bias_add": True} if kind == "RowParallelLinear" else {}
            x = torch.randn(64, 2, k)
            found[kind] = plain_and_overlapped(
                layers, lambda layers, kind=kind, extra=extra: layers.make(kind, is_expert=True, **extra), x
            )
    assert [equal for equal, _ in found.values()] == [[True, True]] * 2


@on_ranks(2)
def test_a_bias_beside_a_frozen_weight_gets_its_gradient(group):
    """Megatron returns no gradient for it; a patched layer does (docs/decisions/0008-bias-of-a-frozen-weight.md)."""
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        layer = layers.make("ColumnParallelLinear")
        layer.weight.requires_grad_(False)
        y, _ = layer(torch.randn(64, 96, requires_grad=True))
        y.sum().backward()
        assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 64))


@on_ranks(2)
def test_odd_inputs_through_the_layers(group):
    """M = 0, fewer rows than chunks, wrong sizes and dtypes, through the layers."""
    shapes = []
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=8)
        for sequence_parallel in (False, True):
            config = {"sequence_parallel": sequence_parallel}
            column = layers.make("ColumnParallelLinear", config=config)
            row = layers.make("RowParallelLinear", config=config)
            for rows in (0, 2, 6):
                x = torch.randn(rows, 2, 96, requires_grad=True)
                y = row(column(x)[0][..., : 96 // group.size()])[0]
                y.sum().backward()
                shapes.append((y.shape == x.shape, x.grad.shape == x.shape))
            for layer in (column, row):
                with pytest.raises((ValueError, RuntimeError), match=r"not a matmul|cannot be multiplied"):
                    layer(torch.randn(64, 2, 7))
                with pytest.raises((ValueError, RuntimeError), match="dtype"):
                    layer(torch.randn(64, 2, layer.weight.shape[1], dtype=torch.float64))
        with pytest.raises(ValueError, match=r"63, is not divisible by the 2 ranks"):
            row(torch.randn(63, 2, 48))
    assert shapes == [(True, True)] * 6


@on_ranks(2)
def test_no_grad_inference_mode_and_retain_graph(group):
    found = []
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        layer, x = layers.make("RowParallelLinear"), torch.randn(128, 48)
        expected = layer(x)[0]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found.append(torch.equal(layer(x)[0], expected))
        loss = layer(x)[0].sum()
        loss.backward(retain_graph=True)
        once = layer.weight.grad.clone()
        loss.backward()
        found.append(torch.equal(layer.weight.grad, 2 * once))
    assert found == [True] * 3


def test_fake_groups_need_no_agreement():
    """Memory is estimated on fake process groups, whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ascend_parallel.process_groups.consistency import SettingsAgreement
    from ascend_parallel.settings import Settings

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        SettingsAgreement(Settings(num_chunks=4).shared).confirm(torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def test_layers_of_other_libraries_are_named():
    from ascend_parallel import coverage

    te = types.new_class("TELinear", (torch.nn.Linear,))
    assert "TransformerEngine's TELinear" in str(coverage(te(4, 4)))
