"""Layers and calls of Megatron-core that a replacement does not cover: why the original forward must run.

Each function returns the reason, or None. Attributes that a version of Megatron-core lacks mean that their feature is
off. Source: megatron/core/tensor_parallel/layers.py, 0.10 to 0.19; `output_dtype` is of later sources.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

TE_EXTENSION = "megatron.core.extensions.transformer_engine"


def uncovered_layer(layer: Any, version: tuple[int, ...]) -> str | None:
    """Return why no call of `layer` is covered, whose group has several ranks."""
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return f"its weight is sharded again by weight rematerialisation (gtp_remat_size {layer.gtp_remat_size})"
    if getattr(layer, "output_dtype", None) is not None:
        return f"its matmul has an output dtype of its own (output_dtype {layer.output_dtype})"
    if reason := _fsdp_gradient(layer, layer._parameters.get("weight"), version):
        return reason
    offloading = layer.config._cpu_offloading_context
    if offloading is not None and offloading.inside_context and layer.config.cpu_offloading:
        return "CPU offloading of activations is active"
    return None


def uncovered_column(
    layer: Any, weight: torch.Tensor | None, *, gathers_output: bool, version: tuple[int, ...]
) -> str | None:
    """Return why a call of a column layer is not covered; `weight` is the call's argument, or None."""
    used = layer.weight if weight is None else weight
    if used is None or tuple(used.shape) != (layer.output_size_per_partition, layer.input_size):
        return "there is no weight of the layer's shape"
    if gathers_output and layer.sequence_parallel and version < (0, 13):
        return "gather_output with sequence parallelism is refused by megatron-core below 0.13"
    if gathers_output and getattr(layer, "use_inference_optimized_all_gather", False) and not layer.training:
        return "its output is gathered by the inference-optimized all-gather (transformer_impl)"
    return _fsdp_gradient(layer, weight, version)


def _fsdp_gradient(layer: Any, weight: torch.Tensor | None, version: tuple[int, ...]) -> str | None:
    """Return a reason if TransformerEngine writes the weight gradient into Megatron-FSDP's buffer, as since 0.18."""
    if version < (0, 18) or not layer.gradient_accumulation_fusion or not hasattr(weight, "__fsdp_param__"):
        return None
    gemm = getattr(importlib.import_module(TE_EXTENSION), "te_general_gemm", None)
    return None if gemm is None else "TransformerEngine writes its weight gradient into Megatron-FSDP's buffer"
