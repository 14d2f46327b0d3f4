"""Architectures of transformers as they are, without a strategy: a training step against one card."""

import copy
import logging

import hf_decoders as example
import pytest
import torch
from architectures import ARCHITECTURES, batch, in_float64, made

from ascend_parallel.training import Strategy, train_step

STRATEGIES = {
    "data": {"mode": "data", "mesh": {"dp": 4}},
    "auto": {"mode": "auto", "mesh": {"dp": 2, "tp": 2}, "hardware": "910b"},
}
# These call .float(), and sum over tokens in float32.
IN_FLOAT32 = {"Gemma", "Gemma2", "Gemma3Text", "Mamba"}


def stepped(name, mode):
    model = made(name)
    whole = copy.deepcopy(model)
    with in_float64(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = train_step(model, batch(), optimizer, Strategy(**STRATEGIES[mode]), loss=example.loss)
        loss, shards = step(*batch()).detach(), step.tensor_shards()
        step.close()
        before = copy.deepcopy(whole.state_dict())
        expected = example.loss(whole, *batch())
        expected.backward()
        torch.optim.SGD(whole.parameters(), lr=1.0).step()
    return loss, expected.detach(), shards, before, whole


def one_step(group, name, mode):
    """Compare the loss and, by the change of each weight, every gradient."""
    logging.disable(logging.WARNING)
    loss, expected, shards, before, whole = stepped(name, mode)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    parameters = dict(whole.named_parameters())
    held = {key: value for key, value in shards.items() if key in parameters}
    rounded = {"rtol": 1e-5, "atol": 1e-7} if name in IN_FLOAT32 else {"rtol": 1e-8, "atol": 1e-11}
    for key, shard in held.items():
        box = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.local.shape, strict=True))
        old, after = before[key][box], parameters[key].detach()[box]
        torch.testing.assert_close(
            old - shard.local.detach(), old - after, **rounded, msg=lambda m, key=key: f"{key}: {m}"
        )
    return set(held), set(parameters)


CASES = [("auto", name) for name in ARCHITECTURES]
# Where the batch alone is cut, it has only to be traced, as in mode "auto": every eighth, and all in make stress.
CASES += [
    pytest.param("data", name, marks=[pytest.mark.stress] if place % 8 else [])
    for place, name in enumerate(ARCHITECTURES)
]


@pytest.mark.sample("auto-BioGpt")
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_an_architecture_trains_as_on_one_card(ranks, mode, name):
    held = ranks(4).run(one_step, name, mode)
    assert set().union(*(own for own, _ in held)) == held[0][1]
