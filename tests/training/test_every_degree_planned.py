"""COC_DETERMINISTIC=tp in planned models: a graph trains with the same bits on every mesh, or is an error."""

import pytest
import small_models
import torch
from every_degree import at_degrees, digest
from marks import promise

import ascend_parallel
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.settings import Settings
from ascend_parallel.sharding import ProcessMesh, mixture_of_experts, propagate, trace
from ascend_parallel.sharding.runtime.every_degree import refuse_sums_without_tree
from ascend_parallel.training.options import OverlapOptions
from ascend_parallel.training.recompute import Recompute
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.train_step import train_step

STEPS = 5
TREE = {"deterministic": "tp"}
COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
CONFIGURED = {f"layers.*.{name}": ((("dp", None, None), ("mp", None)), None) for name in COLUMNS}
CONFIGURED |= {f"layers.*.{name}": ((("dp", None, "mp"), (None, "mp")), None) for name in ("attention.o", "mlp.down")}


def train(group, settings, options, dtype=torch.float32):
    """The losses of some steps, and digests of whole weights after them, or why not."""
    options = {"operators": CONFIGURED, "mode": "semi_auto", "mesh": {"dp": 1, "mp": group.size()}, **options}
    torch.manual_seed(3)
    model = small_models.Llama(width=128, heads=16, groups=8, wide=256).to(dtype)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(64, (2, 4, 16), generator=generator).unbind() for _ in range(STEPS)]
    strategy = Strategy(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ascend_parallel.configure(**settings)
    try:
        step = train_step(model, batches[0], optimizer, strategy)
        losses = [step(*batch).item().hex() for batch in batches]
    except ascend_parallel.DegreeError as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1)
    (module,) = step.modules
    return {"losses": losses, **{name: digest(weight) for name, weight in module.full_state_dict().items()}}


@promise("degree-planned")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_planned_model_trains_alike_on_every_mesh(ranks, dtype):
    """With chunks, too; one rank multiplies in the same blocks."""
    (one,) = at_degrees(ranks, train, TREE, {}, dtype, degrees=(1,))
    assert len(set(one["losses"])) == STEPS
    assert at_degrees(ranks, train, TREE, {}, dtype, degrees=(2, 4)) == [one, one]
    assert at_degrees(ranks, train, {**TREE, "num_chunks": 3}, {}, dtype, degrees=(2,)) == [one]


def test_without_it_meshes_differ(ranks):
    """The comparison above can fail."""
    one, two = at_degrees(ranks, train, {"deterministic": True}, {}, degrees=(1, 2))
    assert one["losses"] != two["losses"]


@promise("degree-planned")
@pytest.mark.slow
@pytest.mark.parametrize(("collectives", "degree"), [("keep", 8), ("recompute", 2)])
def test_recompute_and_eight_ranks_change_nothing(ranks, collectives, degree):
    (one,) = at_degrees(ranks, train, TREE, {}, degrees=(1,))
    recompute = {"recompute": Recompute(modules=("layers.*",), collectives=collectives)}
    assert at_degrees(ranks, train, TREE, recompute, degrees=(1, degree)) == [one] * 2


ATTENTION = {name: layouts for name, layouts in CONFIGURED.items() if "attention" in name}
HALF = {name: CONFIGURED[name] for name in ("layers.*.mlp.gate", "layers.*.mlp.up")}


@promise("degree-planned")
def test_what_the_planner_leaves_whole_trains_alike_too(ranks):
    """It gathers the features of a column layer for a layer that it has not cut."""
    options = {"operators": HALF, "mode": "auto"}
    one, two = at_degrees(ranks, train, TREE, options, degrees=(1, 2))
    assert one == two
    assert len(set(one["losses"])) == STEPS


REFUSALS = {
    "automatic": (
        {"operators": ATTENTION, "mode": "auto", "memory_limit": 5.2e6},
        "layers.0.mlp.gate: linear_4 on mesh dimension mp: the planner has cut it",
    ),
    "data": ({"mesh": {"dp": 2, "mp": 1}}, "the gradient of its input is a sum over ranks, which has no tree"),
    "no overlap": ({"overlap": OverlapOptions(operators=False)}, "a plan without overlap or with compile"),
    "clipping": ({"max_norm": 1.0}, "max_norm=1.0: the norm of gradients is summed over the ranks' parts"),
}


@promise("degree-planned")
@pytest.mark.parametrize(("options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_has_no_tree_is_an_error(ranks, options, words):
    for text in ranks(2).run(train, TREE, options):
        assert isinstance(text, str)
        assert words in text


class Scores(torch.nn.Module):
    """A product of two activations."""

    def forward(self, x, y):
        return x @ y


class Experts(torch.nn.Module):
    """Experts behind a router's scores."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(8, *size)) for size in ((12, 4), (4, 12)))

    def forward(self, x, y):
        chosen, index = y.softmax(-1).topk(2)
        return mixture_of_experts(x, index, chosen, self.up, self.down)


class Model(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, y):
        return self.part(x, y) * 2


INPUTS = {Scores: (torch.randn(2, 8, 16), torch.randn(2, 16, 4)), Experts: (torch.randn(2, 8, 4), torch.randn(2, 8, 8))}
CUT_ROWS, CUT_SUM = ((None, "mp", None), (None, None, None)), ((None, None, "mp"), (None, "mp", None))
BATCHES = (("mp", None, None), ("mp", None, None))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Scores, {"strategies": {"part": (CUT_ROWS, None)}}, "matmul on mesh dimension mp: it is cut, and neither"),
        (Scores, {"strategies": {"part": (CUT_SUM, None)}}, "matmul on mesh dimension mp: its partial sums"),
        (Scores, {"strategies": {"part": (BATCHES, None)}}, None),  # whole matrices
        (Experts, {"expert_dim": "mp"}, "mixture_of_experts on mesh dimension mp: "),
        (Experts, {}, "mixture_of_experts on mesh dimension mp: "),
    ],
)
def test_matmuls_of_parts_and_experts_are_errors(kind, options, words):
    graph = trace(Model(kind()), INPUTS[kind])
    plan = propagate(graph, ProcessMesh(torch.arange(2), ("mp",)), **options)
    if words is None:
        refuse_sums_without_tree(plan, Settings(**TREE))
        return
    with pytest.raises(DegreeError, match=words):
        refuse_sums_without_tree(plan, Settings(**TREE))
