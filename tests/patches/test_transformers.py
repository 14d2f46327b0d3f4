"""Hugging Face models with a tp_plan: losses and gradients, overlapped, plain, and of the whole model in float64."""

import importlib.metadata
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ascend_parallel
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import Written, both, checked, count_of, full_tensor, load, step, tokens, unequal, worst

AS_TRIED = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 23),
    reason="transformers 5.16 cannot do this itself",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("models"))


def trained(group, path, dtype, micro_batches):
    """Return the unequal names, the worst error against the whole model in float64, and the overlapped calls."""
    model, truth = load(group, path, dtype), load(group, path, torch.float64, tensor_parallel=False)
    before = count_of("matmul_all_reduce")
    plain, overlapped = both(model, lambda model: step(model, micro_batches))
    right = step(truth, micro_batches)
    calls = count_of("matmul_all_reduce") - before
    tied = [name for name in right if name not in plain]
    return unequal(plain, overlapped), worst(overlapped, {n: v for n, v in right.items() if n not in tied}), calls


# Of each layer of a Llama: seven input gradients of column layers or outputs of row layers are summed; a GPT-NeoX and a
# Phi-3 (whose projections are gathered and split) have four. The vocabulary's layer sums its own. A GPT-NeoX's row
# biases are added after the sum, where DTensor adds a share of them on each rank before it.
@pytest.mark.sample("Llama-2-1")
@pytest.mark.parametrize(
    ("name", "count", "micro_batches"),
    [
        ("Llama", 2, 1),
        ("Qwen2", 2, 2),
        ("Mistral", 2, 1),
        ("GPTNeoX", 2, 1),
        ("Phi3", 2, 1),
        ("Llama", 3, 1),
        ("Qwen2", 4, 1),
        ("Phi3", 3, 1),
    ],
)
def test_losses_and_gradients(ranks, path, name, count, micro_batches):
    for different, (error, where), calls in ranks(count).run(trained, path(name), torch.float32, micro_batches):
        if count == 2 and name != "GPTNeoX":
            assert different == []
        assert error < 2e-5, where
        assert calls == ((4 if name in ("GPTNeoX", "Phi3") else 7) * 2 + 1) * micro_batches


class LoRALinear(torch.nn.Linear):
    """Adds an adapter's product, as torchtitan's class does; its weights are no parameters of the layer."""

    def forward(self, x):
        """Return both products' sum."""
        torch.default_generator.manual_seed(self.in_features)
        a, b = torch.randn(8, self.in_features).to(x.dtype) / 50, torch.randn(self.out_features, 8).to(x.dtype) / 50
        if isinstance(x, DTensor):
            column = x.placements == (Replicate(),)
            places = (Replicate(), Shard(0)) if column else (Shard(1), Replicate())
            a, b = (
                distribute_tensor(part, x.device_mesh, [place], src_data_rank=None)
                for part, place in zip((a, b), places, strict=True)
            )
        return super().forward(x) + F.linear(F.linear(x, a), b)


def swapped_before(group, path):
    """Return what differs from plain, the coverage, and the error, of layers whose class was set before the plan."""
    from transformers.models.llama import modeling_llama

    def made(kind):
        own = kind.__init__

        def init(self, *args, **kwargs):
            own(self, *args, **kwargs)
            for layer in self.children():
                if isinstance(layer, torch.nn.Linear):
                    layer.__class__ = LoRALinear

        return mock.patch.object(kind, "__init__", init)

    with made(modeling_llama.LlamaMLP), made(modeling_llama.LlamaAttention):
        model, truth = load(group, path), load(group, path, torch.float64, tensor_parallel=False)
    ascend_parallel.configure(num_chunks=4)
    covered = str(ascend_parallel.coverage(model))
    before = count_of("matmul_all_reduce", "chunks")
    plain, overlapped = both(model, step)
    chunks = count_of("matmul_all_reduce", "chunks") - before
    return unequal(plain, overlapped), covered, chunks, worst(overlapped, step(truth))


def test_a_class_swap_before_the_plan_is_overlapped(ranks, path):
    for different, covered, chunks, (error, where) in ranks(2).run(swapped_before, path("Llama")):
        assert different == []
        assert covered == "15 of 15 linear layers covered"
        assert chunks == 4 * (7 * 2 + 1)
        assert error < 2e-5, where


@pytest.mark.sample("Qwen2")
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_16_bits(ranks, path, name):
    for different, (error, where), _ in ranks(2).run(trained, path(name), torch.bfloat16, 1):
        assert different == []
        assert error < 0.1, where


def generated(group, path):
    model = load(group, path).eval()
    ids = tokens()[:1]
    calls = []

    def run(model):
        before = count_of("matmul_all_reduce")
        out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        calls.append(count_of("matmul_all_reduce") - before)
        return {"tokens": out}

    return unequal(*both(model, run)), calls


def test_generate_overlaps_the_prompt_and_leaves_single_tokens_whole(ranks, path):
    for different, calls in ranks(2).run(generated, path("Llama")):
        assert different == []
        assert calls == [0, 2 * 2]  # two row layers of two decoder layers, once: four more tokens add none


def habits(group, path):
    """Return the names that differ from plain, by habit."""
    found = {}
    model = load(group, path)
    found["retained"] = unequal(*both(model, lambda model: _twice(model)))
    model.gradient_checkpointing_enable()
    found["checkpointing"] = unequal(*both(model, step))
    model.gradient_checkpointing_disable()
    seen = []
    hooks = [module.register_forward_hook(lambda *_: seen.append(1)) for module in model.modules()]
    hooks += [module.register_full_backward_hook(lambda *_: seen.append(1)) for module in _linears(model)]
    found["hooks"] = unequal(*both(model, step))
    for hook in hooks:
        hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        plain, overlapped = both(model, step)
    found["autocast"] = worst(overlapped, plain)[0]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "down_proj" in name)
    found["frozen"] = unequal(*both(model, step))
    return found


def _linears(model):
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def _twice(model):
    ids = tokens()
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: full_tensor(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}


def test_habits_of_users_keep_plains_bits(ranks, path):
    for found in ranks(2).run(habits, path("Qwen2")):
        # DTensor sums the input gradients of autocast layers in fp32, and these in 16 bits.
        assert found.pop("autocast") < 0.02
        assert found == {"retained": [], "checkpointing": [], "hooks": [], "frozen": []}


def sharded_twice(group, path):
    model = load(group, path, fsdp_size=2, tp_size=2)
    return unequal(*both(model, step))


@pytest.mark.slow
@AS_TRIED
def test_with_fully_sharded_data_parallel(ranks, path):
    assert ranks(4).run(sharded_twice, path("Llama")) == [[]] * 4


def left(group, path):
    """Return the coverage of a model with layers that are not covered, and the names that differ from plain."""
    model = load(group, path)
    layer = model.model.layers[0]
    layer.self_attn.q_proj.__class__ = type("Adapted", (torch.nn.Linear,), {})
    layer.mlp.up_proj._hf_quantized_needs_local_tp = False
    layer.mlp.gate_proj.forward.ascend_parallel.__dict__["reason"] = "planted"
    ascend_parallel.configure(num_chunks=4)
    on = str(ascend_parallel.coverage(model))
    ascend_parallel.configure(num_chunks=1)
    return on, str(ascend_parallel.coverage(model)), unequal(*both(model, step))


def test_what_is_not_covered_runs_as_it_is(ranks, path):
    for on, off, different in ranks(2).run(left, path("Llama")):
        assert on == "14 of 15 linear layers covered (1 Linear: planted)"  # a tp_plan never calls Adapted's forward
        assert off.startswith("0 of 15 linear layers covered (")
        assert "overlap is switched off" in off
        assert different == []


def uneven(group, path):
    model = load(group, path)
    ascend_parallel.configure(num_chunks=4)
    covered = str(ascend_parallel.coverage(model))
    return covered, unequal(*both(model, step))


@AS_TRIED
def test_features_that_ranks_share_unevenly_are_left(ranks, path):
    for covered, different in ranks(2).run(uneven, path("Llama", intermediate_size=1153)):
        assert "6 Linear: its 1153 features are shared unevenly among 2 ranks" in covered
        assert different == []


def with_a_fault(group, path):
    from ascend_parallel.patches import linear_call

    def wrong(right):
        return lambda *args, **kwargs: right(*args, **kwargs) * (1 + 1e-3 * group.rank())

    return checked(load(group, path), step, linear_call, "run_row", wrong)


@pytest.mark.sample("Llama")
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_verification_compares_with_transformers_own_and_finds_a_planted_fault(ranks, path, name):
    for report, error in ranks(2).run(with_a_fault, path(name)):
        assert "15 of" in report or "model.layers.1.mlp.down_proj" in report, report
        assert "is wrong on rank 1" in error
        assert "by the framework's own" in error


def disagreeing(group, path):
    from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH

    model = load(group, path)
    if group.rank() == 1:
        ACTIVE_PATCH.add_text("a layer of this rank alone")
    ascend_parallel.configure(num_chunks=4)
    try:
        step(model)
        error = ""
    except ascend_parallel.DisagreementError as found:
        error = str(found)
    ascend_parallel.configure(num_chunks=1)
    if group.rank() == 0:
        ACTIVE_PATCH.add_text("a layer of this rank alone")
    dist.barrier(group)
    return error


def test_ranks_with_other_layers_are_told_before_they_communicate(ranks, path):
    for error in ranks(2).run(disagreeing, path("Llama")):
        assert "parallel layers of transformers is" in error
