"""What decides the chunks of a pass beside the settings, and the reasons, without a process."""

from string import Formatter

import pytest
import torch

from ascend_parallel import Settings
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.decision import NOTHING, SENTENCES, Known, Reason, because
from ascend_parallel.ops.registry import UnmetRequestError, choose
from ascend_parallel.overlap.known import known_in_call, known_of
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD, LayerShape
from ascend_parallel.tuning.measured.chunk_plan import Entry, Machine, Plan

MACHINE = Machine(hardware="a", torch="2.13.0", backend="gloo", threads=1, ranks=2)


def shape(kind, sequence_parallel=False, **fields):
    return LayerShape(kind, 512, 64, 32, 2, sequence_parallel, torch.float32, "cpu", **fields)


def plan(*cuts):
    """Return a plan with the sizes of each operator."""
    return Plan(MACHINE, tuple(Entry.of(*operator, sizes, serial=1.0, chosen=0.5) for operator, sizes in cuts))


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        (shape("row"), (ALL_REDUCE, 512, 64, 32), None),
        (shape("row", True), (REDUCE_SCATTER, 512, 64, 32), (ALL_GATHER, 512, 32, 64)),
        (shape("column"), None, (ALL_REDUCE, 512, 32, 64)),
        (shape("column", True), (ALL_GATHER, 1024, 64, 32), (REDUCE_SCATTER, 1024, 32, 64)),
        (shape("column", reduce_input_grad=False), None, None),
    ],
)
def test_operators_of_a_layer(layer, forward, backward):
    """A layer's rows are this rank's own; a column layer with sequence parallelism multiplies those of all ranks."""
    for direction, expected in ((FORWARD, forward), (BACKWARD, backward)):
        problem = (found := layer.operator(direction)) and found.matmul
        assert (problem and (problem.operator, problem.m, problem.k, problem.n)) == expected
    assert [operator.direction for operator in layer.operators] == [
        direction for direction, found in ((FORWARD, forward), (BACKWARD, backward)) if found
    ]


@pytest.mark.parametrize("kind", ["row", "column"])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_are_multiplied_stay_when_ranks_share_them(kind, shared):
    whole = shape(kind)
    assert whole.sharing_rows(shared).rows == whole.rows
    assert whole.sharing_rows(shared).own_rows == (256 if kind == "column" and shared else 512)


def decision_in(settings, layer, direction, **options):
    known = known_in_call(settings, known_of(settings), layer, direction, **options)
    return choose(layer.operator(direction).matmul, settings, known)


def test_what_no_rule_concerns_is_as_the_user_said():
    settings = Settings(num_chunks=4)
    for layer in (shape("row"), shape("column", True)):
        for direction in (FORWARD, BACKWARD):
            assert known_in_call(settings, NOTHING, layer, direction, leaves_rows=True) is NOTHING


def test_a_pass_takes_its_own_entries_of_a_plan():
    layer = shape("row", True)
    forward, backward = layer.operators
    settings = Settings(plan=plan((forward, (128, 128)), (backward, (64,) * 4)))
    for operator, count in ((forward, 2), (backward, 4)):
        decision = decision_in(settings, layer, operator.direction)
        assert (len(decision.sizes), decision.codes) == (count, ("plan_chunks",))


def test_a_column_backward_is_fused_on_request_alone():
    layer, asked = shape("column", True), Settings(fused=True, enable_coc_in_column_backward=True)
    backward = decision_in(Settings(fused=True), layer, BACKWARD)
    assert (len(backward.sizes), backward.codes) == (1, ("column_backward", "count"))
    assert decision_in(asked, layer, BACKWARD).code == "not_fused"
    assert decision_in(Settings(fused=True), layer, FORWARD).code == "not_fused"


@pytest.mark.parametrize(("number", "chunks"), [(1, 4), (3, 3)])
def test_rows_that_stay_unfinished_are_cut_although_a_plan_keeps_them_whole(number, chunks):
    layer = shape("row")
    settings = Settings(num_chunks=number, plan=plan((layer.operator(FORWARD), (512,))))
    whole = decision_in(settings, layer, FORWARD)
    assert (len(whole.sizes), whole.code) == (1, "plan_whole")
    cut = decision_in(settings, layer, FORWARD, leaves_rows=True)
    assert (len(cut.sizes), cut.codes) == (chunks, ("rows_left", "count"))


def test_what_was_measured_stands_above_the_request_to_measure_and_below_the_users_sizes():
    layer, settings = shape("row"), Settings(auto=True)
    matmul = layer.operator(FORWARD).matmul
    known = Known(plan=plan((layer.operator(FORWARD), (256, 256))), because=because("measured"))
    assert choose(matmul, settings, NOTHING).code == "unmeasured"
    assert choose(matmul, settings, known).codes == ("measured", "plan_chunks")
    named = Settings(auto=True, customized_coc={matmul.shape: 4})
    assert len(choose(matmul, named, known).sizes) == 4
    assert len(choose(matmul, named, known._replace(alone=True)).sizes) == 2


@pytest.mark.parametrize("mode", [0, 1])
def test_nothing_known_cuts_what_coc_mode_leaves_whole(mode):
    settings, matmul = Settings(num_chunks=4, mode=mode), shape("row").operator(FORWARD).matmul
    for known in (NOTHING, Known(number=4), Known(plan=plan(), because=because("measured"))):
        decision = choose(matmul, settings, known)
        assert (len(decision.sizes), decision.code) == (1, "mode")


def test_what_somebody_else_decides_is_no_unmet_request_of_the_user():
    settings, matmul = Settings(num_chunks=4, strict=True), shape("row").operator(FORWARD).matmul
    with pytest.raises(UnmetRequestError, match="has no entry"):
        choose(matmul, settings, Known(plan=plan()))
    assert not choose(matmul, settings, Known(plan=plan(), because=because("measured"))).unmet


@pytest.mark.parametrize("code", SENTENCES)
def test_every_reason_has_a_sentence_that_names_its_facts(code):
    """Nobody writes a reason's words but the catalogue, so that programs can rely on its code."""
    facts = {name: "7" for _, name, _, _ in Formatter().parse(SENTENCES[code]) if name}
    facts |= {"gain": 7.0} if "gain" in facts else {}
    assert because(code, **facts) == Reason(code, SENTENCES[code].format(**facts))
