"""Collect the results of this process's checks, layer by layer, for display only."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

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
        of the original layer's quantity. A quantity that was never checked is missing.
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
    errors = [f"{layer.errors[q]:.1e}" if q in layer.errors else "-" for q in QUANTITIES]
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

    def record(self, layer: torch.nn.Module) -> LayerErrors:
        """Return the layer's record; the first call creates the record."""
        if layer not in self._layers:
            record = LayerErrors(self._name(layer), type(layer).__name__)
            self._layers[layer] = record
            self._records.append(record)
        return self._layers[layer]

    def fail(self, text: str) -> VerificationError:
        """Store a failure and return the error to raise."""
        self._failures.append(text)
        return VerificationError(text)

    def note(self, text: str, rank: int) -> None:
        """Store a note, and log it once on rank 0."""
        if text not in self._notes:
            self._notes.append(text)
            if rank == 0:
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
