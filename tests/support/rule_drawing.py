"""Draws the arguments of operators that tests/sharding/test_rules.py runs in parts, and keeps the list of these."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st


class Drawing:
    """Draws sizes and tensors. Values are well apart from each other and from zero, for sorting and for logarithms."""

    def __init__(self, draw, sizes=(6, 6, 2, 3, 1)):
        self.draw, self.choices = draw, sizes
        self.generator = torch.Generator().manual_seed(3)

    def one(self, *choices):
        return self.draw(st.sampled_from(choices))

    def size(self):
        return self.one(*self.choices)

    def sizes(self, count):
        return [self.size() for _ in range(count)]

    def shape(self, least=1, most=3):
        return self.sizes(self.one(*range(most, least - 1, -1)))

    def float(self, *shape):
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape):
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) * 0.8 + 0.1

    def ids(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator)

    def flags(self, *shape):
        return self.ids(2, *shape).bool()

    def broadcast(self, shape):
        """Return a shape that is broadcast to `shape`."""
        kept = [1 if self.one(False, False, True) else size for size in shape]
        return kept[self.one(0, 0, 1) :]

    def dim(self, shape):
        return self.one(*range(-len(shape), len(shape)))


@dataclass
class Case:
    """An operator, its arguments (drawn), and how many strategies that cut or add up have to be met at least."""

    target: object
    arguments: object
    at_least: int = 3
    constants: tuple = ()  # places of inputs that the operator cannot differentiate by
    named: dict = field(default_factory=dict)


CASES = {}


def case(target, arguments, at_least=3, name=None, constants=(), **named):
    packet = str(target)[len("aten.") :]
    key = f"{packet} {name}" if name else packet
    assert key not in CASES, key
    CASES[key] = Case(target, arguments, at_least, constants, named)
