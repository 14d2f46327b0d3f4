"""Blocks that are numbered, as layers of transformers are: stubs if they do the same in spite of their numbers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import transformers
from test_repeated_blocks import COUNT, Stack, X, both  # noqa: F401 - a fixture
from torch import nn

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": COUNT, "num_attention_heads": 4}
TOKENS = torch.zeros(2, 16, dtype=torch.long)


def model_of(name: str, kind: str = "ForCausalLM", **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES, vocab_size=99, **options)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
    return model


DECODERS = {
    "Llama": ({"num_key_value_heads": 2, "use_cache": False}, COUNT - 1),
    "Qwen3": ({"num_key_value_heads": 2, "use_cache": False}, COUNT - 1),
    "Gemma2": ({"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}, COUNT - 1),  # two masks, in turn
    "GPTNeoX": ({"use_cache": False}, COUNT - 1),
    "Bert": ({"kind": "Model"}, COUNT - 1),
    "ViT": ({"kind": "Model", "image_size": 32, "patch_size": 8}, COUNT - 1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DECODERS)
def test_layers_of_transformers_are_stubs(both: Any, name: str) -> None:  # noqa: F811
    options, stubs = DECODERS[name]
    given = TOKENS if name != "ViT" else torch.zeros(2, 3, 32, 32)
    assert both(model_of(name, **options), given)[2] == stubs


@pytest.mark.slow
def test_two_stacks_of_t5(both: Any) -> None:  # noqa: F811
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 4, "num_heads": 4, "d_kv": 16, "vocab_size": 99}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, use_cache=False))
    # the first block of each stack computes the position bias of all
    assert both(model, input_ids=TOKENS, decoder_input_ids=TOKENS)[2] == 2 + 2


@pytest.mark.slow
def test_a_cache_that_is_off(both: Any) -> None:  # noqa: F811
    model = model_of("Llama", num_key_value_heads=2)
    assert both(model, TOKENS, use_cache=False)[2] == COUNT - 1


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", READERS)
def test_blocks_that_read_their_numbers_are_traced(both: Any, kind: Callable[[int], nn.Module]) -> None:  # noqa: F811
    stubs = both(Stack(*(kind(number) for number in (0, 2, 4, 3, 7))), X)[2]
    assert stubs == {InABranch: 2, Match: 3}.get(kind, 0)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [Unread, ItsPresence, Written])
def test_blocks_that_do_the_same_are_stubs(both: Any, kind: Callable[[int], nn.Module]) -> None:  # noqa: F811
    assert both(Stack(*map(kind, range(COUNT))), X)[2] == COUNT - 1


def test_equal_numbers_may_be_read(both: Any) -> None:  # noqa: F811
    assert both(Stack(*(Plain(4) for _ in range(COUNT))), X)[2] == COUNT - 1
    assert both(Stack(*(Plain(number % 2) for number in range(8))), X)[2] == 8 - 2
