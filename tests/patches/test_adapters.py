"""coverage: wrappers of linear layers, as of PEFT, are no layers, and their replicated adapters lose nothing."""

from types import SimpleNamespace

import pytest
from torch import nn

import ascend_parallel

COVERED = SimpleNamespace(uncovered=lambda module: None)


def tensor_parallel(layer):
    """Put a forward on a layer as a patched framework does."""

    def forward(x):
        return type(layer).forward(layer, x)

    forward.ascend_parallel = COVERED
    layer.forward = forward
    return layer


class LoraLinear(nn.Module):
    """A wrapper as PEFT writes them: its base layer, and two adapters, of which one may be parallel."""

    def __init__(self, base, sharded=None):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(8, 8, bias=False)}) for _ in range(2))
        if sharded is not None:
            tensor_parallel(getattr(self, sharded)["default"])

    @property
    def weight(self):
        return self.base_layer.weight


def said(*layers):
    return str(ascend_parallel.coverage(nn.ModuleList(layers)))


def test_wrappers_are_no_layers_and_adapters_lose_nothing():
    column, row = tensor_parallel(nn.Linear(8, 8)), tensor_parallel(nn.Linear(8, 8))
    assert said(LoraLinear(column, "lora_B"), LoraLinear(row, "lora_A"), tensor_parallel(nn.Linear(8, 8))) == (
        "5 of 5 linear layers covered; 2 replicated adapters communicate nothing"
    )
    assert said(LoraLinear(column)) == "1 of 1 linear layers covered; 2 replicated adapters communicate nothing"
    # a wrapper around a wrapper
    assert said(LoraLinear(LoraLinear(column))) == (
        "1 of 1 linear layers covered; 4 replicated adapters communicate nothing"
    )


def test_what_is_not_parallel_is_still_named():
    """Nothing beside these adapters is parallel: the layer that PEFT wraps is one that is lost."""
    assert said(LoraLinear(nn.Linear(8, 8))).startswith("0 of 3 linear layers covered (3 of torch Linear: not a tensor")
    assert said(nn.Linear(8, 8)).startswith("0 of 1 linear layers covered (1 of torch Linear")


def test_peft_itself():
    peft = pytest.importorskip("peft", reason="peft is not installed: the stand-in above has its rule")
    model = nn.Sequential(*(tensor_parallel(nn.Linear(8, 8)) for _ in range(3)))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "1"]))
    assert str(ascend_parallel.coverage(wrapped)) == (
        "3 of 3 linear layers covered; 4 replicated adapters communicate nothing"
    )
