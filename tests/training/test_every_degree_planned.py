"""COC_DETERMINISTIC=tp in planned models: a graph trains with the same bits on every mesh, or is an error."""

import hashlib

import pytest
import small_models
import torch

import ascend_parallel
from ascend_parallel.training.options import OverlapOptions
from ascend_parallel.training.recompute import Recompute
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.train_step import train_step

STEPS = 5
TREE = {"deterministic": "tp"}
COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
CONFIGURED = {f"layers.*.{name}": ((("dp", None, None), ("mp", None)), None) for name in COLUMNS}
CONFIGURED |= {f"layers.*.{name}": ((("dp", None, "mp"), (None, "mp")), None) for name in ("attention.o", "mlp.down")}


def digest(tensor):
    return hashlib.sha1(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


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


def at_degrees(ranks, settings, options, dtype=torch.float32, *, degrees):
    found = []
    for degree in degrees:
        first, *others = ranks(degree).run(train, settings, options, dtype)
        assert all(other == first for other in others)
        found.append(first)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_a_planned_model_trains_alike_on_every_mesh(ranks, dtype):
    """With chunks, too; one rank multiplies in the same blocks."""
    (one,) = at_degrees(ranks, TREE, {}, dtype, degrees=(1,))
    assert len(set(one["losses"])) == STEPS
    assert at_degrees(ranks, TREE, {}, dtype, degrees=(2, 4)) == [one, one]
    assert at_degrees(ranks, {**TREE, "num_chunks": 3}, {}, dtype, degrees=(2,)) == [one]


def test_without_it_meshes_differ(ranks):
    """The comparison above can fail."""
    one, two = at_degrees(ranks, {"deterministic": True}, {}, degrees=(1, 2))
    assert one["losses"] != two["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["keep", "recompute"])
def test_recompute_and_eight_ranks_change_nothing(ranks, collectives):
    (one,) = at_degrees(ranks, TREE, {}, degrees=(1,))
    recompute = {"recompute": Recompute(modules=("layers.*",), collectives=collectives)}
    assert at_degrees(ranks, TREE, recompute, degrees=(1, 2, 8)) == [one] * 3


ATTENTION = {name: layouts for name, layouts in CONFIGURED.items() if "attention" in name}
HALF = {name: CONFIGURED[name] for name in ("layers.*.mlp.gate", "layers.*.mlp.up")}


def test_what_the_planner_leaves_whole_trains_alike_too(ranks):
    """It gathers the features of a column layer for a layer that it has not cut."""
    options = {"operators": HALF, "mode": "auto"}
    one, two = at_degrees(ranks, TREE, options, degrees=(1, 2))
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


@pytest.mark.parametrize(("options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_has_no_tree_is_an_error(ranks, options, words):
    for text in ranks(2).run(train, TREE, options):
        assert isinstance(text, str)
        assert words in text
