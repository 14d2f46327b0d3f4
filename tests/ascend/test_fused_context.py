"""Attention's way back and its projection as one operator, on emulated NPUs: numbers, operators, limits, agreement."""

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
from programs import counted, device, error, gpt_model, megatron

A3, A5 = {"EMULATED_ASCEND_SOC": "Ascend910_9391"}, {"EMULATED_ASCEND_SOC": "Ascend950PR_9599"}
BACK, AWAY = "aclnnAlltoAllMatmul", "aclnnMatmulAlltoAll"
NAMES = BACK, AWAY, f"{BACK}V2", f"{AWAY}V2"


def operators(numbers):
    return {name: number for name, number in numbers.items() if name in NAMES}


def attend(heads, q, k, v):
    """Return causal attention of [S, B, n, D]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -1e4)
    return (torch.softmax(scores, -1) @ v).permute(2, 0, 1, 3)


SHAPES = {"tokens": 16, "batch": 2, "heads": 8, "keys": 4, "width": 32, "features": 96}


def attention_layer(dtype, biased, settings, around="", **changed):
    """Run attention and its projection forward and backward; return errors against fp64 on one rank, and what ran.

    around: "adapter": something else reads the output too; "hook": rank 0 alone keeps its layer to itself;
    "recompute"; "alone": no gradient.
    """
    from torch.utils.checkpoint import checkpoint

    from ascend_parallel import Settings
    from ascend_parallel.ops.counts import COUNTS
    from ascend_parallel.overlap.context import run_attention
    from ascend_parallel.overlap.projected import Projection

    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), {**SHAPES, **changed}
    s, b, n, keys, d, f = (shape[name] for name in ("tokens", "batch", "heads", "keys", "width", "features"))
    drawn = torch.Generator().manual_seed(9)

    def leaf(*sizes):
        return (torch.randn(sizes, generator=drawn, dtype=torch.float64) * 0.5).to(dtype).double()

    q, k, v = leaf(s * ranks, b, n, d), leaf(s * ranks, b, keys, d), leaf(s * ranks, b, keys, d)
    weight, bias, d_y, d_o = leaf(f, n * d), leaf(f), leaf(b, s * ranks, f), leaf(b, s * ranks, n * d)
    whole = [x.requires_grad_() for x in (q, k, v, weight, bias)]
    o = attend(None, q, k, v).transpose(0, 1).flatten(2)
    y = torch.nn.functional.linear(o, weight, bias if biased else None)
    torch.autograd.backward([y, *([o] if around == "adapter" else [])], [d_y, *([d_o] if around == "adapter" else [])])
    own = slice(rank * s, (rank + 1) * s)
    mine = [x.detach()[own].to(dtype).to(device()).requires_grad_() for x in (q, k, v)]
    w, add = (x.detach().to(dtype).to(device()).requires_grad_() for x in (weight, bias))
    given = [d_y[:, own].to(dtype).to(device())]
    held = None if around == "hook" and rank == 0 else Projection(weight=w, bias=add if biased else None)
    COUNTS.clear()

    def layer(*operands):
        how = {"group": dist.group.WORLD, "settings": Settings(**settings), "projection": held, "by_rows": True}
        found = run_attention(*operands, attend, **how).transpose(0, 1).flatten(2)
        return torch.nn.functional.linear(found, w, add if biased else None), found

    def step():
        if around == "alone":
            with torch.no_grad():
                return layer(*mine)[0]
        found, of_heads = checkpoint(layer, *mine, use_reentrant=False) if around == "recompute" else layer(*mine)
        outputs, gradients = [found], [*given]
        if around == "adapter":
            outputs, gradients = [found, of_heads], [*given, d_o[:, own].to(dtype).to(device())]
        torch.autograd.backward(outputs, gradients)
        return found

    found, numbers = counted(step)
    pairs = [(found, y[:, own])]
    if around != "alone":
        pairs += list(zip([x.grad for x in mine], [x.grad[own] for x in whole[:3]], strict=True))
        for ours, theirs in ((w, weight), *([(add, bias)] if biased else [])):
            total = ours.grad.float()
            dist.all_reduce(total)
            pairs.append((total, theirs.grad))
    return [error(a, b) for a, b in pairs], operators(numbers), COUNTS.as_dict()


FUSED = {"fused": True, "strict": True}


@pytest.mark.promise("context-fused")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chip", [{}, A3, A5], ids=["A2", "A3", "950"])
def test_forward_and_backward_are_those_of_one_rank(ranks, count, chip):
    for dtype, biased in ((torch.bfloat16, True), (torch.float16, False)):
        for errors, ran, counts in ranks(count, **chip).run(attention_layer, dtype, biased, FUSED):
            assert max(errors) < 3e-2, errors
            assert ran == {BACK: 1, AWAY: 1}
            assert counts["all_to_all_matmul"]["collectives"] == counts["matmul_all_to_all"]["collectives"] == 1
            assert counts["head_exchange"]["collectives"] == 6  # q, k and v, and their gradients


AROUND = {"adapter": {BACK: 1}, "hook": {}, "recompute": {BACK: 2, AWAY: 1}, "alone": {BACK: 1}}


@pytest.mark.promise("context-fused")
@pytest.mark.parametrize("around", AROUND)
def test_what_a_program_has_around_the_layer(ranks, around):
    """A rank whose layer has a hook, and a gradient of the output itself: all ranks run the same collectives."""
    settings = {"fused": True} if around == "hook" else FUSED
    changed = {"tokens": 24} if around == "hook" else {}  # a shape that the ranks have not agreed on
    for errors, ran, _ in ranks().run(changed_layer, torch.bfloat16, True, settings, around, changed):
        assert max(errors) < 3e-2, errors
        assert ran == AROUND[around]


LEFT = {  # settings, what is changed, groups
    "two groups": (torch.bfloat16, {"fused": True, "strict": True, "num_chunks": 2}, 2),
    "fp32": (torch.float32, {"fused": True}, 2),
    "row tiles": (torch.bfloat16, {"fused": True, "deterministic": True}, 2),
    "not asked": (torch.bfloat16, {}, 1),
    "another engine": (torch.bfloat16, {"fused": True, "comm_mode": "ai_cpu"}, 2),
    "mode": (torch.bfloat16, {"fused": True, "mode": 1}, 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_fused_runs_in_groups(ranks, case):
    dtype, settings, groups = LEFT[case]
    for errors, ran, counts in ranks().run(attention_layer, dtype, True, settings):
        assert max(errors) < 3e-2, errors
        assert ran == {} and set(counts) == {"head_exchange"}
        assert counts["head_exchange"]["chunks"] == 2 * groups, counts


def test_one_head_of_keys_a_rank_is_fused_whatever_number_of_groups_is_asked_for(ranks):
    settings = {"fused": True, "num_chunks": 4, "strict": True}
    given = torch.bfloat16, False, settings, "", {"keys": 2}
    for errors, ran, _ in ranks().run(changed_layer, *given):
        assert max(errors) < 3e-2 and ran == {BACK: 1, AWAY: 1}


def changed_layer(*given):
    *given, changed = given
    return attention_layer(*given, **changed)


def test_ccu_is_named_to_the_second_version(ranks):
    settings = {**FUSED, "comm_mode": "ccu"}
    for errors, ran, _ in ranks(**A5).run(attention_layer, torch.bfloat16, True, settings):
        assert max(errors) < 3e-2 and ran == {f"{BACK}V2": 1, f"{AWAY}V2": 1}


def test_a_small_buffer_of_a2_is_a_reason_for_groups(ranks):
    settings = {"fused": True, "hccl_buffsize": 100}
    for errors, ran, counts in ranks(HCCL_BUFFSIZE="100").run(attention_layer, torch.bfloat16, True, settings):
        assert max(errors) < 3e-2 and ran == {} and counts["head_exchange"]["chunks"] == 4


def other_group():
    """Run a fused operator on a second group, then attention; return what ran."""
    from ascend_parallel import Settings, row_linear

    group = dist.new_group()
    x, w = (torch.zeros(256, 256, dtype=torch.bfloat16, device=device()) for _ in range(2))
    row_linear(x, w, group=group, settings=Settings(fused=True, strict=True))
    return attention_layer(torch.bfloat16, False, {"fused": True})[:2]


def test_a2_has_one_group_for_all_fused_operators():
    from emulated_ascend.ranks import Ranks

    for chip, expected in (({}, {}),):
        pool = Ranks(2, chip)
        try:
            for errors, ran in pool.run(other_group):
                assert max(errors) < 3e-2 and ran == expected
        finally:
            pool.close()


def llamas(attention):
    """Return a Llama on the host in float64, the same on the device in bfloat16, and tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(5)
    whole = LlamaForCausalLM(config).train().to(torch.bfloat16)
    shared = copy.deepcopy(whole).to(device())
    return whole.double(), shared, torch.randint(96, (1, 64), generator=torch.Generator().manual_seed(11))


def errors_of(shared, whole):
    """Return the errors of gradients, summed over the ranks that share a sequence."""
    errors = []
    for ours, theirs in zip(shared.parameters(), whole.parameters(), strict=True):
        total = ours.grad.float()
        dist.all_reduce(total)
        errors.append(error(total, theirs.grad))
    return errors


def llama(settings, steps=2):
    """Train a Llama whose ranks share a sequence; return errors against one rank, and what ran."""
    import ascend_parallel
    from ascend_parallel.patches.transformers import context_parallel

    whole, shared, tokens = llamas("eager")
    truth = whole(input_ids=tokens, labels=tokens).loss
    truth.backward()
    ascend_parallel.configure(**settings)
    try:
        context = context_parallel(shared, dist.group.WORLD)
        part = context.cut(tokens.to(device()), tokens.to(device()))

        def step():
            shared.zero_grad()
            loss = shared(**part).loss
            loss.backward()
            return loss.detach().float()

        for _ in range(steps):
            loss, numbers = counted(step)
        covered = str(ascend_parallel.coverage(shared))
    finally:
        ascend_parallel.configure(num_chunks=1)
    dist.all_reduce(loss)
    return [error(loss, truth), *errors_of(shared, whole)], operators(numbers), covered


@pytest.mark.promise("context-fused")
@pytest.mark.parametrize("count", [2, 4])
def test_transformers_llama(ranks, count):
    for errors, ran, _ in ranks(count).run(llama, FUSED):
        assert max(errors) < 5e-2, errors
        assert ran == {BACK: 2, AWAY: 2}  # of two layers
    for errors, ran, _ in ranks(count).run(llama, {"num_chunks": 1}):
        assert max(errors) < 5e-2 and ran == {}


def test_transformers_with_late_kernels_and_checks(ranks):
    late = {"EMULATED_ASCEND_SEED": "5", "EMULATED_ASCEND_DELAY_US": "2000"}
    for errors, ran, _ in ranks(**late).run(llama, FUSED):
        assert max(errors) < 5e-2 and ran == {BACK: 2, AWAY: 2}
    for errors, ran, _ in ranks().run(llama, {**FUSED, "verify_every": 1}):
        assert max(errors) < 5e-2 and ran[BACK] >= 2


def ulysses(settings, hooked, steps=3):
    """Train a Llama under DeepSpeed's Ulysses; return errors against one rank, and what each step ran.

    hooked: a program's hooks put another tensor before each output projection, so nobody asks for its product.
    """
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    import ascend_parallel

    deepspeed.init_distributed(dist_backend="hccl", verbose=False)
    whole, shared, tokens = llamas("sdpa")
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    places, own = torch.arange(64)[None], slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)

    def train(model, part, to):
        model.zero_grad()
        logits = model(input_ids=tokens[:, part].to(to), position_ids=places[:, part].to(to)).logits
        flat = logits.flatten(0, 1).to(torch.float64 if to == "cpu" else torch.float32)
        (torch.nn.functional.cross_entropy(flat, labels[:, part].to(to).flatten(), reduction="sum") / 63).backward()

    train(whole, slice(None), "cpu")
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=shared, core_attn_implementation="sdpa", sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=1,
    )  # fmt: skip
    for layer in shared.model.layers if hooked else ():
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * 1,))
    ascend_parallel.configure(**settings)
    try:
        ran = [operators(counted(lambda: train(shared, own, device()))[1]) for _ in range(steps)]
    finally:
        ascend_parallel.configure(num_chunks=1)
    return errors_of(shared, whole), ran


@pytest.mark.promise("context-fused")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="make compat-deepspeed-ascend")
@pytest.mark.parametrize("hooked", [False, True])
def test_deepspeeds_ulysses(hooked, tmp_path):
    """Of two layers in each step; also where nobody asks for the product: what communicates, all ranks run."""
    from emulated_ascend.ranks import Ranks

    pool = Ranks(2, {"ASCEND_HOME_PATH": str(tmp_path)}, seconds=180)  # DeepSpeed keeps its place in transformers
    try:
        for errors, ran in pool.run(ulysses, FUSED, hooked):
            assert max(errors) < 5e-2, errors
            assert ran == [{BACK: 2} if hooked else {BACK: 2, AWAY: 2}] * 3
    finally:
        pool.close()


def megatron_gpt(settings, dtype, behind=False, steps=2):
    """Train Megatron-core's GPT whose ranks share a sequence; return its loss and gradients, and what ran.

    behind: hooks of every rank keep the products of the output projections behind the exchange.
    """
    import ascend_parallel

    rank, ranks, seq = dist.get_rank(), dist.get_world_size(), 64
    ascend_parallel.configure(num_chunks=2)  # as a model is built that shares sequences
    try:
        shape = {"hidden_size": 128, "num_attention_heads": 8, "num_query_groups": 4}
        with megatron(False, False, context=True, **shape, params_dtype=dtype, bf16=dtype is torch.bfloat16) as config:
            model, mask = gpt_model(config, None, seq)
            with torch.no_grad():
                for index, weight in enumerate(model.parameters()):
                    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
                    weight.copy_(drawn.bfloat16() * 0.05)
            if behind:
                for layer in model.decoder.layers:
                    layer.self_attention.linear_proj.register_forward_hook(lambda *_: None)
            tokens = torch.randint(128, (2, seq), generator=torch.Generator().manual_seed(2)).to(device())
            places = torch.arange(seq).chunk(2 * ranks)
            own = torch.cat([places[rank], places[2 * ranks - 1 - rank]]).to(device())
            batch = tokens[:, own], own.expand(2, -1), mask[:, :, own]
            ascend_parallel.configure(**{"num_chunks": 1, "fused": False, "mode": 2, "strict": False, **settings})

            def step():
                model.zero_grad()
                loss = model(*batch, labels=tokens.roll(-1, 1)[:, own]).float().mean()
                loss.backward()
                return loss.detach()

            for _ in range(steps):
                loss, numbers = counted(step)
            found = [loss.cpu(), *(weight.grad.cpu().double() for weight in model.parameters())]
    finally:
        ascend_parallel.configure(num_chunks=1)
    return found, operators(numbers)


@pytest.mark.promise("context-fused")
@pytest.mark.parametrize("count", [2, 4])
def test_megatrons_gpt(ranks, count):
    plain = ranks(count).run(megatron_gpt, {}, torch.float32, True)
    fused = ranks(count, **A3).run(megatron_gpt, FUSED, torch.bfloat16)  # A2 has one group for all fused operators
    assert [ran for _, ran in plain] == [{}] * count
    assert [ran for _, ran in fused] == [{BACK: 2, AWAY: 2}] * count  # of two layers
    for (expected, _), (found, _) in zip(plain, fused, strict=True):
        assert max(map(error, found, expected)) < 5e-2
