"""Models of transformers whose ranks share a sequence: the bits of one rank that has the whole of it."""

import importlib.metadata
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from marks import promise
from torch.nn.functional import cross_entropy

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 18),
    reason="older versions were not tried",
)

VOCABULARY = 96


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it trains.

    heads: of queries, of keys.
    documents: lengths of packed documents.
    padded: how many tokens of the first sequence are padding.
    exchange: what is asked for.
    """

    model: str = "Llama"
    ranks: int = 2
    heads: tuple[int, int] = (8, 4)
    length: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    groups: tuple[int | str, ...] = (1, 2)
    documents: tuple[int, ...] = ()
    padded: int = 0
    wrapped: str = ""
    exchange: str | None = None


def built(case, dtype=None):
    import transformers

    kind = getattr(transformers, f"{case.model}Config")
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=64 - 64 % case.heads[0],
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=case.heads[0],
        num_key_value_heads=case.heads[1],
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=None,
        use_cache=False,
        attn_implementation=case.attention,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{case.model}ForCausalLM")(config).to(dtype or case.dtype)
    if case.wrapped == "checkpoints":
        model.gradient_checkpointing_enable()
    return model.train()


def batch_of(case):
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(VOCABULARY, (case.batch, case.length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.documents:
        places = torch.cat([torch.arange(length) for length in case.documents])
        batch["position_ids"] = places.expand(case.batch, -1)
    if case.padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -case.padded :] = 0
        batch["labels"][0, -case.padded :] = -100
    return batch


def step(model, arguments):
    """Return the loss, losses of tokens, logits, gradients of activations and gradients of weights."""
    activations = {}
    hook = model.model.layers[0].register_forward_hook(lambda *call: keep(activations, call[-1]))
    output = model(**arguments)
    hook.remove()
    output.loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    losses = cross_entropy(output.logits.float().flatten(0, 1), arguments["shift_labels"].flatten(), reduction="none")
    found = {"logits": output.logits.detach(), "activations": activations["x"].grad}
    return output.loss.detach(), found | {"losses": losses.view_as(arguments["shift_labels"]).detach()}, gradients


def keep(activations, x):
    activations["x"] = x[0] if isinstance(x, tuple) else x
    activations["x"].retain_grad()


def whole_arguments(batch):
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    count = (shifted != -100).sum()
    return {**batch, "shift_labels": shifted, "num_items_in_batch": count}


def own_tokens(case, context):
    """Return the operator that runs, and the numbers of this rank's tokens: two pieces where keys are gathered."""
    rank, ranks = context.group.rank(), context.group.size()
    if context.exchange == "gather":
        pieces = torch.arange(case.length).chunk(2 * ranks)
        return "key_gather", torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
    return "head_exchange", torch.arange(case.length).chunk(ranks)[rank]


def trained(group, case):
    """Return what differs from one rank's bits, the worst error against float64, and the groups that ran."""
    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    arguments = whole_arguments(batch_of(case))
    _, plain, rounded = step(built(case), arguments)
    true_loss, _, truth = step(built(case, torch.float64), arguments)
    model = built(case)
    context = context_parallel(model, group, exchange=case.exchange)
    assert set(context.projecting) == {layer.self_attn for layer in model.model.layers}
    operator, part = own_tokens(case, context)
    different, worst, ran = [], [], []
    for groups in case.groups:
        verify = 1 if case.wrapped == "verify" else 0
        number = {"auto": True} if groups == "auto" else {"num_chunks": groups}
        ascend_parallel.configure(**number, verify_every=verify, **({"mode": 2} if groups == 1 else {}))
        before = COUNTS.as_dict().get(operator, {"calls": 0, "chunks": 0})
        try:
            loss, found, gradients = step(model, context.cut(**batch_of(case)))
            if verify:
                assert "checks of 2 layers, 0 over" in str(ascend_parallel.verification())
        finally:
            ascend_parallel.configure(num_chunks=1, verify_every=0)
        after = COUNTS.as_dict()[operator]
        ran.append((after["chunks"] - before["chunks"]) / (after["calls"] - before["calls"]))
        different += [(groups, name) for name, x in found.items() if not torch.equal(x, plain[name][:, part])]
        dist.all_reduce(loss, group=group)
        worst.append(float(abs(loss - true_loss) / true_loss))
        for name, x in gradients.items():
            total = x.double()
            dist.all_reduce(total, group=group)
            scale = truth[name].abs().max()
            own, by_one = ((each - truth[name]).abs().max() / scale for each in (total, rounded[name].double()))
            worst.append(float(own - 3 * by_one))
    return different, max(worst), ran


CASES = [
    Case(groups=(1, 2, 4), heads=(16, 8)),
    Case(dtype=torch.bfloat16, batch=2),
    Case(ranks=4, heads=(8, 8), dtype=torch.bfloat16),
    Case(ranks=4, heads=(16, 8), length=192),
    Case(attention="eager", batch=2),
    Case(documents=(50, 30, 48)),
    Case(documents=(60, 68), attention="eager"),
    Case(batch=2, padded=40),
    Case(wrapped="checkpoints"),
    Case(wrapped="verify"),
    Case(model="Qwen3"),
    Case(model="Mistral", groups=("auto",)),
]


@promise("context-bits")
@pytest.mark.sample(7)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_shared_sequence_has_the_bits_of_one_rank(ranks, case):
    for different, worst, ran in ranks(case.ranks).run(trained, case):
        assert different == []
        assert worst < {torch.float32: 2e-6, torch.bfloat16: 1e-2}[case.dtype]
        assert case.groups == ("auto",) or ran == list(case.groups)


GATHERS = [
    Case(heads=(8, 2), groups=(1, 2), exchange="gather", length=640),
    Case(ranks=4, heads=(8, 2), groups=(2,), batch=2),  # chosen: a gather sends two thirds
    Case(heads=(7, 7), dtype=torch.bfloat16, groups=("auto",)),
    Case(heads=(8, 4), exchange="gather", documents=(50, 30, 48), groups=(4,)),
    Case(heads=(8, 4), exchange="gather", batch=2, padded=40, wrapped="checkpoints", groups=(2,)),
    Case(heads=(8, 4), exchange="gather", attention="eager", wrapped="verify", groups=(2,)),
]


@promise("context-gather")
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_gathered_keys_have_the_logits_of_one_rank(ranks, case):
    """Logits and losses of sdpa have its bits; gradients are within rounding of the float64 truth."""
    for different, worst, ran in ranks(case.ranks).run(trained, case):
        allowed = {"activations"} if case.attention == "sdpa" else {"activations", "logits", "losses"}
        assert {name for _, name in different} <= allowed
        assert worst < {torch.float32: 4e-6, torch.bfloat16: 1e-2}[case.dtype]
        assert case.groups == ("auto",) or ran == list(case.groups)


def evaluated(case, group):
    """Return a batch, the model on one card and shared by the group, and how it is cut."""
    from ascend_parallel.patches.transformers import context_parallel

    plain, model = built(case).eval(), built(case).eval()
    return batch_of(case), plain, model, context_parallel(model, group)


def gathered(group):
    """Return by name whether what users do with gathered keys is right, or its error."""
    from ascend_parallel.patches.transformers import context_parallel

    case, found = Case(length=125, heads=(8, 1)), {}
    batch, plain, model, context = evaluated(case, group)
    with torch.no_grad():
        expected = plain(input_ids=batch["input_ids"]).logits
        parts = context.cut(batch["input_ids"])
        _, own = own_tokens(Case(length=128), context)
        shared = own < 125
        logits = model(**parts).logits[:, shared]
        found["an odd length"] = torch.allclose(logits, expected[:, own[shared]], atol=1e-5)
        found["left padding"] = left_padded(context, plain, model)
        if group.rank() == 0:
            prompt = {"input_ids": batch["input_ids"][:, :9], "max_new_tokens": 3, "do_sample": False}
            found["generation"] = torch.equal(model.generate(**prompt), plain.generate(**prompt))
    contiguous = torch.arange(64)[None] + 64 * group.rank()
    found["contiguous"] = raised(lambda: model(input_ids=parts["input_ids"], position_ids=contiguous))
    flex = Case(heads=(8, 1), attention="flex_attention")
    found["heads where no mask of rows can be given"] = context_parallel(built(flex), group).exchange == "heads"
    found["flex"] = raised(lambda: context_parallel(built(flex), group, exchange="gather"))
    found["odd"] = raised(lambda: model(input_ids=parts["input_ids"][:, :63], position_ids=contiguous[:, :63]))
    found["ring"] = raised(lambda: context_parallel(model, group, exchange="ring"))
    return found


def left_padded(context, plain, model):
    ids = batch_of(Case(length=128))["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :70] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    expected = plain(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True).logits
    own = own_tokens(Case(length=128), context)[1]
    parts = context.cut(ids, attention_mask=mask, position_ids=places)
    logits = model(**parts, use_cache=True).logits
    return torch.allclose(logits[:, own >= 70], expected[:, own[own >= 70]], atol=1e-5)


def test_what_users_do_with_gathered_keys(ranks):
    for found in ranks(2).run(gathered):
        assert "keys are gathered, and the positions of the ranks are not those of two pieces" in found.pop(
            "contiguous"
        )
        assert "attn_implementation='flex_attention' takes no masks of a rank's rows" in found.pop("flex")
        assert "a rank has 63 tokens of a sequence whose keys are gathered" in found.pop("odd")
        assert "exchange='ring' is not allowed: give one of heads, gather, or None" in found.pop("ring")
        assert [name for name, right in found.items() if right is not True] == []


def used(group):
    """Return by name whether what users do beside training works as on one rank."""
    from ascend_parallel.patches.transformers import context_parallel

    case, found = Case(length=125, heads=(8, 8)), {}
    batch, plain, model, context = evaluated(case, group)
    with torch.no_grad():
        expected = plain(input_ids=batch["input_ids"]).logits
        parts = context.cut(batch["input_ids"])
        gathered = [torch.empty(1, 63, VOCABULARY) for _ in range(2)]
        dist.all_gather(gathered, model(**parts).logits, group=group)
        logits = torch.cat(gathered, 1)[:, :125]
        found["evaluation of an odd length"] = torch.allclose(logits, expected, atol=1e-5)
        found["padded"] = parts["input_ids"].shape == (1, 63) and parts["position_ids"][0, -1] == 63 * group.rank() + 62
        with context.whole():
            found["whole sequences"] = torch.equal(model(input_ids=batch["input_ids"]).logits, expected)
    if group.rank() == 0:  # on one rank alone
        prompt = {"input_ids": batch["input_ids"][:, :9], "max_new_tokens": 5, "do_sample": False}
        found["generation"] = torch.equal(model.generate(**prompt), plain.generate(**prompt))
        model.model.layers[0].register_forward_hook(lambda *call: None)
        model.model.layers[1].self_attn.register_full_backward_hook(lambda *call: None)
    model.train()
    model(**context.cut(**batch)).loss.backward()
    found["hooks of one rank"] = all(x.grad is not None for x in model.parameters())
    again = context_parallel(model, group)
    found["a second time"] = (again.implementation, again.name != context.name) == ("sdpa", True)
    return found


def test_what_users_do_beside_training(ranks):
    for found in ranks(2).run(used):
        assert [name for name, right in found.items() if not right] == []


def errors(group):
    """Return the error of each misuse."""
    import transformers

    from ascend_parallel.patches.transformers import context_parallel

    case = Case()
    model, batch = built(case), batch_of(case)
    context = context_parallel(model, group)
    ids = batch["input_ids"]
    windowed = transformers.MistralForCausalLM(
        transformers.MistralConfig(vocab_size=8, hidden_size=256, num_hidden_layers=1, sliding_window=4)
    )
    dropping = built(case)
    dropping.config.attention_dropout = 0.1
    later = built(case)
    of_later = context_parallel(later, group)
    later.model.layers[1].self_attn.attention_dropout = 0.1
    uneven = ids[:, : 64 - group.rank()]
    mixed = torch.ones_like(ids[:, :64]) if group.rank() else None
    part = context.cut(ids)
    misuses = {
        "sliding window": lambda: context_parallel(windowed, group),
        "dropout": lambda: context_parallel(dropping, group),
        "dropout, later": lambda: later(**of_later.cut(ids)),
        "heads": lambda: context_parallel(built(Case(heads=(1, 1))), group, exchange="heads"),
        "no model": lambda: context_parallel(torch.nn.Linear(2, 2), group),
        "uncut": lambda: model(input_ids=ids[:, :64]),
        "labels": lambda: context.cut(ids, ids[:, 1:]),
        "batches": lambda: context_parallel(built(case), group).cut(ids + group.rank()),
        "uneven": lambda: model(input_ids=uneven, position_ids=torch.arange(uneven.shape[1])[None] + 64 * group.rank()),
        "masks": lambda: model(input_ids=part["input_ids"], position_ids=part["position_ids"], attention_mask=mixed),
        "4D": lambda: model(**part, attention_mask=torch.zeros(1, 1, 64, 64)),
    }
    found = {name: raised(misuse) for name, misuse in misuses.items()}
    for frameworks in (("transformers",), ("torch",)):  # the second has no patches of transformers in force
        ascend_parallel.configure(deterministic="tp", frameworks=frameworks)
        found[f"tree of {frameworks[0]}"] = raised(lambda: context_parallel(built(case), group))
        found[f"tree, later, of {frameworks[0]}"] = raised(lambda: model(**part))
    ascend_parallel.configure(deterministic=False, frameworks=None)
    return found


def raised(misuse):
    try:
        misuse()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_cannot_be_shared_is_an_error(ranks):
    for error in ranks(2).run(errors):
        assert "MistralForCausalLM.supports_context_parallel is false" in error["sliding window"]
        assert "sliding_window=4" in error["sliding window"]
        assert "LlamaForCausalLM has attention_dropout=0.1; only 0 is allowed" in error["dropout"]
        assert "1 heads of queries and 1 of keys cannot be shared by the 2 ranks" in error["heads"]
        assert "Linear is no model of transformers" in error["no model"]
        assert "the positions of every rank begin at 0" in error["uncut"]
        assert "labels is [1, 127], and input_ids [1, 128]" in error["labels"]
        assert "cut different batches" in error["batches"]
        assert "rank 0: 64 tokens, attention_mask False; rank 1: 63 tokens, attention_mask False" in error["uneven"]
        assert "rank 0: 64 tokens, attention_mask False; rank 1: 64 tokens, attention_mask True" in error["masks"]
        assert "given a mask that the model made itself" in error["4D"]
        assert "computes attention with dropout=0.1, which ranks do not share" in error["dropout, later"]
        for name in [name for name in error if name.startswith("tree")]:
            assert error[name].startswith("DegreeError: ") and "context parallelism has no tree" in error[name], name
