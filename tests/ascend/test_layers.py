"""column_linear and row_linear over ProcessGroupHCCL: the unsharded truth, the bits of the plain run, late kernels."""

import pytest
import torch
import torch.distributed as dist
from programs import counted, device, error, layer, layer_and_counts, on_device, part, whole_layer

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


def test_the_rows_for_a_weight_gradient_come_in_one_gather(ranks):
    """Between three ranks a gather in chunks passes a buffer for each, and copies its rows to their places."""
    given = "column", (96, 2, 48), 48, torch.float32, True, {"num_chunks": 4, "mode": 2}
    for (errors, _), numbers in ranks(3).run(layer_and_counts, *given):
        assert max(errors) < 1e-6
        assert numbers["HcclAllGather"] == 4 + 1, numbers  # forward, backward


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


def row_with_bias(sequence, dtype, bias_dtype, settings):
    """Run a row layer and add its bias as a framework does; return the errors of output, input, weight and bias."""
    from ascend_parallel import Settings
    from ascend_parallel.overlap.layer import ParallelLinear
    from ascend_parallel.overlap.linear import known_of, run_row

    chosen, group, n = Settings(fused=True, strict=True, **settings), dist.group.WORLD, 384
    x, weight, y, dy = whole_layer((32, 2, 1024), n, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(dtype).double()
    known = known_of(chosen)
    layer = ParallelLinear(
        kind="row", group=group, settings=chosen, known=known, arithmetic=chosen.arithmetic, sequence_parallel=sequence
    )
    x_r, w_r = on_device(part(x, -1), dtype), on_device(part(weight, -1), dtype)
    b_r = on_device(bias, bias_dtype)
    y_r = run_row(x_r, w_r, layer, b_r)
    given = part(dy, 0) if sequence else dy
    y_r.backward(given.to(y_r.dtype).to(device()))
    shown = part(y + bias, 0) if sequence else y + bias
    truth = shown, part(x.grad, -1), part(weight.grad, -1), given.flatten(0, 1).sum(0)
    found = y_r, x_r.grad, w_r.grad, b_r.grad
    return [error(a, b) for a, b in zip(found, truth, strict=True)], (y_r.dtype, b_r.grad.dtype)


ADDED_INSIDE = [  # ranks, sequence parallelism, engine, chip, the operator
    (2, True, "aiv", "Ascend910B1", "aclnnMatmulReduceScatterV2"),
    (4, True, "aiv", "Ascend910B1", "aclnnMatmulReduceScatterV2"),
    (2, True, "aiv", "Ascend910_9391", "aclnnMatmulReduceScatterV2"),
    (2, True, "ccu", "Ascend950PR_9599", "aclnnMatmulReduceScatterV2"),
    (2, True, None, "Ascend910B1", "aclnnMatmulReduceScatter"),
    (2, False, None, "Ascend910B1", "aclnnMatmulAllReduce"),
    (4, False, None, "Ascend910B1", "aclnnMatmulAllReduce"),
    (2, False, "ccu", "Ascend950PR_9599", "aclnnMatmulAllReduceV3"),
]


@pytest.mark.parametrize(("count", "sequence", "comm_mode", "soc", "operator"), ADDED_INSIDE)
def test_a_row_layer_adds_its_bias_in_the_operator_that_can(ranks, count, sequence, comm_mode, soc, operator):
    """The bias is added once, on 2 and 4 ranks; where the operator takes none, an Add follows it."""
    chip = {} if soc == "Ascend910B1" else {"EMULATED_ASCEND_SOC": soc}
    for dtype in (torch.bfloat16, torch.float16):
        pool = ranks(count, **chip)
        given = row_with_bias, sequence, dtype, dtype, {"comm_mode": comm_mode}
        pool.run(counted_call, *given)  # the first call of a dtype asks the machine
        for (errors, dtypes), numbers in pool.run(counted_call, *given):
            assert max(errors) < 2e-2 and dtypes == (dtype, dtype)
            assert numbers[operator] == 1, numbers
            assert ("aclnnAdd" in numbers) == (operator == "aclnnMatmulReduceScatter"), numbers


def test_a_bias_of_another_dtype_is_added_after_the_operator(ranks):
    given = row_with_bias, True, torch.bfloat16, torch.float32, {"comm_mode": "aiv"}
    for (errors, dtypes), numbers in ranks().run(counted_call, *given):
        assert max(errors) < 2e-2 and dtypes == (torch.float32, torch.float32)
        assert numbers["aclnnMatmulReduceScatterV2"] == 1, numbers


def test_a_machine_whose_operator_leaves_out_the_bias_is_noticed(ranks):
    """An older CANN may ignore it: the operator is asked, and the layer adds the bias itself."""
    given = row_with_bias, True, torch.bfloat16, torch.bfloat16, {"comm_mode": "aiv"}
    for (errors, _), numbers in ranks(EMULATED_ASCEND_WITHOUT_BIAS="1").run(counted_call, *given):
        assert max(errors) < 2e-2
        assert numbers["aclnnMatmulReduceScatterV2"] == 2, numbers  # it was asked


def counted_call(function, *arguments):
    return counted(function, *arguments)


@pytest.mark.parametrize(("kind", "sequence"), FUSED)
def test_ascend_950_runs_all_three_operators(ranks, kind, sequence):
    """With either engine, within the limits that the emulated operators enforce for this chip."""
    for comm_mode in (None, "ai_cpu", "ccu"):
        settings = {"fused": True, "strict": True, "enable_coc_in_column_backward": True, "comm_mode": comm_mode}
        pool = ranks(EMULATED_ASCEND_SOC="Ascend950PR_9599")
        for (errors, _), numbers in pool.run(
            layer_and_counts, kind, (32, 2, 512), 512, torch.bfloat16, sequence, settings
        ):
            assert max(errors) < 2e-2
            called = [name for name in numbers if name.startswith(tuple(OPERATORS))]
            assert sorted(name.rstrip("V23") for name in called) == sorted(FUSED[kind, sequence]), numbers


@pytest.mark.parametrize(("k", "n", "dtype"), [(128, 512, torch.bfloat16), (512, 512, torch.float32)], ids=str)
def test_what_fused_operators_do_not_take_runs_in_chunks(ranks, k, n, dtype):
    settings = {"fused": True, "num_chunks": 2}
    for (errors, _), numbers in ranks().run(layer_and_counts, "column", (32, 2, k), n, dtype, True, settings):
        assert max(errors) < 2e-2
        assert "aclnnAllGatherMatmul" not in numbers
        assert numbers["HcclAllGather"] >= 1, numbers
