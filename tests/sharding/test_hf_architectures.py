"""Small random decoders of many architectures of transformers, without a strategy: a training step against one card."""

import copy
import logging

import hf_decoders as example
import pytest
import torch
import transformers
from decoders import float64_module
from one_card import box_of

from ascend_parallel.training import Strategy, train_step

VOCABULARY, ROWS, LENGTH = 96, 8, 8
TOKENS = {"vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUTS = (
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop residual_dropout activation_dropout dropout "
    "hidden_dropout_prob attention_probs_dropout_prob resid_dropout embed_dropout"
)
PLAIN = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA = {**PLAIN, "intermediate_size": 96, "num_key_value_heads": 2}
HEADS = {**LLAMA, "head_dim": 16}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
DEEPSEEK = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
# The prefix of the configuration's name, and its options beyond TOKENS.
ARCHITECTURES = {
    "BioGpt": {**PLAIN, "intermediate_size": 96},
    "CodeGen": GPT,
    "Cohere": LLAMA,
    "Cohere2": LLAMA,
    "DeepseekV3": {**LLAMA, **DEEPSEEK, **ROUTED, "moe_intermediate_size": 48, "num_key_value_heads": 4}
    | {"experts_implementation": "batched_mm"},
    "DiffLlama": LLAMA,
    "Ernie4_5": LLAMA,
    "Exaone4": LLAMA,
    "Falcon": PLAIN,
    "GPTBigCode": GPT,
    "GPTJ": GPT,
    "GPTNeo": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "GPTNeoX": {**PLAIN, "intermediate_size": 96},
    "Gemma": HEADS,
    "Gemma2": HEADS,
    "Gemma3Text": HEADS,
    "Glm": HEADS,
    "Glm4": HEADS,
    "GptOss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    "Granite": LLAMA,
    "Helium": HEADS,
    "HunYuanDenseV1": HEADS,
    "Lfm2": {**LLAMA, "layer_types": ["conv", "full_attention"]},
    "Llama4Text": {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 96},
    "Mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "Nemotron": LLAMA,
    "OPT": {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo": LLAMA,
    "Olmo2": LLAMA,
    "Olmoe": {**LLAMA, **EXPERTS},
    "Persimmon": LLAMA,
    "Phi": LLAMA,
    "Phi3": LLAMA,
    "Qwen3": HEADS,
    "Qwen3Moe": {**HEADS, **EXPERTS, "moe_intermediate_size": 48},
    "Rwkv": {"hidden_size": 64, "num_hidden_layers": 2},
    "SeedOss": HEADS,
    "SmolLM3": LLAMA,
    "StableLm": LLAMA,
    "Starcoder2": LLAMA,
    "XLMRoberta": {**PLAIN, "intermediate_size": 96, "is_decoder": True},
}
TWICE = ("CodeGen", "Llama4Text", "Qwen3Moe")
# Three architectures, one of them with experts, train on two replicas, the others on one; the rest in `make stress`.
CASES = [
    pytest.param(
        name, replicas, id=f"{name}-{replicas}", marks=[] if (name in TWICE) == (replicas == 2) else pytest.mark.stress
    )
    for name in ARCHITECTURES
    for replicas in (1, 2)
]
# These call .float(), and sum over tokens in float32.
IN_FLOAT32 = {"Gemma", "Gemma2", "Gemma3Text", "Mamba"}


def made(name):
    """Return the decoder in float64 and in training mode, with the same random weights on every rank."""
    without = dict.fromkeys(DROPOUTS.split(), 0.0)
    config = getattr(transformers, f"{name}Config")(**{**TOKENS, **without, **ARCHITECTURES[name]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).double().train()
    for parameter in model.parameters():  # norms and biases that are not ones and zeros
        parameter.data += torch.randn_like(parameter) * 0.02
    return model


def batch():
    """Return tokens ``[rows, length]``, no padding among them."""
    return (torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)),)


def stepped(name, replicas):
    model = made(name)
    whole = copy.deepcopy(model)
    with float64_module(type(model).__module__):  # its norms and softmaxes too, which convert to float32
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = Strategy(mode="auto", mesh={"dp": replicas, "tp": 2}, hardware="910b")
        step = train_step(model, batch(), optimizer, strategy, loss=example.loss)
        loss, shards = step(*batch()).detach(), step.tensor_shards()
        step.close()
        before = copy.deepcopy(whole.state_dict())
        expected = example.loss(whole, *batch())
        expected.backward()
        torch.optim.SGD(whole.parameters(), lr=1.0).step()
    return loss, expected.detach(), shards, before, whole


def one_step(group, name, replicas):
    """Compare the loss and, by the change of each weight, every gradient."""
    logging.disable(logging.WARNING)
    loss, expected, shards, before, whole = stepped(name, replicas)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    parameters = dict(whole.named_parameters())
    held = {key: value for key, value in shards.items() if key in parameters}
    rounded = {"rtol": 1e-5, "atol": 1e-7} if name in IN_FLOAT32 else {"rtol": 1e-8, "atol": 1e-11}
    for key, shard in held.items():
        old, after = before[key][box_of(shard)], parameters[key].detach()[box_of(shard)]
        torch.testing.assert_close(
            old - shard.local.detach(), old - after, **rounded, msg=lambda m, key=key: f"{key}: {m}"
        )
    return set(held), set(parameters)


@pytest.mark.sample("BioGpt-1")
@pytest.mark.parametrize(("name", "replicas"), CASES)
def test_an_architecture_trains_as_on_one_card(ranks, name, replicas):
    held = ranks(2 * replicas).run(one_step, name, replicas)
    assert set().union(*(own for own, _ in held)) == held[0][1]
