"""Read a model's tensors from Megatron-core's distributed checkpoints (format torch_dist).

The files have torch.distributed.checkpoint's format, with Megatron's own names:

- The layers of a block are stacked along a first dimension: ``decoder.layers.mlp.linear_fc1.weight`` holds
  ``decoder.layers.N.mlp.linear_fc1.weight`` of every layer N.
- A norm before a linear layer has the linear layer's name, as Transformer Engine fuses both.

Megatron's arrangement inside a tensor is kept, such as query, key and value of a head side by side.
Sources in megatron-core 0.16: dist_checkpointing/, transformer/transformer_block.py, models/gpt/gpt_layer_specs.py.
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


def megatron_state(path: str | Path) -> dict[str, torch.Tensor]:
    """Return a model's unsharded tensors by name, unstacked by layer; runs in one process without process groups.

    path
        The directory with Megatron's metadata.json, such as ``iter_0001000``.

    Names are the checkpoint's, with the layer's number; for a model with other names see `load_megatron`.
    Raises `CheckpointError` if the directory is no such checkpoint or has another format.
    """
    checkpoint = _checked_path(path)
    metadata = read_metadata(checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    for key, (shape, _) in _model_kinds(metadata).items():
        whole, stacked = read_whole(checkpoint, metadata, key), _STACKED.fullmatch(key)
        if stacked is None:
            tensors[key] = whole
        else:
            tensors |= {f"{stacked[1]}.{layer}.{stacked[2]}": whole[layer].clone() for layer in range(shape[0])}
    return tensors


def load_megatron(path: str | Path, model: Mapping[str, TensorShard]) -> None:
    """Fill the shards of a GPTModel in place, by module name; every rank of the default group calls this.

    path
        The directory with Megatron's metadata.json.
    model
        Shards by name, such as `tensor_shards_of` returns for an unsharded GPTModel. A gated ``linear_fc1`` must not be
        sharded along its first dimension: Megatron's own slice of it is two separate ranges.

    Raises `CheckpointError` on every rank if a tensor is missing in the model or the checkpoint, or if shapes or
    dtypes differ.
    """
    group, fault = everybody(), ""
    requested: dict[str, list[TensorShard]] = {}
    try:
        checkpoint = _checked_path(path)
        saved = _model_kinds(read_metadata(checkpoint))
        requested, names = _by_saved_name(model, saved)
    except Exception as error:  # noqa: BLE001  `agree` raises it on every rank
        fault = in_words(error)
    agree(group, "load of a Megatron-core checkpoint", {"path": str(path)}, fault)
    names_on_all_ranks = names_of_all(group, names)
    missing = _missing(saved, names_on_all_ranks)
    refuse([f"{name}: in the checkpoint, not here" for name in missing], f"{path} is of another model")
    with same_error_on_all_ranks(group):
        reader, planner = Reader(checkpoint), TensorShardLoadPlanner(requested)
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def _checked_path(path: str | Path) -> Path:
    config = Path(path) / CONFIG
    try:
        backend = json.loads(config.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no distributed checkpoint of Megatron-core: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} has the format {backend!r}; only torch_dist is read: convert it with Megatron-core"
        )
    return Path(path)


def _model_kinds(metadata: Metadata) -> dict[str, Kind]:
    return {name: kind for name, kind in saved_kinds(metadata).items() if not _OPTIMIZER.match(name)}


def _by_saved_name(
    model: Mapping[str, TensorShard], saved: Mapping[str, Kind]
) -> tuple[dict[str, list[TensorShard]], list[str]]:
    """Return the model's shards by the checkpoint's names, and these names with the layer's number."""
    requested: dict[str, list[TensorShard]] = {}
    names: list[str] = []
    here, there = kinds(model), {}
    for name, shard in model.items():
        key, layer = _find(name, saved)
        if key is None:
            continue
        shape, dtype = saved[key]
        if layer is None:
            there[name], stacked = (shape, dtype), shard
            names.append(key)
        else:
            there[name] = shape[1:], dtype
            stacked = TensorShard(shard.local.detach().unsqueeze(0), (shape[0], *shard.shape), (layer, *shard.offsets))
            names.append(f"{key}[{layer}]")
        requested.setdefault(key, []).append(stacked)
    refuse(differences(here, there), "the checkpoint is of another model")
    return requested, names


def _find(name: str, saved: Mapping[str, Kind]) -> tuple[str | None, int | None]:
    """Return the checkpoint's name of a tensor, and its layer number if that name holds all layers."""
    for spelling in _spellings(name):
        if spelling in saved:
            return spelling, None
        match = _LAYER.fullmatch(spelling)
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


def _missing(saved: Mapping[str, Kind], names: set[str]) -> list[str]:
    """Return the saved tensors, layer by layer, that are not in `names`."""
    missing = []
    for key, (shape, _) in saved.items():
        stacked = _STACKED.fullmatch(key) and key not in names
        layers = [f"{key}[{layer}]" for layer in range(shape[0])] if stacked else [key]
        missing += [name for name in layers if name not in names]
    return missing
