"""A verified run with changed operands: hooks on saved tensors, replaced data and gradients."""

import pytest
import torch
from layer_verification import verifying
from layers import same
from marks import promise
from pool import on_ranks
from torch.autograd.graph import saved_tensors_hooks

import ascend_parallel


def swapped_weight(layer, x):
    """``weight.data`` is replaced between forward and backward, as gathering and offloading do."""
    y = layer(x)[0]
    layer.weight.data = layer.weight.data * 2 + 1
    return y


def swapped_input(layer, x):
    y = layer(x)[0]
    x.data = x.data * 2 + 1
    return y


def lossy(layer, x):
    """Save tensors for backward in bf16."""
    with saved_tensors_hooks(lambda saved: (saved.dtype, saved.bfloat16()), lambda packed: packed[1].to(packed[0])):
        return layer(x)[0]


def lossy_activations(layer, x):
    """Keep parameters unchanged, so that they are recognised as parameters."""

    def pack(saved):
        return saved if isinstance(saved, torch.nn.Parameter) else saved.bfloat16()

    with saved_tensors_hooks(pack, lambda packed: packed.float()):
        return layer(x)[0]


def scaled_gradient(layer, x):
    y = layer(x)[0]
    y.register_hook(lambda dy: 3 * dy)
    return y


def under_autocast(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return swapped_weight(layer, x)


def frozen_weight(layer, x):
    layer.weight.requires_grad_(False)
    return lossy(layer, x)


def frozen_input(layer, x):
    return lossy(layer, x.detach())


USES = (
    *(swapped_weight, swapped_input, lossy, lossy_activations, scaled_gradient),
    *(under_autocast, frozen_weight, frozen_input),
)
LAYERS = {
    "column": ("ColumnParallelLinear", 96, {}, {}),
    "column, sequence parallel": ("ColumnParallelLinear", 96, {"config": {"sequence_parallel": True}}, {}),
    "column, gathered rows kept": (
        "ColumnParallelLinear",
        96,
        {"config": {"sequence_parallel": True}},
        {"recompute_all_gather": False},
    ),
    "row": ("RowParallelLinear", 48, {}, {}),
    "row, sequence parallel": ("RowParallelLinear", 48, {"config": {"sequence_parallel": True}}, {}),
    "row, input whole": ("RowParallelLinear", 96, {"input_is_parallel": False}, {}),
}


@promise("verify-bits")
@pytest.mark.sample(1)
@pytest.mark.parametrize("path", LAYERS)
@on_ranks(2)
def test_a_check_sees_the_operands_that_the_layer_sees(group, path):
    """Results of every use without and with verification; the failures and notes of the latter."""
    kind, k, options, settings = LAYERS[path]
    different = []
    with verifying(group) as layers:
        for use in USES:
            runs = []
            for every in (0, 1):
                ascend_parallel.configure(num_chunks=4, verify_every=every, **settings)
                layer = layers.make(kind, **options)
                torch.manual_seed(3 if "whole" in path or path == "column" else group.rank())
                x = torch.randn(64, 2, k).requires_grad_()
                y = use(layer, x)
                torch.manual_seed(9)
                (y * torch.randn(y.shape)).sum().backward()
                runs.append({"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad})
            different += [f"{use.__name__} {name}" for name in runs[0] if not same(runs[0][name], runs[1][name])]
        report = ascend_parallel.verification()
        backwards = [layer.backwards for layer in report.layers]
    notes = report.notes
    assert different == [] and notes == []
    assert backwards == [1] * len(USES)
