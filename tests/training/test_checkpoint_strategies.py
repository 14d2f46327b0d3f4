"""Training saved under one strategy continues under another, also on other meshes, with the whole model's losses."""

import gpt
import pytest
import torch
from mesh_stages import ACROSS, LINE, MEGATRON, SQUARE, semi_auto
from one_card import losses_of
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import PipelineOptions, Recompute, ShardingOptions, Strategy, train_step

TP = {"mode": "semi_auto", "mesh": SQUARE, "operators": MEGATRON}


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
    # On 8 ranks, with stages on meshes of different shapes, which cut the tied embedding in different ways.
    "square, line": semi_auto(SQUARE, LINE, sharding=ShardingOptions(zero_stage=1)),
    "line, across": semi_auto(LINE, ACROSS, sharding=ShardingOptions(zero_stage=2)),
    "equal meshes": {
        "mode": "data",
        "mesh": {"dp": 4},
        "pipeline": PipelineOptions(degree=2, micro_batches=4),
        "sharding": ShardingOptions(zero_stage=3),
    },
    "three meshes": semi_auto({"dp": 1, "tp": 2}, LINE, {"dp": 2, "tp": 1}),
}
# Each goes on where the one before it has saved; the last of the 4 ranks runs the model's own code.
CHAINS = {
    4: ("zero 1", "pipeline", "zero 2 by parameters", "interleaved", "zero 3", "zero 1"),
    8: ("square, line", "line, across", "equal meshes", "three meshes"),
}


def made(options):
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    return model, optimizer, Strategy(**{**options, "max_norm": 0.5})


def change(group, folder):
    """Train 2 batches under each strategy of the chain, with a save and a load between them; return the losses."""
    losses, chain = [], CHAINS[group.size()]
    for place, name in enumerate(chain):
        model, optimizer, strategy = made(STRATEGIES[name])
        static = group.size() == 8 or place < len(chain) - 1
        step = train_step(model, gpt.batch_of(0), optimizer, strategy, static=static)
        if place:
            assert step.load(folder) == {"told": 7}
        assert step.batches == 2 * place
        losses += [step(*gpt.batch_of(number)).item() for number in range(step.batches, 2 * (place + 1))]
        step.save(folder, {"told": 7}, asynchronous=True)
        step.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("count", CHAINS)
def test_training_goes_on_under_another_strategy(ranks, tmp_path, count):
    model, optimizer, strategy = made(STRATEGIES["zero 1"])
    batches = map(gpt.batch_of, range(2 * len(CHAINS[count])))
    expected = losses_of(model, optimizer, batches, max_norm=strategy.max_norm)
    for losses in ranks(count).run(change, str(tmp_path)):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
