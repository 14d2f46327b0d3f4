"""Calls that auto and COC_TUNE keep whole run Megatron-core's own layer, where that computes the same as ours."""

import contextlib
import os
import re
from unittest.mock import patch

import pytest
import torch
from layers import Layers
from logged import logged

import ascend_parallel
from ascend_parallel import patch_control
from ascend_parallel.tuning.measured import decider, pass_times


@contextlib.contextmanager
def every_cut_loses(path):
    """Make every cut look slower, and the cache of auto empty."""
    kept = pass_times.TimedLinear.time_sizes
    pass_times.TimedLinear.time_sizes = lambda self, operator, candidates, rounds: {
        sizes: [float(len(sizes))] * rounds for sizes in candidates
    }
    try:
        with patch.dict(os.environ, XDG_CACHE_HOME=f"{path}-cache"):
            yield
    finally:
        pass_times.TimedLinear.time_sizes = kept


def calls_of(counts):
    return sum(count["calls"] for count in counts.values())


def last_line():
    """Return what a run with overlap says at its end on rank 0."""
    with logged() as said, patch.dict(os.environ, RANK="0"):
        patch_control.CONTROL.warn_if_idle()
    return said


def kept_whole(group, path, settings):
    """Compare layers of which every cut loses with Megatron-core's own."""
    decider.CHUNKS.clear()
    with every_cut_loses(path), Layers(group.size(), settings) as layers:
        results = [
            layers.compare(kind, (256, columns), config={"sequence_parallel": sequence_parallel}, **more)
            for kind, columns, more in (
                ("RowParallelLinear", 64 // group.size(), {}),
                ("ColumnParallelLinear", 64, {"gather_output": False}),
            )
            for sequence_parallel in (False, True)
        ]
        said = [] if ascend_parallel.ops.COUNTS.as_dict() else last_line()
    return [differ for differ, _ in results], [calls_of(counts) for _, counts in results], said


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"num_chunks": "auto"}, False),
        ({"tune": "FILE"}, False),
        ({"num_chunks": "auto", "recompute_all_gather": False}, True),
        ({"num_chunks": "auto", "verify_every": 1}, True),
        ({"num_chunks": "auto", "customized_coc": {"[256, 64, 96]": 2}}, True),
    ],
)
def test_a_call_that_is_kept_whole_runs_megatrons_own_layer(ranks, tmp_path, settings, ours):
    settings = {name: str(tmp_path / "plan.json") if value == "FILE" else value for name, value in settings.items()}
    option = "COC_TUNE" if "tune" in settings else "COC_PARALLEL_NUM=auto"
    for differ, calls, said in ranks(2).run(kept_whole, str(tmp_path / "no-cache.json"), settings):
        assert differ == [[]] * 4
        assert (sum(calls) > 0) == ours
        assert ours or re.fullmatch(
            rf"{option} measured the \d matmuls .* whole is faster here.*; nothing is lost", *said
        )


@pytest.mark.slow
def test_sums_of_four_ranks_in_rank_order_stay_in_every_forward(ranks, tmp_path):
    """With sequence parallelism gloo's reduce-scatter adds in another order than ours."""
    for _, (row, row_sequence, column, column_sequence), _ in ranks(4).run(
        kept_whole, str(tmp_path / "no-cache.json"), {"num_chunks": "auto"}
    ):
        assert (row, column) == (0, 0)
        assert min(row_sequence, column_sequence) > 0


class Counting(torch.nn.Module):
    """A parametrisation that gives another weight each time."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def forward(self, weight):
        self.reads += 1
        return weight * self.reads


def unlike_the_original(group, path):
    """Call layers that Megatron-core would run otherwise; return what shows that ours ran."""
    found = {}
    with every_cut_loses(path), Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks="auto")
        frozen = layers.make("ColumnParallelLinear", (64, 96), config={"sequence_parallel": True}, gather_output=False)
        frozen.weight.requires_grad_(False)
        frozen(torch.randn(256, 64, requires_grad=True))[0].sum().backward()
        found["gradient of a frozen weight's bias"] = frozen.bias.grad is not None
        read = layers.make("RowParallelLinear", (64, 96))
        x = torch.randn(256, 64 // group.size(), requires_grad=True)
        read(x)  # finds out
        torch.nn.utils.parametrize.register_parametrization(read, "weight", Counting(), unsafe=True)
        before = read.parametrizations.weight[0].reads
        read(x)
        found["reads of a weight"] = read.parametrizations.weight[0].reads - before
        cast = layers.make("RowParallelLinear", (64, 96))
        with torch.autocast("cpu", torch.bfloat16):
            y = cast(x)[0]
        y.float().sum().backward()
        found["a backward after autocast"] = bool(x.grad.isfinite().all())
    return found


def test_calls_that_megatron_would_compute_otherwise_stay_ours(ranks, tmp_path):
    for found in ranks(2).run(unlike_the_original, str(tmp_path / "no-cache.json")):
        assert found == {
            "gradient of a frozen weight's bias": True,
            "reads of a weight": 1,
            "a backward after autocast": True,
        }
