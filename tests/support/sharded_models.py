"""What tests of sharded execution share: models, their batches, plans and the comparison with the whole model."""

from collections import Counter

import torch
from dispatched import Dispatched
from plans import by_hand
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, SUM, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate

R, C, S0, S1, S2 = (REPLICATE,), (PARTIAL_GRAD,), (shard(0),), (shard(1),), (shard(2),)
PARTIAL = (SUM,)
CHUNKS = {"num_chunks": 2}
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class MLP(nn.Module):
    """A residual branch as Megatron-core has it: column, gelu, row; `scale` gives its input a gradient."""

    def __init__(self, width=12, wide=24, bias=True):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.up, self.down = nn.Linear(width, wide, bias=bias), nn.Linear(wide, width, bias=bias)

    def forward(self, x):
        h = x * self.scale
        return h + self.down(F.gelu(self.up(h)))


class Blocks(nn.Module):
    """Residual blocks of a column-parallel and a row-parallel layer."""

    def __init__(self, count, width=64, wide=256):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, wide), "down": nn.Linear(wide, width)}) for _ in range(count)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](F.gelu(block["up"](x)))
        return x.square().mean()


def column_and_row(batch=None):
    """Return the strategies of blocks as Megatron-core has them, with the batch along a mesh dimension."""
    return {
        "blocks.*.up": (((batch, None, None), ("mp", None)), None),
        "blocks.*.down": (((batch, None, "mp"), (None, "mp")), None),
    }


GIVEN = {"up.weight": S0, "up.bias": S0, "down.weight": S1}


def tensor_parallel(graph, mesh):
    calls = {"linear": ([C, S0, S0], S2), "gelu": ([S2], S2), "linear_1": ([S2, S1, C], PARTIAL)}
    return by_hand(graph, mesh, GIVEN, calls, inputs_have_gradients=True)


def sequence_parallel(graph, mesh, rows=S0):
    calls = {
        "mul": ([rows, C], rows),
        "linear": ([C, S0, S0], S2),
        "gelu": ([S2], S2),
        "linear_1": ([S2, S1, C], PARTIAL),
        "add": ([rows, rows], rows),
    }
    return by_hand(graph, mesh, {**GIVEN, "x": rows}, calls, inputs_have_gradients=True)


FORMS = {"tensor": tensor_parallel, "sequence": sequence_parallel}
FORMS["samples"] = lambda graph, mesh: sequence_parallel(graph, mesh, S1)


def made(model, *arguments, **keywords):
    torch.manual_seed(5)
    return model(*arguments, **keywords).double()


def step(model, *args):
    """Return output, and the gradients of inputs and parameters, for a gradient of the output that is not constant."""
    args = [one.clone().requires_grad_() if one.is_floating_point() else one for one in args]
    y = model(*args)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    return y.detach(), [one.grad for one in args if one.is_floating_point()]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(model, sharded, *args):
    y, inputs = step(model, *args)
    sharded_y, sharded_inputs = step(sharded, *args)
    torch.testing.assert_close(sharded_y, y, **EXACT)
    torch.testing.assert_close(sharded_inputs, inputs, **EXACT)
    torch.testing.assert_close(sharded.full_gradients(), gradients(model), **EXACT)


def seen(sharded):
    """Return what ran, as `planned_collectives` has it; a plan knows no gradients of what the user gives."""
    return {
        (one.kind, one.mesh_dim, one.value, one.reader, one.direction): count
        for one, count in sharded.collective_counts.items()
        if one.reader != one.value.node
    }


def collectives_of(function):
    """Return what a function returns, and how often it called each collective of torch.distributed."""
    counts = Counter()
    with Dispatched(lambda operator, _: counts.update([operator.name()] if operator.namespace == "c10d" else [])):
        return function(), counts


def calls_of(counts):
    return {name: count["calls"] for name, count in counts.items()}


def mesh_of(mesh_shape):
    names = ["dp", "mp"][-len(mesh_shape) :]
    return ProcessMesh(torch.arange(torch.Size(mesh_shape).numel()).reshape(mesh_shape), names)


# What is configured as columns and as rows, and how many dimensions their inputs have.
CONFIGURED = {
    "Llama": (
        [f"layers.*.{name}" for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")],
        ["layers.*.attention.o", "layers.*.mlp.down"],
        3,
    ),
    "GPT": (["layers.*.qkv", "layers.*.up"], ["layers.*.o", "layers.*.down"], 3),
    "Bert": (["q", "k", "v", "up"], ["o", "down"], 3),
    "ResNet": (["wide"], ["head"], 2),
}


def planned(name, graph, mesh, rows_cut=False, data_dim=None, row_dim=1):
    """Configure Megatron-core's layers along mp, the batch along dp if there is such a dimension.

    rows_cut: sequence parallelism, along dimension `row_dim`.
    data_dim: as of `propagate`; also what is not configured is then cut along it.
    """
    columns, rows, dims = CONFIGURED[name]
    batch = ("dp" if mesh.ndim == 2 else None, *(None,) * (dims - 2))
    chosen = dict.fromkeys(columns, (((*batch, None), ("mp", None)), None))
    chosen |= dict.fromkeys(rows, (((*batch, "mp"), (None, "mp")), None))
    if rows_cut:
        # the stream between the halves; and the norms' products, or gathering before them saves a small all-reduce
        layout = tuple({0: data_dim, row_dim: "mp"}.get(dim) for dim in range(3))
        norms = "layers.*.norm?:mul" if name == "Llama" else "layers.*.norm?"
        chosen |= dict.fromkeys(("layers.*:add", norms), (None, (layout,)))
    return propagate(graph, mesh, chosen, data_dim=data_dim, objective="redistribution")


def tokens_of(count, generator, length=16, vocabulary=64):
    return torch.randint(vocabulary, (count, length), generator=generator)


BATCHES = {
    "Llama": lambda generator: (tokens_of(4, generator), tokens_of(4, generator)),
    "GPT": lambda generator: (tokens_of(4, generator), tokens_of(4, generator)),
    "Bert": lambda generator: (
        tokens_of(4, generator),
        torch.arange(16) < torch.randint(5, 16, (4, 1), generator=generator),
        tokens_of(4, generator, 1, 4).flatten(),
    ),
    "ResNet": lambda generator: (
        torch.randn((4, 3, 6, 6), generator=generator, dtype=torch.float64),
        tokens_of(4, generator, 1, 16).flatten(),
    ),
}
