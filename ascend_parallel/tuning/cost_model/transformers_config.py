"""Read a model's dimensions from a config.json of Hugging Face transformers; transformers itself is not needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ascend_parallel.tuning.cost_model.tables import PlanningError, need_keys, need_table, require

# Decoders with gated MLPs, RMSNorm and rotary embeddings; small biases and norms inside attention are left out.
FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
DIMENSIONS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
OPTIONAL = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
LATENT = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def dimensions_of(text: str, place: str) -> dict[str, Any]:
    """Return the keys of `Model` that a config.json gives; raises `PlanningError` with what they cannot express."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanningError(f"{place} is no valid JSON: {error}") from error
    need_table(place, config, "model_type and sizes")
    return dimensions_of_config(config, place)


def dimensions_of_config(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the keys of `Model` that the values of a config.json give; raises `PlanningError`."""
    need_keys(place, config, ["model_type"])
    kind = config["model_type"]
    require(f"{place}: model_type", kind, kind in FAMILIES, f"one of {', '.join(FAMILIES)}, or a TOML file of sizes")
    need_keys(place, config, DIMENSIONS.values())
    values = {name: config[key] for name, key in DIMENSIONS.items()}
    values |= {name: config[key] for name, key in OPTIONAL.items() if config.get(key) is not None}
    if config.get("kv_lora_rank"):
        values |= _latent(config, place)
    tied = bool(config.get("tie_word_embeddings", False))
    return values | {"title": kind, "gated": True, "tied": tied} | _experts(config, place)


def _latent(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    need_keys(place, config, (*LATENT.values(), "qk_nope_head_dim"), ", which latent attention (kv_lora_rank) needs")
    values = {name: config[key] for name, key in LATENT.items()}
    return values | {"head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}


def _experts(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the dimensions of the experts; none for a dense model."""
    experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
    if not experts:
        return {}
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    dense = config.get("mlp_only_layers") or []
    first = config.get("first_k_dense_replace") or len(dense)
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    alike = step == 1 and sorted(dense) == list(range(len(dense)))
    given = f"decoder_sparse_step={step}, mlp_only_layers={dense}"
    require(f"{place}: layers", given, alike, "experts in all layers behind the first dense ones")
    return {
        "experts": experts,
        "top_k": config.get("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": first,
    }
