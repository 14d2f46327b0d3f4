"""COC_PARALLEL_NUM=auto in vLLM: the counts that dummy steps are fastest with, the same on all ranks."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from ascend_parallel.ops.call import ALL_REDUCE, Matmul
from ascend_parallel.overlap.layer_shape import FORWARD
from ascend_parallel.patches.compiled import Compiled
from ascend_parallel.patches.vllm import start
from ascend_parallel.patches.vllm.auto import (
    CUT,
    EAGER,
    TURNS,
    WHOLE,
    MeasuredCounts,
    PlannedCounts,
    StepVariant,
    Sum,
    TimedSteps,
    chosen,
    measure,
    tried_tokens,
)
from ascend_parallel.patches.vllm.bits import RowBits
from ascend_parallel.patches.vllm.chunks import token_chunks
from ascend_parallel.patches.vllm.layers import Vllm
from ascend_parallel.patches.vllm.operators import CONTEXT, LAYER_NAME, LINEAR, engine_of
from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import Entry, Plan, this_machine

VARIANTS = [WHOLE, *CUT]


def turns(*seconds):
    return [[each] * TURNS for each in seconds]


@pytest.mark.parametrize(
    ("by_rank", "count"),
    [
        ([turns(1, 0.9, 0.7, 0.8)], 4),
        ([turns(1, 1.2, 1.3, 1.4)], 1),
        ([turns(1, 0.9, 0.5, 0.8), turns(1, 0.9, 1.5, 0.8)], 8),  # a step takes as long as its slowest rank
        ([[[1, 1, 1], [0.1, 2, 2], [0.9, 0.9, 0.9], [9, 9, 9]]], 4),  # one turn is luck
    ],
)
def test_the_fastest_count_of_the_slowest_rank(by_rank, count):
    assert chosen(2048, VARIANTS, by_rank).variant == StepVariant(count)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((1, 0.9, 0.7, 0.8, 0.65, 0.5, 0.6), "in 4 chunks outside the graphs (500 ms; whole 1000; in 4 chunks 700)"),
        ((1, 0.9, 0.7, 0.8, 0.9, 0.69, 0.7), "in 4 chunks (700 ms; whole 1000; in 4 chunks outside the graphs 690)"),
        ((1, 2, 2, 3, 3, 2, 3), "whole (1000 ms; in 2 chunks 2000; in 4 chunks outside the graphs 2000)"),
    ],
)
def test_the_graphs_are_left_where_that_gains_over_the_fastest_way_in_them(seconds, words):
    assert str(chosen(2048, [*VARIANTS, *EAGER], [turns(*seconds)])) == f"2048 tokens {words}"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((1, 0.9, 0.7, 0.8), "in 4 chunks outside the graphs (700 ms; whole 1000)"),
        ((1, 1.1, 0.99, 1.2), "whole (1000 ms; in 4 chunks outside the graphs 990)"),
    ],
)
def test_graphs_without_operators_are_left_or_kept_whole(seconds, words):
    step = chosen(2048, [WHOLE, *EAGER], [turns(*seconds)])
    assert str(step) == f"2048 tokens {words}"
    assert MeasuredCounts((step,), 0.0).leave_graphs == words.startswith("in")


def test_a_number_of_tokens_takes_the_count_of_the_nearest():
    found = MeasuredCounts((TimedSteps(4096, {}, StepVariant(8, eager=True)), TimedSteps(1024, {}, WHOLE)), 0.0)
    summed = Sum(768, 768, torch.float32)
    assert [found.count(tokens, summed) for tokens in (256, 1024, 2000, 2100, 4096, 9000)] == [1, 1, 1, 8, 8, 8]
    assert [found.variant(tokens).eager for tokens in (1024, 4096)] == [False, True]


@pytest.mark.parametrize(
    ("device", "leaving"), [("cpu", [False, False, True, True]), ("npu", [False, False, False, True])]
)
def test_a_step_leaves_the_graphs_only_if_it_would_be_cut_there(device, leaving):
    vllm, model = Vllm(Settings(num_chunks=4), "0.32.0"), torch.nn.Module()
    vllm.may_leave_graphs(model, with_variant(StepVariant(4, eager=True)))
    vllm.keep_counts(2, with_variant(WHOLE))  # of another engine, which was loaded later
    assert [vllm.leaves_graphs(model, tokens, device) for tokens in (1, 255, 512, 2048)] == leaving
    assert not any(vllm.leaves_graphs(torch.nn.Module(), tokens, device) for tokens in (1, 255, 512, 2048))


def with_variant(variant):
    """Return what would be known if this way was the fastest; None: nothing is."""
    return variant and MeasuredCounts((TimedSteps(2048, {}, variant),), 0.0)


@pytest.mark.parametrize(
    ("name", "variant", "away"),
    [
        ("down", None, False),  # an operator
        (None, None, True),  # nothing is timed yet
        (None, WHOLE, True),
        (None, StepVariant(4, eager=True), False),
    ],
)
def test_coverage_is_of_operators_and_of_steps_that_leave_the_graphs(name, variant, away):
    vllm, layer, beside = Vllm(Settings(num_chunks=4), "0.32.0"), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    if name is not None:
        setattr(layer, LAYER_NAME, name)
    model = torch.nn.Sequential(torch.nn.Sequential(layer))
    vllm.may_leave_graphs(model, with_variant(variant))
    assert vllm.compiled_away(layer, Compiled.IN_ONE_GRAPH) is away
    assert vllm.compiled_away(layer, Compiled.NOT) is False
    assert vllm.compiled_away(beside, Compiled.IN_ONE_GRAPH) is True  # of a model that never leaves its graphs


def test_a_second_engine_leaves_the_first_its_least_rows():
    vllm = Vllm(Settings(num_chunks=8), "0.32.0")
    summed, bits = Sum(768, 768, torch.float32), [RowBits(least, 1, (), 0.0) for least in (512, 128)]
    vllm.asked_bits(bits[0])
    first = vllm.chunks(2048, "cpu", summed)
    assert min(first) == 512
    vllm.forget_model(2)
    assert vllm.bits is None and vllm.chunks(2048, "cpu", summed) == first
    vllm.asked_bits(bits[1])
    assert vllm.chunks(2048, "cpu", summed) == first


class Forwards:
    """vLLM's module of forward contexts, whose forward is that of an engine by its configuration, or of none."""

    def __init__(self):
        self.config = None

    def is_forward_context_available(self):
        return self.config is not None

    def get_forward_context(self):
        return SimpleNamespace(no_compile_layers=self.config.compilation_config.static_forward_context)


def test_two_engines_of_a_process_keep_their_own_counts(monkeypatch):
    forwards = Forwards()
    monkeypatch.setitem(sys.modules, CONTEXT, forwards)
    vllm, summed = Vllm(Settings(auto=True), "0.32.0"), Sum(768, 768, torch.float32)
    engines = [SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={})) for _ in range(3)]

    def counts():
        found = []
        for forwards.config in (*engines, None):
            found.append(vllm.count(2048, summed))
        return found

    assert counts() == [4] * 4  # nothing is timed yet
    for engine, variant in zip(engines, (StepVariant(8), WHOLE), strict=False):
        vllm.forget_model(engine_of(engine))
        vllm.keep_counts(engine_of(engine), with_variant(variant))
    assert counts() == [8, 1, 4, 1]  # outside a forward, as in an encoder, what was timed last
    vllm.forget_model(engine_of(engines[0]))  # a worker of this configuration loads a model anew
    assert counts() == [4, 1, 4, 4]


def test_a_variable_that_vllm_cannot_read_is_named_in_the_state(monkeypatch):
    class Variables:
        """As vllm.envs, which reads the environment at each look."""

        @property
        def VLLM_BATCH_INVARIANT(self):
            return bool(int("true"))

    monkeypatch.setitem(sys.modules, "vllm.envs", Variables())
    why = Vllm(Settings(num_chunks=4), "0.32.0").uncovered_everywhere()
    assert why.startswith("VLLM_BATCH_INVARIANT cannot be read: invalid literal for int()")


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_plan_cuts_the_timed_steps_as_they_were_timed(count):
    summed, machine = Sum(768, 768, torch.float32), this_machine(2, torch.device("cpu"), "gloo")
    for tokens in (256, 500, 1250, 2304, 2500, 5000, 8192, 10000):
        sizes = token_chunks(tokens, count, "cpu")
        problem = Matmul(ALL_REDUCE, tokens, summed.k, summed.n, summed.dtype, "cpu", 2)
        entry = Entry.of(FORWARD, problem, sizes, 1.0, 0.5)
        found = PlannedCounts(Plan(machine, (entry,))).count(tokens, summed)
        assert token_chunks(tokens, found, "cpu") == sizes


def test_no_step_is_timed_that_would_not_be_cut():
    assert tried_tokens(512, 1024) == []
    assert tried_tokens(2304, 1024) == [2304]


def measured(group):
    """Measure steps of which large ones are faster in four chunks on rank 1, and rank 0 sees no difference."""
    calls = []

    def step(tokens, variant):
        calls.append((tokens, variant.chunks))
        faster = (tokens, variant.chunks) in ((2048, 4), (512, 8))
        time.sleep(0.02 if group.rank() == 0 or faster else 0.06)

    found = measure(step, tried_tokens(2048, 256), VARIANTS, group)
    return [each.variant.chunks for each in found.steps], str(found), calls


def test_ranks_time_the_same_steps_and_take_the_same_counts(ranks):
    first, second = ranks(2).run(measured)
    assert first[0] == second[0] == [4, 8] and first[2] == second[2]
    assert first[2] == [
        (tokens, variant.chunks) for tokens in (2048, 512) for _ in range(1 + TURNS) for variant in VARIANTS
    ]
    assert "2048 tokens in 4 chunks (" in first[1] and "512 tokens in 8 chunks (" in first[1]


class OneLayer(torch.nn.Module):
    """A model whose only module is a row layer of vLLM by its name."""

    def __init__(self):
        super().__init__()
        self.row = type("RowParallelLinear", (torch.nn.Linear,), {"__module__": LINEAR})(2, 2)


class Bare(Vllm):
    """The framework in a process without vLLM."""

    def group_of(self, layer):
        return torch.distributed.group.WORLD

    def uncovered(self, layer):
        return None


def loads_with_other_settings(group):
    """Load a compiled model whose graphs have operators on rank 1 alone, by the settings; return the error."""
    settings = {"auto": True} if group.rank() == 0 else {"num_chunks": 4}
    compilation = SimpleNamespace(mode=3, pass_config=SimpleNamespace(), static_forward_context={})
    config = SimpleNamespace(compilation_config=compilation, parallel_config=SimpleNamespace(data_parallel_size=1))
    worker = SimpleNamespace(get_model=OneLayer, model_runner=SimpleNamespace(_dummy_run=None))
    load = start.load_model(lambda self: None, Bare(Settings(**settings), "0.32.0"))
    with pytest.raises(DisagreementError) as error:
        load(SimpleNamespace(worker=worker, vllm_config=config))
    return str(error.value)


def test_settings_that_differ_are_named_before_a_graph_is_traced(ranks):
    for error in ranks(2).run(loads_with_other_settings):
        assert "COC_PARALLEL_NUM" in error
