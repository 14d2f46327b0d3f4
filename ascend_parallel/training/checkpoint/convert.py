"""Convert checkpoints between formats and compare them, in one process and tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.differences import CheckpointError, Kind, differences
from ascend_parallel.training.checkpoint.folder import whole_file
from ascend_parallel.training.checkpoint.loading import CheckpointReader
from ascend_parallel.training.checkpoint.megatron import CONFIG, megatron_state
from ascend_parallel.training.checkpoint.safetensors import SafeTensors, write_safetensors
from ascend_parallel.training.checkpoint.saving import save

FORMATS = ("safetensors", "torch", "dcp")
MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True)
class Source:
    """An open checkpoint of any format.

    kinds
        Shape and dtype by ``model.<name>`` or ``optimizer.<name>``.
    read
        Returns the unsharded tensor of a name in `kinds`.
    """

    kinds: dict[str, Kind]
    read: Callable[[str], torch.Tensor]
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)


def open_source(path: str | Path, step: int | None = None) -> Source:
    """Open a checkpoint of this package, a .safetensors file, or a directory of Megatron-core's.

    Raises `CheckpointError` if `path` has none of these formats, or is damaged.
    """
    path = Path(path)
    if path.is_file():
        file = SafeTensors(path)
        kinds = {f"{MODEL}{name}": kind for name, kind in file.kinds.items()}
        return Source(kinds, lambda name: file.view(name.removeprefix(MODEL)))
    if (path / CONFIG).is_file():
        state = {f"{MODEL}{name}": tensor for name, tensor in megatron_state(path).items()}
        return Source({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}, state.__getitem__)
    saved = CheckpointReader.open(path, step)
    return Source(saved.kinds, saved.read, saved.manifest["step"], saved.values)


def convert(
    source: Source,
    out: str | Path,
    to: str,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> Path:
    """Write a checkpoint in another format; return its path.

    out
        safetensors (the model) and torch (a dict of model, optimizer, values and step, for ``torch.load``): a file.
        dcp, a checkpoint as `save` writes it: a folder.
    dtype
        The new dtype of the model's floating-point tensors; None: unchanged. The optimizer's state keeps its dtypes.
    progress
        Called with each name before the tensor is read.

    safetensors needs the memory of the largest tensor, the others the memory of all tensors. Raises `ValueError` for an
    unknown format or a dtype that is not floating-point, and `CheckpointError` if `out` exists already (for dcp: a
    checkpoint of that step) or cannot be written; a failed write leaves nothing.
    """
    if to not in FORMATS or (dtype is not None and not dtype.is_floating_point):
        raise ValueError(f"to={to!r}, dtype={dtype}: one of {', '.join(FORMATS)}, and a floating-point dtype or none")

    if to != "dcp" and Path(out).exists():
        raise CheckpointError(f"{out} is there already: remove it, or write to another path")

    def kind(name: str) -> Kind:
        shape, own = source.kinds[name]
        cast = dtype is not None and own.is_floating_point and name.startswith(MODEL)
        return shape, dtype if cast and dtype is not None else own

    def read(name: str) -> torch.Tensor:
        progress(name)
        return source.read(name).to(kind(name)[1])

    if to == "safetensors":
        kinds = {name.removeprefix(MODEL): kind(name) for name in source.kinds if name.startswith(MODEL)}
        write_safetensors(out, kinds, lambda name: read(MODEL + name), {"format": "pt", "step": str(source.step)})
        return Path(out)
    spaces = {
        space: {name.removeprefix(space): read(name) for name in source.kinds if name.startswith(space)}
        for space in (MODEL, OPTIMIZER)
    }
    model, optimizer = spaces[MODEL], spaces[OPTIMIZER]
    if to == "torch":
        with whole_file(Path(out)) as file:
            torch.save({"model": model, "optimizer": optimizer, "values": source.values, "step": source.step}, file)
        return Path(out)
    whole = [{name: TensorShard.whole(tensor) for name, tensor in space.items()} for space in (model, optimizer)]
    return save(out, step=source.step, model=whole[0], optimizer=whole[1], values=source.values).path


def compare(
    first: Source, second: Source, progress: Callable[[str], object] = lambda name: None
) -> Iterator[tuple[str, str]]:
    """Yield the name and the difference of every tensor, and value, that differs between two checkpoints."""
    for line in differences(first.kinds, second.kinds, "in the first", "in the second"):
        name, _, how = line.partition(": ")
        yield name, how
    for name in (name for name, kind in first.kinds.items() if second.kinds.get(name) == kind):
        progress(name)
        a, b = first.read(name), second.read(name)
        if not torch.equal(a, b):
            yield name, _distance(a, b)
    for key in sorted({*first.values, *second.values}):
        if repr(first.values.get(key)) != repr(second.values.get(key)):
            yield f"values[{key!r}]", f"{first.values.get(key)!r} and {second.values.get(key)!r}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> str:
    wide = torch.complex128 if a.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs()
    return f"{int((a != b).sum())} of {a.numel()} elements, by {apart.max().item():.3g} at most"
