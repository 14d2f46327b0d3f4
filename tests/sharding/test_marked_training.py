"""Marked models under users' habits: hooks, checkpoints, dropout, batch norm, autocast; torch lays out nothing."""

import copy
import io

import hf_decoders as example
import pytest
import torch
from decoders import decoder
from dispatched import Dispatched
from marks import promise
from pool import on_ranks
from test_marked_decoders import columns_and_rows
from test_marked_decoders import loss as decoder_loss
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_parallel.sharding import ProcessMesh, shard_dataloader, shard_layer, shard_tensor, unshard


@promise("marked-rules")
@pytest.mark.slow
@on_ranks(4)
def test_torch_lays_out_no_function_of_a_marked_model(group):
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
    model = shard_layer(decoder("Llama"), mesh, columns_and_rows)
    (tokens,) = example.batch_of(8, 8)
    (given,) = next(iter(shard_dataloader([(tokens,)], mesh, "dp")))
    seen = []

    def note(operator, types):
        if any(issubclass(kind, DTensor) for kind in types):
            seen.append(str(operator))

    with Dispatched(note):
        decoder_loss(model, given)
    assert seen == []


class Net(nn.Module):
    def __init__(self, recompute=None, rate=0.0):
        super().__init__()
        self.recompute, self.rate = recompute, rate
        self.up, self.norm, self.down = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def middle(self, x):
        return F.dropout(F.gelu(self.norm(x)), self.rate, self.training)

    def forward(self, x):
        x = self.up(x)
        x = self.middle(x) if self.recompute is None else checkpoint(self.middle, x, use_reentrant=self.recompute)
        return self.down(x) * self.scale.exp()


def cut(path, module, mesh):
    if path in ("up", "down"):
        dim = 0 if path == "up" else 1
        module.weight = shard_tensor(module.weight, mesh, [Replicate(), Shard(dim)])


def nets(group, shape=(2, 2), **options):
    """Return the same net plain and marked, and a batch plain and cut."""
    mesh = ProcessMesh(torch.arange(group.size()).reshape(shape).tolist(), ["dp", "mp"])
    torch.manual_seed(0)
    truth = Net(**options).double()
    net = shard_layer(copy.deepcopy(truth), mesh, cut)
    x = torch.randn(12, 8, dtype=torch.float64)
    torch.manual_seed(group.rank())
    return mesh, truth, net, x, shard_tensor(x, mesh, [Shard(0), Replicate()])


def assert_same(net, truth):
    for name, tensor in (*truth.named_parameters(), *truth.named_buffers()):
        held = net.get_parameter(name) if isinstance(tensor, nn.Parameter) else net.get_buffer(name)
        torch.testing.assert_close(unshard(held.detach()), tensor.detach())
        if isinstance(tensor, nn.Parameter):
            torch.testing.assert_close(held.grad.full_tensor(), tensor.grad)


@pytest.mark.sample(3)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("recompute", [None, False, True])
@on_ranks()
def test_a_net_with_running_statistics_trains_as_on_one_card(group, recompute):
    _, truth, net, x, given = nets(group, (group.size() // 2, 2), recompute=recompute)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1, foreach=recompute is False) for each in (truth, net)]
    seen = []
    net.down.register_forward_hook(lambda _, inputs, output: seen.append(output.detach().norm().item()))
    truth.down.register_forward_hook(lambda _, inputs, output: seen.append(output.detach().norm().item()))
    for _ in range(3):
        for _ in range(2):  # gradients of two batches
            truth(x).square().mean().backward()
            net(given).square().mean().backward()
        assert_same(net, truth)
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (truth, net)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(seen[::2], seen[1::2])
    truth.eval(), net.eval()
    torch.testing.assert_close(unshard(net(given)), truth(x))


@on_ranks(4)
def test_what_users_do_with_tensors_and_models(group):
    _, truth, net, x, given = nets(group)
    # hooks on tensors change gradients, torch.autograd.grad and retain_grad read them
    results = []
    for model, batch in ((truth, x), (net, given)):
        middle = model.up(batch)
        middle.retain_grad()
        middle.register_hook(lambda gradient: gradient * 2)
        out = model.down(middle.relu())
        out.square().sum().backward(retain_graph=True)
        (weight, unused) = torch.autograd.grad(
            out.mean(), [model.up.weight, model.scale], retain_graph=True, materialize_grads=True
        )
        results.append([middle.grad, model.up.weight.grad, weight, unused])
        out.backward(torch.ones_like(out), inputs=[model.down.weight])
        results[-1].append(model.down.weight.grad)
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)
    # states and copies
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    assert b"ascend_parallel" not in buffer.getvalue()
    copied = copy.deepcopy(net)
    with torch.no_grad():
        copied.down.weight.add_(1)
        truth.down.weight.add_(1)
        net.load_state_dict(copied.state_dict())
    torch.testing.assert_close(unshard(net.eval()(given)), truth.eval()(x))
    with torch.inference_mode():
        torch.testing.assert_close(unshard(net(given)), truth(x))
    assert f"{net(given).sum():.3f}" == f"{truth(x).sum():.3f}"


@on_ranks(4)
def test_autocast_casts_what_it_casts_on_one_card(group):
    _, truth, net, x, given = nets(group)
    truth, net, x, given = truth.float(), net.float(), x.float(), given.float()
    outputs = []
    for model, batch in ((truth, x), (net, given)):
        with torch.autocast("cpu", torch.bfloat16):
            out = model.down(F.gelu(model.up(batch)))
            loss = F.mse_loss(out.float(), batch)
        assert out.dtype == torch.bfloat16
        loss.backward()
        outputs.append((out, loss))
    torch.testing.assert_close(unshard(outputs[1][0]), outputs[0][0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(unshard(outputs[1][1]), outputs[0][1], rtol=0.02, atol=0.02)
    gradient = net.up.weight.grad.full_tensor()
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, truth.up.weight.grad, rtol=0.1, atol=0.05)


def dropped(group):
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
    torch.manual_seed(group.rank())
    x = shard_tensor(torch.ones(64, 32), mesh, [Shard(0), Replicate()]).requires_grad_()

    def draw(x):
        return F.dropout(x, 0.5)

    first = checkpoint(draw, x, use_reentrant=False)
    whole = unshard(first.detach())
    first.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole)  # recomputed with the same numbers
    assert 0.4 < whole.eq(0).float().mean() < 0.6
    assert not torch.equal(whole[:32], whole[32:])  # ranks with other rows draw others
    assert not torch.equal(whole, unshard(F.dropout(x, 0.5).detach()))
    return whole


def test_ranks_that_hold_the_same_rows_drop_the_same_and_others_do_not(ranks):
    first, *others = ranks(4).run(dropped)
    assert all(torch.equal(first, other) for other in others)


def outside(group):
    mesh = ProcessMesh([0, 1])
    x = shard_tensor(torch.arange(8.0), mesh, [Shard(0)])
    y = (x * 2 + 1).exp()
    return list(y.shape), y.to_local().tolist()


def test_a_rank_outside_of_the_mesh_has_no_part(ranks):
    expected = (torch.arange(8.0) * 2 + 1).exp()
    for rank, (shape, local) in enumerate(ranks(3).run(outside)):
        assert shape == [8]
        assert local == (expected.chunk(2)[rank].tolist() if rank < 2 else [])
