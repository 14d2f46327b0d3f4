"""The first layer's call asks which chunks keep the bits for the whole model: one agreement of its ranks."""

import contextlib
import logging
from unittest import mock

import pytest
import torch
from agreements import agreements
from backends import as_backend
from gpt_training import megatron, train
from hugging_face import load, step, write
from marks import promise
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch_parallel import decoder, parallel
from torch_parallel import step as torch_step

import ascend_parallel
from ascend_parallel.ops import Matmul, bits, choose
from ascend_parallel.ops.decision import OF_GROUPS, of_group
from ascend_parallel.overlap.known import decisions_ahead, known_of
from ascend_parallel.overlap.layer_shape import ROW, LayerShape
from ascend_parallel.tuning.measured.chunk_plan import Plan, this_machine

FOUR = {"num_chunks": 4}
EMPTY = Plan(this_machine(2, torch.device("cpu"), "gloo"))


class Kept(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def gpt(options, backend=None, known=None):
    """Train a GPT of several shapes for two steps; return the agreements, the lines of the log, and the losses."""
    logger, kept = logging.getLogger("ascend_parallel"), Kept()
    known, level = bits.AHEAD if known is None else known, logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        with megatron(2), mock.patch.object(bits, "AHEAD", known), agreements() as asked:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
            with contextlib.nullcontext() if backend is None else as_backend(backend, group):
                losses, _, counts, _ = train({"steps": 2, "vocab": 512, "settings": FOUR, **options}, overlap=True)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    assert counts
    return asked, [line for line in kept.lines if "asked in" in line], losses


@promise("probe-machines")
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"recompute": True}], ids=str)
@on_ranks(2)
def test_all_shapes_of_a_gpt_are_asked_in_one_agreement(group, options):
    asked, lines, _ = gpt(options)
    assert len(asked) == 1 and asked[0] >= 5, asked  # projection, both of the MLP, qkv, the output layer
    assert len(lines) == (group.rank() == 0)
    assert all(f"and {asked[0] - 1} calls that follow: asked in" in line for line in lines), lines


@on_ranks(2)
def test_on_a_device_its_collectives_are_finished_once(group):
    """Two exchanges more: nobody is in a capture, nobody has a collective in flight."""
    asked, _, _ = gpt({}, backend="nccl")
    assert asked[:2] == [0, 0] and len(asked) == 3, asked


@promise("probe-machines")
@on_ranks(2)
def test_what_one_rank_alone_knows_is_asked_when_it_is_called(group):
    """A program may have replaced layers on one rank: the ranks ask the same questions all the same."""
    expected = gpt({})[2]
    asked, _, losses = gpt({}, known=None if group.rank() == 0 else [])
    assert len(asked) >= 5, asked
    assert losses == expected


def other_questions(group):
    """Of three ranks' questions two have the second in common, and all the first and the last."""
    calls = {"all": 512, "some": 256 if group.rank() else 128, "last": 1024}

    class Knows:
        def calls_ahead(self, group, problem):
            for m in calls.values():
                other = Matmul("all_gather_matmul", m * 3, 64, 48, torch.float32, "cpu", 3)
                yield choose(other, ascend_parallel.Settings(num_chunks=4)), "transposed"

    x, w = torch.randn(96, 64), torch.randn(48, 64).t()
    three = torch.distributed.new_group()
    knows = Knows()
    with mock.patch.object(bits, "AHEAD", [knows]), agreements() as asked:
        ascend_parallel.ops.all_gather_matmul(x, w, three, num_chunks=4)
    return asked, sorted(question.matmul.m for question in of_group(three).bits)


def test_of_what_follows_counts_what_every_rank_names(ranks):
    for asked, rows in ranks(3).run(other_questions):
        assert asked == [4]
        assert rows == [96 * 3, 512 * 3, 1024 * 3]


@pytest.mark.parametrize(
    ("m", "settings", "calls"), [(1155, {}, 0), (1156, {}, 2), (1156, {"strict": True, "plan": EMPTY}, 0)]
)
def test_a_call_that_may_never_come_is_no_error(m, settings, calls):
    """Rows of a vision tower that its ranks do not share are no rows of a layer that shares its own."""
    problem = Matmul("matmul_all_reduce", m, 64, 48, torch.float32, "cpu", 2)
    shape = LayerShape.beside(problem, ROW, 64, 48, sequence_parallel=True)
    settings = ascend_parallel.Settings(num_chunks=4, **settings)
    ahead = decisions_ahead(settings, known_of(settings), shape, backward=True, leaves_rows=True)
    assert len(list(ahead)) == calls


def llama(group, path):
    OF_GROUPS.clear()  # other tests of these processes may have asked for the same shapes
    model = load(group, path)
    try:
        with agreements() as asked:
            for _ in range(2):
                step(model)
    finally:
        ascend_parallel.configure(num_chunks=1)
    return asked


def test_all_shapes_of_a_tp_plan_are_asked_in_one_agreement(ranks, tmp_path):
    for asked in ranks(2).run(llama, write(tmp_path, "Llama")):
        assert len(asked) == 1 and asked[0] > 2, asked


@on_ranks(2)
def test_all_shapes_of_torchs_styles_are_asked_in_one_agreement(group):
    ascend_parallel.configure(**FOUR)
    try:
        model = parallel(decoder(), init_device_mesh("cpu", (2,)), "plain")
        with agreements() as asked:
            for _ in range(2):
                torch_step(model, rows=(2, 112))  # no other test has asked about so many
    finally:
        ascend_parallel.configure(num_chunks=1)
    assert len(asked) == 1 and asked[0] > 2, asked
