"""Digests of the rows that the modules of a model return, one for each token, by which two programs are compared."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch

# What a transformer returns whole on every rank, by the ends of the names that transformers and vLLM give it.
COMPARED = r"embed_tokens|input_layernorm|o_proj|post_attention_layernorm|down_proj|(?:model|^)\.?norm"


class RowDigests:
    """Hooks on a model's modules that keep a digest of each row that they return."""

    def __init__(self, model: torch.nn.Module, pattern: str = COMPARED) -> None:
        """Watch the modules whose names end with the pattern."""
        self._found: dict[str, list[str]] = {}
        self._handles = [
            module.register_forward_hook(self._keep(name))
            for name, module in model.named_modules()
            if re.search(rf"(?:{pattern})$", name)
        ]

    def _keep(self, name: str) -> Any:
        def keep(module: Any, args: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            self._found.setdefault(name, []).extend(digests_of(y.detach().flatten(0, -2)))

        return keep

    def taken(self) -> dict[str, list[str]]:
        """Return the digests by module since the last call, in the order of their first call, and forget them."""
        found, self._found = self._found, {}
        return found

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def digests_of(rows: torch.Tensor) -> Iterator[str]:
    """Yield a digest of each row of [tokens, N]."""
    for row in rows.contiguous().cpu():
        yield hashlib.blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
