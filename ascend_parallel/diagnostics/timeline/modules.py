"""Which module's forward is running, by the name that its model knows it by: what layers are called in a timeline."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as hooks


class ModuleNames:
    """Follows the calls of all modules by torch's global hooks, which exist only while somebody records.

    A module that no running module holds is a model: its own modules get their names from it.
    """

    def __init__(self) -> None:
        """Hook in."""
        self.stack: list[str] = []
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            for name, inner in module.named_modules():
                self._names.setdefault(inner, name)
        self.stack.append(self._names[module] or type(module).__name__)

    def _leave(self, *_: Any) -> None:
        if self.stack:  # empty where recording began inside
            self.stack.pop()
