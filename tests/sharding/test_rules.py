"""Tests every strategy of every rule against the whole operator, on simulated ranks (tests/support/brute_force.py)."""

import random

import pytest
import rule_cases
import rule_cases_along
import rule_cases_of_samples
import torch
from brute_force import call_of, check, check_all, describe, fits, whole_outputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_drawing import CASES, Drawing
from rule_models import made

from ascend_parallel.sharding.graph import BUFFER, INPUT, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, SUM, shard
from ascend_parallel.sharding.rules import OpPlacements, has_rule, local_call, register_rule, registry, strategies
from ascend_parallel.sharding.tracing.trace import trace

aten = torch.ops.aten
assert rule_cases and rule_cases_along and rule_cases_of_samples  # imported for their entries in CASES
DRAWS = settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def texts(call):
    return {describe([strategy]) for strategy in strategies(call)}


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", CASES)
def test_all_strategies_of_an_operator_give_the_whole(name):
    case, seen = CASES[name], set()

    @DRAWS
    @given(st.data())
    def every_strategy(data):
        call, tensors = call_of(case.target, *case.arguments(Drawing(data.draw)), **case.named)
        assert has_rule(call)
        for mesh in ((2,), (3,)):
            seen.update(map(describe, check_all(call, tensors, mesh, case.constants)))

    every_strategy()
    cut = {text for text in seen if "S(" in text or "P(" in text}
    assert len(cut) >= case.at_least, f"only {sorted(seen)}"


MESHES = ["linear.default 2 bias", "embedding.default", "addmm.default", "convolution.default", "view.default"]
MESHES += ["expand.default", "mean.dim", "add.Tensor", "mul.Tensor", "layer_norm.default", "gather.default"]
MESHES += ["scaled_dot_product_attention.default grouped", "cross_entropy_loss.default mean", "cat.default"]
MESHES += ["cross_entropy_loss.default mean, smoothed", "matmul.default 4-D by 3-D", "repeat_interleave.self_int flat"]
MESHES += ["_native_batch_norm_legit_functional.default", "index.Tensor", "repeat.default", "mse_loss.default mean"]
MESHES += [f"cross_entropy_loss.default {reduction}, 3-D, 6 classes, 0.1" for reduction in ("none", "mean", "sum")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MESHES)
def test_pairs_of_strategies_on_a_mesh_give_the_whole(name):
    case, seen, chance = CASES[name], set(), random.Random(5)

    @settings(DRAWS, max_examples=3)
    @given(st.data())
    def pairs(data):
        drawing = Drawing(data.draw, sizes=(4, 2, 8))
        call, tensors = call_of(case.target, *case.arguments(drawing), **case.named)
        found = check_all(call, tensors, (2, 2), case.constants, limit=25, random=chance)
        seen.update(describe(pair) for pair in found if pair[0] != pair[1])

    pairs()
    assert len(seen) >= 4


@pytest.mark.parametrize(
    ("target", "arguments", "expected"),
    [
        (
            aten.linear.default,
            (torch.ones(2, 4, 6), torch.ones(8, 6), torch.ones(8)),
            {
                "R R R -> R",  # whole everywhere
                "R* R* R* -> R*",
                "S(0) R* R* -> S(0)",  # data parallel
                "S(1) R* R* -> S(1)",  # sequence parallel
                "R* S(0) S(0) -> S(2)",  # column parallel
                "S(2) S(1) R* -> P(sum)",  # row parallel
                "P(sum) R* R* -> P(sum)",
            },
        ),
        (
            aten.embedding.default,
            (torch.ones(8, 4), torch.zeros(2, 6, dtype=torch.int64)),
            {"R R -> R", "R* R -> R*", "R* S(0) -> S(0)", "R* S(1) -> S(1)", "S(1) R -> S(2)", "S(0) R -> P(sum)"},
        ),
        (
            aten.add.Tensor,
            (torch.ones(4), torch.ones(4)),
            {"R R -> R", "R* R* -> R*", "S(0) S(0) -> S(0)"}
            | {f"{partial} {partial} -> {partial}" for partial in ("P(sum)", "P(avg)")},
        ),
        (aten.relu.default, (torch.ones(4, 1),), {"R -> R", "R* -> R*", "S(0) -> S(0)"}),
        (
            aten.view.default,
            (torch.ones(2, 4, 6), [8, 6]),
            {"R -> R", "R* -> R*", "S(0) -> S(0)", "S(2) -> S(1)"}
            | {f"{partial} -> {partial}" for partial in ("P(sum)", "P(avg)")},
        ),
        (
            aten.cross_entropy_loss.default,
            (torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)),
            {"R R -> R", "R* R -> R*", "S(0) R -> P(sum)", "S(1) R -> R"},
        ),
    ],
)
def test_strategies_are_all_that_there_are(target, arguments, expected):
    call, _ = call_of(target, *arguments)
    assert texts(call) == expected
    assert describe(strategies(call)[:1]).startswith("R")


def test_an_operator_without_a_rule_runs_whole():
    call, tensors = call_of(aten.linalg_inv.default, torch.eye(4).double() + 0.1)
    assert not has_rule(call)
    assert texts(call) == {"R -> R", "R* -> R*"}
    check_all(call, tensors, (2,))


WRONG = {
    "a sum that is not one": (aten.sigmoid.default, OpPlacements((SUM,), (SUM,)), "output 0"),
    "a slice of another dimension": (aten.t.default, OpPlacements((shard(0),), (shard(0),)), "output 0"),
    "a factor whose gradient is only a part": (
        aten.mul.Tensor,
        OpPlacements((shard(0), REPLICATE), (shard(0),)),
        "should have the same",
    ),
    "a gradient added up twice": (aten.neg.default, OpPlacements((PARTIAL_GRAD,), (REPLICATE,)), "gradient of input 0"),
    "a bias added by every rank": (aten.add.Tensor, OpPlacements((SUM, PARTIAL_GRAD), (SUM,)), "output 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name):
    target, wrong, message = WRONG[name]
    tensors = [torch.randn(4, 4, dtype=torch.float64) for _ in wrong.inputs]
    if len(tensors) == 2:
        tensors[1] = tensors[1][:1]
    call, tensors = call_of(target, *tensors)
    with pytest.raises(AssertionError, match=message):
        check(call, tensors, [wrong], (2,))


def test_a_bias_added_by_every_rank_of_a_row_parallel_linear_is_caught(monkeypatch):
    linear = registry.ENTRIES["aten.linear"]
    monkeypatch.setitem(registry.ENTRIES, "aten.linear", registry.RegisteredRule(linear.rule))
    drawn = [torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (2, 6), (2,))]
    with pytest.raises(AssertionError, match="output 0"):
        check_all(*call_of(aten.linear.default, *drawn), (2,))


@pytest.fixture
def rule_of_this_test():
    """Give the operator for which a test registers a rule, and remove the rule."""
    yield aten.cummax
    registry.ENTRIES.pop("aten.cummax")


def test_a_user_can_register_a_rule(rule_of_this_test):
    call, tensors = call_of(aten.cummax.default, torch.randn(4, 2, dtype=torch.float64), 1)
    by_row = OpPlacements((shard(0),), (shard(0), shard(0)))

    @register_rule(rule_of_this_test)
    def rule(asked):
        assert asked is call
        return [by_row]

    assert strategies(call)[2:] == [by_row]
    check(call, tensors, [by_row], (2,))
    register_rule("aten.cummax.default", lambda asked: [])
    assert len(strategies(call)) == 2
    with pytest.raises(ValueError, match="give an operator"):
        register_rule("cummax", rule)


def dropped(state, coordinate, x):
    call, _ = call_of(aten.dropout.default, torch.ones(8, 8), 0.5, True)
    torch.manual_seed(coordinate)  # ranks may be seeded apart
    return local_call(call, [(state,)], [(state,)], (2,), (coordinate,))([x], stream="one")[0]


def test_dropout_differs_between_pieces_and_agrees_between_copies():
    whole, piece = torch.ones(8, 8), torch.ones(4, 8)
    assert torch.equal(dropped(REPLICATE, 0, whole), dropped(REPLICATE, 1, whole))
    assert torch.equal(dropped(PARTIAL_GRAD, 0, whole), dropped(PARTIAL_GRAD, 1, whole))
    pieces = [dropped(shard(0), place, piece) for place in (0, 1)]
    assert not torch.equal(*pieces)
    assert all(set(piece.unique().tolist()) == {0.0, 2.0} for piece in pieces)


def test_dropout_follows_its_stream_and_leaves_the_process_generator_alone():
    call, _ = call_of(aten.dropout.default, torch.ones(8, 8), 0.5, True)
    cut, before = [(shard(0),)], torch.get_rng_state()

    def drawn(stream):
        return local_call(call, cut, cut, (2,), (0,))([torch.ones(4, 8)], stream=stream)[0]

    assert torch.equal(drawn("one"), drawn("one"))
    assert not torch.equal(drawn("one"), drawn("two"))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match=r"dropout.* draws random numbers: give stream"):
        drawn("")


def test_uneven_combinations_are_not_checked():
    call, _ = call_of(aten.relu.default, torch.ones(3))
    assert fits(call, strategies(call)[2:3], (3,))
    assert not fits(call, strategies(call)[2:3], (2,))


def test_rules_are_of_operators_that_there_are():
    pytest.importorskip("transformers.integrations.moe")  # registers operators of its own
    missing = []
    for name in registry.ENTRIES:
        library, packet, *overload = name.split(".")
        if library == "npu":  # torch_npu's: test_npu_rules.py has the wheel
            continue
        operator = getattr(getattr(torch.ops, library), packet, None)
        if operator is None or not set(overload) <= set(operator.overloads()):
            missing.append(name)
    assert not missing


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Llama", "Bert", "Block in training", "Block in evaluation"])
def test_all_operators_of_a_traced_model_give_the_whole(name):
    model, args = made(name)
    graph, inputs = trace(model, args), iter(args)
    named, values = {**dict(model.named_parameters()), **dict(model.named_buffers())}, {}
    for node in graph.nodes.values():
        if node.call is None:
            values[Value(node.name)] = next(inputs) if node.kind == INPUT else named[node.source].detach()
            continue
        tensors = [values[value] for value in node.inputs]
        assert has_rule(node.call)
        constants = [place for place, value in enumerate(node.inputs) if graph.nodes[value.node].kind == BUFFER]
        assert check_all(node.call, tensors, (2,), constants)
        outputs = whole_outputs(node.call, tensors)
        values |= {Value(node.name, index): output.detach() for index, output in enumerate(outputs)}
