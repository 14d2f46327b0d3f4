"""What tests of optimizer parallel share: a model of odd shapes, optimizers, and the ways of dividing them."""

from functools import partial

import torch
from torch import nn

from ascend_parallel.training.optimizer import ParallelOptimizer, data_parallel_targets, optimizer_factory

SHAPES = {"bias": (7,), "odd": (3, 5), "scalar": (), "row": (1, 13), "block": (4, 2, 9), "few": (2,), "late": (6, 6)}
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "plain": partial(torch.optim.SGD, lr=0.05),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta),
    "Adamax": partial(torch.optim.Adamax),
    "ASGD": partial(torch.optim.ASGD),
    "Rprop": partial(torch.optim.Rprop),
}
WAYS = [(0, "slices"), (1, "slices"), (1, "parameters"), (2, "slices"), (2, "parameters")]


class Odd(nn.Module):
    """Parameters of shapes that do not divide; `unused` gets no gradient, `sometimes` in every other step."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.sometimes = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, seed, sometimes=False):
        """Return a sum with whole numbers as gradients, so that sums over ranks are exact."""
        generator = torch.Generator().manual_seed(seed)
        weights = {name: torch.randint(-8, 9, shape, generator=generator) for name, shape in SHAPES.items()}
        total = sum((getattr(self, name) * weight).sum() for name, weight in weights.items())
        return total + (self.sometimes.sum() if sometimes else 0)


def groups(model):
    """Two groups with hyperparameters of their own, in another order than the model's."""
    names = dict(model.named_parameters())
    second = [names.pop(name) for name in ("row", "bias")]
    return [{"params": list(names.values())}, {"params": second, "lr": 0.02}]


def made(model, kind, targets=None, **options):
    return ParallelOptimizer(
        data_parallel_targets(model) if targets is None else targets,
        optimizer_factory(kind(groups(model)), model),
        **options,
    )


def pair(name, dtype=torch.float64, **options):
    """Return a model and its optimizer, and the same model with the same optimizer divided over ranks."""
    whole, mine = Odd(dtype), Odd(dtype)
    return whole, OPTIMIZERS[name](groups(whole)), mine, made(mine, OPTIMIZERS[name], **options)


def seeds(step, rank):
    return 100 * step + rank
