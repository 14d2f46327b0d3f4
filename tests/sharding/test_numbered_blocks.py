"""Blocks that are numbered, as layers of transformers are: copied if their code does not read the number."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import transformers
from test_repeated_blocks import COUNT, Stack, X, both  # noqa: F401 - a fixture
from torch import nn

from ascend_parallel.sharding.tracing import repeated_blocks

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": COUNT, "num_attention_heads": 4}
TOKENS = torch.zeros(2, 16, dtype=torch.long)
IMAGE = {"image_size": 32, "patch_size": 8}


def model_of(name: str, kind: str = "ForCausalLM", **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES, vocab_size=99, **options)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
    return model


DECODERS = {
    "Llama": ({"num_key_value_heads": 2, "use_cache": False}, COUNT - 2),
    "Qwen3": ({"num_key_value_heads": 2, "use_cache": False}, COUNT - 2),
    "Gemma2": ({"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}, 1),  # two kinds of attention, in turn
    "GPTNeoX": ({"use_cache": False}, COUNT - 2),
    "Bert": ({"kind": "Model"}, COUNT - 2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DECODERS)
def test_layers_of_transformers_are_copied(both: Any, name: str) -> None:  # noqa: F811
    options, copies = DECODERS[name]
    assert both(model_of(name, **options), TOKENS)[2] == copies


def test_a_cache_reads_the_numbers(both: Any) -> None:  # noqa: F811
    model = model_of("Llama", num_key_value_heads=2)
    assert both(model, TOKENS, use_cache=False)[2] == COUNT - 2


class Numbered(nn.Module):
    """Has a number, which a subclass may read."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.odd = number % 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.factor()

    def factor(self) -> float:
        return 1.0


class Config:
    """A helper that knows its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def number(self) -> int:
        return int(vars(self.module)["number"])


class Unread(Numbered):
    def factor(self) -> float:
        return 2.0 if len(str(self.linear)) else self.number  # a branch that is not taken


class Plain(Numbered):
    def factor(self) -> float:
        return self.number + 1.0


class InABranch(Numbered):
    def factor(self) -> float:
        return self.number if self.odd else 1.0


class ByName(Numbered):
    def factor(self) -> float:
        return float(getattr(self, "num" + "ber"))


class ByGetter(Numbered):
    get = operator.attrgetter("number")

    def factor(self) -> float:
        return float(type(self).get(self))


class OfTheObject(Numbered):
    def factor(self) -> float:
        return float(object.__getattribute__(self, "number"))


class InItsVariables(Numbered):
    def factor(self) -> float:
        return float(vars(self)["number"])


class InAllOfThem(Numbered):
    def factor(self) -> float:
        return float(sum(value for name, value in self.__dict__.items() if name == "number"))


class OfAHelper(Numbered):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.config = Config(self)

    def factor(self) -> float:
        return float(self.config.number())


class OfACopy(Numbered):
    def factor(self) -> float:
        return float(copy.copy(self).number)


class InAText(Numbered):
    def factor(self) -> float:
        return float(f"{self.number}.5")


class Bound(Numbered):
    def times(self, base: float) -> float:
        return base * self.number

    factor = partialmethod(times, 2.0)  # type: ignore[assignment]


class Property(Numbered):
    @property
    def twice(self) -> int:
        return 2 * self.number

    def factor(self) -> float:
        return float(self.twice)


class ItsPresence(Numbered):
    def factor(self) -> float:
        return 2.0 if hasattr(self, "number") else 1.0


class Written(Numbered):
    def factor(self) -> float:
        self.number += 1
        return 1.0


class Match(Numbered):
    __match_args__ = ("number",)

    def factor(self) -> float:
        match self:
            case Match(3):
                return 5.0
        return 1.0


class InAClosure(Numbered):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.read = partial(float, number)

    def factor(self) -> float:
        return self.read()


READERS = (Plain, InABranch, ByName, ByGetter, OfTheObject, InItsVariables, InAllOfThem, OfAHelper, OfACopy, InAText)
READERS = (*READERS, Bound, Property, Match, InAClosure)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", READERS)
def test_blocks_that_read_their_numbers_are_traced(both: Any, kind: Callable[[int], nn.Module]) -> None:  # noqa: F811
    copies = both(Stack(*(kind(number) for number in (0, 2, 4, 3, 7))), X)[2]
    assert copies == (kind is InABranch)  # the third even block reads no number


@pytest.mark.parametrize(("kind", "copies"), [(Unread, COUNT - 2), (ItsPresence, 0)])
def test_blocks_that_do_not_are_copied(both: Any, kind: Callable[[int], nn.Module], copies: int) -> None:  # noqa: F811
    assert both(Stack(*map(kind, range(COUNT))), X)[2] == copies


def test_equal_numbers_may_be_read(both: Any) -> None:  # noqa: F811
    assert both(Stack(*(Plain(4) for _ in range(COUNT))), X)[2] == COUNT - 2
    # two kinds of blocks in turn: each is traced twice
    assert both(Stack(*(Plain(number % 2) for number in range(8))), X)[2] == COUNT - 2 + 4


def test_classes_are_left_as_they_were(both: Any) -> None:  # noqa: F811
    both(Stack(*map(Plain, range(COUNT))), X)
    assert not {"number", "odd"} & (set(vars(Plain)) | set(vars(Numbered)))


def test_numbers_that_are_written_are_read(both: Any) -> None:  # noqa: F811
    assert both(Stack(*map(Written, range(COUNT))), X)[2] == 0


def test_a_read_that_goes_unnoted_is_caught(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """What this file asserts is not true by chance: where no read is noted, blocks are copied that differ."""
    monkeypatch.setattr(repeated_blocks, "noting_reads", lambda _: nullcontext(set[int]()))
    with pytest.raises(AssertionError):
        both(Stack(*(InABranch(number) for number in (0, 2, 4, 3, 7))), X)
