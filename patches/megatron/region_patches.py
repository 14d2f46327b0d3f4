"""The patches of regions: MLP.forward and TransformerLayer.forward."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.coverage import RegionKind
from ascend_parallel.patches.megatron.layer_region import LayerRegion
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.region_checks import LAYER, MLP, layer_reason, mlp_reason, proj_reason
from ascend_parallel.patches.megatron.regions import Regions, mlp_forward

VERSIONS = ">=0.10,<0.17"  # later layers have not been read

# Arguments of a layer's call that exclude a region: inference has few rows, and caches.
EXCLUDED = ("context", "inference_params", "inference_context")


def region_patch_set(megatron: Megatron) -> PatchSet:
    """Return the patches that run regions with the settings of `megatron`; none if regions are off."""
    if megatron.settings.region is False:
        return PatchSet("megatron-core", None, [])
    regions = Regions(megatron)
    scaled = ("per_token_scale",) if megatron.version >= (0, 12) else ()
    more = ("kwargs",) if megatron.version >= (0, 16) else ()
    bound = ("args", "kwargs") if megatron.version >= (0, 12) else _monolithic(megatron.version)
    return PatchSet(
        "megatron-core",
        VERSIONS,
        [
            Patch(
                module=MLP,
                owner="MLP",
                method="forward",
                replacement=lambda original: mlp_forward(original, regions),
                parameters=("self", "hidden_states", *scaled, *more),
                reason="runs fc1, activation and fc2 chunk by chunk, collectives under all of them",
            ),
            Patch(
                module=LAYER,
                owner="TransformerLayer",
                method="forward",
                replacement=lambda original: layer_forward(original, regions),
                parameters=("self", *bound),
                reason="runs the MLP's chunks under the attention's collective, and the next layer's under the MLP's",
            ),
        ],
        newest="0.16.1",
    )


def _monolithic(version: tuple[int, ...]) -> tuple[str, ...]:
    """Return the parameters of the layer's forward before 0.12."""
    rotary = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
    last = ("attention_bias", "inference_params", "packed_seq_params")
    offset = ("sequence_len_offset",) if version >= (0, 11) else ()
    return ("hidden_states", "attention_mask", "context", "context_mask", *rotary, *last, *offset)


def layer_forward(original: Function, regions: Regions) -> Function:
    """Make the method that replaces ``TransformerLayer.forward``."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        called_with = _arguments(getattr(type(self), "_forward_attention", original), self, args, kwargs)
        with regions.received(self, called_with["hidden_states"]):
            return regions.timed(self, called_with["hidden_states"], lambda: run(self, called_with, args, kwargs))

    def reason_of(layer: Any) -> str | None:
        """Return why a layer cannot run as a region in any call, or None."""
        if (reason := layer_reason(layer, {})) is not None:
            return reason
        if (reason := regions.mlp_reason(layer.mlp)) is not None:
            return f"its MLP: {reason}"
        return proj_reason(regions.megatron, layer.self_attention.linear_proj, layer.mlp.linear_fc2.sequence_parallel)

    def run(self: Any, called_with: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not regions.choice.on:
            return original(self, *args, **kwargs)
        reason = layer_reason(self, {name: called_with.get(name) for name in EXCLUDED})
        if reason is not None:
            regions.skip(self, f"{reason}; its MLP may still run in chunks")
        elif mlp_reason(regions.megatron, self.mlp, called_with["hidden_states"], None) is None:
            proj, sequence_parallel = self.self_attention.linear_proj, self.mlp.linear_fc2.sequence_parallel
            reason = proj_reason(regions.megatron, proj, sequence_parallel)
            if reason is None:
                return LayerRegion(self, regions).run(lambda: original(self, *args, **kwargs))
            regions.skip(self, reason)
        return original(self, *args, **kwargs)

    vars(forward)["ascend_parallel"] = regions
    vars(forward)["region_kind"] = RegionKind("transformer layers", lambda layer: regions.excluded(layer, reason_of))
    return forward


@functools.lru_cache(maxsize=16)
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def _arguments(function: Function, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer's call by name; `function` names its parameters."""
    signature = _signature(function)
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    return dict(signature.bind_partial(layer, *args, **known).arguments)
