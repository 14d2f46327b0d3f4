"""DeepSpeed's Ulysses: models whose ranks share sequences, beside DeepSpeed's own exchange and the whole model."""

import contextlib
import functools
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import promise

import ascend_parallel
from ascend_parallel.ops import COUNTS

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make compat-deepspeed")
pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import launched_by, model_of

WORDS = 480


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch; heads: of queries, of keys."""

    ranks: int = 2
    heads: tuple[int, int] = (8, 4)
    shape: tuple[int, int] = (1, 128)
    dtype: torch.dtype = torch.float32
    groups: tuple[int | str, ...] = (1, 2)
    checkpoints: bool = False
    verified: bool = False
    options: dict = field(default_factory=dict)

    def __str__(self):
        """Return what is unlike other cases."""
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name, {}))


@contextlib.contextmanager
def sharing(group, case, **options):
    """Have DeepSpeed put its attention in the place of sdpa's; yield it."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with launched_by(group):
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    try:
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=built(case),
            core_attn_implementation="sdpa",
            sequence_parallel_size=group.size(),
            micro_batch_size=case.shape[0],
            **options,
        )
        wrapper = ALL_ATTENTION_FUNCTIONS["sdpa"]
        yield next(cell.cell_contents for cell in wrapper.__closure__ if hasattr(cell.cell_contents, "attn"))
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        parallel_state_sp._release_sequence_parallel_groups()


def built(case, dtype=None):
    queries, keys = case.heads
    shape = {"hidden_size": 16 * queries, "intermediate_size": 160, "num_attention_heads": queries}
    model = model_of("Llama", num_key_value_heads=keys, use_cache=False, **shape, **case.options)
    if case.checkpoints:
        model.gradient_checkpointing_enable()
    return model.to(dtype or case.dtype).train()


def batch_of(case, part=slice(None)):
    """Return a part of the batch, as DeepSpeed's adapter of loaders cuts it."""
    ids = torch.randint(WORDS, case.shape, generator=torch.Generator().manual_seed(3))
    places = torch.arange(case.shape[1]).expand(case.shape)
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    return {"input_ids": ids[:, part], "position_ids": places[:, part]}, labels[:, part]


def step(case, model, part=slice(None)):
    """Return logits, the gradient of a layer's output, and gradients of weights."""
    kept = []
    hook = model.model.layers[0].register_forward_hook(lambda *call: kept.append(call[-1]) or call[-1].retain_grad())
    batch, labels = batch_of(case, part)
    logits = model(**batch).logits
    hook.remove()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    (loss / labels.numel()).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return {"logits": logits.detach(), "activations": kept[0].grad}, gradients


def trained(group, case):
    """Return what differs from DeepSpeed's own bits, the worst error against float64, the groups, and coverage."""
    length = case.shape[1] // group.size()
    part = slice(group.rank() * length, (group.rank() + 1) * length)
    _, truth = step(case, built(case, torch.float64))
    different, ran, covered = [], [], []
    with sharing(group, case):
        own, own_gradients = step(case, built(case), part)
        for groups in case.groups:
            number = {"auto": True} if groups == "auto" else {"num_chunks": groups, "mode": 2}
            ascend_parallel.configure(**number, verify_every=int(case.verified))
            COUNTS.clear()
            model = built(case)
            try:
                found, gradients = step(case, model, part)
                covered.append(str(ascend_parallel.coverage(model)))
                assert not case.verified or "0 over the limit" in str(ascend_parallel.verification())
            finally:
                ascend_parallel.configure(num_chunks=1, verify_every=0)
            count = COUNTS.as_dict()["head_exchange"]
            ran.append(count["chunks"] / count["calls"])
            different += [(groups, name) for name in own if not torch.equal(found[name], own[name])]
            different += [(groups, name) for name in truth if not torch.equal(gradients[name], own_gradients[name])]
    worst = []
    for name, right in truth.items():
        total = gradients[name].double()
        dist.all_reduce(total, group=group)
        worst.append(float((total / group.size() - right).abs().max() / right.abs().max()))
    return different, max(worst), ran, covered


CASES = [
    Case(groups=(1, 2, 4), heads=(16, 8)),
    Case(dtype=torch.bfloat16, shape=(2, 128)),
    Case(heads=(8, 1), groups=(1,)),  # DeepSpeed sends the head of keys to both ranks
    Case(ranks=4, heads=(8, 8), shape=(2, 64)),
    Case(checkpoints=True),
    Case(verified=True),
    Case(groups=("auto",)),
]


@promise("deepspeed-context-bits")
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ulysses_in_groups_of_heads_has_the_bits_of_deepspeed(ranks, case):
    for different, worst, ran, covered in ranks(case.ranks).run(trained, case):
        assert different == []
        assert worst < {torch.float32: 2e-5, torch.bfloat16: 3e-2}[case.dtype]
        assert case.groups == ("auto",) or ran == list(case.groups)
        assert case.groups != (1, 2) or covered[1].endswith("attention of 2 layers: exchanged in 2 groups")


def projected(group):
    """Return whether outputs are DeepSpeed's, whether they are those of `project`, and its calls in two forwards.

    On rank 1 a hook puts another tensor of the same numbers before the projections, in the last model.
    """
    from ascend_parallel.overlap import context

    case, own, called = Case(), context.project, []
    part = slice(64 * group.rank(), 64 * group.rank() + 64)

    def spied(*operands, factor=1.0):
        called.append(len(called))
        return own(*operands) * factor

    with sharing(group, case):
        plain = step(case, built(case), part)[0]
        ascend_parallel.configure(num_chunks=2, mode=2)
        try:
            with mock.patch.object(context, "project", functools.partial(spied, factor=1.1)):
                wrong = step(case, built(case), part)[0]
            model, calls = built(case), []
            for layer in model.model.layers if group.rank() == 1 else ():
                layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * 1,))
            with mock.patch.object(context, "project", spied):
                for _ in range(2):
                    called.clear()
                    found = step(case, model, part)[0]
                    calls.append(len(called))
        finally:
            ascend_parallel.configure(num_chunks=1)
    same = [torch.equal(found[name], plain[name]) for name in plain]
    return all(same), not torch.equal(wrong["logits"], plain["logits"]), calls


@promise("context-projection")
def test_the_projection_of_transformers_module_runs_under_the_exchange(ranks):
    of_ranks = ranks(2).run(projected)
    assert of_ranks == [(True, True, [2, 2]), (True, True, [2, 0])]


def left(group):
    """Return, of each call that is not covered, DeepSpeed's error, exchanges counted, and coverage."""
    case, found = Case(), {}
    dropping = Case(options={"attention_dropout": 0.5})
    ascend_parallel.configure(num_chunks=2, mode=2)

    def called(model, **changes):
        COUNTS.clear()
        batch = batch_of(case, slice(64 * group.rank(), 64 * group.rank() + 64))[0]
        error = ""
        try:
            model(**{**batch, **changes})
        except AssertionError as raised:
            error = str(raised)
        return error, "head_exchange" in COUNTS.as_dict(), str(ascend_parallel.coverage(model))

    try:
        with sharing(group, case) as ulysses:
            found["batch"] = called(built(case), input_ids=torch.zeros(2, 64, dtype=torch.long))
            found["dropout"] = called(built(dropping))
            found["evaluation"] = called(built(dropping).eval())
            ulysses.disable_in_eval = True
            found["on one rank"] = called(built(case).eval())
            ulysses.disable_in_eval, ulysses.skip_all_but_last_attention_debug_mode = False, True
            found["debug"] = called(built(case))
    finally:
        ascend_parallel.configure(num_chunks=1)
    return found


def test_what_is_not_covered_stays_deepspeeds(ranks):
    for found in ranks(2).run(left):
        assert "does not match the required shape" in found["batch"][0]
        assert found["dropout"][1] is False
        assert "attention of 2 layers: not overlapped: with dropout=0.5" in found["dropout"][2]
        assert found["evaluation"] == ("", True, found["evaluation"][2])
        assert found["on one rank"][:2] == ("", False)
        assert "skip_all_but_last_attention_debug_mode is on" in found["debug"][2]


def refused(group):
    ascend_parallel.configure(num_chunks=2, deterministic="tp")
    try:
        with sharing(group, Case()):
            step(Case(), built(Case()), slice(64 * group.rank(), 64 * group.rank() + 64))
    except ascend_parallel.ops.DegreeError as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1, deterministic=False)
    return ""


def test_the_same_bits_at_every_degree_are_refused(ranks):
    for error in ranks(2).run(refused):
        assert "context parallelism has no tree" in error


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import deepspeed
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=480, use_cache=False, **shape))
mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)
rows = [{"input_ids": ids, "position_ids": torch.arange(64), "labels": ids} for ids in torch.randint(480, (2, 64))]
group = mpu.get_sequence_parallel_group()
adapter = UlyssesSPDataLoaderAdapter(torch.utils.data.DataLoader(rows), dist.get_rank(), group, 2, "cpu")
for batch in adapter:
    labels = batch.pop("shift_labels")
    loss = torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    print(loss.item())
print(sum(weight.grad.double().sum().item() for weight in model.parameters()))
if "ascend_parallel" in sys.modules:
    print(sys.modules["ascend_parallel"].status().counts["head_exchange"]["chunks"], file=sys.stderr)
"""


def test_the_variable_alone_overlaps_a_program():
    from launch import launch

    variable = {"plain": {}, "overlapped": {"COC_PARALLEL_NUM": "2"}}
    ended = {
        name: launch(PROGRAM, [{"LOCAL_RANK": str(rank), **value} for rank in range(2)], fresh=True)
        for name, value in variable.items()
    }
    for rank in range(2):
        plain, overlapped = (of_name[rank] for of_name in ended.values())
        assert plain.returncode == overlapped.returncode == 0, overlapped.stderr[-2000:] + plain.stderr[-2000:]
        losses = [float(line) for line in plain.stdout.splitlines()[-5:]]
        assert losses == [float(line) for line in overlapped.stdout.splitlines()[-5:]]
        # 2 layers, forward and backward, in 2 groups, of 4 micro-batches
        assert overlapped.stderr.split()[-1] == "32"
