"""What the examples of this folder share: options, tokens, and the file of losses and gradients."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

DTYPES = ("float32", "bfloat16")


def options(description: str | None, **more: Any) -> argparse.Namespace:
    """Return the options of the command line; `more`: the defaults of further ones by name."""
    parser = argparse.ArgumentParser(description=description)
    sizes = {
        "steps": 3,
        "hidden": 512,
        "inner": 1408,
        "layers": 2,
        "heads": 8,
        "vocabulary": 1024,
        "batch": 2,
        "rows": 128,
    }
    for name, default in {**sizes, **more}.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{default}")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of weights and activations: float32")
    parser.add_argument("--out", default="", help="write losses and gradients to OUT.<rank>")
    return parser.parse_args()


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """Return the dtype that --dtype names."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    return dtype


def tokens(args: argparse.Namespace, step: int) -> torch.Tensor:
    """Return the batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(args.vocabulary, (args.batch, args.rows), generator=generator)


class Results:
    """The losses of all steps, the gradients of the first and the last, and generated tokens."""

    def __init__(self) -> None:
        """Nothing was computed."""
        self.losses: list[torch.Tensor] = []
        self.generated: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, loss: torch.Tensor, gradients: dict[str, Any]) -> None:
        """Keep a step's loss and gradients."""
        step = "last" if self.losses else "first"
        self.losses.append(loss.detach().clone())
        kept = {name: _own(each).detach().clone() for name, each in gradients.items() if each is not None}
        self._gradients[step] = {f"{name}, {step} step": gradient for name, gradient in kept.items()}

    def write(self, out: str) -> None:
        """Print the losses on rank 0, and write this rank's file if `out` names one."""
        if dist.get_rank() == 0:
            print("losses:", *(f"{loss.item():.6f}" for loss in self.losses))
        losses = {f"loss of step {step}": loss for step, loss in enumerate(self.losses)}
        gradients = {name: each for step in self._gradients.values() for name, each in step.items()}
        if out:
            found = {"losses": losses, "gradients": gradients, "generated": self.generated}
            torch.save(found, f"{out}.{dist.get_rank()}")


def gradients_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the gradients by parameter."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _own(gradient: Any) -> torch.Tensor:
    """Return this rank's part of a gradient."""
    own: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own
