"""Hugging Face decoders in float64 throughout, and the comparison of a strategy's training step with one process."""

import copy
import importlib
from contextlib import contextmanager

import hf_decoders as example
import torch
from one_card import box_of

from ascend_parallel.training import train_step

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def in_float64(name):
    """Let a model of transformers compute its norms and softmaxes in float64, which it converts to float32."""
    return float64_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")


@contextmanager
def float64_module(name):
    """Let a module have torch.float64 for torch.float32."""
    module = importlib.import_module(name)

    class Doubled:
        float32 = torch.float64

        def __getattr__(self, attribute):
            return getattr(torch, attribute)

    kept, module.torch = module.torch, Doubled()
    try:
        yield
    finally:
        module.torch = kept


def decoder(name, **changes):
    """Return a random decoder whose norms and biases are not ones and zeros."""
    model = example.decoder(name, **changes)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.02
    return model


def step_of(name, strategy, changes, batch):
    """Train one step of SGD by the strategy; return its loss and the part of each weight that this rank holds."""
    model = decoder(name, **changes)
    step = train_step(model, batch, sgd(model), strategy, loss=example.loss)
    loss = step(*batch)
    shards = step.tensor_shards()
    step.close()
    return loss.detach(), shards


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def check_step(name, strategy, changes, of_one_card=None, tolerance=EXACT, batch=None):
    """Compare a training step with one process: the loss and, by the change of each weight, every gradient."""
    batch = batch or example.batch_of(0)
    with in_float64(name):
        loss, shards = step_of(name, strategy, changes, batch)
        whole = decoder(name, **(changes if of_one_card is None else of_one_card))
        before = copy.deepcopy(whole.state_dict())
        expected = example.loss(whole, *batch)
        expected.backward()
        sgd(whole).step()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    held = {key: value for key, value in shards.items() if key in dict(whole.named_parameters())}
    assert held
    for key, shard in held.items():
        own, after = (state[key][box_of(shard)] for state in (before, whole.state_dict()))
        torch.testing.assert_close(own - shard.local.detach(), own - after, **tolerance, msg=lambda m: f"{key}: {m}")  # noqa: B023
    return set(held)
