"""Digests of what linear layers compute, written to files that runs at different degrees can be compared by.

COC_DIGESTS names the folder. A rank writes a line of JSON for each tensor of a layer's pass, in the order in which they
are computed: the tensor's name, and a digest of each block that the rank holds (ops/blocks.py), or of the whole tensor.
Blocks are the same at every degree, so no rank has to gather a tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from ascend_parallel.ops.blocks import BlockedFeatures

WHOLE = "whole"


class DigestFiles:
    """The files of this process, one for each folder; a file begins anew with the process."""

    def __init__(self) -> None:
        """Open none yet."""
        self.paused = False
        self._files: dict[str, tuple[TextIO, list[int]]] = {}

    def write(self, folder: str, what: Mapping[str, str], digests: Mapping[str, str]) -> None:
        """Write a line, numbered in the order of the calls."""
        if folder not in self._files:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"rank{dist.get_rank()}.jsonl"
            self._files[folder] = (path.open("w", encoding="utf-8"), [0])
        file, count = self._files[folder]
        file.write(json.dumps({"number": count[0], **what, "digests": digests}) + "\n")
        file.flush()
        count[0] += 1


FILES = DigestFiles()


@contextmanager
def no_digests() -> Iterator[None]:
    """Write nothing inside this context, in which calls are timed."""
    before, FILES.paused = FILES.paused, True
    try:
        yield
    finally:
        FILES.paused = before


def write_digests(
    folder: str,
    layer: str,
    name: str,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    dim: int | None,
    parts: tuple[int, ...] = (),
) -> None:
    """Write the digests of the blocks of `tensor` along dimension `dim`; with None, one digest of the whole.

    group
        The ranks that share the dimension; None: each has it whole.

    layer, name
        The layer and the tensor in words.
    parts
        Of a fused weight, as in `Matmul`.
    """
    if FILES.paused:
        return
    tensor = tensor.detach()
    if dim is None:
        digests = {WHOLE: digest(tensor)}
    else:
        features = BlockedFeatures(parts or (tensor.shape[dim],), 1 if group is None else group.size())
        if features.refusal:
            raise ValueError(f"COC_DIGESTS: {layer}, {name}: {features.refusal}")
        first = 0 if group is None else group.rank() * features.count
        digests = {str(first + index): digest(block) for index, block in enumerate(features.blocks_of(tensor, dim))}
    FILES.write(folder, {"layer": layer, "tensor": name}, digests)


def digest(tensor: torch.Tensor) -> str:
    """Return the first 16 digits of the SHA-1 of a tensor's elements."""
    plain = tensor.contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha1(plain.numpy().tobytes(), usedforsecurity=False).hexdigest()[:16]
