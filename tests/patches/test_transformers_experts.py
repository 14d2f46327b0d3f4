"""Mixtures of experts of transformers with an ep_plan: three steps, overlapped in groups of experts, bit for bit."""

import importlib.metadata
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import DTensor

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import load, tokens, whole, write

pytestmark = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 23),
    reason="before 5.23 transformers exchanges rows in another way, or not at all",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder, written = tmp_path_factory.mktemp("models"), {}

    def of(name, changes=()):
        key = (name, *changes)
        if key not in written:
            written[key] = write(folder / str(len(written)), name, **dict(changes))
        return written[key]

    return of


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is distributed, and the groups of experts that have to keep its bits."""

    model: str
    ranks: int = 2
    by: str = "fsdp"  # or "tp", or both
    dtype: torch.dtype = torch.float32
    experts: str = "grouped_mm"
    groups: tuple[int, ...] = (2, 4)
    changes: tuple = ()
    skewed: bool = False
    wrapped: str = ""


def distributed(case):
    """Return the options of transformers' DistributedConfig."""
    ep, none = {"ep_size": case.ranks}, {"tp_size": 1, "tp_plan": None}
    return {
        "fsdp": {**ep, **none, "fsdp_size": case.ranks},
        "tp": {**ep, "tp_size": case.ranks},
        "both": {**ep, "tp_size": 2, "fsdp_size": case.ranks // 2},
        "sharded experts": {**none, "ep_size": case.ranks // 2, "fsdp_size": case.ranks},
    }[case.by]


def made(group, path, case):
    """Load the model; a skewed router sends rows to half of the experts."""
    model = load(group, path, case.dtype, **distributed(case))
    model.set_experts_implementation(case.experts)
    if case.skewed:
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                skew(whole(parameter.data), parameter.data)
    if case.wrapped == "checkpoints":
        model.gradient_checkpointing_enable()
    return model


def skew(weight, parameter):
    """Make two pairs of opposite experts, of which each token takes one of each; no token takes another expert."""
    weight = weight.clone() * 1e-3
    weight[0], weight[5] = weight[1] * 1e5, weight[2] * 1e5
    weight[3], weight[6] = -weight[0], -weight[5]
    if isinstance(parameter, DTensor):
        from torch.distributed.tensor import distribute_tensor

        parameter.copy_(distribute_tensor(weight, parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(weight)


def local(x):
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def three_steps(model, seeds):
    """Return losses, logits, all gradients and the weights of three steps, this rank's parts."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = {}
    for number, seed in enumerate(seeds):
        ids = tokens(seed)
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        found |= {f"{number} loss": local(output.loss), f"{number} logits": local(output.logits)}
        found |= {f"{number} {name}": local(x.grad) for name, x in model.named_parameters() if x.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: local(x) for name, x in model.named_parameters()}


def trained(group, path, case):
    """Return the names that differ from plain for each number of groups, how many groups ran, and the coverage."""
    model = made(group, path, case)
    start = [x.detach().clone() for x in model.parameters()]
    seeds = [step + (10 * group.rank() if case.by == "fsdp" else 0) for step in range(3)]

    def run(groups):
        with torch.no_grad():
            for x, at_start in zip(model.parameters(), start, strict=True):
                x.copy_(at_start)
        ascend_parallel.configure(num_chunks=groups, **({"mode": 2} if groups == 1 else {}))
        before = COUNTS.as_dict().get("expert_exchange", {"calls": 0, "chunks": 0})
        found = three_steps(model, seeds)
        after = COUNTS.as_dict().get("expert_exchange", {"calls": 0, "chunks": 0})
        return found, after["chunks"] - before["chunks"], after["calls"] - before["calls"]

    ascend_parallel.configure(num_chunks=1)
    plain = run_plain(model, start, seeds)
    different, calls = {}, []
    for groups in case.groups:
        found, chunks, count = run(groups)
        assert found.keys() == plain.keys()
        different[groups] = [name for name in plain if not torch.equal(found[name], plain[name])]
        calls.append(chunks / count if count else 0)
    ascend_parallel.configure(num_chunks=4)
    covered = str(ascend_parallel.coverage(model).experts.of_total("experts"))
    ascend_parallel.configure(num_chunks=1)
    return different, calls, covered, loads_of(model, seeds[0])


def run_plain(model, start, seeds):
    with torch.no_grad():
        for x, at_start in zip(model.parameters(), start, strict=True):
            x.copy_(at_start)
    ascend_parallel.configure(num_chunks=1)
    return three_steps(model, seeds)


def loads_of(model, seed):
    """Return how many experts no row of this rank goes to, of the first router."""
    router = next(
        module for name, module in model.named_modules() if name.endswith("mlp.gate") or name.endswith("gate")
    )
    loads = []

    def count(module, args, output):
        chosen = output[-1] if isinstance(output, tuple) else output
        chosen = chosen.to_local() if isinstance(chosen, DTensor) else chosen
        loads.append(int((torch.bincount(chosen.flatten().long(), minlength=8) == 0).sum()))

    hook = router.register_forward_hook(count)
    ids = tokens(seed)
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    return loads[0]


REAL = (("hidden_size", 1024), ("intermediate_size", 2048), ("num_hidden_layers", 1), ("num_attention_heads", 16))
REAL += (("num_key_value_heads", 16),)
ONE = (("num_experts_per_tok", 1),)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "case",
    [
        Case(model="Mixtral", groups=(1, 2, 4)),
        Case(model="Mixtral", changes=ONE, experts="eager", by="tp"),
        Case(model="DeepseekV3", by="tp", wrapped="checkpoints"),
        Case(model="Mixtral", skewed=True, experts="eager"),
        Case(model="Qwen3Moe", dtype=torch.bfloat16),
        Case(model="Qwen3Moe", ranks=4, by="both", groups=(2,)),
        Case(model="Qwen3Moe", experts="eager"),
        Case(model="Mixtral", by="tp"),
        Case(model="Mixtral", skewed=True, by="tp"),
        Case(model="Mixtral", dtype=torch.bfloat16, experts="eager", skewed=True),
        Case(model="DeepseekV3", dtype=torch.bfloat16),
        Case(model="Mixtral", ranks=4, groups=(2,), by="sharded experts"),
        Case(model="Mixtral", ranks=4, groups=(1, 2), experts="eager", skewed=True),
        Case(model="Mixtral", groups=(4,), changes=REAL),
        Case(model="Mixtral", groups=(4,), changes=REAL, dtype=torch.bfloat16, experts="eager"),
        Case(model="Mixtral", wrapped="checkpoints"),
    ],
    ids=str,
)
def test_three_steps_keep_their_bits(ranks, path, case):
    experts = 8 // (case.ranks if case.by != "sharded experts" else case.ranks // 2)
    for different, groups, covered, empty in ranks(case.ranks).run(trained, path(case.model, case.changes), case):
        assert different == {count: [] for count in case.groups}
        assert groups == [min(count, experts) for count in case.groups]
        layers = 1 if case.changes == REAL or case.model == "DeepseekV3" else 2
        assert covered.startswith(f"{layers} of {layers} experts")
        assert not case.skewed or empty >= 4
