"""Layers in programs of torch.compile: overlapped between two graphs, or the originals, compiled and not counted."""

import copy
import logging
import os
import warnings
from unittest import mock

import hugging_face
import pytest
import torch
from gpt_training import REGION, megatron
from hugging_face import unequal
from layers import Layers
from logged import logged
from megatron_cpu import finalize_gradients, next_token_loss, small_gpt
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch_parallel import decoder, parallel, step

import ascend_parallel
from ascend_parallel.environment import read_settings
from ascend_parallel.ops import COUNTS
from ascend_parallel.settings import Settings, SettingsError


def counted(run):
    """Return what a run computes in three steps, the graphs and breaks after each, and the collectives' chunks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    COUNTS.clear()
    found, graphs = [], []
    for _ in range(3):
        found = run()
        graphs.append((counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())))
    return found, graphs, sum(count["chunks"] for count in COUNTS.as_dict().values())


def gpt(settings, backend, sequence_parallel, **options):
    """Train a GPT of one layer, compiled with `backend`; None: eagerly."""
    ascend_parallel.configure(**settings)
    model = small_gpt(num_layers=1, sequence_parallel=sequence_parallel, **options)
    if backend is not None:
        model.decoder.layers[0].compile(backend=backend)

    def run():
        model.zero_grad()
        loss = next_token_loss(model, torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(1)))
        loss.backward()
        finalize_gradients(model)
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    return *counted(run), str(ascend_parallel.coverage(model))


def equal(left, right):
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def compiled_gpt(group, sequence_parallel, backend, settings):
    warnings.simplefilter("ignore")
    with megatron(group.size()):
        eager, *_ = gpt({"num_chunks": 1}, None, sequence_parallel)
        plain, stock, _, _ = gpt({"num_chunks": 1}, backend, sequence_parallel)
        uncompiled, _, chunks_of_eager, _ = gpt(settings, None, sequence_parallel)
        overlapped, graphs, chunks, covered = gpt(settings, backend, sequence_parallel)
    bits = equal(eager, plain) or backend == "inductor", equal(plain, overlapped), equal(uncompiled, overlapped)
    return bits, stock, graphs, chunks, chunks_of_eager, covered


@pytest.mark.parametrize(
    ("ranks_of_group", "sequence_parallel", "backend", "settings"),
    [
        (2, True, "eager", {"num_chunks": 4}),
        pytest.param(2, False, "aot_eager", REGION, marks=pytest.mark.slow),
        pytest.param(2, True, "inductor", {"num_chunks": 4}, marks=pytest.mark.slow),
        pytest.param(4, True, "aot_eager", {"num_chunks": 4}, marks=pytest.mark.stress),
    ],
)
def test_a_compiled_layer_of_megatron_is_overlapped_between_graphs(
    ranks, ranks_of_group, sequence_parallel, backend, settings
):
    """The same bits and collectives as uncompiled, fewer graphs than without overlap, and none after the first step."""
    for bits, stock, graphs, chunks, chunks_of_eager, covered in ranks(ranks_of_group).run(
        compiled_gpt, sequence_parallel, backend, settings
    ):
        assert bits[0]
        assert bits[2] or backend == "inductor"
        assert bits[1] or ranks_of_group == 4  # their sums are in rank order here
        assert len(set(graphs)) == 1
        assert graphs[0][0] <= stock[0][0]
        assert graphs[0][1] < stock[0][1]
        assert chunks == chunks_of_eager > 0
        assert covered.startswith("5 of 5 linear layers covered")


def compiled_away(group):
    warnings.simplefilter("ignore")
    with megatron(group.size()):
        gpt({"num_chunks": 1, "compiled": "auto"}, "eager", True)  # warnings, once a process, break the graph too
        plain, stock, _, _ = gpt({"num_chunks": 1}, "eager", True)
        with logged() as lines:
            own, *rest = gpt({"num_chunks": 4, "compiled": "original"}, "eager", True)
        return stock, equal(plain, own), rest, [line for line in lines if line.endswith("compiled: the original runs")]


@pytest.mark.slow  # those of torch's styles are not
def test_originals_of_megatron_are_compiled_on_request_and_not_counted(ranks):
    for rank, (stock, same_bits, (graphs, chunks, covered), said) in enumerate(ranks(2).run(compiled_away)):
        names = sorted(line.split()[0] for line in said)
        assert names == (["ColumnParallelLinear", "RowParallelLinear"] if rank == 0 else [])
        assert same_bits
        assert graphs == stock  # in the same pieces
        assert chunks == 2 * 4 * 3  # the output layer's gather, forward and backward
        assert covered.startswith(
            "1 of 5 linear layers covered (2 RowParallelLinear: compiled: the original runs; 2 Col"
        )


class Column(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.column = layers.make("ColumnParallelLinear")

    def forward(self, x):
        return self.column(x)[0]


@on_ranks(2)
def test_a_graph_of_megatrons_layers_that_must_not_break_has_the_originals(group):
    warnings.simplefilter("ignore")
    with Layers(2) as layers, torch.no_grad():  # Megatron-core's backward breaks the graph
        ascend_parallel.configure(num_chunks=1)
        blocks, x = torch.nn.ModuleList([Column(layers), Column(layers)]), torch.randn(8, 2, 96)
        expected = [block(x) for block in blocks]
        ascend_parallel.configure(num_chunks=4)
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)
        before = str(ascend_parallel.coverage(blocks))
        with logged() as lines:
            found, graphs, _ = counted(lambda: [block(x) for block in blocks])
        covered = str(ascend_parallel.coverage(blocks))
    assert equal(found, expected)
    assert graphs == [(1, 0)] * 3
    assert covered == before == "0 of 2 linear layers covered (2 ColumnParallelLinear: compiled: the original runs)"
    said = [line.split()[0] for line in lines if line.endswith("compiled: the original runs")]
    assert said == ["ColumnParallelLinear"] * (group.rank() == 0)


@on_ranks(2)
def test_layers_of_groups_of_one_rank_stay_parts_of_the_graph(group):
    warnings.simplefilter("ignore")
    with Layers(1) as layers:
        found = []
        original = {"compiled": "original"}
        for settings in ({}, {"num_chunks": 4}, {"num_chunks": 4, "strict": True, **original}, original):
            ascend_parallel.configure(**{"num_chunks": 1, "strict": False, "compiled": "auto", **settings})
            column, row, x = (
                layers.make("ColumnParallelLinear"),
                layers.make("RowParallelLinear"),
                torch.randn(8, 2, 96),
            )
            run = torch.compile(lambda x, column=column, row=row: row(column(x)[0])[0], backend="eager")
            _, graphs, chunks = counted(lambda run=run, x=x: run(x))
            assert chunks == 0
            found.append(graphs)
    plain, *patched = found
    for graphs in patched:
        assert [made for made, _ in graphs] == [made for made, _ in plain]
    assert found[1] == plain
    ascend_parallel.configure(num_chunks=1, strict=False, compiled="auto")


@on_ranks(2)
def test_groups_of_one_rank_are_no_error_in_compiled_styles(group):
    """COC_STRICT=1 makes a compiled original an error, but for one that would communicate nothing."""
    ascend_parallel.configure(num_chunks=4, strict=True)
    mesh = init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("dp", "tp"))["tp"]
    model = parallel(decoder(layers=1, hidden=96, inner=192, heads=4), mesh, "plain")
    torch._dynamo.reset()
    model.layers[0].compile(backend="eager")
    model(torch.zeros(2, 96, dtype=torch.long))
    ascend_parallel.configure(num_chunks=1, strict=False)


def decoder_run(group, settings, plan, *, compiled=True, **options):
    """Train a decoder of one block, which is compiled, parallelised with torch's styles."""
    ascend_parallel.configure(**settings)
    model = parallel(decoder(layers=1, hidden=96, inner=192, heads=4), init_device_mesh("cpu", (group.size(),)), plan)
    for block in model.layers if compiled else ():
        block.compile(backend="eager", **options)
    before = str(ascend_parallel.coverage(model))
    found = counted(lambda: step(model))
    covered = str(ascend_parallel.coverage(model))
    assert covered == before  # known before the first call
    return *found, covered, model


def styles(group, plan):
    said = []
    log = logging.getLogger("ascend_parallel")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    plain, stock, *_ = decoder_run(group, {"num_chunks": 1}, plan)
    log.addHandler(handler)
    original = decoder_run(group, {"num_chunks": 4}, plan)[:4]
    log.removeHandler(handler)
    overlap = {"num_chunks": 4, "compiled": "overlap"}
    whole = decoder_run(group, overlap, plan, fullgraph=True)[:4]
    *overlapped, model = decoder_run(group, overlap, plan)
    ascend_parallel.configure(num_chunks=1, compiled="auto")
    _, *off = counted(lambda: step(model))
    moved = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()  # the copy has its own
    bits = [unequal(plain, found[0]) for found in (original, whole, overlapped)]
    return stock, original[1:], whole[1:], overlapped[1:], off, bits, unequal(plain, step(moved)), said


@pytest.mark.sample("sequence")
@pytest.mark.parametrize("plan", ["plain", pytest.param("layers", marks=pytest.mark.stress), "sequence"])
def test_compiled_blocks_of_torchs_styles(ranks, plan):
    """One graph of originals, or overlapped layers between graphs; with fullgraph=True the first."""
    for rank, (stock, original, whole, overlapped, off, bits, of_copy, said) in enumerate(ranks(2).run(styles, plan)):
        assert bits == [[], [], []]
        assert of_copy == []
        assert off == [stock, 0]  # switched off, nothing breaks the graph
        ends = 0 if plan == "plain" else 1  # the output layer is not compiled
        for graphs, chunks, covered in (original, whole):
            assert graphs == stock
            assert (chunks > 0) == bool(ends)
            assert covered.startswith(f"{ends} of 8 linear layers covered (7 Linear: compiled: the original runs")
        assert ("Linear runs without overlap: compiled: the original runs" in said) == (rank == 0)
        graphs, chunks, covered = overlapped
        assert len(set(graphs[1:])) == 1
        assert graphs[0][1] > 0
        assert chunks > original[1]
        assert covered.startswith(f"{7 + ends} of 8 linear layers covered")


@on_ranks(2)
def test_layers_that_a_compiled_function_calls_are_known_after_their_call(group):
    """torch.compile traces the first of two blocks that are alike, and runs both by that; a third runs by itself.

    That all have run by themselves before, as in an evaluation, does not count.
    """
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=3, hidden=96, inner=192, heads=4), init_device_mesh("cpu", (2,)), "plain")
    torch._dynamo.reset()
    call = torch.compile(lambda block, x: block(x), backend="eager")
    first, second, third = model.layers
    with torch.no_grad():
        third(second(first(torch.randn(2, 96, 96))))
    third(call(second, call(first, torch.randn(2, 96, 96)))).sum().backward()
    covered = str(ascend_parallel.coverage(model))
    ascend_parallel.configure(num_chunks=1)
    assert covered.startswith("7 of 22 linear layers covered (14 Linear: compiled: the original runs;")


def hugging_face_run(group, path, value, num_chunks=4, **options):
    """Train a model of transformers with a tp_plan, each of its blocks compiled."""
    with mock.patch.dict(os.environ, COC_COMPILE=value), warnings.catch_warnings(action="ignore"):
        model = hugging_face.load(group, path)
        ascend_parallel.configure(num_chunks=num_chunks)
        for block in model.model.layers:
            block.compile(backend="eager", **options)
        with logged() as lines:
            found = counted(lambda: hugging_face.step(model))
        covered = str(ascend_parallel.coverage(model))
        ascend_parallel.configure(num_chunks=1)
    return *found, covered, [line for line in lines if line.endswith("compiled: the original runs")]


def transformers_blocks(group, path, original, options):
    """Return the graphs of the plain run, and what the originals and the overlapped layers give beside it."""
    plain, stock, *_ = hugging_face_run(group, path, "auto", 1)
    runs = hugging_face_run(group, path, original, **options), hugging_face_run(group, path, "overlap")
    return stock, [(unequal(plain, values), *rest) for values, *rest in runs]


@pytest.mark.parametrize(
    ("original", "options"),
    [
        pytest.param("auto", {}, marks=pytest.mark.slow),
        pytest.param("original", {}, marks=pytest.mark.slow),
        pytest.param("overlap", {"fullgraph": True}, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_of_transformers(ranks, tmp_path, original, options):
    """One graph of originals, or with COC_COMPILE=overlap the layers between graphs."""
    pytest.importorskip("transformers", "5.16", reason="older versions have no tp_plan that is overlapped")
    path = hugging_face.write(tmp_path, "Llama")
    answers = ranks(2).run(transformers_blocks, path, original, options)
    for rank, (stock, (originals, overlapped)) in enumerate(answers):
        different, graphs, chunks, covered, lines = originals
        assert different == []
        assert graphs == stock
        assert chunks == 4 * 3  # the output layer is not compiled: chunks of its backward, steps
        assert covered.startswith("1 of 15 linear layers covered (14 Linear: compiled: the original runs")
        assert len(lines) == (rank == 0)
        different, graphs, chunks, covered, lines = overlapped
        assert different == []
        assert graphs[0][1] > stock[0][1]
        assert len(set(graphs[1:])) == 1
        assert chunks > 4 * 3
        assert covered.startswith("15 of 15 linear layers covered")
        assert lines == []


@pytest.mark.parametrize("value", ["graph", ""])
def test_the_variable_has_three_values(value):
    with pytest.raises(SettingsError, match=r"is not allowed: give one of auto, original, overlap"):
        Settings(compiled=value)
    assert read_settings({"COC_COMPILE": "Overlap"}).compiled == "overlap"
