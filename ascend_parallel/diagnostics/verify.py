"""Verify layers inside a run: compare tensors block by block, and collect this process's results, for display only.

The frameworks' patches run the checks (patches/check.py).
"""

from __future__ import annotations

import gc
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Elements per block: 4 MiB in fp32; a few temporaries of this size are alive at a time.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors.

    error
        Largest absolute difference / largest expected magnitude; the largest float if the actual tensor has a NaN, or
        if all expected values are 0 and the actual ones are not.
    scale
        The largest expected magnitude.
    skipped
        Number of elements that are not compared because their expected value is not finite.
    """

    error: float
    scale: float
    skipped: int


def difference(actual: torch.Tensor, expected: torch.Tensor, rounding: float = 0.0) -> Difference:
    """Return the difference of two tensors; differences up to `rounding` count as 0, unequal shapes as the maximum.

    An actual infinity counts as the dtype's largest number: the order of a sum near that number decides whether the
    sum overflows.
    """
    if actual.shape != expected.shape:
        return Difference(sys.float_info.max, 0.0, 0)
    maxima = [_maxima(*block) for block in _blocks(actual, expected)]
    if not maxima:
        return Difference(0.0, 0.0, 0)
    apart, scale, skipped = (column.tolist() for column in torch.stack(maxima).double().cpu().unbind(1))
    largest, magnitude = max(max(apart) - rounding, 0.0), max(scale)
    error = min(largest / magnitude if magnitude else math.inf, sys.float_info.max) if largest else 0.0
    return Difference(error, magnitude, int(sum(skipped)))


def worst_place(actual: torch.Tensor, expected: torch.Tensor) -> tuple[list[int], float, float]:
    """Return the index of the largest difference, and the actual and the expected value there."""
    apart = [_apart(*block).max(0) for block in _blocks(actual, expected)]
    number = int(torch.stack([largest for largest, _ in apart]).argmax())
    flat = number * BLOCK + int(apart[number][1])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)]
    place = tuple(index)
    return index, float(actual[place]), float(expected[place])


def default_limit(dtype: torch.dtype) -> float:
    """Return the default of the allowed error: 2 %, the published bound, for 16-bit dtypes, otherwise 1e-6."""
    return 2e-2 if dtype.itemsize <= 2 else 1e-6


def _blocks(actual: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of flat blocks of both tensors in a dtype wide enough for their difference."""
    if actual.numel() == 0:
        return
    wide = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    bound = torch.finfo(actual.dtype).max
    for left, right in zip(*(torch.split(tensor.reshape(-1), BLOCK) for tensor in (actual, expected)), strict=True):
        yield left.to(wide).nan_to_num(nan=torch.inf, posinf=bound, neginf=-bound), right.to(wide)


def _apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (actual - expected).abs_().masked_fill_(~expected.isfinite(), 0)


def _maxima(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, the largest expected magnitude and the number of non-finite expected elements."""
    unusable = ~expected.isfinite()
    scale = expected.abs().masked_fill_(unusable, 0).max()
    return torch.stack([_apart(actual, expected).max(), scale, unusable.sum().to(expected.dtype)])


log = logging.getLogger("ascend_parallel")

QUANTITIES = ("output", "input gradient", "weight gradient")
COLUMNS = ("forwards", "backwards", *QUANTITIES, "limit")
HEADER = "  ".join(f"{name:>7}" for name in COLUMNS)


class VerificationError(RuntimeError):
    """A patched layer's result is further from the original's than the limit, or ranks check different calls."""


@dataclass
class LayerErrors:
    """The largest errors of one layer, over all its checks and all ranks of its group.

    layer, kind
        Its name in the model, or its class and a number if it is in no model; its class.
    forwards, backwards
        Number of checked forwards and backwards.
    errors
        Largest error by quantity ("output", "input gradient", "weight gradient"), relative to the largest magnitude
        of the original layer's quantity. A quantity that was never checked is missing. Those of a region say
        which output or operand they are of, such as "linear_fc1 weight gradient" or "norm output".
    limit
        The allowed error.
    """

    layer: str
    kind: str
    forwards: int = 0
    backwards: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0

    def add(self, direction: str, errors: list[dict[str, float]], limit: float) -> None:
        """Count a check of a "forward" or "backward", and update the largest errors with those of each rank."""
        self.limit = limit
        self.forwards += direction == "forward"
        self.backwards += direction == "backward"
        for quantity, error in (item for of_rank in errors for item in of_rank.items()):
            self.errors[quantity] = max(error, self.errors.get(quantity, 0.0))


@dataclass(frozen=True)
class Verification:
    """The results of verification in this process.

    every
        Every `every`-th call is checked; 0: none.
    layers
        The checked layers.
    failures
        The messages of the errors raised.
    notes
        Unchecked quantities, with reasons.
    """

    every: int
    layers: list[LayerErrors]
    failures: list[str]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether at least one layer was checked and no error exceeded its limit."""
        return bool(self.layers) and not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        """Return a summary, a line for each layer, the failures and the notes."""
        checks = sum(layer.forwards + layer.backwards for layer in self.layers)
        lines = [f"verification, every {self.every} calls: {checks} checks of {len(self.layers)} layers, "]
        lines[0] += f"{len(self.failures)} over the limit" if self.layers else "so nothing is known"
        if self.layers:
            width = max(len(layer.layer) for layer in self.layers)
            lines.append(f"{'layer':{width}}  {HEADER}")
            lines += [_line(layer, width) for layer in self.layers]
        return "\n".join([*lines, *(f"failed: {text}" for text in self.failures), *(f"note: {n}" for n in self.notes)])


def _line(layer: LayerErrors, width: int) -> str:
    # A part of a region has several outputs and gradients; the table shows the worst.
    worst = [max((e for name, e in layer.errors.items() if name.endswith(q)), default=None) for q in QUANTITIES]
    errors = ["-" if error is None else f"{error:.1e}" for error in worst]
    cells = [layer.forwards, layer.backwards, *errors, f"{layer.limit:g}"]
    columns = zip(cells, COLUMNS, strict=True)
    return f"{layer.layer:{width}}  " + "  ".join(f"{cell:>{max(len(name), 7)}}" for cell, name in columns)


class Ledger:
    """Collects the results of a verified run: errors by layer, failures and notes."""

    def __init__(self) -> None:
        """Start without results."""
        self._layers: WeakKeyDictionary[torch.nn.Module, LayerErrors] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._records: list[LayerErrors] = []
        self._failures: list[str] = []
        self._notes: list[str] = []
        self.rank: int | None = None

    def record(self, layer: torch.nn.Module, name: str = "") -> LayerErrors:
        """Return the layer's record; the first call creates the record. name: in its model, empty: to be looked for."""
        if layer not in self._layers:
            record = LayerErrors(name or self._name(layer), type(layer).__name__)
            self._layers[layer] = record
            self._records.append(record)
        return self._layers[layer]

    def fail(self, text: str) -> VerificationError:
        """Store a failure and return the error to raise."""
        self._failures.append(text)
        return VerificationError(text)

    def note(self, text: str) -> None:
        """Store a note, and log it once on rank 0."""
        if text not in self._notes:
            self._notes.append(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("verification: %s", text)

    def summary(self, every: int) -> Verification:
        """Return the results so far, with a copy of every record."""
        checked = [record for record in self._records if record.errors]
        layers = [replace(record, errors=dict(record.errors)) for record in checked]
        return Verification(every, layers, list(self._failures), list(self._notes))

    def clear(self) -> None:
        """Delete all results; layers keep their names."""
        self._layers.clear()
        for results in (self._records, self._failures, self._notes):
            results.clear()

    def _name(self, layer: torch.nn.Module) -> str:
        if layer not in self._names:
            self._names.update(module_names())
        name = self._names.get(layer) or f"{type(layer).__name__} {len(self._records)}"
        twins = sum(record.layer.partition(" #")[0] == name for record in self._records)
        return f"{name} #{twins + 1}" if twins else name


def module_names() -> dict[torch.nn.Module, str]:
    """Return the name of every module of this process in its model, such as ``decoder.layers.0.mlp.linear_fc1``.

    A module does not know its parent, so the function walks all Python objects once. A module with several parents
    gets the name under one of them. A wrapper's leading ``module.`` is removed.
    """
    modules = [entry for entry in gc.get_objects() if issubclass(type(entry), torch.nn.Module)]
    parents = {
        id(child): (module, name)
        for module in modules
        for name, child in module.__dict__.get("_modules", {}).items()
        if child is not None
    }
    # Skip modules that define equality: they may have no hash.
    identity_hash: Any = object.__hash__
    return {module: _place(module, parents) for module in modules if type(module).__hash__ is identity_hash}


def _place(module: torch.nn.Module, parents: dict[int, tuple[torch.nn.Module, str]]) -> str:
    names: list[str] = []
    passed: set[int] = set()
    while id(module) in parents and id(module) not in passed:
        passed.add(id(module))
        module, name = parents[id(module)]
        names.insert(0, name)
    while len(names) > 1 and names[0] == "module":
        del names[0]
    return ".".join(names)


LEDGER = Ledger()
