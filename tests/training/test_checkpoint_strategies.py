"""Training saved under one strategy continues under another, with the whole model's losses throughout."""

import gpt
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import PipelineOptions, Recompute, ShardingOptions, Strategy, train_step

COLUMNS, ROWS = ([("dp", 1, 1), ("tp", 1)], None), ([("dp", 1, "tp"), (1, "tp")], None)
MEGATRON = {"layers.*.qkv": COLUMNS, "layers.*.up": COLUMNS, "layers.*.o": ROWS, "layers.*.down": ROWS}
TP = {"mode": "semi_auto", "mesh": {"dp": 2, "tp": 2}, "operators": MEGATRON}


class Tied(gpt.GPT):
    """A GPT with a second name for the embedding, a parameter without readers, and a frozen norm."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, gpt.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.ones(2))
        self.norm.requires_grad_(False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


STRATEGIES = {
    "zero 1": {**TP, "sharding": ShardingOptions(zero_stage=1), "max_norm": 0.5},
    "zero 2 by parameters": {
        "mode": "data",
        "mesh": {"dp": 4},
        "sharding": ShardingOptions(zero_stage=2, partition_by="parameters"),
    },
    "zero 3": {"mode": "data", "mesh": {"dp": 4}, "sharding": ShardingOptions(zero_stage=3), "max_norm": 0.5},
    "pipeline": {
        "mode": "data",
        "mesh": {"dp": 2},
        "pipeline": PipelineOptions(degree=2, micro_batches=4),
        "recompute": Recompute(modules=["layers.*"]),
    },
    "interleaved": {
        "mode": "data",
        "mesh": {"dp": 2},
        "pipeline": PipelineOptions(degree=2, micro_batches=4, schedule="interleaved_1f1b", virtual_stages=2),
        "sharding": ShardingOptions(zero_stage=1),
    },
}


def made(options):
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    return model, optimizer, Strategy(**{**options, "max_norm": 0.5})


# Each goes on where the one before it has saved; the last runs the model's own code.
CHAIN = ("zero 1", "pipeline", "zero 2 by parameters", "interleaved", "zero 3", "zero 1")


def change(_group, folder):
    """Train 4 batches under each strategy of the chain, with a save and a load between them; return the losses."""
    losses = []
    for place, name in enumerate(CHAIN):
        model, optimizer, strategy = made(STRATEGIES[name])
        static = place < len(CHAIN) - 1
        step = train_step(model, gpt.batch_of(0), optimizer, strategy, static=static)
        if place:
            assert step.load(folder) == {"told": 7}
        assert step.batches == 4 * place
        losses += [step(*gpt.batch_of(number)).item() for number in range(step.batches, 4 * (place + 1))]
        step.save(folder, {"told": 7}, asynchronous=True)
        step.close()
    return losses


def whole():
    model, optimizer, strategy = made(STRATEGIES["zero 1"])
    losses = []
    for number in range(4 * len(CHAIN)):
        loss = model(*gpt.batch_of(number))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), strategy.max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_goes_on_under_another_strategy(ranks, tmp_path):
    found = ranks(4).run(change, str(tmp_path))
    expected = whole()
    for losses in found:
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
