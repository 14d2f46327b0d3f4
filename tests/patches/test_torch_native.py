"""torch's parallelize_module: losses and gradients, overlapped, plain, and of the whole model in float64."""

import functools
import json
from pathlib import Path

import pytest
import torch
from hugging_face import both, checked, full_tensor, unequal, worst
from launch import launch
from pairwise import base_choice
from pool import on_ranks
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import cached, register_parametrization
from torch.utils.checkpoint import checkpoint
from torch_parallel import decoder, parallel, step

import ascend_parallel
from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.decision import Known, because
from ascend_parallel.patches import linear_call
from ascend_parallel.tuning.measured.decider import Decider


def parallelised(group, plan, **options):
    ascend_parallel.configure(num_chunks=4)  # the forwards are installed while the model is parallelised
    return parallel(decoder(**options), init_device_mesh("cpu", (group.size(),)), plan)


def calls():
    return {name: count["calls"] for name, count in COUNTS.as_dict().items()}


def trained(group, plan, options, micro_batches):
    """Return the names that differ from plain, the worst error against the whole model, and the overlapped calls."""
    model = parallelised(group, plan, **options)
    before = calls()
    plain, overlapped = both(model, lambda model: step(model, micro_batches))
    right = step(decoder(**{**options, "dtype": torch.float64}), micro_batches)
    after = {name: count - before.get(name, 0) for name, count in calls().items()}
    return unequal(plain, overlapped), worst(overlapped, right), {name: n for name, n in after.items() if n}


class Adapted(torch.nn.Module):
    """A row layer with a LoRA, all of whose layers have styles, after a column layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.base = torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 256, bias=False)
        self.A, self.B = torch.nn.Linear(512, 16, bias=False), torch.nn.Linear(16, 256, bias=False)

    def forward(self, x):
        inner = self.up(x).relu()
        return self.base(inner) + self.B(self.A(inner))


def stepped(model, dtype=torch.float32):
    model.zero_grad()
    x, dy = (torch.randn(512, 256, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    y = model(x.requires_grad_())
    full_tensor(y).backward(dy)
    return {
        "y": full_tensor(y).detach(),
        "dx": x.grad,
        **{name: full_tensor(p.grad) for name, p in model.named_parameters()},
    }


@on_ranks(2)
def test_a_lora_by_styles_has_plains_bits_but_where_torch_adds_products_of_a_partial_gradient(group):
    """A's output gradient arrives as Partial: torch multiplies the parts, this package their sum."""
    ascend_parallel.configure(num_chunks=4)
    row, column = (
        functools.partial(style, output_layouts=Replicate(), use_local_output=False)
        for style in (RowwiseParallel, ColwiseParallel)
    )
    styles = {"up": ColwiseParallel(use_local_output=False), "base": row(), "A": row(), "B": column()}
    model = parallelize_module(Adapted(), init_device_mesh("cpu", (group.size(),)), styles)
    plain, overlapped = both(model, stepped)
    truth = stepped(Adapted().double(), torch.float64)
    assert set(unequal(plain, overlapped)) <= {"dx", "up.weight"}
    assert worst(overlapped, truth)[0] < 1e-6


@pytest.mark.sample("3-layers")
@pytest.mark.parametrize(
    ("count", "plan"), base_choice([2, 3, 4], ["plain", "layers", "sequence"], (2, "layers")), ids=str
)
def test_losses_and_gradients(ranks, plan, count):
    for different, (error, where), made in ranks(count).run(trained, plan, {}, 1):
        if count == 2:
            assert different == []
        assert error < 2e-5, where
        # In each of two blocks: two row layers, and five column layers; the vocabulary's layer gathers for itself.
        if plan == "plain":
            assert made == {"matmul_all_reduce": 2 * 7}
        else:  # one column layer of attention and one of the MLP gathers for the others; then one reduce-scatter
            gathering = 5 if plan == "layers" else 2
            assert made["matmul_reduce_scatter"] == made["all_gather_matmul"] == 2 * (2 + gathering) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "options", "micro_batches", "limit"),
    [
        ("layers", {"dtype": torch.bfloat16}, 1, 0.1),
        ("sequence", {"dtype": torch.bfloat16}, 1, 0.1),
        *((plan, {"bias": True}, 2, 2e-5) for plan in ("plain", "layers", "sequence")),
        ("plain", {"dtype": torch.float64}, 1, 1e-12),
    ],
)
def test_other_models(ranks, plan, options, micro_batches, limit):
    for different, (error, where), _ in ranks(2).run(trained, plan, options, micro_batches):
        if "bias" not in options:  # torch adds a share of a row layer's bias on each rank before the sum
            assert different == []
        assert error < limit, where


def sized(group, plan, options, rows):
    model = parallelised(group, plan, **options)
    return unequal(*both(model, lambda model: step(model, rows=rows)))


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "hidden", "inner"), [("plain", 1024, 2816), ("sequence", 2048, 8192)])
def test_sizes_of_real_layers(ranks, plan, hidden, inner):
    options = {"hidden": hidden, "inner": inner, "heads": 16, "layers": 1}
    assert ranks(2).run(sized, plan, options, (2, 128)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(3, 90), (1, 96)])
def test_batches(ranks, rows):
    for plan in ("plain", "layers", "sequence"):
        assert ranks(2).run(sized, plan, {}, rows) == [[], []]


@on_ranks(2)
def test_habits_of_users_keep_plains_bits(group):
    found = {}
    for plan in ("plain", "sequence"):
        model = parallelised(group, plan)
        for block in model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        found[plan, "checkpoint"] = unequal(*both(model, step))
        for block in model.layers:
            del block.forward
        hooks = [each.register_forward_hook(lambda *_: None) for each in model.modules()]
        hooks += [each.register_forward_pre_hook(lambda *_: None) for each in model.modules()]
        found[plan, "hooks"] = unequal(*both(model, step))
        for hook in hooks:
            hook.remove()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("wq" in name or "w3" in name or "norm" in name)
        found[plan, "frozen"] = unequal(*both(model, step))
        with torch.no_grad():
            ids = torch.randint(480, (2, 96))
            plain, overlapped = both(model, lambda model, ids=ids: {"y": full_tensor(model(ids))})
        found[plan, "no gradients"] = unequal(plain, overlapped)
    assert {name: different for name, different in found.items() if different} == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["sequence", "plain"])
@on_ranks(4)
def test_with_fsdp_on_two_by_two(group, plan):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(), mesh["tp"], plan)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    before = sum(calls().values())
    different, made = unequal(*both(model, step)), sum(calls().values()) - before
    assert different == []
    assert made == (14 if plan == "plain" else 18)


@on_ranks(2)
def test_a_class_of_later_multiplies_between_the_collectives_of_the_layer(group):
    class Quantised(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight * 1.5)

    class Other(Quantised):
        forward = functools.partialmethod(Quantised.forward)

    model = parallelised(group, "sequence")
    on = str(ascend_parallel.coverage(model))
    model.layers[0].attention.wk.__class__ = Other
    ascend_parallel.configure(num_chunks=4)
    other = str(ascend_parallel.coverage(model))
    different = unequal(*both(model, step))
    assert on == "15 of 15 linear layers covered"
    assert other.startswith("14 of 15 linear layers covered (1 Other: its class is test_torch_native.")
    assert different == []


@on_ranks(2)
def test_a_forward_in_a_row_layers_place_may_have_other_features(group):
    ascend_parallel.configure(num_chunks=4)  # the forwards are installed while the layer is parallelised
    mesh = init_device_mesh("cpu", (2,))
    layer = parallelize_module(torch.nn.Linear(16, 8), mesh, RowwiseParallel(input_layouts=Replicate()))
    torch.manual_seed(1)
    weight, x = distribute_tensor(torch.randn(6, 16), mesh, [Shard(1)]), torch.randn(128, 16)
    layer.forward = lambda given: torch.nn.functional.linear(given, weight)
    found = []
    for chunks in (1, 4):
        ascend_parallel.configure(num_chunks=chunks)
        found.append(layer(x))
    assert calls()["matmul_all_reduce"] > 0
    assert found[0].shape == (128, 6)
    assert torch.equal(*found)


@pytest.mark.sample("layers")
@pytest.mark.parametrize("plan", ["plain", "layers"])
@on_ranks(2)
def test_verification_finds_a_planted_fault(group, plan):
    def wrong(right):
        return lambda *args, **kwargs: right(*args, **kwargs) + 1e-3 * group.rank()

    _, error = checked(parallelised(group, plan), step, linear_call, "run_column", wrong)
    assert "is wrong on rank 1" in error


USES = {  # what a user's code runs the forward and backward in
    "saved tensors that lose precision": lambda: saved_tensors_hooks(
        lambda saved: (saved.dtype, saved.bfloat16() if saved.is_floating_point() else saved),
        lambda packed: packed[1].to(packed[0]),
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("plan", "batch"), [("plain", 2), ("layers", 2), ("layers", 1)])
@on_ranks(2)
def test_a_check_sees_the_operands_that_the_layer_sees(group, plan, use, batch):
    model = parallelised(group, plan, layers=1, bias=True)
    steps = []
    for every in (0, 1):
        ascend_parallel.configure(num_chunks=4, verify_every=every)
        with USES[use]():
            steps.append(step(model, rows=(batch, 96)))
    report = ascend_parallel.verification()
    LEDGER.clear()
    ascend_parallel.configure(num_chunks=1, verify_every=0)
    different, backwards, notes = unequal(*steps), sum(layer.backwards for layer in report.layers), report.notes
    assert different == []
    assert notes == []
    assert backwards >= 2  # both row layers at least


class Shifted(torch.nn.Module):
    """A parametrisation of a weight, with a parameter of its own."""

    def __init__(self, weight):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight):
        return weight + self.shift


@pytest.mark.parametrize("plan", ["plain", "sequence"])
@on_ranks(2)
def test_a_parametrised_weight_is_checked(group, plan):
    model = parallelised(group, plan, layers=1)
    for layer in (model.layers[0].attention.wq, model.layers[0].attention.wo):
        register_parametrization(layer, "weight", Shifted(layer.weight.detach()))
    assert unequal(*both(model, step)) == []
    ascend_parallel.configure(num_chunks=4, verify_every=1)
    step(model)
    with cached():
        step(model)
    report = ascend_parallel.verification()
    LEDGER.clear()
    ascend_parallel.configure(num_chunks=1, verify_every=0)
    assert {"ParametrizedLinear"} < {layer.kind for layer in report.layers}


def recorded(group, folder):
    """Return the passes that a timeline of a step has, and the fields of their calls."""
    model = parallelised(group, "sequence")
    with ascend_parallel.timeline.record(folder):
        step(model)
    ascend_parallel.configure(num_chunks=1)
    torch.distributed.barrier(group)  # each rank writes its own file
    files, _ = read_run(Path(folder))
    return [(each.kind, each.direction) for each in files[group.rank()].passes]


def test_a_timeline_has_every_pass(ranks, tmp_path):
    for passes in ranks(2).run(recorded, str(tmp_path)):
        # Five column and two row layers in each of two blocks, and the last layer.
        assert passes.count(("column", "forward")) == passes.count(("column", "backward")) == 2 * 5 + 1
        assert passes.count(("row", "forward")) == passes.count(("row", "backward")) == 2 * 2


def tuned(group, path, plan):
    """Return what differs from plain with COC_TUNE, and the shapes in the plan that it writes."""
    model = parallelised(group, plan, layers=1)
    different = unequal(*both(model, step, tune=path, num_chunks=1))
    return different, Path(path).exists() and len(json.loads(Path(path).read_text())["entries"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_tuning_measures_the_shapes(ranks, tmp_path, plan):
    (different, shapes), (also, _) = ranks(2).run(tuned, str(tmp_path / "plan.json"), plan)
    assert different == also == []
    assert shapes >= 3


@pytest.mark.sample("plain")
@pytest.mark.parametrize("plan", ["plain", "sequence"])
@on_ranks(2)
def test_what_tuning_keeps_whole_runs_as_torch_does(group, plan):
    model = parallelised(group, plan)
    before = calls()

    def never(self, shape, group, *, backward, agree):
        agree()
        return Known(because=because("as_fast"), original=True)

    own, Decider.known_of_layer = Decider.known_of_layer, never
    try:
        different = unequal(*both(model, step, num_chunks="auto"))
    finally:
        Decider.known_of_layer = own
    assert different == []
    assert calls() == before


SIMULATED_RANKS = """
import ascend_parallel, torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("fake", rank=0, world_size=2)
mesh = dist.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), torch.randn(256, 64)
whole = model(x)
with LocalTensorMode(2):
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    y = model(x)
    print(torch.allclose((y + 0).reconcile(), whole, atol=1e-5))
"""


def test_ranks_that_torch_simulates_in_one_process_run_torchs_own_layers():
    (done,) = launch(SIMULATED_RANKS, [{"COC_PARALLEL_NUM": "4"}])
    assert done.stdout == "True\n", done.stderr
    assert "torch's LocalTensorMode simulates its ranks in one process" in done.stderr
