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


class Config:
    """A helper that knows its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def number(self) -> int:
        return int(vars(self.module)["number"])


class Numbered(nn.Module):
    """Has a number, which a subclass may read."""

    __match_args__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.odd, self.helper, self.bound = number % 2, Config(self), partial(float, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.factor()

    def factor(self) -> float:
        return 1.0

    @property
    def twice(self) -> int:
        return 2 * self.number


def matched(self: Any) -> float:
    match self:
        case Numbered(3):
            return 5.0
    return 1.0


# Ways to read the number, and how many of five blocks, numbered 0, 2, 4, 3 and 7, are stubs in spite of it.
READERS: dict[str, tuple[Any, int]] = {
    "plain": (lambda self: self.number + 1.0, 0),
    "in a branch": (lambda self: self.number if self.odd else 1.0, 2),
    "by its name": (lambda self: float(getattr(self, "num" + "ber")), 0),
    "by a getter": (lambda self: float(operator.attrgetter("number")(self)), 0),
    "of the object": (lambda self: float(object.__getattribute__(self, "number")), 0),
    "in its variables": (lambda self: float(vars(self)["number"]), 0),
    "in all of them": (lambda self: float(sum(each for name, each in self.__dict__.items() if name == "number")), 0),
    "of a helper": (lambda self: float(self.helper.number()), 0),
    "of a copy": (lambda self: float(copy.copy(self).number), 0),
    "in a text": (lambda self: float(f"{self.number}.5"), 0),
    "in a part of a method": (partialmethod(lambda self, base: base * self.number, 2.0), 0),
    "by a property": (lambda self: float(self.twice), 0),
    "in a match": (matched, 3),
    "in a closure": (lambda self: self.bound(), 0),
}


def written(self: Any) -> float:
    self.number += 1
    return 1.0


NO_READERS: dict[str, Callable[[Any], float]] = {
    "a branch that is not taken": lambda self: 2.0 if len(str(self.linear)) else self.number,
    "its presence": lambda self: 2.0 if hasattr(self, "number") else 1.0,
    "written": written,
}


def kind_of(factor: Any) -> Callable[[int], nn.Module]:
    return type("Kind", (Numbered,), {"factor": factor})


@pytest.mark.sample(2)
@pytest.mark.parametrize("reader", READERS)
def test_blocks_that_read_their_numbers_are_traced(both: Any, reader: str) -> None:  # noqa: F811
    factor, stubs = READERS[reader]
    assert both(Stack(*map(kind_of(factor), (0, 2, 4, 3, 7))), X)[2] == stubs


@pytest.mark.parametrize("factor", NO_READERS.values(), ids=NO_READERS)
def test_blocks_that_do_the_same_are_stubs(both: Any, factor: Callable[[Any], float]) -> None:  # noqa: F811
    assert both(Stack(*map(kind_of(factor), range(COUNT))), X)[2] == COUNT - 1


def test_equal_numbers_may_be_read(both: Any) -> None:  # noqa: F811
    kind = kind_of(READERS["plain"][0])
    assert both(Stack(*(kind(4) for _ in range(COUNT))), X)[2] == COUNT - 1
    assert both(Stack(*(kind(number % 2) for number in range(8))), X)[2] == 8 - 2
