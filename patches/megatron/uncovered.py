"""Layers and calls of Megatron-core that a replacement does not cover: why the original forward must run.

Each function returns the reason, or None. Attributes that a version of Megatron-core lacks mean that their feature is
off. Source: megatron/core/tensor_parallel/layers.py, 0.10 to 0.19; `output_dtype` is of later sources.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

TE_EXTENSION = "megatron.core.extensions.transformer_engine"
# Since this version TransformerEngine may write weight gradients into Megatron-FSDP's buffer.
FSDP_BUFFER = (0, 18)


def uncovered_layer(layer: Any, version: tuple[int, ...]) -> str | None:
    """Return why no call of `layer` is covered, whose group has several ranks."""
    held = vars(layer)  # torch's modules raise an error for an attribute that is absent, which costs a microsecond
    if held.get("gtp_remat_size", 1) > 1:
        return f"its weight is sharded again by weight rematerialisation (gtp_remat_size {layer.gtp_remat_size})"
    if held.get("output_dtype") is not None:
        return f"its matmul has an output dtype of its own (output_dtype {layer.output_dtype})"
    may_write = version >= FSDP_BUFFER and layer.gradient_accumulation_fusion
    if may_write and (reason := _fsdp_gradient(layer, layer._parameters.get("weight"))):
        return reason
    offloading = layer.config._cpu_offloading_context
    if offloading is not None and offloading.inside_context and layer.config.cpu_offloading:
        return "CPU offloading of activations is active"
    return None


def captures_each_layer(config: Any) -> str | None:
    """Return the option with which Megatron-core captures each transformer layer alone, if it is on; else None.

    A graph of a whole iteration, with its backward, is no such option.
    """
    if "full_iteration" in str(getattr(config, "cuda_graph_scope", "")):
        return None
    for option in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
        if (value := getattr(config, option, None)) not in (None, False, "none"):
            return f"{option}={value}"
    return None


def uncovered_column(
    layer: Any, weight: torch.Tensor | None, *, given: bool, gathers_output: bool, version: tuple[int, ...]
) -> str | None:
    """Return why a call of a column layer with `weight` is not covered; given: the weight is the call's argument."""
    if weight is None or weight.shape != (layer.output_size_per_partition, layer.input_size):
        return "there is no weight of the layer's shape"
    if gathers_output and layer.sequence_parallel and version < (0, 13):
        return "gather_output with sequence parallelism is refused by megatron-core below 0.13"
    if gathers_output and getattr(layer, "use_inference_optimized_all_gather", False) and not layer.training:
        return "its output is gathered by the inference-optimized all-gather (transformer_impl)"
    return _fsdp_gradient(layer, weight) if given and version >= FSDP_BUFFER else None


def _fsdp_gradient(layer: Any, weight: torch.Tensor | None) -> str | None:
    """Return a reason if TransformerEngine writes the weight gradient into Megatron-FSDP's buffer."""
    if not layer.gradient_accumulation_fusion or not hasattr(weight, "__fsdp_param__"):
        return None
    gemm = getattr(importlib.import_module(TE_EXTENSION), "te_general_gemm", None)
    return None if gemm is None else "TransformerEngine writes its weight gradient into Megatron-FSDP's buffer"
