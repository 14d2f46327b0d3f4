"""Mixtures of experts of transformers with an ep_plan: three steps, overlapped in groups of experts, bit for bit."""

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.tuning.measured.chunk_plan import load_plan

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import Written, both, checked, count_of, full_tensor, load, step, tokens, unequal, worst
from marks import promise

pytestmark = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 23),
    reason="before 5.23 transformers exchanges rows in another way, or not at all",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("models"))


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
                skew(full_tensor(parameter.data), parameter.data)
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


def exchanges():
    return count_of("expert_exchange"), count_of("expert_exchange", "chunks")


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
        before = exchanges()
        found = three_steps(model, seeds)
        return found, *(after - each for after, each in zip(exchanges(), before, strict=True))

    ascend_parallel.configure(num_chunks=1)
    plain = run_plain(model, start, seeds)
    different, calls = {}, []
    for groups in case.groups:
        found, count, chunks = run(groups)
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


@promise("experts-bits")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(model="Mixtral", groups=(1, 2, 4)),
        Case(model="Mixtral", changes=ONE, experts="eager", by="tp"),
        Case(model="DeepseekV3", by="tp", wrapped="checkpoints"),
        Case(model="Mixtral", skewed=True, experts="eager"),
        Case(model="Qwen3Moe", dtype=torch.bfloat16),
        Case(model="Qwen3Moe", ranks=4, by="both", groups=(2,)),
        pytest.param(Case(model="Qwen3Moe", experts="eager"), marks=pytest.mark.stress),
        Case(model="Mixtral", by="tp"),
        pytest.param(Case(model="Mixtral", skewed=True, by="tp"), marks=pytest.mark.stress),
        Case(model="Mixtral", dtype=torch.bfloat16, experts="eager", skewed=True),
        pytest.param(Case(model="DeepseekV3", dtype=torch.bfloat16), marks=pytest.mark.stress),
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
    for different, groups, covered, empty in ranks(case.ranks).run(
        trained, path(case.model, **dict(case.changes)), case
    ):
        assert different == {count: [] for count in case.groups}
        assert groups == [min(count, experts) for count in case.groups]
        layers = 1 if case.changes == REAL or case.model == "DeepseekV3" else 2
        assert covered.startswith(f"{layers} of {layers} experts")
        assert not case.skewed or empty >= 4


def against_truth(group, path):
    """Return the worst error of overlapped losses and gradients against the whole model in float64."""
    model, truth = load(group, path, tp_size=2, ep_size=2), load(group, path, torch.float64, tensor_parallel=False)
    truth.set_experts_implementation("eager")  # the others know no float64
    ascend_parallel.configure(num_chunks=4)
    found = step(model)
    ascend_parallel.configure(num_chunks=1)
    return worst(found, step(truth))


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_gradients_are_those_of_the_whole_model_in_float64(ranks, path, name):
    for error, where in ranks(2).run(against_truth, path(name)):
        assert error < 2e-5, where


def refused(group, path):
    """Return for each refused model the reason, the exchanges that ran, and the names that differ from plain."""
    found = {}
    for name, options, experts in (
        ("all_reduce", {"tp_size": 2, "ep_implementation": "all_reduce"}, "grouped_mm"),
        ("batched_mm", {"tp_size": 2}, "batched_mm"),
    ):
        model = load(group, path, ep_size=2, **options)
        model.set_experts_implementation(experts)
        ascend_parallel.configure(num_chunks=4)
        reason = str(ascend_parallel.coverage(model).experts.of_total("experts"))
        before = count_of("expert_exchange")
        different = unequal(*both(model, step))
        found[name] = reason, count_of("expert_exchange") - before, different
    return found


def test_what_is_not_covered_runs_transformers_own_code(ranks, path):
    small = {"hidden_size": 96, "intermediate_size": 64}  # batched_mm gathers an expert's weights for each row
    for found in ranks(2).run(refused, path("Mixtral", **small)):
        assert "0 of 2 experts (2 MixtralExperts: its ep_implementation is AllReduceEP" in found["all_reduce"][0]
        assert "its experts_implementation is 'batched_mm', not one of 'eager', 'grouped_mm'" in found["batched_mm"][0]
        assert [each[1:] for each in found.values()] == [(0, [])] * 2


def odd_rows(group, path):
    model = load(group, path, tp_size=2, ep_size=2)
    model.set_experts_implementation("grouped_mm")
    ascend_parallel.configure(num_chunks=4)
    grouped = str(ascend_parallel.coverage(model).experts.of_total("experts"))
    model.set_experts_implementation("eager")
    eager = str(ascend_parallel.coverage(model).experts.of_total("experts"))
    return grouped, eager, unequal(*both(model, step))


@pytest.mark.slow
def test_rows_at_odd_addresses_are_left_to_the_loop(ranks, path):
    for grouped, eager, different in ranks(2).run(odd_rows, path("Mixtral", intermediate_size=250)):
        assert "has rows of no multiple of 64 bytes, under grouped_mm" in grouped
        assert eager == "2 of 2 experts"
        assert different == []


def habits(group, path):
    """Return the names that differ from plain, by habit of users, and how often the host waited for a device."""
    found = {}
    model = load(group, path, tp_size=2, ep_size=2)
    if group.rank() == 1:  # on one rank alone
        experts = [module for name, module in model.named_modules() if name.endswith("experts")]
        hooks = [module.register_forward_hook(lambda *_: None) for module in experts]
        hooks += [module.register_full_backward_hook(lambda *_: None) for module in experts]
    found["hooks on a rank"] = unequal(*both(model, step))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" in name or "gate.weight" in name)
    found["frozen"] = unequal(*both(model, step))
    syncs = []
    for chunks in (1, 4):
        ascend_parallel.configure(num_chunks=chunks)
        step(model)
        with Reads() as reads:
            step(model)
        syncs.append(reads.count)
    ascend_parallel.configure(num_chunks=1)
    return found, syncs


class Reads(torch.overrides.TorchFunctionMode):
    """Counts the functions that read a tensor's values on the host."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in ("item", "tolist", "__bool__", "__int__", "__index__", "cpu")
        return function(*args, **(kwargs or {}))


@promise("experts-host-waits")
def test_habits_of_users(ranks, path):
    for found, (plain, overlapped) in ranks(2).run(habits, path("Mixtral")):
        assert found == {"hooks on a rank": [], "frozen": []}
        assert 0 < overlapped <= plain  # no host synchronisation more


def measured(group, path):
    model = load(group, path, tp_size=2, ep_size=2)
    before = count_of("expert_exchange")
    different = unequal(*both(model, step, auto=True))
    return different, count_of("expert_exchange") - before


@pytest.mark.slow
def test_auto_measures_at_the_first_call_and_keeps_bits(ranks, path):
    results = ranks(2).run(measured, path("Mixtral"))
    for different, calls in results:
        assert different == []
        assert calls >= 2 * 2 * 4  # forward and backward of two numbers of groups, four rounds
        assert calls == results[0][1]


def planned(group, path, file):
    """Measure into a file; then train by it, in two groups, and with none that wins: return what each run did."""
    answers = []
    for sizes in (None, [2, 2], [4]):
        if sizes is None:
            options = {"tune": file}
        else:
            plan = json.loads(Path(file).read_text())
            for entry in plan["entries"]:
                entry["sizes"] = sizes if entry["operator"] == "expert_exchange" else entry["sizes"]
            own = f"{file}.{group.rank()}"
            Path(own).write_text(json.dumps(plan))
            options = {"plan": load_plan(own)}
        model = load(group, path, tp_size=2, ep_size=2)
        before = exchanges()
        different = unequal(*both(model, step, **options))
        answers.append((different, *(after - each for after, each in zip(exchanges(), before, strict=True))))
        ascend_parallel.configure(tune=None, plan=None, num_chunks=1)
    return answers


@promise("auto-experts")
def test_a_plan_has_the_groups_of_experts_that_tuning_measured(ranks, path, tmp_path):
    file = tmp_path / "plan.json"
    for tuned, in_two, original in ranks(2).run(planned, path("Mixtral"), str(file)):
        assert [each[0] for each in (tuned, in_two, original)] == [[], [], []]
        assert tuned[1] > 0
        calls, groups = in_two[1:]
        assert calls > 0 and groups == 2 * calls
        assert original[1] == 0  # transformers' own layer
    (entry,) = [each for each in load_plan(str(file)).entries if each.operator == "expert_exchange"]
    assert (entry.run, entry.m, entry.k) == ("forward", 4, 384) and sum(entry.sizes) == 4


def with_a_fault(group, path):
    from ascend_parallel.patches.transformers import experts

    def change(right):
        def wrong(rows, *args, **kwargs):
            made, shared = right(rows, *args, **kwargs)
            return made * (1 + 1e-3 * group.rank()), shared

        return wrong

    return checked(load(group, path, tp_size=2, ep_size=2), step, experts, "run_experts", change)


def test_verification_compares_with_transformers_own_and_finds_a_planted_fault(ranks, path):
    for report, error in ranks(2).run(with_a_fault, path("Mixtral")):
        assert "model.layers.1.mlp.experts" in report
        assert "MixtralExperts, experts): the output of call 2 is wrong on rank" in error, error
        assert "expert_exchange of 4 experts a rank, rows of 384 float32 on 2 cpu ranks in groups of experts" in error


def recorded(group, path, folder):
    model = load(group, path, tp_size=2, ep_size=2)
    ascend_parallel.configure(num_chunks=4)
    plain = step(model)
    with ascend_parallel.timeline.record(folder):
        found = step(model)
    ascend_parallel.configure(num_chunks=1)
    return unequal(plain, found)


def test_a_timeline_has_the_exchange(ranks, path, tmp_path):
    from ascend_parallel.diagnostics.timeline import files, table

    assert ranks(2).run(recorded, path("Mixtral"), str(tmp_path)) == [[], []]
    rows = [row for row in table.table(files.read_run(tmp_path)[0]) if "expert" in str(row)]
    assert {(row.layer, row.direction) for row in rows} == {
        (f"model.layers.{layer}.mlp.experts", direction) for layer in (0, 1) for direction in ("forward", "backward")
    }
    for row in rows:
        assert row.kernel == "chunked 4"
        assert row.comm > 0
        assert row.matmul > 0
