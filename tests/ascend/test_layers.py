"""column_linear and row_linear over ProcessGroupHCCL: the unsharded truth, the bits of the plain run, late kernels."""

import pytest
import torch
from programs import layer, layer_and_counts

LATE = {"EMULATED_ASCEND_SEED": "7", "EMULATED_ASCEND_DELAY_US": "3000"}
SIDES = [(kind, sequence) for kind in ("column", "row") for sequence in (False, True)]


@pytest.mark.parametrize(("kind", "sequence"), SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_has_the_numbers_of_the_unsharded_one(ranks, kind, sequence, dtype):
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for settings in ({"num_chunks": 2}, {"num_chunks": 4}, {"num_chunks": 3, "recompute_all_gather": False}):
        for errors, _ in ranks().run(layer_given, kind, (36, 3, 48), 40, dtype, sequence, {"mode": 2, **settings}):
            assert max(errors) < limit, (settings, errors)


def layer_given(*arguments):
    *given, settings = arguments
    return layer(*given, **settings)


COLLECTIVES = {
    ("column", False): {"HcclAllReduce": 4},
    ("column", True): {"HcclAllGather": 5, "HcclReduceScatter": 4},
    ("row", False): {"HcclAllReduce": 4},
    ("row", True): {"HcclReduceScatter": 4, "HcclAllGather": 4},
}


@pytest.mark.parametrize(("kind", "sequence"), SIDES)
def test_chunks_have_the_same_bits_when_kernels_are_late(ranks, kind, sequence):
    """A wait that is missing is a race, which a late kernel or collective makes a wrong number."""
    given = kind, (64, 2, 48), 40, torch.float32, sequence, {"num_chunks": 4, "mode": 2}
    first, late = (pool.run(layer_and_counts, *given) for pool in (ranks(), ranks(**LATE)))
    for ((errors, ours), numbers), ((_, theirs), _) in zip(first, late, strict=True):
        assert max(errors) < 1e-6
        assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * 3
        for collective, number in COLLECTIVES[kind, sequence].items():
            assert sum(n for name, n in numbers.items() if name.startswith(collective)) == number, numbers


@pytest.mark.parametrize("mode", [True, "tp"])
@pytest.mark.parametrize(("kind", "sequence"), SIDES)
def test_deterministic_layers_are_right_when_kernels_are_late(ranks, kind, sequence, mode):
    settings = {"num_chunks": 4, "mode": 2, "deterministic": mode}
    first, second = (
        pool.run(layer_given, kind, (64, 2, 48), 40, torch.float32, sequence, settings)
        for pool in (ranks(), ranks(**LATE))
    )
    for (errors, ours), (late_errors, late) in zip(first, second, strict=True):
        assert max(errors) < 1e-6 and max(late_errors) < 1e-6, (errors, late_errors)
        assert [torch.equal(a, b) for a, b in zip(ours, late, strict=True)] == [True] * 3


def test_three_ranks_with_rows_that_chunks_do_not_divide(ranks):
    for kind, sequence in SIDES:
        for errors, _ in ranks(3).run(
            layer_given, kind, (21, 2, 48), 36, torch.float32, sequence, {"num_chunks": 4, "mode": 2}
        ):
            assert max(errors) < 1e-6, (kind, sequence, errors)


FUSED = {
    ("row", False): {"aclnnMatmulAllReduce": 1},
    ("row", True): {"aclnnMatmulReduceScatter": 1, "aclnnAllGatherMatmul": 1},
    ("column", True): {"aclnnAllGatherMatmul": 1, "aclnnMatmulReduceScatter": 1},
    ("column", False): {"aclnnMatmulAllReduce": 1},
}
OPERATORS = {name for called in FUSED.values() for name in called}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "sequence"), FUSED)
def test_fused_operators_of_torch_npu_compute_the_layer(ranks, kind, sequence, dtype):
    """Each is called once, within the limits that the emulated operator enforces; results as the chunked ones'."""
    settings = {"fused": True, "enable_coc_in_column_backward": True}
    for (errors, _), numbers in ranks().run(layer_and_counts, kind, (32, 2, 512), 512, dtype, sequence, settings):
        assert max(errors) < 2e-2
        called = {name: number for name, number in numbers.items() if name in OPERATORS}
        assert called == FUSED[kind, sequence], numbers


@pytest.mark.parametrize(("k", "n", "dtype"), [(128, 512, torch.bfloat16), (512, 512, torch.float32)], ids=str)
def test_what_fused_operators_do_not_take_runs_in_chunks(ranks, k, n, dtype):
    settings = {"fused": True, "num_chunks": 2}
    for (errors, _), numbers in ranks().run(layer_and_counts, "column", (32, 2, k), n, dtype, True, settings):
        assert max(errors) < 2e-2
        assert "aclnnAllGatherMatmul" not in numbers
        assert numbers["HcclAllGather"] >= 1, numbers
