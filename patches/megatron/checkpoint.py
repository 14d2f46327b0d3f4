"""Megatron-core's distributed checkpoints (format torch_dist), of which the same model's tensors are read.

Inside it is torch.distributed.checkpoint's format, in Megatron's own names:

- the layers of a block are one tensor with a first dimension of layers, ``decoder.layers.mlp.linear_fc1.weight``
  for every ``decoder.layers.N.mlp.linear_fc1.weight``;
- a norm before a linear layer stands under the linear layer's name, as Transformer Engine fuses them.

Query, key and value of a head stay side by side, and what else Megatron arranges inside a tensor.
Read from megatron-core 0.16: dist_checkpointing/, transformer/transformer_block.py, models/gpt/gpt_layer_specs.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_files import Reader, read_metadata, read_whole
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardLoadPlanner, kinds, saved_kinds
from ascend_parallel.training.checkpoint.differences import CheckpointError, Kind, differences, in_words, refuse
from ascend_parallel.training.checkpoint.storage import agree, everybody, names_of_all, same_error_on_all_ranks

CONFIG = "metadata.json"
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.*)")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.*)")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def megatron_format(path: Path) -> dict[str, torch.Tensor] | None:
    """Return `megatron_state` of a directory of Megatron-core's, or None: a format for `convert`."""
    return megatron_state(path) if is_megatron(path) else None


def megatron_state(path: str | Path) -> dict[str, torch.Tensor]:
    """Return a model's tensors whole, a name for each layer, in one process and without process groups.

    path
        The directory with Megatron's metadata.json, such as ``iter_0001000``.

    Names are the checkpoint's with the layer's number; see `load_megatron` for a model whose names differ.
    Raises `CheckpointError` when it is no such directory, or of another format.
    """
    checkpoint = _opened(path)
    metadata = read_metadata(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for key, (shape, _) in _model_kinds(metadata).items():
        whole, stacked = read_whole(checkpoint, metadata, key), _STACKED.fullmatch(key)
        if stacked is None:
            found[key] = whole
        else:
            found |= {f"{stacked[1]}.{layer}.{stacked[2]}": whole[layer].clone() for layer in range(shape[0])}
    return found


def load_megatron(path: str | Path, model: Mapping[str, TensorShard]) -> None:
    """Fill the pieces of a GPTModel in place, by its module names; every rank of the default group calls it.

    path
        The directory with Megatron's metadata.json.
    model
        As `tensor_shards_of` returns for a whole GPTModel, or shards of its tensors under the same names. Megatron's
        own slice of a gated ``linear_fc1`` is two shards, so that name may not be cut along its first dimension.

    Raises `CheckpointError` on every rank when a tensor is missing here or there, or of another shape or dtype.
    """
    group, fault = everybody(), ""
    wanted: dict[str, list[TensorShard]] = {}
    try:
        checkpoint = _opened(path)
        saved = _model_kinds(read_metadata(checkpoint))
        wanted, names = _keyed(model, saved)
    except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it
        fault = in_words(error)
    agree(group, "load of a Megatron-core checkpoint", {"path": str(path)}, fault)
    asked = names_of_all(group, names)
    refuse([f"{name}: in the checkpoint, not here" for name in _unasked(saved, asked)], f"{path} is of another model")
    with same_error_on_all_ranks(group):
        reader, planner = Reader(checkpoint), TensorShardLoadPlanner(wanted)
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def is_megatron(path: str | Path) -> bool:
    """Tell whether a directory is a distributed checkpoint of Megatron-core."""
    return (Path(path) / CONFIG).is_file()


def _opened(path: str | Path) -> Path:
    config = Path(path) / CONFIG
    try:
        told = json.loads(config.read_text(encoding="utf-8"))
        backend = told["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no distributed checkpoint of Megatron-core: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} is of the format {backend!r}; torch_dist is read, which Megatron-core can convert to"
        )
    return Path(path)


def _model_kinds(metadata: Metadata) -> dict[str, Kind]:
    return {name: kind for name, kind in saved_kinds(metadata).items() if not _OPTIMIZER.match(name)}


def _keyed(
    model: Mapping[str, TensorShard], saved: Mapping[str, Kind]
) -> tuple[dict[str, list[TensorShard]], list[str]]:
    """Return the pieces by the checkpoint's names, and the names that they have there with the layer's number."""
    wanted: dict[str, list[TensorShard]] = {}
    names: list[str] = []
    here, there = kinds(model), {}
    for name, piece in model.items():
        key, layer = _find(name, saved)
        if key is None:
            continue
        shape, dtype = saved[key]
        if layer is None:
            there[name], stacked = (shape, dtype), piece
            names.append(key)
        else:
            there[name] = shape[1:], dtype
            stacked = TensorShard(piece.local.detach().unsqueeze(0), (shape[0], *piece.shape), (layer, *piece.offsets))
            names.append(f"{key}[{layer}]")
        wanted.setdefault(key, []).append(stacked)
    refuse(differences(here, there), "the checkpoint is of another model")
    return wanted, names


def _find(name: str, saved: Mapping[str, Kind]) -> tuple[str | None, int | None]:
    """Return the checkpoint's name of a tensor, and its layer if all layers have that name."""
    for spelt in _spellings(name):
        if spelt in saved:
            return spelt, None
        match = _LAYER.fullmatch(spelt)
        if match is not None:
            key, layer = f"{match[1]}.{match[3]}", int(match[2])
            if key in saved and layer < saved[key][0][0]:
                return key, layer
    return None, None


def _spellings(name: str) -> Iterable[str]:
    yield name
    for norm, fused in _FUSED.items():
        if norm in name:
            yield name.replace(norm, fused)


def _unasked(saved: Mapping[str, Kind], asked: set[str]) -> list[str]:
    found = []
    for key, (shape, _) in saved.items():
        layers = (
            [f"{key}[{layer}]" for layer in range(shape[0])] if _STACKED.fullmatch(key) and key not in asked else [key]
        )
        found += [name for name in layers if name not in asked]
    return found
