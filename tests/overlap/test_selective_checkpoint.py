"""Layers under selective activation checkpoints, whose policies keep results of matmuls or of everything."""

import functools
import itertools

import pytest
import torch
from layers import Layers
from marks import promise
from pool import on_ranks
from tolerances import close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ascend_parallel

aten = torch.ops.aten
POLICIES = {
    "mm": [aten.mm.default],
    "mm.out": [aten.mm.default, aten.mm.out],
    "all": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    "all but views": lambda _, operator, *__, **___: (
        CheckpointPolicy.PREFER_RECOMPUTE
        if any(y.alias_info is not None and not y.alias_info.is_write for y in operator._schema.returns)
        else CheckpointPolicy.MUST_SAVE
    ),
}


def unsharded_layer(bias, ranks, seed=5):
    """Return a whole layer in float64: operands, gradients and result."""
    torch.manual_seed(seed)
    x = torch.randn(64, 2, 16 * ranks, dtype=torch.float64) / 8
    weight, b = torch.randn(12 * ranks, 16 * ranks, dtype=torch.float64), torch.randn(12 * ranks, dtype=torch.float64)
    leaves = [x.requires_grad_(), weight.requires_grad_(), b.requires_grad_()]
    y = torch.nn.functional.linear(x, weight, b if bias else None)
    y.sin().sum().backward()
    return [leaf.detach() for leaf in leaves], [leaf.grad for leaf in leaves], y.detach()


def part(tensor, group, dim):
    return tensor.chunk(group.size(), dim)[group.rank()].clone()


def cuts(kind, sequence_parallel):
    """Return the sharded dimension of x, the weight, the bias and y; None: not sharded."""
    rows = 0 if sequence_parallel else None
    return (rows, 0, 0, -1) if kind == "ColumnParallelLinear" else (-1, 1, None, rows)


def layers_under_policies(group, settings, dtype, verify_every=0):
    """Every layer under every policy, against the truth in float64, output and every gradient."""
    done = []
    with Layers(group.size(), params_dtype=dtype) as layers:
        ascend_parallel.configure(**settings, verify_every=verify_every)
        for kind, bias, sequence_parallel, (name, policy) in itertools.product(
            ("ColumnParallelLinear", "RowParallelLinear"), (False, True), (False, True), POLICIES.items()
        ):
            operands, gradients, y = unsharded_layer(bias, group.size())
            along = cuts(kind, sequence_parallel)
            own = [
                (operand if dim is None else part(operand, group, dim)).to(dtype)
                for operand, dim in zip(operands, along, strict=False)
            ]
            config = {"sequence_parallel": sequence_parallel}
            layer = layers.make(kind, tuple(reversed(operands[1].shape)), bias=bias, config=config)
            x = own[0].requires_grad_()
            with torch.no_grad():
                layer.weight.copy_(own[1])
                if bias:
                    layer.bias.copy_(own[2])
            found = checkpoint(
                lambda x, layer=layer: layer(x)[0].sin(),
                x,
                use_reentrant=False,
                context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
            )
            found.sum().backward()
            what = f"{kind} bias={bias} sequence_parallel={sequence_parallel} {name}"
            results = {"y": (found, y.sin(), along[3])}
            results["dx"] = (x.grad, gradients[0], along[0])
            results["dw"] = (layer.weight.grad, gradients[1], along[1])
            if bias and along[3] != 0:  # else each rank has the bias's gradient of its own rows
                results["db"] = (layer.bias.grad, gradients[2], along[2])
            for quantity, (result, truth, dim) in results.items():
                try:
                    close(result, truth if dim is None else part(truth, group, dim), dtype)
                except AssertionError as error:
                    done.append(f"{what} {quantity}: {error}")
        checked = sum(layer.forwards for layer in ascend_parallel.verification().layers) if verify_every else 0
    return done, checked


SETTINGS = pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"num_chunks": 1, "deterministic": True}, torch.float64),
        ({"num_chunks": 4}, torch.float64),
        ({"num_chunks": 4, "deterministic": True}, torch.float64),
        ({"fused": True}, torch.float32),
    ],
    ids=["one chunk", "chunked", "deterministic", "fused"],
)


@promise("selective-checkpoints")
@SETTINGS
def test_selective_checkpoints_keep_every_gradient(ranks, settings, dtype):
    for found, _ in ranks(2).run(layers_under_policies, settings, dtype):
        assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_verified_run_under_selective_checkpoints(ranks, every):
    for found, checked in ranks(2).run(layers_under_policies, {"num_chunks": 4}, torch.float64, every):
        assert found == []
        assert checked


@on_ranks(2)
def test_operators_and_int8_weights_under_selective_checkpoints(group):
    """The registered operators, and a row layer with an int8 weight, against a checkpoint without a policy."""
    from ascend_parallel import Settings, ops
    from ascend_parallel.overlap.quantised import quantise_weight, quantised_row_linear

    torch.manual_seed(group.rank())
    w = torch.randn(16, 24)
    int8 = quantise_weight(w, "channel")
    calls = {
        "all_reduce": lambda x: ops.matmul_all_reduce(x, w, group, num_chunks=2),
        "reduce_scatter": lambda x: ops.matmul_reduce_scatter(x, w, group, num_chunks=2),
        "all_gather": lambda x: ops.all_gather_matmul(x, w, group, num_chunks=2)[0],
        "int8": lambda x: quantised_row_linear(x, int8, group=group, settings=Settings(num_chunks=2)),
    }
    different = []
    for (call, run), (name, policy) in itertools.product(calls.items(), POLICIES.items()):
        gradients = []
        for context in ({}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}):
            torch.manual_seed(7 + group.rank())
            x = torch.randn(64, 16, requires_grad=True)
            checkpoint(lambda x, run=run: run(x).sin().square(), x, use_reentrant=False, **context).sum().backward()
            gradients.append(x.grad)
        if not torch.equal(*gradients):
            different.append(f"{call} {name}")
    assert different == []
