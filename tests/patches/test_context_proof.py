"""What context parallelism proves of a model before its first batch: right numbers of each kind, or a refusal."""

import contextlib
import copy
import functools
import importlib.metadata
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_models import BATCHES, RANDOM, built, errors_of, model_class, runs_alone
from marks import promise
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 18),
    reason="older versions were not tried",
)


def compared(group, kinds, exchange):
    """Return for each model and batch the largest error against one rank in float64, or why it is refused."""
    torch.set_num_threads(1)
    return {kind: errors_of(kind, group, exchange) for kind in kinds}


# Positions that begin at padding_idx + 1; labels of the tokens, as a mean or as a sum; a mask that reads no positions;
# a mask that no layer reads, and experts.
RIGHT = [
    "LlamaForCausalLM",
    "RobertaForMaskedLM",
    "BertForTokenClassification",
    "EuroBertForMaskedLM",
    "OPTForCausalLM",
    "Qwen2MoeForCausalLM",
]


@promise("context-proof")
@pytest.mark.parametrize(("number", "exchange"), [(2, None), (3, None), (2, "gather")])
def test_positions_masks_and_losses_of_each_kind_are_those_of_one_rank(ranks, number, exchange):
    for found in ranks(number).run(compared, RIGHT, exchange):
        for kind, of_batches in found.items():
            assert set(of_batches) == set(BATCHES)
            refused = {name for name, error in of_batches.items() if isinstance(error, str)}
            assert refused == ({"padded at the start"} if kind == "OPTForCausalLM" else set()), of_batches
            assert max(error for error in of_batches.values() if not isinstance(error, str)) < 1e-6


MAPPINGS = {
    "CAUSAL_LM": 80,
    "MASKED_LM": 10,
    "TOKEN_CLASSIFICATION": 30,
    "SEQUENCE_CLASSIFICATION": 0,  # all of them pool a token
    "QUESTION_ANSWERING": 0,
}


def tried(group, kinds):
    """Return for each model the largest error of all batches, "" if it does not run here, or what refuses it."""
    torch.set_num_threads(1)
    found = {}
    for kind in kinds:
        if not runs_alone(kind):
            continue
        try:
            errors = errors_of(kind, group)
            found[kind] = max([error for error in errors.values() if not isinstance(error, str)], default="no batch")
        except ValueError as error:
            found[kind] = str(error)
    return found


@promise("context-proof")
@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_model_of_transformers_is_right_or_refused(ranks, mapping, number):
    from transformers.models.auto import modeling_auto

    kinds = sorted(set(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()) - RANDOM)
    right = 0
    for first in range(0, len(kinds), 10):
        for found in ranks(number).run(tried, kinds[first : first + 10]):
            for kind, error in found.items():
                assert str(error).startswith("context_parallel: ") or error < 1e-5, f"{kind}: {error}"
            right += sum(isinstance(error, float) for error in found.values()) / number
    assert right >= MAPPINGS[mapping]


# Of the class: the reason.
REFUSED = {
    "BartForCausalLM": "does not take its positions from position_ids",
    "BertForSequenceClassification": "gives logits [2, 3] for tokens [2, 15], without a row for each token",
    "BertModel": "gives pooler_output [2, 48] for tokens [2, 15], without a row for each token",
    "DogeForCausalLM": "does not run on a sequence that ranks share: it computes with its attention mask itself",
    "MixtralForCausalLM": "gives aux_loss [] for tokens [2, 15], without a row for each token",
    "BertForQuestionAnswering": "BertForQuestionAnswering computes no loss from labels of tokens: compute a loss",
}


def refusals(group):
    """Return for each model why it is refused."""
    from ascend_parallel.patches.transformers import context_parallel

    found = {}
    for kind in REFUSED:
        model = built(kind, output_router_logits=True)
        before = model.config._attn_implementation
        found[kind] = raised(lambda model=model: cut(context_parallel(model, group)))
        undone = "forward" not in vars(model) and model.config._attn_implementation == before
        found[kind] += "" if undone or kind == "BertForQuestionAnswering" else "; it stays shared"
    return found


def cut(context):
    ids = torch.arange(16)[None]
    return context.cut(ids, ids)


def raised(misuse):
    try:
        misuse()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@promise("context-proof")
def test_models_whose_numbers_would_be_others_are_refused(ranks):
    for found in ranks(2).run(refusals):
        for kind, reason in REFUSED.items():
            assert found[kind].startswith("ValueError: context_parallel: ") and reason in found[kind], found[kind]
            assert "it stays shared" not in found[kind]


def guarded(group):
    """Return the errors of forwards that would give other numbers, each after one that was right."""
    from ascend_parallel.patches.transformers import context_parallel

    def shared(kind="LlamaForCausalLM", **changes):
        model = built(kind, torch.float32, **changes)
        context = context_parallel(model, group)
        step(model, context.cut(ids, ids))
        return model, context

    def step(model, parts, **more):
        model(**parts, **more).loss.backward()

    ids = torch.arange(30)[None] % 7 + 4
    found = {}
    model, context = shared()
    parts = context.cut(ids, ids)
    found["attentions"] = raised(lambda: step(model, parts, output_attentions=True))
    found["labels"] = raised(lambda: step(model, {**context.cut(ids), "labels": ids[:, :15]}))
    found["batches"] = raised(lambda: step(model, context.cut(ids + group.rank(), ids)))
    if group.rank():
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    found["frozen"] = raised(lambda: step(model, context.cut(ids, ids)))
    model, context = shared()
    model.set_attn_implementation("sdpa")
    found["sdpa"] = raised(lambda: step(model, context.cut(ids, ids)))
    model, context = shared("MixtralForCausalLM")
    found["router"] = raised(lambda: step(model, context.cut(ids, ids), output_router_logits=True))
    model, context = shared()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    found["replaced"] = raised(lambda: step(model, context.cut(ids, ids)))
    return found


@promise("context-proof")
def test_a_forward_that_was_not_proved_is_an_error_on_every_rank(ranks):
    for error in ranks(2).run(guarded):
        assert "output_attentions=True is not allowed" in error["attentions"]
        assert "is given labels that cut() did not make" in error["labels"]
        assert error["batches"].startswith("DisagreementError") and "cut different batches" in error["batches"]
        assert error["frozen"].startswith("DisagreementError")
        assert "other parameters require gradients" in error["frozen"] and "freeze the same" in error["frozen"]
        assert "LlamaForCausalLM has attn_implementation='sdpa', which reads a rank's tokens alone" in error["sdpa"]
        assert "MixtralForCausalLM gives aux_loss, which was not compared" in error["router"]
        assert "computed attention without an exchange" in error["replaced"]


def left_as_it_was(group):
    """Return by name whether a proof leaves a model as it was."""
    from ascend_parallel.patches.transformers import context_parallel

    model, calls = built("RobertaForMaskedLM", torch.float32).train(), []
    model.lm_head.eval()
    for module in model.modules():
        module.register_forward_hook(functools.partial(lambda *call: calls.append(1)))
        module.register_forward_pre_hook(lambda *call: calls.append(1))
        module.register_forward_hook(torch.no_grad()(lambda *call: calls.append("decorated")))
    of_all = [
        register(lambda *call: calls.append("of all modules"))
        for register in (register_module_forward_hook, register_module_forward_pre_hook)
    ]
    config, buffers = copy.deepcopy(vars(model.config)), dict(model.named_buffers())
    versions = [x._version for x in [*buffers.values(), *model.parameters()]]
    attributes = [(module, set(vars(module))) for module in model.modules()]
    state, counts = torch.get_rng_state(), COUNTS.as_dict()
    context_parallel(model, group)
    during = list(calls)
    torch.nn.Identity()(torch.ones(1))
    for handle in of_all:
        handle.remove()
    after = copy.deepcopy(vars(model.config))
    changed = {name for name in config if config[name] != after.get(name)} | set(after) - set(config)
    return {
        "hooks": not during,
        "hooks of all modules": calls == ["of all modules"] * 2,
        "random state": torch.equal(state, torch.get_rng_state()),
        "flags": model.training and not model.lm_head.training and not model.lm_head.dense.training,
        "configuration": changed <= {"_attn_implementation_internal"},
        "buffers": all(x is buffers[name] for name, x in model.named_buffers()),
        "versions": versions == [x._version for x in [*buffers.values(), *model.parameters()]],
        "attributes": all(set(vars(module)) - {"forward"} == names for module, names in attributes),
        "gradients": all(x.grad is None for x in model.parameters()),
        "counts": COUNTS.as_dict() == counts,
    }


@promise("context-proof")
def test_a_proof_leaves_the_model_as_it_was(ranks):
    for found in ranks(2).run(left_as_it_was):
        assert [name for name, right in found.items() if not right] == []


class Widened(torch.nn.Sequential):
    """A head as of models that end in ``logits.float()``: the rounding is that of 16 bits."""

    def forward(self, hidden):
        return super().forward(hidden).float()


def under_defaults(group):
    """Return what comes of proofs under another default device, and under autocast."""
    from ascend_parallel.patches.transformers import context_parallel, context_proof

    found = {}

    def prove(name):
        def proved():
            found[name] = dict(context_parallel(model, group).proof.refused)

        found[name] = raised(proved) or found[name]

    model = built("LlamaForCausalLM", torch.float32)
    with torch.device("meta"):  # as that of a device on which nothing can be drawn by the host
        prove("device")
    model = built("LlamaForCausalLM", torch.bfloat16)
    for name, module in model.named_modules():
        if "norm" in name:
            module.to(torch.float32)
    prove("outside")
    with torch.autocast("cpu", torch.bfloat16):
        prove("autocast")
        model = built("LlamaForCausalLM", torch.float32)
        prove("one dtype")
    model = built("LlamaForCausalLM", torch.bfloat16)
    model.lm_head = Widened(model.lm_head)
    with mock.patch.dict(context_proof.LIMITS, {torch.float32: 1e-12}):  # it does not count here
        prove("widened")
    return found


@promise("context-proof")
def test_a_proof_has_devices_and_dtypes_of_the_model(ranks):
    for found in ranks(2).run(under_defaults):
        assert "if it needs torch.autocast, call this inside of it" in found.pop("outside")
        assert found == {"device": {}, "autocast": {}, "one dtype": {}, "widened": {}}


def one_rank_otherwise(group):
    """Return the errors where one rank has another exchange, or another model, and whether models stay as they were."""
    from ascend_parallel.patches.transformers import context_parallel

    found, last = {}, group.rank() == 1
    for name, exchange in (("exchange", "gather" if last else "heads"), ("model", None)):
        model = built("LlamaForCausalLM", torch.float32)
        if last and name == "model":
            model.config.attention_dropout = 0.1
        error = raised(functools.partial(context_parallel, model, group, exchange=exchange))
        found[name] = error, model.config._attn_implementation, "forward" in vars(model)
    return found


@promise("context-proof")
def test_what_one_rank_has_otherwise_is_an_error_on_all_that_leaves_their_models(ranks):
    first, second = ranks(2).run(one_rank_otherwise)
    for found in (first, second):
        assert all(rest == ["sdpa", False] for _, *rest in found.values())
        assert "rank 1: LlamaForCausalLM, gather, " in found["exchange"][0]
    assert "context_parallel: rank 1 of" in first["model"][0] and "attention_dropout=0.1" in first["model"][0]
    assert first["model"][0].startswith("DisagreementError") and second["model"][0].startswith("ValueError")


class Failing(torch.nn.Module):
    """A module whose n-th forward raises on one rank."""

    def __init__(self, inner, calls):
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, *args, **options):
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                raise ArithmeticError("planted")
        return self.inner(*args, **options)


def one_rank_fails(group, exchange, culprit):
    """Return, for each place where the forward of one rank fails, the error and the seconds; then of a right proof.

    A rank that waited for the other in an exchange would wait for the group's time limit.
    """
    from ascend_parallel.patches.transformers import context_parallel

    found, mesh = {}, init_device_mesh("cpu", (group.size(),))
    attention = torch.nn.functional.scaled_dot_product_attention
    places = {"whole": 0, "shared": 1, "documents": 5, "attention": 3, "FSDP2": 0, "nobody": None}
    for place, calls in places.items():
        model = built("LlamaForCausalLM", torch.float32)
        failing = Failing(attention if place == "attention" else model.model.layers[0].mlp, None)
        if group.rank() == culprit:
            failing.calls = calls
        if place != "attention":
            model.model.layers[0].mlp = failing
        if place == "FSDP2":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            if place == "attention":
                stack.enter_context(mock.patch.object(torch.nn.functional, attention.__name__, failing))
            error = raised(functools.partial(context_parallel, model, group, exchange=exchange))
        found[place] = error, time.monotonic() - begin, "forward" in vars(model)
    return found


@promise("context-proof")
@pytest.mark.parametrize(("exchange", "culprit"), [("heads", 1), ("gather", 0)])
def test_a_forward_that_fails_on_one_rank_is_an_error_on_all(ranks, exchange, culprit):
    of_ranks = ranks(2).run(one_rank_fails, exchange, culprit)
    for rank, found in enumerate(of_ranks):
        assert found.pop("nobody")[0] == ""
        for place, (error, seconds, shared) in found.items():
            kind = "ValueError" if rank == culprit else f"DisagreementError: context_parallel: rank {culprit} of "
            assert error.startswith(kind) and "ArithmeticError: planted" in error, (place, error)
            assert seconds < 30 and not shared, (place, seconds)


def proved_later(group):
    """Return what happens where the model cannot run, or has other weights on each rank, when it is made shared."""
    from ascend_parallel.patches.transformers import context_parallel

    found, ids = {}, torch.arange(30)[None] % 7 + 4
    truth = built("LlamaForCausalLM", torch.float32)

    def right(model, context, name):
        with torch.no_grad():
            parts = context.cut(ids)
            expected = truth(input_ids=ids).logits.chunk(group.size(), 1)[group.rank()]
            found[name] = torch.allclose(model(**parts).logits, expected, atol=1e-5)

    with torch.device("meta") if group.rank() else contextlib.nullcontext():
        model = model_class("LlamaForCausalLM")(copy.deepcopy(truth.config))
    context = context_parallel(model, group)
    found["meta"] = raised(lambda: context.cut(ids))
    model.to_empty(device="cpu") if group.rank() else None
    found["before cut"] = raised(lambda: model(input_ids=ids[:, :15], position_ids=torch.arange(15)[None]))
    model.load_state_dict(truth.state_dict())
    model.model.rotary_emb = copy.deepcopy(truth.model.rotary_emb)
    right(model, context, "loaded")
    torch.manual_seed(group.rank())
    model = model_class("LlamaForCausalLM")(copy.deepcopy(truth.config))
    context = context_parallel(model, group)
    found["other weights"] = raised(lambda: context.cut(ids))
    dist.barrier(group)
    if group.rank() == 0:
        model.load_state_dict(truth.state_dict())
    right(DistributedDataParallel(model), context, "broadcast")
    return found


@promise("context-proof")
def test_a_model_that_cannot_run_yet_is_proved_by_the_first_cut(ranks):
    for found in ranks(2).run(proved_later):
        assert "other models, exchanges or weights" in found["other weights"]
        assert "nothing has been proved of it since" in found["before cut"]
        assert "LlamaForCausalLM has weights on the meta device" in found["meta"]
        assert found["loaded"] is True and found["broadcast"] is True


def gradient_error(group, truth, model, context):
    """Return the largest error of a gradient against one rank's; gradients are those of all ranks, or their shares."""
    ids = torch.arange(30)[None] % 7 + 4
    truth(input_ids=ids, labels=ids).loss.backward()
    (model(**context.cut(ids, ids)).loss * group.size()).backward()
    worst = 0.0
    for expected, weight in zip(truth.parameters(), model.parameters(), strict=True):
        if expected.grad is not None:
            gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad / group.size()
            if not isinstance(weight.grad, DTensor):
                dist.all_reduce(gradient, group=group)
            worst = max(worst, float((gradient - expected.grad).abs().max() / expected.grad.abs().max()))
    return worst


def wrapped(group):
    """Return the error of each way in which programs wrap a model."""
    import peft

    from ascend_parallel.patches.transformers import context_parallel

    found, mesh = {}, init_device_mesh("cpu", (group.size(),))

    def adapted(model):
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    def llama():
        return built("LlamaForCausalLM")

    model = llama()
    context = context_parallel(model, group)
    found["LoRA later"] = gradient_error(group, adapted(llama()), adapted(model), context)
    model = adapted(llama())
    found["LoRA before"] = gradient_error(group, adapted(llama()), model, context_parallel(model, group))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    found["prompts"] = raised(lambda: context_parallel(peft.get_peft_model(llama(), prompts), group))
    model = llama()
    context = context_parallel(model, group)
    copied = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    found["a copy"] = gradient_error(group, llama(), copied, context)
    compiled = torch.compile(model, backend="eager")
    found["compiled"] = raised(lambda: compiled(**context.cut(torch.arange(30)[None])))
    for when in ("before", "between layers and model"):
        model = llama()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if when == "before":
            fully_shard(model, mesh=mesh)
        context = context_parallel(model, group)
        if when != "before":
            fully_shard(model, mesh=mesh)
        found[f"FSDP2 {when}"] = gradient_error(group, llama(), model, context)
    model = adapted(llama())
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.base_model.model, mesh=mesh)
    context_parallel(model, group).prove()
    weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    found["FSDP2 inside an adapted model leaves its weights whole"] = float(len(weights))
    return found


@promise("context-proof")
def test_wrapped_models_are_proved_and_right(ranks):
    pytest.importorskip("peft")
    for found in ranks(2).run(wrapped):
        assert "gives logits [2, 19, 96] for tokens [2, 15]" in found.pop("prompts")
        assert found.pop("compiled")  # an error, of ours or of the compiler, which cannot read a process group
        assert {name: error for name, error in found.items() if not error < 1e-9} == {}
