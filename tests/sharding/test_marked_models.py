"""Models of transformers with marks at random: loss, gradients and running statistics are those of one card."""

import random
from collections import Counter

import pytest
import torch
import transformers
from marks import promise
from pool import on_ranks
from torch.distributed.tensor import Replicate, Shard

from ascend_parallel.sharding import ProcessMesh, shard_layer, shard_tensor, unshard

LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**LAYERS, "vocab_size": 40}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "use_cache": False}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 40, "dropout_rate": 0.0}
T5 |= {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
CONVOLUTIONS = {"hidden_sizes": [8, 16], "depths": [1, 1]}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
WHISPER = {"d_model": 16, "vocab_size": 40, "num_mel_bins": 8, "dropout": 0.0, "use_cache": False}
WHISPER |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
WHISPER |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
WHISPER |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
WHISPER |= dict.fromkeys(("max_source_positions", "max_target_positions"), 16)
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# {class: (its configuration, the name of its input)}; a class without labels has the mean square of its logits as loss.
MODELS = {
    "LlamaForCausalLM": (DECODER, "input_ids"),
    "Qwen2ForCausalLM": (DECODER, "input_ids"),
    "GemmaForCausalLM": ({**DECODER, "head_dim": 4}, "input_ids"),
    "MixtralForCausalLM": ({**DECODER, "num_local_experts": 4, "experts_implementation": "eager"}, "input_ids"),
    "GPTNeoXForCausalLM": ({**TEXT, "use_cache": False}, "input_ids"),
    "GPT2LMHeadModel": (GPT2, "input_ids"),
    "MambaForCausalLM": ({**TEXT, "state_size": 4, "use_cache": False}, "input_ids"),
    "BertForMaskedLM": ({**TEXT, **NO_DROPOUT}, "input_ids"),
    "ElectraForMaskedLM": ({**TEXT, **NO_DROPOUT, "embedding_size": 16}, "input_ids"),
    "T5ForConditionalGeneration": (T5, "input_ids"),
    "WhisperForConditionalGeneration": (WHISPER, "input_features"),
    "ViTForImageClassification": ({**LAYERS, **NO_DROPOUT, "image_size": 32, "patch_size": 8}, "pixel_values"),
    "SwinForImageClassification": ({**SWIN, "drop_path_rate": 0.0}, "pixel_values"),
    "ConvNextForImageClassification": ({**CONVOLUTIONS, "num_stages": 2, "patch_size": 4}, "pixel_values"),
    "ResNetForImageClassification": ({**CONVOLUTIONS, "embedding_size": 8, "layer_type": "basic"}, "pixel_values"),
}
SHAPES = {"pixel_values": (12, 3, 32, 32), "input_features": (12, 8, 32)}


def made(name):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**MODELS[name][0])).double().train()


def batch_of(name):
    source, generator = MODELS[name][1], torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (12, 6), generator=generator)
    if source == "input_ids":
        return {source: tokens, "labels": tokens}
    given = {source: torch.randn(SHAPES[source], generator=generator, dtype=torch.float64)}
    return given if source == "pixel_values" else {**given, "labels": tokens}


def loss_of(model, batch):
    returned = model(**batch)
    return returned.loss if "labels" in batch else returned.logits.square().mean()


def at_random(model, seed):
    """Return a function that places each parameter that is not tied in any way."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    draw = random.Random(seed)

    def place(_path, module, mesh):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and uses[id(parameter)] == 1:
                cuts = [Replicate(), Replicate(), *map(Shard, range(parameter.ndim))]
                module._parameters[name] = shard_tensor(parameter, mesh, draw.choices(cuts, k=2))

    return place


# A model on 2, 3 or 4 ranks in turn; on the others, where the marks are others too, in make stress.
CASES = [
    pytest.param(name, count, marks=[pytest.mark.stress] if place % 3 != count - 2 else [])
    for place, name in enumerate(MODELS)
    for count in (2, 3, 4)
]


@promise("marked-models")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "count"), CASES)
@on_ranks()
def test_a_model_marked_at_random_is_that_of_one_card(group, name):
    mesh = ProcessMesh(torch.arange(group.size()).view(-1, 2 - group.size() % 2).tolist(), ["dp", "mp"])
    truth, model = made(name), made(name)
    model = shard_layer(model, mesh, at_random(model, len(name) + group.size()))
    torch.manual_seed(group.rank())
    batch = {key: shard_tensor(value, mesh, [Shard(0), Replicate()]) for key, value in batch_of(name).items()}
    found, expected = loss_of(model, batch), loss_of(truth, batch_of(name))
    found.backward()
    expected.backward()
    near = {"rtol": 1e-6, "atol": 1e-6}  # Llama's norms compute in float32
    torch.testing.assert_close(unshard(found.detach()), expected.detach(), **near)
    for path, parameter in truth.named_parameters():
        gradient = model.get_parameter(path).grad
        assert (gradient is None) == (parameter.grad is None)
        if gradient is not None:
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad, **near)
    for path, buffer in truth.named_buffers():
        torch.testing.assert_close(unshard(model.get_buffer(path)), buffer, **near)
