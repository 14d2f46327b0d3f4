"""The predicted bytes that operators keep for backward, beside those that autograd holds."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding import ProcessMesh, propagate, trace
from ascend_parallel.sharding.runtime.activation_memory import saved_bytes
from ascend_parallel.sharding.runtime.rank_plan import plan_for_rank
from ascend_parallel.sharding.runtime.recompute_config import Recompute

BATCH, LENGTH, WIDTH = 4, 12, 16


class Around(nn.Module):
    """An operator between two linear layers, so that its input and result are activations."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class First(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class Channels(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.transpose(1, 2)).transpose(1, 2)


def attention(x):
    head = x.unsqueeze(1)
    return F.scaled_dot_product_attention(head, head, head, is_causal=True).squeeze(1)


CASES = {
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)),
    "lstm both ways": lambda: First(nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)),
    "gru": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "rnn": lambda: First(nn.RNN(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda: Function(attention),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "group_norm": lambda: Channels(nn.GroupNorm(4, WIDTH)),
    "batch_norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "instance_norm": lambda: Channels(nn.InstanceNorm1d(WIDTH)),
    "conv1d": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "max_pool1d": lambda: Channels(nn.MaxPool1d(2)),
    "dropout": lambda: nn.Dropout(0.5),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softmax": lambda: nn.Softmax(-1),
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "power": lambda: Function(lambda x: x**3),
    "mean": lambda: Function(lambda x: x - x.mean(-1, keepdim=True)),
    "clamp": lambda: Function(lambda x: x.clamp(-1, 1)),
    "gated": lambda: Function(lambda x: x * x.sigmoid()),
    "glu": lambda: Function(lambda x: F.glu(torch.cat((x, x), -1))),
    "prelu": nn.PReLU,
}


def held(model, batch):
    """Return the bytes that autograd holds after a forward, without parameters, buffers and the batch."""
    kept, given = {}, [*model.parameters(), *model.buffers(), batch]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", CASES)
def test_an_operator_keeps_what_autograd_holds(name):
    torch.manual_seed(0)
    # In fp64 no kernel of oneDNN runs, whose LSTM has a workspace of its own.
    dtype = torch.float64 if name.split()[0] in ("lstm", "gru", "rnn") else torch.float32
    model, batch = Around(CASES[name]()).to(dtype), torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    plan = propagate(trace(model, (batch,)), ProcessMesh([0], ["mp"]))
    predicted = saved_bytes(plan_for_rank(plan, (0,), None), Recompute())
    assert predicted == pytest.approx(held(model, batch), rel=0.03)
    assert predicted > 0


def test_what_an_operator_makes_for_backward_is_divided_with_the_batch():
    model, batch = Around(CASES["dropout"]()), torch.randn(BATCH, LENGTH, WIDTH)
    sizes = []
    for ranks in (1, 2):
        mesh = ProcessMesh(list(range(ranks)), ["dp"])
        plan = propagate(trace(model, (batch,)), mesh, data_dim="dp")
        sizes.append(saved_bytes(plan_for_rank(plan, (0,), None), Recompute()))
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.05)
