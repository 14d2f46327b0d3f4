"""COC_DETERMINISTIC=invariant with transformers: logprobs and gradients of any batch, at every degree."""

import contextlib
from pathlib import Path

import pytest
import torch
from every_degree import at_degrees, digest

import ascend_parallel

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import full_tensor, load, write
from marks import promise

from ascend_parallel.ops.attention import key_spans, sequences_of
from ascend_parallel.patches.transformers import on_one_rank
from ascend_parallel.patches.transformers.attention import NAME, attention

# Four heads of keys: fewer than the blocks of the tree.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
LENGTHS = (3, 40, 17)


def drawn(count, seed):
    return torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(seed))


def batches(model, sequences):
    """The logprobs of sequences: alone, padded left, padded right, packed; each without padding."""
    width = max(map(len, sequences)) + 5
    found = {"alone": [ascend_parallel.logprobs(model, ids.unsqueeze(0))[0] for ids in sequences]}
    for side in ("left", "right"):
        starts = [width - len(ids) if side == "left" else 0 for ids in sequences]
        ids, mask = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width)
        for row, (start, own) in enumerate(zip(starts, sequences, strict=True)):
            ids[row, start : start + len(own)], mask[row, start : start + len(own)] = own, 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0).long()
        made = ascend_parallel.logprobs(model, ids, attention_mask=mask, position_ids=positions)
        found[side] = [
            row[start : start + len(own) - 1] for row, start, own in zip(made, starts, sequences, strict=True)
        ]
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences]).unsqueeze(0)
    logits = full_tensor(
        model(input_ids=torch.cat(sequences).unsqueeze(0), position_ids=positions, use_cache=False).logits
    )
    parts = logits[0].split([len(ids) for ids in sequences])
    found["packed"] = [ascend_parallel.logprobs(part[:-1], ids[1:]) for part, ids in zip(parts, sequences, strict=True)]
    return found


def of_model(group, path, dtype, chunks):
    model = load(group, path, dtype, tensor_parallel=group.size() > 1)
    ascend_parallel.configure(deterministic="invariant", num_chunks=chunks)
    try:
        model = model if group.size() > 1 else on_one_rank(model)
        model.set_attn_implementation(NAME)
        sequences = [drawn(count, count) for count in LENGTHS]
        found = batches(model, sequences)
        assert all(all(map(torch.equal, made, found["alone"])) for made in found.values())
        sum(each.sum() for each in found["left"]).backward()
        gradients = {name: digest(full_tensor(p.grad)) for name, p in model.named_parameters()}
        return [digest(each) for each in found["alone"]], gradients
    finally:
        ascend_parallel.configure(num_chunks=1)


@promise("invariant-server")
@pytest.mark.sample("Qwen3-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_any_batch_has_the_logprobs_and_gradients_of_every_degree(ranks, tmp_path, name, dtype):
    extra = {"Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": None}}.get(name, {})
    path = write(tmp_path, name, **SIZES, **extra)
    one, two, four = at_degrees(ranks, of_model, path, dtype, 1)
    assert one == two == four
    assert at_degrees(ranks, of_model, path, dtype, 4, degrees=(2,)) == [one]


def of_replicas(group, path, tp):
    """The logprobs and the gradients of a model that FSDP2 shards over replicas, all of which have the same batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = load(group, path, tensor_parallel=False)
    ascend_parallel.configure(deterministic="invariant", num_chunks=4)
    try:
        mesh = init_device_mesh("cpu", (group.size() // tp, tp), mesh_dim_names=("dp", "tp"))
        expand = getattr(model, "_expand_parallel_plan", dict)  # transformers 5.23 has it
        model = apply_tensor_parallelism(model, mesh["tp"], expand(dict(model.tp_plan)))
        if group.size() > tp:
            for layer in (*model.model.layers, model):
                fully_shard(layer, mesh=mesh["dp"])
        model.set_attn_implementation(NAME)
        made = [ascend_parallel.logprobs(model, drawn(count, count).unsqueeze(0))[0] for count in LENGTHS]
        sum(each.sum() for each in made).backward()
        gradients = {name: digest(full_tensor(p.grad)) for name, p in model.named_parameters()}
        return [digest(each) for each in made], gradients, ascend_parallel.weight_digests(model)
    finally:
        ascend_parallel.configure(num_chunks=1)


@promise("invariant-server")
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fsdp_beside_it_changes_no_bit(ranks, tmp_path, tp):
    path = write(tmp_path, "Qwen3", **SIZES, head_dim=16)
    ((logprobs, gradients, weights),) = ranks(1).run(of_replicas, path, 1)
    for own, of_loss, digests in ranks(2 * tp).run(of_replicas, path, tp):
        assert own == logprobs
        assert [name for name in gradients if of_loss[name] != gradients[name]] == []
        assert digests == weights


def digests(group, path, changed):
    model = load(group, path, tensor_parallel=group.size() > 1)
    if changed:
        own = next(iter(model.parameters()))
        local = own.to_local() if hasattr(own, "to_local") else own
        with torch.no_grad():
            local[:2] = local[:2].flip(0).clone()
    return ascend_parallel.weight_digests(model)


@promise("invariant-weights")
def test_digests_of_weights_do_not_depend_on_the_degree(ranks, tmp_path):
    """Two rows that change places are found, in their weight alone."""
    path = write(tmp_path, "Qwen2", **SIZES, tie_word_embeddings=False)
    one, two, four = at_degrees(ranks, digests, path, False)
    assert one == two == four
    assert len(set(one.values())) == len(one) > 20
    (other,) = at_degrees(ranks, digests, path, True, degrees=(2,))
    assert [name for name in one if one[name] != other[name]] == ["model.embed_tokens.weight"]


def refused(group, path, extra):
    model = load(group, path, torch.float32, tensor_parallel=False).train()
    ascend_parallel.configure(deterministic="invariant")
    try:
        model.set_attn_implementation(NAME)
        with pytest.raises(ascend_parallel.DegreeError) as error:
            model(input_ids=drawn(9, 0).unsqueeze(0), **extra)
        return str(error.value)
    finally:
        ascend_parallel.configure(num_chunks=1)


def test_what_the_attention_does_not_compute_is_refused(ranks, tmp_path):
    path = write(tmp_path, "Llama", **SIZES, attention_dropout=0.1)
    (text,) = ranks(1).run(refused, path, {})
    assert text == 'COC_DETERMINISTIC=invariant: attn_implementation="invariant": LlamaAttention asks for dropout=0.1'
    x, module = torch.randn(1, 2, 4, 8), torch.nn.Module()
    with pytest.raises(ascend_parallel.DegreeError, match="Module asks for is_causal=False"):
        attention(module, x, x, x, None, is_causal=False)
    holes = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    (text,) = ranks(1).run(refused, write(tmp_path, "Llama", **SIZES), {"attention_mask": holes})
    assert "was not made by it" in text


def changed(model, how):
    """A model of one rank whose logprobs would not be a server's, and what gives it an argument."""
    around = contextlib.nullcontext()
    if how == "none":
        return model, around
    model = on_one_rank(model)
    if how != "sdpa":
        model.set_attn_implementation(NAME)
    layer = model.model.layers[0]
    if how == "norm":
        norm = layer.input_layernorm
        norm.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    elif how == "class":
        layer.mlp.act_fn = torch.nn.GELU()
    elif how == "linear":
        model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    elif how == "autocast":
        around = torch.autocast("cpu", torch.bfloat16)
    elif how == "compiled":
        model = torch.compile(model, backend="eager")
    return model, around


def refusals_of(group, path, hows):
    """The errors of `logprobs`, and of calls, for models that were changed."""
    found = {}
    try:
        for how in hows:
            model = load(group, path, torch.float32, tensor_parallel=False)
            ascend_parallel.configure(deterministic="invariant")
            model, around = changed(model, how)
            ids = drawn(9, 0).unsqueeze(0)
            with around, pytest.raises(ascend_parallel.DegreeError) as error:
                ascend_parallel.logprobs(model, ids)
            found[how] = str(error.value).removeprefix("COC_DETERMINISTIC=invariant: ")
            if how != "none":
                with around, pytest.raises(ascend_parallel.DegreeError):
                    model(ids)
        return found
    finally:
        ascend_parallel.configure(num_chunks=1)


REFUSALS = {
    "none": "logprobs: LlamaForCausalLM has not the arithmetic of a server",
    "sdpa": 'transformers: LlamaForCausalLM attends by attn_implementation="sdpa": give',
    "norm": f"transformers: model.layers.0.input_layernorm (LlamaRMSNorm) runs {Path(__file__).stem}.changed.<locals>.",
    "class": "transformers: model.layers.0.mlp.act_fn (GELU): torch.nn.modules.activation.GELU was not compared",
    "linear": "transformers: lm_head (Linear): torch.nn.modules.linear.Linear was not compared",
    "autocast": "transformers: LlamaForCausalLM runs under autocast",
    "compiled": "transformers: LlamaForCausalLM is compiled",
}


@promise("invariant-trainer-refused")
def test_a_model_whose_logprobs_would_be_others_is_refused(ranks, tmp_path):
    """Whatever is asked: by `logprobs`, and by a call, whose logits a program may take the logprobs of."""
    (found,) = ranks(1).run(refusals_of, write(tmp_path, "Llama", **SIZES), list(REFUSALS))
    for how, text in REFUSALS.items():
        assert found[how].startswith(text), (how, found[how])


def rewarded(group):
    """A model that is no language model may have a head of its own; its attention has to be this package's."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**SIZES, vocab_size=480, num_hidden_layers=1, num_labels=1, pad_token_id=0)
    ascend_parallel.configure(deterministic="invariant")
    try:
        model = on_one_rank(LlamaForSequenceClassification(config).eval())
        with pytest.raises(ascend_parallel.DegreeError, match="attends by"):
            model(drawn(9, 0).unsqueeze(0))
        model.set_attn_implementation(NAME)
        return list(model(drawn(9, 0).unsqueeze(0)).logits.shape)
    finally:
        ascend_parallel.configure(num_chunks=1)


def test_a_reward_model_may_have_a_head_of_its_own(ranks):
    assert ranks(1).run(rewarded) == [[1, 1]]


def test_sequences_of_masks():
    spans = torch.tensor([[[0, -1], [0, -1], [2, 2], [2, 3]], [[0, 0], [0, 1], [2, 2], [2, 3]]])
    assert sequences_of(spans, 2, 4, 4) == ((2, 2, 2, 2), (4, 2, 4, 2), (6, 2, 6, 2))
    holes = torch.tensor([[[True, False, True]]])
    with pytest.raises(ascend_parallel.DegreeError, match="leaves out keys"):
        key_spans(holes)
    assert sequences_of(None, 2, 1, 5) == ((0, 1, 0, 5), (1, 1, 5, 5))
