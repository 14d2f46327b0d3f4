"""The presets as modules: as large as published, and searched in their own kind of layers."""

from dataclasses import replace

import pytest
import torch

from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.training.degrees.presets import TOKENS, built_preset, default_batch, traced_preset
from ascend_parallel.training.degrees.search import search_traced
from ascend_parallel.training.degrees.transformer import VOCABULARY_MULTIPLE
from ascend_parallel.tuning.cost_model.models import all_models

MODELS = all_models()


@pytest.mark.parametrize("name", MODELS)
def test_a_module_has_the_parameters_of_the_preset(name):
    model = MODELS[name]
    built, (tokens, targets) = built_preset(model, model.sequence or 64, 2)
    count = sum(parameter.numel() for parameter in built.parameters())
    padded = -model.vocab % VOCABULARY_MULTIPLE * model.hidden * (1 if model.tied else 2)
    # Beside the count of the cost model: two biases of norms, and latent attention's norms.
    assert count - padded == pytest.approx(model.count_parameters(), rel=1e-4)
    assert tokens.shape == targets.shape == (2, model.sequence or 64)


def small(name):
    """Return a preset of its kind with few and narrow layers."""
    model = MODELS[name]
    latent = {"q_rank": 64, "kv_rank": 32, "rotary_dim": 16, "head_dim": 48, "value_dim": 32} if model.latent else {}
    sizes = {"layers": 5, "hidden": 256, "ffn": 512, "heads": 8, "vocab": 1000}
    groups = 2 if model.kv_heads < model.heads else 8
    return replace(model, **{**sizes, "kv_heads": groups, "head_dim": 32, "value_dim": 32, **latent})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt3-175b", "bfloat16"), ("llama3-8b", "float32"), ("deepseek-v3-dense", "bfloat16")]
)
def test_each_kind_of_layers_is_searched(name, dtype):
    traced = traced_preset(small(name), 128, 16, dtype)
    first = traced.trace(1)
    assert (first.depth, first.layers) == (5, ("layers.*",))
    found = search_traced(traced, ranks=4, memory=60e9, hardware="910b")
    assert found.amp == ("bfloat16" if dtype == "bfloat16" else None)
    parameters = sum(node.outputs[0].nbytes for node in first.graph.nodes.values() if node.kind == PARAMETER)
    assert parameters > 0
    whole, _ = built_preset(small(name), 128, 16)
    nbytes = sum(parameter.numel() for parameter in whole.parameters()) * getattr(torch, dtype).itemsize
    alone = search_traced(traced, ranks=1, memory=60e9, hardware="910b").best[0].memory
    assert alone.parameters == nbytes
    assert alone.optimizer == nbytes * (6 if dtype == "bfloat16" else 2)  # 12 bytes for 2, 8 for 4


@pytest.mark.parametrize(("ranks", "length", "batch"), [(64, 4096, 1024), (10_000, 4096, 10_000), (1, 2048, 1954)])
def test_the_batch_has_four_million_tokens(ranks, length, batch):
    assert default_batch(ranks, length) == batch
    assert batch * length >= TOKENS and batch % ranks == 0


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='float16': give one of bfloat16, float32"):
        traced_preset(MODELS["llama2-7b"], 64, 4, "float16")
