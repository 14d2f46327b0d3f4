"""Regions with COC_TUNE, COC_PARALLEL_NUM=auto and COC_PLAN: chunks that are right for a layer alone bind no region."""

import json
import os
from unittest import mock

import pytest
import torch
from gpt_training import REGION, megatron, train
from planted_clocks import one_chunk_wins, planted, two_chunks_win

from ascend_parallel.tuning.measured.chunk_plan import load_plan


def tuned(group, clock, settings, path, options):
    """Return whether a run with regions has plain's bits, and its counts; shapes are tuned by a planted clock."""
    with (
        megatron(group.size()),
        planted(clock),
        mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{path}-cache"),
    ):
        plain = train({**options, "steps": 1}, overlap=False)
        found = train({**options, "steps": 1, "settings": {**REGION, "num_chunks": 1, **settings}}, overlap=True)
    different = [name for name in plain[1] if not torch.equal(plain[1][name], found[1][name])]
    return plain[0] == found[0], different, found[2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "sequence parallel"])
@pytest.mark.parametrize(
    ("asked", "clock", "chunks"),
    [("COC_TUNE", one_chunk_wins, 4), ("COC_TUNE", two_chunks_win, 2), ("COC_PARALLEL_NUM=auto", one_chunk_wins, 4)],
)
def test_tuning_leaves_regions_their_chunks(ranks, tmp_path, asked, clock, chunks, sequence_parallel):
    """Where tuning keeps fc2 whole, a region takes four chunks; where it cuts fc2, the same chunks."""
    path = str(tmp_path / "plan.json")
    settings = {"tune": path} if asked == "COC_TUNE" else {"num_chunks": "auto"}
    options = {"sequence_parallel": sequence_parallel}
    for same, different, counts in ranks(2).run(tuned, clock, settings, path, options):
        assert same
        assert different == []
        assert counts["region"] == {"calls": 4, "chunks": 4 * chunks, "collectives": 0}
    if asked == "COC_TUNE":
        kept = {len(entry.sizes) for entry in load_plan(path).entries if entry.run == "forward"}
        assert kept == {1 if clock is one_chunk_wins else 2}


def planned(group, path, num_chunks):
    """Tune without regions into a plan in which every matmul is whole; return the counts of a run with this plan."""
    with megatron(group.size()), planted(one_chunk_wins):
        train({"steps": 1, "settings": {"tune": path}}, overlap=True)
        torch.distributed.barrier()
        settings = {**REGION, "num_chunks": num_chunks, "plan": path}
        return train({"steps": 1, "settings": settings}, overlap=True)[2]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("num_chunks", "chunks"), [(1, 4), (3, 3)])
def test_a_plan_that_keeps_layers_whole_leaves_regions_their_chunks(ranks, tmp_path, num_chunks, chunks):
    path = tmp_path / "plan.json"
    for counts in ranks(2).run(planned, str(path), num_chunks):
        assert counts["region"] == {"calls": 4, "chunks": 4 * chunks, "collectives": 0}
    assert all(len(entry["sizes"]) == 1 for entry in json.loads(path.read_text())["entries"])


def few_rows(group, path):
    """Return the counts of a run whose rows are too few for two chunks of `region_rows`."""
    return tuned(group, one_chunk_wins, {"tune": path, "region_rows": 200, "strict": False}, path, {})[2]


@pytest.mark.slow
def test_few_rows_have_no_region_with_tuning_either(ranks, tmp_path):
    for counts in ranks(2).run(few_rows, str(tmp_path / "plan.json")):
        assert "region" not in counts
