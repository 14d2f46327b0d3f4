"""COC_DETERMINISTIC=invariant with Megatron-core: any batch at every degree, and the logprobs of transformers."""

import pytest
import torch
import torch.distributed as dist
from every_degree import at_degrees, digest
from gpt_training import LLAMA, megatron
from marks import promise
from megatron_cpu import megatron_on_cpu, small_gpt
from test_every_degree_megatron import PACKED_IS_KNOWN, train

import ascend_parallel

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import full_tensor, model_of

from ascend_parallel.patches.transformers import on_one_rank

INVARIANT = {"deterministic": "invariant"}
HIDDEN, HEADS, GROUPS, INNER, VOCABULARY = 128, 8, 4, 256, 256
GPT = {"hidden": HIDDEN, "heads": HEADS, "ffn_hidden_size": INNER, "tied": False, **LLAMA, "num_query_groups": GROUPS}
LENGTHS = (5, 48, 20)


def drawn(count, seed):
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@PACKED_IS_KNOWN
@promise("invariant-megatron")
def test_a_gpt_trains_alike_at_every_degree(ranks):
    """With sequence parallelism and without, in chunks."""
    one, two = at_degrees(ranks, train, GPT, INVARIANT, torch.float32, 2, degrees=(1, 2))
    assert two == one
    parallel = {**GPT, "sequence_parallel": True}
    assert at_degrees(ranks, train, parallel, {**INVARIANT, "num_chunks": 4}, torch.float32, 2, degrees=(2,)) == [one]


def llama():
    return model_of(
        "Llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ).eval()


def of_transformers(group):
    model = llama()
    ascend_parallel.configure(**INVARIANT)
    try:
        model = on_one_rank(model)
        model.set_attn_implementation("invariant")
        with torch.no_grad():
            return [ascend_parallel.logprobs(model, drawn(count, count).unsqueeze(0))[0] for count in LENGTHS]
    finally:
        ascend_parallel.configure(num_chunks=1)


def part(weight, dim, group):
    return weight.chunk(group.size(), dim)[group.rank()]


def weights_of(model, group):
    """Megatron-core's names and this rank's parts of the weights of a Llama."""
    given = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    found = {
        "embedding.word_embeddings.weight": part(given["model.embed_tokens.weight"], 0, group),
        "decoder.final_layernorm.weight": given["model.norm.weight"],
        "output_layer.weight": part(given["lm_head.weight"], 0, group),
    }
    for index in range(model.config.num_hidden_layers):
        theirs, own = f"model.layers.{index}.", f"decoder.layers.{index}."
        q, k, v = (given[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv")
        q, k, v = (each.view(GROUPS, -1, HIDDEN) for each in (q, k, v))
        gate, up = (part(given[f"{theirs}mlp.{name}_proj.weight"], 0, group) for name in ("gate", "up"))
        found |= {
            f"{own}input_layernorm.weight": given[f"{theirs}input_layernorm.weight"],
            f"{own}self_attention.linear_qkv.weight": part(torch.cat([q, k, v], 1).flatten(0, 1), 0, group),
            f"{own}self_attention.linear_proj.weight": part(given[f"{theirs}self_attn.o_proj.weight"], 1, group),
            f"{own}pre_mlp_layernorm.weight": given[f"{theirs}post_attention_layernorm.weight"],
            f"{own}mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{own}mlp.linear_fc2.weight": part(given[f"{theirs}mlp.down_proj.weight"], 1, group),
        }
    return found


def of_stage(weights, model):
    """Return those of the whole weights that a stage of a pipeline holds, by its own numbers of layers."""
    prefixes = [
        (f"decoder.layers.{layer.layer_number - 1}.", f"decoder.layers.{index}.")
        for index, layer in enumerate(model.decoder.layers)
    ]
    own = {
        name.replace(theirs, ours): each
        for theirs, ours in prefixes
        for name, each in weights.items()
        if name.startswith(theirs)
    }
    ends = {"embedding.": model.pre_process, "decoder.final": model.post_process, "output_layer": model.post_process}
    return own | {
        name: each for name, each in weights.items() for end, has in ends.items() if has and name.startswith(end)
    }


def of_megatron(group, tensor_parallel=None, stages=1):
    """The logprobs of sequences alone, and in a batch, by logits that ranks share; on the last stage of a pipeline."""
    from megatron.core import parallel_state

    with (
        megatron(tensor_parallel or group.size(), pipeline_parallel=stages),
        megatron_on_cpu(schedules=True),
    ):
        shared = parallel_state.get_tensor_model_parallel_group()
        ascend_parallel.configure(**INVARIANT)
        model = small_gpt(seq=64, vocab=VOCABULARY, rope=True, layernorm_epsilon=1e-5, **GPT).eval()
        missing = model.load_state_dict(of_stage(weights_of(llama(), shared), model), strict=False)
        assert not missing.unexpected_keys
        assert not [name for name in missing.missing_keys if not name.endswith("_extra_state")]
        width, found = max(LENGTHS), []
        rows = torch.zeros(len(LENGTHS), width, dtype=torch.long)
        for row, count in zip(rows, LENGTHS, strict=True):
            row[:count] = drawn(count, count)
        for ids in (*(row[:count].unsqueeze(0) for row, count in zip(rows, LENGTHS, strict=True)), rows):
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            hidden_from = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
            if not model.pre_process:
                received = torch.empty(ids.shape[1], len(ids), HIDDEN)
                dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
                model.set_input_tensor(received)
            with torch.no_grad():
                made = model(ids, positions, hidden_from)
            if model.post_process:
                found.append(ascend_parallel.logprobs(made[:, :-1], ids[:, 1:], group=shared))
            else:
                dist.send(made.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        if not model.post_process:
            return None
        alone = [each[0] for each in found[:-1]]
        assert all(torch.equal(row[: len(own)], own) for row, own in zip(found[-1], alone, strict=True))
        return alone


@PACKED_IS_KNOWN
@promise("invariant-megatron")
@pytest.mark.parametrize(
    ("world", "tensor_parallel", "stages"),
    [(1, 1, 1), (2, 2, 1), (2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2)],
)
def test_megatron_has_the_logprobs_of_transformers(ranks, world, tensor_parallel, stages):
    """Also of replicas (data parallelism), and of the stages of a pipeline."""
    (expected,) = ranks(1).run(of_transformers)
    found = [each for each in ranks(world).run(of_megatron, tensor_parallel, stages) if each is not None]
    assert len(found) == world // stages
    for each in found:
        assert [digest(own) for own in each] == [digest(own) for own in expected]


def refused(group, how):
    """The error of a model whose attention, norm or activation is another kernel."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Own(DotProductAttention):
        """An attention of a program's own."""

    class Norm(torch.nn.RMSNorm):
        """A norm of a program's own."""

    with megatron(1), megatron_on_cpu(schedules=True):
        ascend_parallel.configure(**INVARIANT)
        model = small_gpt(seq=64, vocab=VOCABULARY, **{**GPT, "bias_activation_fusion": how == "fused"}).eval()
        layer = model.decoder.layers[0]
        if how == "attention":
            layer.self_attention.core_attention.__class__ = Own
        elif how == "norm":
            layer.input_layernorm.__class__ = Norm
        ids = drawn(9, 0).unsqueeze(0)
        hidden_from = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1)
        with pytest.raises(ascend_parallel.DegreeError) as error:
            model(ids, torch.arange(9).unsqueeze(0), hidden_from)
        return str(error.value)


@PACKED_IS_KNOWN
@promise("invariant-trainer-refused")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("attention", "SelfAttention: its core_attention is test_invariant_megatron.refused.<locals>.Own"),
        ("norm", "TransformerLayer: its input_layernorm is test_invariant_megatron.refused.<locals>.Norm"),
        ("fused", "config bias_activation_fusion=True: a fused kernel"),
    ],
)
def test_another_kernel_between_the_layers_is_refused(ranks, how, text):
    (found,) = ranks(1).run(refused, how)
    assert text in found
