"""Track the name of the module whose forward is running, to name the layers of a timeline."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as hooks


class ModuleNames:
    """The stack of running modules, tracked by torch's global module hooks until `remove`.

    A module that runs outside all other modules is a model: its submodules get their names from `named_modules`.
    """

    def __init__(self) -> None:
        """Register the hooks."""
        self.stack: list[str] = []
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            for name, inner in module.named_modules():
                self._names.setdefault(inner, name)
        self.stack.append(self._names[module] or type(module).__name__)

    def _leave(self, *_: Any) -> None:
        if self.stack:  # empty if recording began inside this forward
            self.stack.pop()
