"""Which MLPs and transformer layers of Megatron-core can run as a region; the reasons for the others.

A region runs the modules' work without calling them, or hands them rows that are not there yet. Both are safe only for
Megatron-core's own modules, without hooks, in a plain training or evaluation step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules import module as hooks

from ascend_parallel.ops.record import RECORDING
from ascend_parallel.overlap.quantised import int8_weight
from ascend_parallel.overlap.region.rows import saved_hook_reason
from ascend_parallel.patches.base import defined_in
from ascend_parallel.patches.megatron.built_classes import looks_at_classes
from ascend_parallel.patches.megatron.layers import Megatron

MLP = "megatron.core.transformer.mlp"
LAYER = "megatron.core.transformer.transformer_layer"
ATTENTION = "megatron.core.transformer.attention"
FUSED_ADD = "megatron.core.fusions.fused_bias_dropout"
FUSED_NORM = "megatron.core.fusions.fused_layer_norm"

# Activations that are known to work row by row and to draw nothing: torch's, and Megatron-core's by module and name.
ROW_BY_ROW = (F.gelu, F.silu, F.relu, F.relu6, F.leaky_relu, F.mish, F.elu, torch.sigmoid, torch.tanh, torch.relu)
OWN_ROW_BY_ROW = {
    "megatron.core.activations": ("squared_relu", "quick_gelu", "fast_gelu"),
    "megatron.core.fusions.fused_bias_geglu": ("quick_gelu",),
    "megatron.core.transformer.utils": ("openai_gelu", "erf_gelu"),
}
# Steps of a layer's forward: methods of TransformerLayer in some of the supported versions.
STEPS = ("_forward_attention", "_forward_mlp", "_forward_pre_mlp_layernorm", "_forward_post_mlp")
# Options of a configuration that exclude regions -> what they are.
EXCLUDING = {
    "fp8": "fp8",
    "fp4": "fp4",
    "cpu_offloading": "CPU offloading of activations",
    "fine_grained_activation_offloading": "offloading of activations",
    "enable_cuda_graph": "CUDA graphs",
    "external_cuda_graph": "CUDA graphs",
    "defer_embedding_wgrad_compute": "deferred weight gradients",
    "delay_wgrad_compute": "delayed weight gradients",
    "use_te_activation_func": "TransformerEngine's activation",
    "inference_fuse_tp_communication": "fused communication in inference",
}


def mlp_reason(megatron: Megatron, mlp: Any, hidden: torch.Tensor, per_token_scale: object) -> str | None:
    """Return the reason why an MLP's layers must run one by one, or None if the MLP can run in chunks."""
    return next(_mlp_reasons(megatron, mlp, hidden, per_token_scale), None)


def layer_reason(layer: Any, arguments: dict[str, Any]) -> str | None:
    """Return the reason why the region of a transformer layer must be its MLP alone, or None.

    `arguments` are those of the call that can exclude a region, by name. The MLP is judged by `mlp_reason`.
    """
    return next(_layer_reasons(layer, arguments), None)


def _mlp_reasons(megatron: Megatron, mlp: Any, hidden: torch.Tensor, per_token_scale: object) -> Iterator[str]:
    kind = type(mlp)
    if (kind.__module__, kind.__name__) != (MLP, "MLP"):
        yield f"it is a {kind.__module__}.{kind.__name__}"
        return
    if per_token_scale is not None:
        yield "it is called with per_token_scale"
    if torch.is_autocast_enabled(hidden.device.type):
        yield "autocast is active"
    yield from _configured(mlp.config)
    for name, owner in (("linear_fc1", "ColumnParallelLinear"), ("linear_fc2", "RowParallelLinear")):
        yield from (f"{name} {reason}" for reason in _linear_reasons(megatron, getattr(mlp, name), owner))
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    if fc1.sequence_parallel is not fc2.sequence_parallel:
        yield "one of its layers alone has sequence parallelism"
    if not fc1.skip_bias_add or not fc2.skip_bias_add:
        yield "its layers add their biases"
    if fc1.gather_output or not fc2.input_is_parallel or fc1.disable_grad_reduce:
        yield "its layers communicate in another place"
    if megatron.group_of(fc1) is not megatron.group_of(fc2):
        yield "its layers have different groups"
    yield from _not_as_defined((name or "it", inner) for name, inner in mlp.named_modules())
    yield from _foreign_hooks()
    if not row_by_row(mlp.activation_func):
        yield f"its activation {mlp.activation_func!r} is not known to work row by row"


def _layer_reasons(layer: Any, arguments: dict[str, Any]) -> Iterator[str]:
    kind = type(layer)
    if (kind.__module__, kind.__name__) != (LAYER, "TransformerLayer"):
        yield f"it is a {kind.__module__}.{kind.__name__}"
        return
    own, attention = sys.modules[LAYER], layer.self_attention
    replaced = (step for step in STEPS if hasattr(kind, step) and not defined_in(getattr(kind, step), own))
    yield from (f"{step} was replaced" for step in replaced)
    if layer.hidden_dropout > 0 and layer.training:
        yield f"hidden_dropout={layer.hidden_dropout} draws for whole tensors"
    yield from (f"{name} is given" for name, value in arguments.items() if value is not None)
    if torch.is_grad_enabled() and (reason := saved_hook_reason()) is not None:
        yield reason
    yield from _configured(layer.config)
    if layer.config.fp32_residual_connection:
        yield "fp32_residual_connection"
    for flag in ("recompute_pre_mlp_layernorm", "recompute_mlp", "recompute_input_layernorm"):
        if getattr(layer, flag, False):
            yield flag
    identities = ("pre_cross_attn_layernorm", "cross_attention", "cross_attn_bda")
    if any(not type(getattr(layer, name)).__name__.startswith("Identity") for name in identities):
        yield "it has cross attention"
    add = importlib.import_module(FUSED_ADD)
    if layer.self_attn_bda is not add.get_bias_dropout_add or not defined_in(layer.self_attn_bda, add):
        yield "self_attn_bda is not Megatron-core's"
    if type(attention).__module__ != ATTENTION or not defined_in(type(attention).forward, sys.modules[ATTENTION]):
        yield f"its attention is a {type(attention).__module__}.{type(attention).__name__}"
        return
    norm = type(layer.pre_mlp_layernorm)
    if norm not in (torch.nn.LayerNorm, torch.nn.RMSNorm) and norm.__module__ != FUSED_NORM:
        yield f"its pre_mlp_layernorm is a {norm.__module__}.{norm.__name__}"
    inside = {"self_attention": attention, "linear_proj": attention.linear_proj, "norm": layer.pre_mlp_layernorm}
    yield from _not_as_defined(inside.items())
    yield from _foreign_hooks()


def successor_reason(megatron: Megatron, layer: Any, successor: Any) -> str | None:
    """Return the reason why the next layer of a block cannot pull the rows of `layer`, or None.

    The arguments of both calls are the same, and were judged for `layer`.
    """
    return next(_successor_reasons(megatron, layer, successor), None)


def _successor_reasons(megatron: Megatron, layer: Any, successor: Any) -> Iterator[str]:
    yield from _layer_reasons(successor, {})
    add, attention = importlib.import_module(FUSED_ADD), successor.self_attention
    if layer.mlp_bda is not add.get_bias_dropout_add:
        yield "mlp_bda is not Megatron-core's"
    if layer.config.recompute_granularity == "full" and layer.training:
        yield "layers are recomputed one by one"
    if type(attention).__name__ != "SelfAttention":
        yield f"its attention is a {type(attention).__name__}"
        return
    if not defined_in(type(attention).get_query_key_value_tensors, sys.modules[ATTENTION]):
        yield "get_query_key_value_tensors was replaced"
    qkv, norm = attention.linear_qkv, type(successor.input_layernorm)
    yield from (f"linear_qkv {reason}" for reason in _linear_reasons(megatron, qkv, "ColumnParallelLinear"))
    if qkv.gather_output or qkv.disable_grad_reduce:
        yield "linear_qkv communicates in another place"
    if norm not in (torch.nn.LayerNorm, torch.nn.RMSNorm) and norm.__module__ != FUSED_NORM:
        yield f"its input_layernorm is a {norm.__module__}.{norm.__name__}"
    if qkv.sequence_parallel is not layer.mlp.linear_fc2.sequence_parallel:
        yield "one of its layers alone has sequence parallelism"
    inside = {"the layer": layer, "the next layer": successor, "norm": successor.input_layernorm, "linear_qkv": qkv}
    yield from _not_as_defined(inside.items())


def proj_reason(megatron: Megatron, proj: Any, sequence_parallel: bool) -> str | None:
    """Return the reason why the row-parallel layer of an attention cannot begin a region, or None."""
    reason = next(_linear_reasons(megatron, proj, "RowParallelLinear"), None)
    if reason is None and not (proj.input_is_parallel and proj.skip_bias_add):
        reason = "scatters its input, or adds its bias"
    if reason is None and proj.sequence_parallel is not sequence_parallel:
        reason = "and the MLP differ in sequence parallelism"
    return None if reason is None else f"linear_proj {reason}"


def _linear_reasons(megatron: Megatron, layer: Any, owner: str) -> Iterator[str]:
    kind = getattr(megatron.layers, owner)
    if type(layer) is not kind or getattr(kind.forward, "ascend_parallel", None) is not megatron:
        yield f"is a {type(layer).__module__}.{type(layer).__name__}"
        return
    if (reason := megatron.uncovered(layer)) is not None:
        yield f"is not overlapped: {reason}"
    if layer._parameters.get("weight") is None or int8_weight(layer) is not None:
        yield "has no plain weight"


def configured_reason(config: Any) -> str | None:
    """Return the option of a configuration that excludes regions, or None."""
    return next(_configured(config), None)


def _configured(config: Any) -> Iterator[str]:
    yield from (what for name, what in EXCLUDING.items() if getattr(config, name, None))
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        yield "CUDA graphs"


def _foreign_hooks() -> Iterator[str]:
    """A timeline's own global hooks only follow the modules' names, and `BuiltClasses` only looks at classes."""
    before = [hook for hook in hooks._global_forward_pre_hooks.values() if not looks_at_classes(hook)]
    if (hooks._global_forward_hooks or before) and RECORDING.recorder is None:
        yield "hooks on all modules"
    if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
        yield "backward hooks on all modules"


def _not_as_defined(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[str]:
    """A call of these modules does more than run the forward of their class, or runs it traced."""
    for name, module in modules:
        if hooked(module):
            yield f"hooks on {name}"
        if module._compiled_call_impl is not None:
            yield f"{name} is compiled"


def hooked(module: torch.nn.Module) -> bool:
    """Tell whether a module has hooks or a forward of its own, which a region would not call."""
    held = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(held) or "forward" in vars(module)


def row_by_row(activation: Any) -> bool:
    """Tell whether an activation is known to compute each row from that row alone."""
    own = OWN_ROW_BY_ROW.get(getattr(activation, "__module__", None) or "", ())
    return activation in ROW_BY_ROW or getattr(activation, "__name__", None) in own
