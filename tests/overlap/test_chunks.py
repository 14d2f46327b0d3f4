"""What cuts a pass of a layer, and the reason, without a process."""

import pytest
import torch

from ascend_parallel import Settings
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.overlap.chunks import Chunks
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD, LayerShape
from ascend_parallel.tuning.measured.chunk_plan import Entry, Machine, Plan

MACHINE = Machine(hardware="a", torch="2.13.0", backend="gloo", threads=1, ranks=2)


def shape(kind, sequence_parallel=False, **fields):
    return LayerShape(kind, 512, 64, 32, 2, sequence_parallel, torch.float32, "cpu", **fields)


def plan(*cuts):
    """Return a plan with the sizes of each operator."""
    return Plan(MACHINE, tuple(Entry.of(operator, sizes, serial=1.0, chosen=0.5) for operator, sizes in cuts))


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
        problem = (found := layer.operator(direction)) and found.problem
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


def test_settings_that_no_rule_concerns_stay_the_users_own():
    settings = Settings(num_chunks=4)
    for layer in (shape("row"), shape("column", True)):
        for direction in (FORWARD, BACKWARD):
            chunks = Chunks.for_call(settings, layer, direction, leaves_rows=True)
            assert chunks.settings is settings
            assert (chunks.reason, chunks.original) == ("", False)


def test_a_pass_takes_its_own_entries_of_a_plan():
    layer = shape("row", True)
    forward, backward = layer.operators
    settings = Settings(plan=plan((forward, (128, 128)), (backward, (64,) * 4)))
    for operator, count in ((forward, 2), (backward, 4)):
        assert len(Chunks.for_call(settings, layer, operator.direction).choice(operator.problem).sizes) == count


def test_a_column_backward_is_fused_on_request_alone():
    layer = shape("column", True)
    problem = layer.operator(BACKWARD).problem
    chunks = Chunks.for_call(Settings(fused=True), layer, BACKWARD)
    assert not chunks.settings.fused
    assert chunks.choice(problem).reason.startswith("a column layer's backward is fused with enable_coc_in_column_ba")
    assert len(chunks.choice(problem).sizes) == 1
    asked = Settings(fused=True, enable_coc_in_column_backward=True)
    assert Chunks.for_call(asked, layer, BACKWARD).settings.fused
    assert Chunks.for_call(Settings(fused=True), layer, FORWARD).settings.fused


@pytest.mark.parametrize(("number", "chunks"), [(1, 4), (3, 3)])
def test_rows_that_stay_unfinished_are_cut_although_a_plan_keeps_them_whole(number, chunks):
    layer = shape("row")
    operator = layer.operator(FORWARD)
    settings = Settings(num_chunks=number, plan=plan((operator, (512,))))
    whole = Chunks.for_call(settings, layer, FORWARD)
    assert len(whole.choice(operator.problem).sizes) == 1
    cut = Chunks.for_call(settings, layer, FORWARD, leaves_rows=True)
    assert len(cut.choice(operator.problem).sizes) == chunks
    assert "although the plan keeps them whole" in cut.choice(operator.problem).reason


def test_what_was_measured_replaces_the_request_to_measure():
    settings, known = Settings(auto=True), plan()
    chunks = Chunks.measured(settings, known, "as fast", original=True)
    assert (chunks.settings.plan, chunks.settings.auto, chunks.settings.mode) == (known, False, 2)
    assert chunks.original
    assert settings.auto  # the user's settings stay


@pytest.mark.parametrize("mode", [0, 1])
def test_no_rule_cuts_what_coc_mode_leaves_whole(mode):
    settings, problem = Settings(num_chunks=4, mode=mode), shape("row").operator(FORWARD).problem
    for chunks in (Chunks(settings), Chunks.counted(settings, 4, "tried"), Chunks.measured(settings, None)):
        assert len(chunks.choice(problem).sizes) == 1
