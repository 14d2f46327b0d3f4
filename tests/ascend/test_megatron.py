"""Megatron-core's GPT as a script for NPUs trains it: transfer_to_npu, HCCL, and the launch script's variables."""

import programs
import pytest
import torch
from programs import gpt, gpt_and_counts

REGION = {"num_chunks": 4, "region": True, "region_rows": 8}
LATE = {"EMULATED_ASCEND_SEED": "3", "EMULATED_ASCEND_DELAY_US": "2000"}


def run(pool, settings, **options):
    return pool.run(gpt_and_counts, settings, options)


def near(first, second, limit=1e-5):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first[0], second[0], strict=True)) < limit


def exchanges(run):
    return sum(number for name, number in run[2].items() if name.startswith("HcclAlltoAll"))


def equal(first, second):
    return [torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("settings", [{"num_chunks": 2}, REGION], ids=["chunks", "region"])
def test_overlap_trains_as_the_plain_run_and_with_the_same_bits_when_kernels_are_late(ranks, settings, sequence):
    kind = "HcclReduceScatter" if sequence else "HcclAllReduce"
    runs = (
        run(ranks(), {"num_chunks": 1}, sequence=sequence),
        *(run(pool, settings, sequence=sequence) for pool in (ranks(), ranks(**LATE))),
    )
    for plain, ours, late in zip(*runs, strict=True):
        assert near(ours, plain) and all(equal(ours, late))
        assert ours[2][kind] > plain[2][kind]


def only_ahead(*given):
    """Train with regions where the host runs ahead alone."""
    programs.ONLY_AHEAD = True
    try:
        return gpt_and_counts(*given)
    finally:
        programs.ONLY_AHEAD = False


def test_regions_where_the_host_is_ahead_have_the_bits_of_regions_everywhere(ranks):
    everywhere = run(ranks(), REGION)
    for pool in (ranks(), ranks(**LATE)):
        for ours, theirs in zip(pool.run(only_ahead, REGION, {}), everywhere, strict=True):
            assert all(equal(ours, theirs))
            assert ours[2]["HcclAllReduce"] == theirs[2]["HcclAllReduce"]


def test_experts_exchanged_in_groups_train_as_the_plain_run(ranks):
    runs = (
        run(ranks(), {"num_chunks": 1}, sequence=True, experts=True),
        *(run(pool, {"num_chunks": 2}, sequence=True, experts=True) for pool in (ranks(), ranks(**LATE))),
    )
    for plain, ours, late in zip(*runs, strict=True):
        assert near(ours, plain) and all(equal(ours, late))
        assert exchanges(ours) > exchanges(plain)


def test_an_exported_variable_patches_beside_transfer_to_npu(ranks):
    """COC_PARALLEL_NUM alone, no line of the script changed: torch loads torch_npu and this package.

    So small a model is covered and not cut: a chunk's matmul would leave units of an NPU without work.
    """
    plain = run(ranks(), {"num_chunks": 1})
    for theirs, ours in zip(plain, run(ranks(COC_PARALLEL_NUM="2"), None), strict=True):
        assert all(equal(theirs, ours))
        assert "9 of 9" in ours[1], ours[1]
        assert [number for name, number in sorted(ours[2].items()) if "Hccl" in name] == [
            number for name, number in sorted(theirs[2].items()) if "Hccl" in name
        ]


def test_the_fused_variable_calls_torch_npus_operators(ranks):
    options = {"hidden_size": 512, "seq": 64, "params_dtype": torch.bfloat16, "bf16": True}
    plain = run(ranks(), {"num_chunks": 1}, **options)
    for theirs, ours in zip(plain, run(ranks(USE_COC_FUSED_KERNEL="1"), None, **options), strict=True):
        assert ours[2]["aclnnMatmulAllReduce"] == 8  # two row layers in two blocks, two steps
        for a, b in zip(theirs[0], ours[0], strict=True):
            assert (a.float() - b.float()).abs().max() <= 5e-2 * a.float().abs().max()


@pytest.mark.parametrize("deterministic", [True, "tp"])
def test_deterministic_training_is_the_same_when_kernels_are_late(ranks, deterministic):
    settings = {"num_chunks": 2, "deterministic": deterministic}
    first, late = run(ranks(), settings, sequence=True), run(ranks(**LATE), settings, sequence=True)
    for ours, theirs in zip(first, late, strict=True):
        assert all(equal(ours, theirs))


def checked(settings):
    import ascend_parallel

    _, covered = gpt(settings)
    result = ascend_parallel.verification()
    ascend_parallel.configure(num_chunks=1)
    return covered, result.passed, [(each.kind, each.forwards, each.backwards) for each in result.layers]


def test_verify_checks_every_layer_and_the_timeline_is_written(ranks, tmp_path):
    settings = {"num_chunks": 2, "verify_every": 1, "timeline": str(tmp_path)}
    for covered, passed, layers in ranks().run(checked, settings):
        assert passed and "9 of 9" in covered
        assert len(layers) == 9 and all(forwards and backwards for _, forwards, backwards in layers), layers
