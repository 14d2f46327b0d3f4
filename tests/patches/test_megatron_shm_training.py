"""A GPT trained with the fused kernel of CPU ranks: the same losses for every chunk count and in every run."""

import pytest
from gpt_training import both, train
from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel

from ascend_parallel.ops import shm

pytestmark = pytest.mark.skipif(isinstance(shm.extension(), str), reason=str(shm.extension()))

FUSED = {"fused": True, "enable_coc_in_column_backward": True}
SMALL = {2: {}, 3: {"hidden": 96, "heads": 3, "vocab": 258}, 4: {}}  # sizes that the ranks divide


def losses(group, options, variants):
    """Train once with each of `variants`, from the same initial weights."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    found = []
    with megatron_on_cpu():
        start_model_parallel(group.size())
        for settings in variants:
            model_parallel_cuda_manual_seed(1234)
            run, _, counts, coverage = train({**options, "settings": settings}, overlap=True)
            assert str(coverage).startswith("9 of 9 linear layers covered")
            if "fused" in settings and "enable_coc_in_column_backward" in settings:  # fused calls have no chunks
                assert all(count["chunks"] == count["calls"] for count in counts.values())
            found.append(run)
        end_model_parallel()
    return found


# Not 3 ranks in sequence parallelism: the sequence of 64 is not divisible by them.
@pytest.mark.slow
@pytest.mark.parametrize(("count", "sequence_parallel"), [(2, False), (2, True), (3, False), (4, False), (4, True)])
def test_losses_depend_neither_on_the_chunk_count_nor_on_the_run(ranks, count, sequence_parallel):
    options = {**SMALL[count], "sequence_parallel": sequence_parallel}
    variants = [{**FUSED, "num_chunks": chunks} for chunks in (1, 2, 8, 1)] + [{"fused": True}] * 2
    for found in ranks(count).run(losses, options, variants):
        everywhere, forward_alone = found[:4], found[4:]
        assert all(run == everywhere[0] for run in everywhere)
        assert forward_alone[0] == forward_alone[1]  # as published: the column layers' backward unfused
        assert len(set(everywhere[0])) == 3  # it does train


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_deterministic_runs_have_the_same_losses_by_every_kernel(ranks, count):
    """COC_DETERMINISTIC=1: the same losses fused, with any number of chunks, and without chunks."""
    deterministic = {"deterministic": True, "mode": 2}
    variants = [{**deterministic, "num_chunks": chunks} for chunks in (1, 3, 4)] + [{**deterministic, **FUSED}]
    for found in ranks(count).run(losses, SMALL[count], variants):
        assert all(run == found[0] for run in found)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_train_with_megatrons_bits(ranks, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel, "settings": {**FUSED, "num_chunks": 1}}
    for found in ranks(2).run(both, options):
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
        assert found["counts"]
