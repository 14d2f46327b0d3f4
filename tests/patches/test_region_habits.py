"""Regions under what users do around a model: hooks on saved tensors, other parameters in place, evaluation between."""

import contextlib
import functools

import pytest
import torch
from delayed_collectives import delayed_collectives
from gpt_training import LLAMA, REGION, megatron
from megatron_cpu import next_token_loss, small_gpt
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ascend_parallel


def tokens(seed):
    return torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def trained(model, around=contextlib.nullcontext):
    with around():
        loss = next_token_loss(model, tokens(1))
    loss.backward()
    return [loss, *gradients(model)]


def copied_when_saved(model):
    """As offloading does."""
    return trained(model, lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved))


def checkpointed(model, **options):
    """Every chunk's activation has a graph of its own, and none of them may run the forward again."""
    calls = []

    def run(batch):
        calls.append(batch)
        return next_token_loss(model, batch)

    loss = checkpoint(run, tokens(1), use_reentrant=False, **options)
    loss.backward()
    assert len(calls) == 2
    return [loss, *gradients(model)]


def unchecked(model):
    """Megatron-core's loss changes logits in place, which a selective checkpoint would have kept: compare without."""
    if ascend_parallel.status().settings.num_chunks == 1:
        return checkpointed(model)
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpointed(model, context_fn=kept)


def compiled(part):
    def run(model):
        torch._dynamo.reset()
        for layer in model.decoder.layers:
            layer.get_submodule(part).compile(backend="aot_eager")
        return trained(model)

    return run


def functional(model):
    """The parameters of the forward are gone when backward runs."""
    marks = ("sequence_parallel", "tensor_model_parallel", "allreduce", "partition_dim", "partition_stride")
    leaves = {name: (parameter.detach() * 1.5).requires_grad_() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        vars(leaves[name]).update({mark: getattr(parameter, mark) for mark in marks if hasattr(parameter, mark)})
    inputs, labels = tokens(1)[:, :-1], tokens(1)[:, 1:]
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
    arguments = (inputs, torch.arange(64).expand_as(inputs), mask)
    loss = torch.func.functional_call(model, leaves, arguments, {"labels": labels}).mean()
    return [loss, *torch.autograd.grad(loss, list(leaves.values()))]


def evaluated(mode):
    def run(model):
        """Evaluate before every step."""
        found = []
        for step in range(2):
            model.eval()
            with mode():
                found.append(next_token_loss(model, tokens(10 + step)).clone())
            model.train()
            loss = next_token_loss(model, tokens(step))
            loss.backward()
            found += [loss, *(gradient.clone() for gradient in gradients(model))]
        return found

    return run


HABITS = {
    "copied when saved": copied_when_saved,
    "functional call": functional,
    "evaluated, no_grad": evaluated(torch.no_grad),
    "evaluated, inference": evaluated(torch.inference_mode),
    "checkpointed": checkpointed,
    "selectively checkpointed": unchecked,
    "compiled proj": compiled("self_attention.linear_proj"),
    "compiled MLP": compiled("mlp"),
}


def compared(group, habit, options):
    """Return the counts of regions, and which of loss and gradients have other bits than without overlap."""
    runs = []
    with megatron(group.size()):
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            ascend_parallel.ops.COUNTS.clear()
            with delayed_collectives() if runs and "compiled" not in habit else contextlib.nullcontext():
                runs.append(HABITS[habit](small_gpt(**options)))
        counts = ascend_parallel.ops.COUNTS.as_dict()
    unlike = [place for place, (a, b) in enumerate(zip(*runs, strict=True)) if not torch.equal(a, b)]
    return sorted(name for name in counts if "region" in name), unlike


# A compiled layer without sequence parallelism and a compiled MLP with it; the others in `make stress`.
CASES = [
    pytest.param(
        habit,
        parallel,
        marks=[pytest.mark.stress] if (habit, parallel) in (("compiled proj", True), ("compiled MLP", False)) else [],
    )
    for habit in HABITS
    for parallel in (False, True)
]


@pytest.mark.sample("copied when saved-False", "checkpointed-False")
@pytest.mark.parametrize(("habit", "sequence_parallel"), CASES)
def test_habits_keep_the_bits(ranks, habit, sequence_parallel):
    if sequence_parallel and habit == "evaluated, inference":
        pytest.skip("Megatron-core itself cannot train after it: its buffer of gathered rows is an inference tensor")
    options = {"sequence_parallel": sequence_parallel, **(LLAMA if habit == "functional call" else {})}
    assert ranks(2).run(compared, habit, options) == [(["region", "region backward", "region embedding"], [])] * 2
