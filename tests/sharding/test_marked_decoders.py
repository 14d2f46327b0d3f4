"""Decoders of transformers, marked by shard_layer, run eagerly as they are: positions and masks are plain tensors."""

import hf_decoders as example
import pytest
import torch
from decoders import decoder, in_float64
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.overrides import _len_torch_function_stack

from ascend_parallel.sharding import (
    ProcessMesh,
    dtensor_from_local,
    shard_dataloader,
    shard_layer,
    shard_tensor,
    unshard,
)

COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def columns_and_rows(path, module, mesh):
    cut = {**dict.fromkeys(COLUMNS, Shard(0)), **dict.fromkeys(ROWS, Shard(1))}.get(path.rpartition(".")[2])
    if cut is not None:
        module.weight = shard_tensor(module.weight, mesh, [Replicate(), cut])


def full_tensor(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def looked(_group, name, **changes):
    """Compare losses, gradients and what hooks see, with batches of several sizes."""
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
    with in_float64(name):
        truth, model = decoder(name, **changes), shard_layer(decoder(name, **changes), mesh, columns_and_rows)
        seen = {True: [], False: []}

        @torch.no_grad()
        def look(module, _, output):
            own = isinstance(next(module.parameters()), DTensor)
            detached = (output[0] if isinstance(output, tuple) else output).detach()
            assert ("DTensor" in repr(detached)) == own
            seen[own].append([full_tensor(each) for each in (detached, detached.norm(), detached.isnan().any())])

        for each in (*model.modules(), *truth.modules()):
            if type(each).__name__.endswith(("MLP", "Attention")):
                each.register_forward_hook(look)
        for rows in (8, 4):
            (tokens,) = example.batch_of(rows, rows)
            (given,) = next(iter(shard_dataloader([(tokens,)], mesh, "dp")))
            found, expected = unshard(loss(model, given)), loss(truth, tokens)
            torch.testing.assert_close(found, expected)
            found.backward()
            expected.backward()
            assert len(seen[True]) == len(seen[False]) > 3
            torch.testing.assert_close(seen[True], seen[False])
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad.full_tensor(), truth.get_parameter(key).grad)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [("GPT2", {}), ("Llama", {"attn_implementation": "eager"})])
@on_ranks(4)
def test_a_marked_decoder_runs_as_one_card(group, name, changes):
    looked(group, name, **changes)


class Shifted(nn.Module):
    """Adds a tensor that its code makes."""

    def __init__(self, made):
        super().__init__()
        self.linear, self.made = nn.Linear(4, 4), made

    def forward(self, x):
        return self.linear(x) * self.made(x)


def given(group, made):
    mesh = ProcessMesh(list(range(group.size())))
    torch.manual_seed(0)
    truth = Shifted(made).double()
    model = shard_layer(Shifted(made).double(), mesh)
    model.load_state_dict({key: shard_tensor(value, mesh, [Replicate()]) for key, value in truth.state_dict().items()})
    x = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    return mesh, model, truth, x


@on_ranks(3)
def test_a_tensor_that_the_forward_makes_is_replicated(group):
    made = lambda x: torch.arange(x.shape[-1], dtype=x.dtype) + torch.tensor(1.0)  # noqa: E731
    mesh, model, truth, x = given(group, made)
    found = model(shard_tensor(x, mesh, [Shard(0)]))
    torch.testing.assert_close(unshard(found), truth(x))
    unshard(found).square().sum().backward()
    truth(x).square().sum().backward()
    torch.testing.assert_close(full_tensor(model.linear.weight.grad), truth.linear.weight.grad)
    # Outside of the forward too, also after a forward that failed.
    for _ in range(2):
        torch.testing.assert_close(unshard(found.detach() * torch.arange(4)), truth(x).detach() * torch.arange(4))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(shard_tensor(torch.ones(6, 5, dtype=torch.float64), mesh, [Replicate()]))
        assert _len_torch_function_stack() == 0
    # A copy without DTensors, and a module inside, run as they are.
    nested = shard_layer(nn.Sequential(model), mesh)
    torch.testing.assert_close(unshard(nested(shard_tensor(x, mesh, [Shard(0)]))), truth(x))
    assert dtensor_from_local(x, mesh, [Shard(0)]).shape == (6 * group.size(), 4)


@on_ranks(3)
def test_tensors_that_differ_between_ranks_are_refused_on_all(group):
    mesh, model, _, x = given(group, lambda x: torch.full((4,), float(group.rank() == 1), dtype=x.dtype))
    with pytest.raises(ValueError, match=r"mul gets a plain tensor, \[4\] of torch\.float64, beside DTensors, and its"):
        model(shard_tensor(x, mesh, [Shard(0)]))
    mesh, model, _, x = given(group, lambda x: 1)
    with pytest.raises(ValueError, match=r"linear gets a plain tensor, \[2, 4\] of torch\.float64"):
        model(x[2 * group.rank() :][:2])  # each rank's own rows, without shard_dataloader
    mesh, model, _, x = given(group, lambda x: torch.zeros(6, 4, dtype=x.dtype).add_(x))
    with pytest.raises(ValueError, match=r"add_ of DTensors writes to a plain tensor: make it a DTensor"):
        model(shard_tensor(x, mesh, [Shard(0)]))
    assert _len_torch_function_stack() == 0
