"""Queries, keys and values that are projected under the exchange of heads, with the bits of those before it."""

import contextlib
import importlib.metadata
import logging

import pytest
import torch
from marks import promise

import ascend_parallel
from ascend_parallel.ops import COUNTS, unfinished_heads
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 18),
    reason="older versions were not tried",
)

VOCABULARY, LENGTH, LAYERS, HIDDEN = 96, 64, 2, 128
# The model, options of its configuration, and the features of what a layer's projections of q, k and v make.
MODELS = {
    "Llama": ("LlamaForCausalLM", {"num_key_value_heads": 4}, (128, 64, 64)),
    "Qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 4, "head_dim": 16}, (128, 64, 64)),
    "Gemma": ("GemmaForCausalLM", {"num_key_value_heads": 8, "head_dim": 16}, (128, 128, 128)),
    "Phi3, packed": ("Phi3ForCausalLM", {"num_key_value_heads": 4, "pad_token_id": 0}, (256,)),
    "GPTNeoX, packed, a bias": ("GPTNeoXForCausalLM", {}, (384,)),
    "OPT, biases": ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}, (128, 128, 128)),
    "Bert": ("BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, (128, 128, 128)),
}


def built(name, dtype=torch.float32):
    import transformers

    kind, options, _ = MODELS[name]
    config = getattr(transformers, kind).config_class(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=256,
        use_cache=False,
        attn_implementation="sdpa",
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.02)  # biases and norms that are told apart
    return model.to(dtype).train()


def ids():
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def read_at_once(model, of):
    """Return handles of hooks that see what the projections of queries, keys and values make."""
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer.out_features in of and "mlp" not in name
    ]
    return [layer.register_forward_hook(lambda *_: None) for layer in layers]


def step(model, batch, groups, around=contextlib.nullcontext):
    """Return the loss and gradients of a step, its collectives, and the widths of products in groups of columns."""
    widths, own = [], unfinished_heads.multiply_columns

    def multiply_columns(x, w, bias, columns):
        widths.append(sum(stop - first for first, stop in columns))
        return own(x, w, bias, columns)

    model.zero_grad()
    COUNTS.clear()
    ascend_parallel.configure(num_chunks=groups)
    unfinished_heads.multiply_columns = multiply_columns
    try:
        with around():
            loss = model(**batch).loss
        forward = list(widths)
        loss.backward()
    finally:
        unfinished_heads.multiply_columns = own
        ascend_parallel.configure(num_chunks=1)
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **found}, COUNTS.as_dict(), forward


def compared(model, context, groups=(2, 4), around=contextlib.nullcontext, of=(64, 128, 256, 384)):
    """Return what differs from one group with projections before it, whether collectives do, and the widths."""
    batch = context.cut(ids(), ids())
    for each in groups:
        step(model, batch, each, around)  # asks the machine for bits
    handles = read_at_once(model, of)
    plain, _, widths = step(model, batch, 1, around)
    assert widths == [], "hooks see whole projections"
    counts = [step(model, batch, each, around)[1] for each in groups]
    for handle in handles:
        handle.remove()
    different, of_groups = [], {}
    for each, count in zip(groups, counts, strict=True):
        found, ran, of_groups[each] = step(model, batch, each, around)
        assert found.keys() == plain.keys()
        different += [(each, name) for name, x in found.items() if not torch.equal(x, plain[name])]
        different += [(each, "collectives")] if ran != count else []
    one, *_ = step(model, batch, 1, around)
    different += [(1, name) for name, x in one.items() if not torch.equal(x, plain[name])]
    return different, of_groups


def of_model(group, name, dtype=torch.float32, habit=""):
    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    model = built(name, dtype)
    if habit == "checkpoints":
        model.gradient_checkpointing_enable()
    if habit == "frozen":
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_(False)
            layer.self_attn.v_proj.requires_grad_(False)
    context = context_parallel(model, group)
    around = contextlib.nullcontext
    if habit == "autocast":
        around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    if habit == "save_on_cpu":
        around = torch.autograd.graph.save_on_cpu
    key_heads = model.config.get_text_config().to_dict().get("num_key_value_heads") or 8
    groups = tuple(each for each in (2, 4) if each <= key_heads // group.size())
    return compared(model, context, groups, around)


@promise("context-projection")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_heads_that_are_projected_under_the_exchange_have_the_bits_of_those_before_it(ranks, name):
    for different, widths in ranks(2).run(of_model, name):
        assert different == []
        made = MODELS[name][2]
        for groups, columns in widths.items():
            assert sum(columns) == LAYERS * sum(made), "each column is multiplied once"
            products = 1 if "GPTNeoX" in name else 3  # of a head its query, key and value lie side by side
            assert len(columns) == LAYERS * groups * products


@promise("context-projection")
@pytest.mark.sample(2)
@pytest.mark.parametrize("habit", ["checkpoints", "frozen", "autocast", "save_on_cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_does_so_with_what_programs_have_around_them(ranks, habit, dtype):
    for different, widths in ranks(2).run(of_model, "Qwen3", dtype, habit):
        assert different == []
        assert all(sum(columns) == LAYERS * 256 for columns in widths.values())


@promise("context-projection")
@pytest.mark.parametrize("count", [3, 4])
def test_more_ranks(ranks, count):
    for different, widths in ranks(count).run(of_more_ranks):
        assert different == []
        assert widths and all(sum(columns) == LAYERS * 3 * 192 for columns in widths.values())


def of_more_ranks(group):
    import transformers

    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 16, "hidden_size": 96}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=64, num_hidden_layers=LAYERS, use_cache=False, **heads
    )
    model = transformers.LlamaForCausalLM(config).train()
    return compared(model, context_parallel(model, group), (2, 3), of=(192,))


def of_one_rank(group):
    """Return what differs, and what was logged, where rank 1 alone has hooks, an adapter or a class of its own."""
    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    model, said = built("Llama"), []
    context = context_parallel(model, group)
    batch = context.cut(ids(), ids())
    plain, collectives, _ = step(model, batch, 2)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ascend_parallel").addHandler(handler)
    attention, different, widths = [layer.self_attn for layer in model.model.layers], [], {}

    def again(name):
        found, ran, widths[name] = step(model, batch, 2)
        different.extend((name, each) for each, x in found.items() if not torch.equal(x, plain[each]))
        different.extend([(name, "collectives")] if ran != collectives else [])

    seen = []
    if group.rank() == 1:
        handles = [each.q_proj.register_forward_hook(lambda m, x, y: seen.append(float(y.sum()))) for each in attention]
        handles += [each.o_proj.register_forward_pre_hook(lambda m, x: None) for each in attention]
    again("hooks")
    again("hooks again")
    if group.rank() == 1:
        for handle in handles:
            handle.remove()
        for each in attention:
            each.k_proj.__class__ = type("Own", (torch.nn.Linear,), {})
    again("a class")
    if group.rank() == 1:
        for each in attention:
            each.k_proj.__class__ = torch.nn.Linear
            own = each.v_proj.forward
            each.v_proj.forward = lambda x, own=own: own(x)
    again("a forward")
    logging.getLogger("ascend_parallel").removeHandler(handler)
    return different, widths, [text for text in said if "projected before" in text], len(seen)


@promise("one-rank-habits")
def test_what_one_rank_has_on_a_projection_changes_no_collective(ranks):
    (first, *_), (second, widths, said, seen) = ranks(2).run(of_one_rank)
    assert first == second == [] and seen == 2 * LAYERS
    assert {name: sum(columns) for name, columns in widths.items()} == {
        "hooks": LAYERS * 128,
        "hooks again": LAYERS * 128,
        "a class": LAYERS * 192,
        "a forward": LAYERS * 192,
    }
    begin = "context_parallel: LlamaAttention: "
    assert [text.removeprefix(begin).partition(":")[0] for text in said] == [
        "q_proj has hooks",
        "Linear, which reads attention's output, has hooks on what it reads",
        "k_proj is a Own with a forward of its own",
        "v_proj is a Linear with a forward of its own",
    ]


def adapted(group):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(built("Llama"), lora)
    return compared(model, context_parallel(model, group), (2,), of=(64,))


@promise("context-projection")
def test_adapters_are_projected_before_the_exchange(ranks):
    for different, widths in ranks(2).run(adapted):
        assert different == [] and sum(widths[2]) == LAYERS * 64  # k_proj's


def used_otherwise(group):
    """Return by name whether what a program does with the model's attention is right."""
    import copy
    import io

    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    plain, model, found = built("Llama").eval(), built("Llama").eval(), {}
    context = context_parallel(model, group)
    part = slice(LENGTH // 2 * group.rank(), LENGTH // 2 * (group.rank() + 1))
    ascend_parallel.configure(num_chunks=2)
    try:
        with torch.no_grad():
            expected = plain(input_ids=ids()).logits[:, part]
            found["no_grad"] = torch.equal(model(**context.cut(ids())).logits, expected)
            with contextlib.nullcontext() if group.rank() else torch.enable_grad():
                found["gradients on one rank"] = torch.equal(model(**context.cut(ids())).logits, expected)
            found["a copy"] = torch.equal(copy.deepcopy(model)(**context.cut(ids())).logits, expected)
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            found["a file"] = torch.equal(torch.load(buffer, weights_only=False)(**context.cut(ids())).logits, expected)
        with torch.inference_mode():
            found["inference"] = torch.equal(model(**context.cut(ids())).logits, expected)
        if group.rank() == 0:
            prompt = {"input_ids": ids()[:, :9], "max_new_tokens": 3, "do_sample": False}
            found["generate"] = torch.equal(model.generate(**prompt), plain.generate(**prompt))
    finally:
        ascend_parallel.configure(num_chunks=1)
    return found


@promise("context-projection")
def test_evaluation_copies_and_generation(ranks):
    for found in ranks(2).run(used_otherwise):
        assert len(found) >= 5 and [name for name, right in found.items() if not right] == []


def recorded(group, folder):
    """Return what differs in a step that is recorded."""
    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    model = built("Llama")
    context = context_parallel(model, group)
    batch = context.cut(ids(), ids())
    plain, *_ = step(model, batch, 2)
    with ascend_parallel.timeline.record(folder):
        found, *_ = step(model, batch, 2)
    return [name for name, x in found.items() if not torch.equal(x, plain[name])]


def test_a_timeline_has_the_projections_under_the_exchange(ranks, tmp_path):
    from ascend_parallel.diagnostics.timeline.files import read_run

    assert ranks(2).run(recorded, tmp_path) == [[], []]
    for file in read_run(tmp_path)[0]:
        assert len(file.passes) == 2 * LAYERS
        for each in file.passes:
            computed = [span for span in each.spans if span.kind == "matmul"]
            sent = [span for span in each.spans if span.kind == "comm"]
            dispatched = min(span.queued for span in sent)
            last_wait = max(span.begin for span in each.spans if span.kind == "wait")
            names = [span.name for span in computed]
            if each.direction == "forward":
                # Of each group q, k and v; then the rows of the output as they come.
                assert names == ["projection"] * 6 + ["attention"] * 2 + ["aten::mm"] * 2
                assert computed[1].begin > dispatched, "all but the first are multiplied once heads are on their way"
                assert computed[-2].begin < last_wait < computed[-1].begin, "rows as they come back"
            else:
                assert names == ["projection"] * 2 + ["attention"] * 2 + ["weight gradient"]
                assert computed[1].begin > dispatched
                assert max(span.queued for span in sent) < computed[-1].begin < last_wait, "under the last combine"
