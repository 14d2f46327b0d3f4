"""Equal options as one object: layers share them, so what is computed from them is looked up by identity.

Options are compared by their objects (`Options.of` returns the same for operators with the same signature, and
restrictions only leave some out), which costs far less than to hash hundreds of layouts for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.options import Option

Result = TypeVar("Result")


class Interned:
    """Sequences of options, and of their layouts; and results by such sequences."""

    def __init__(self) -> None:
        """Start empty."""
        self._options: dict[tuple[int, ...], tuple[Option, ...]] = {}
        # Values hold what their keys name by identity, so that nothing else gets the same identity.
        self._results: dict[Hashable, tuple[object, tuple[object, ...]]] = {}

    def options(self, options: Sequence[Option]) -> tuple[Option, ...]:
        """Return the one tuple of these options."""
        key = tuple(map(id, options))
        known = self._options.get(key)
        if known is None:
            self._options[key] = known = tuple(options)
        return known

    def outputs(self, options: tuple[Option, ...], index: int) -> tuple[Layout, ...]:
        """Return the layouts of an output in each option."""
        return self.result(("outputs", index), (options,), lambda: tuple(option.outputs[index] for option in options))

    def inputs(self, options: tuple[Option, ...], index: int) -> tuple[Layout, ...]:
        """Return the layouts of an input in each option."""
        return self.result(("inputs", index), (options,), lambda: tuple(option.inputs[index] for option in options))

    def result(self, kind: Hashable, of: tuple[object, ...], compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns for the objects `of`, computed once.

        kind: what is computed, with all arguments that are compared by value.
        """
        key = (kind, *map(id, of))
        if key not in self._results:
            self._results[key] = compute(), of
        return self._results[key][0]  # type: ignore[return-value]
