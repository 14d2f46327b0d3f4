"""Products beside an all-to-all: numbers, limits by chip, argument lists, order, and their time."""

import re

import pytest
import torch
import torch.distributed as dist
from emulated_ascend.devices import DEVICES
from emulated_ascend.ranks import Ranks

A3, A5 = "Ascend910_9391", "Ascend950PR_9599"


@pytest.fixture(scope="module")
def pools():
    made = {}

    def pool(count=2, **variables):
        key = (count, *sorted(variables.items()))
        if key not in made or not made[key].alive:
            made[key] = Ranks(count, variables)
        return made[key]

    yield pool
    for each in made.values():
        each.close()


def device():
    return torch.device("npu", dist.get_rank())


def drawn(*shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def name():
    return dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())


def operands(rows, k, n, dtype=torch.bfloat16):
    """Return x1 of every rank, x2 and a bias."""
    xs = [drawn(rows, k, seed=rank, dtype=dtype) for rank in range(dist.get_world_size())]
    return xs, drawn(k, n, seed=50, dtype=dtype), drawn(n, seed=51, dtype=dtype)


def error(found, expected):
    return ((found.cpu().double() - expected).abs().max() / expected.abs().max()).item()


def both(dtype, transposed, comm_mode=None, biased=True):
    """Return the errors of both operators' results, against float64."""
    import torch_npu

    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = {"bias": None, **({} if comm_mode is None else {"comm_mode": comm_mode})}
    errors = []
    for shows, axes in ((True, None), (False, [-2, -1])):
        xs, _, _ = operands(8 * ranks, 64, 1, dtype)
        w, bias = drawn(64 * ranks, 48, seed=60, dtype=dtype), drawn(48, seed=61, dtype=dtype)
        whole = torch.cat([x.chunk(ranks)[rank] for x in xs], 1).double()  # this rank's rows, columns by rank
        given["bias"] = (bias.float() if dtype == torch.bfloat16 else bias).to(device()) if biased else None
        right = w.to(device())
        y, came = torch_npu.npu_all_to_all_matmul(
            xs[rank].to(device()), right.t().contiguous().t() if transposed else right, name(), ranks,
            all2all_axes=axes, all2all_out_flag=shows, **given,
        )  # fmt: skip
        errors.append(error(y, whole @ w.double() + (bias.double() if biased else 0)))
        assert came is None or not came.numel() if not shows else torch.equal(came.cpu().double(), whole)
    xs, w, bias = operands(24, 64, 16 * ranks, dtype)
    given["bias"] = (bias.float() if dtype == torch.bfloat16 else bias).to(device()) if biased else None
    right = w.to(device())
    y = torch_npu.npu_matmul_all_to_all(
        xs[rank].to(device()), right.t().contiguous().t() if transposed else right, name(), ranks,
        all2all_axes=[-1, -2], **given,
    )  # fmt: skip
    parts = [(x.double() @ w.double() + (bias.double() if biased else 0)).chunk(ranks, 1)[rank] for x in xs]
    return [*errors, error(y, torch.cat(parts))]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("soc", ["", A3, A5])
def test_numbers_are_those_of_the_formulas(pools, count, soc):
    for dtype in (torch.bfloat16, torch.float16):
        for biased in (True, False):
            for errors in pools(count, EMULATED_ASCEND_SOC=soc).run(both, dtype, False, None, biased):
                assert max(errors) < 1e-2, errors


@pytest.mark.parametrize(("soc", "modes"), [("", ["aiv"]), (A3, ["ai_cpu"]), (A5, ["ai_cpu", "ccu"])])
def test_the_second_version_is_told_the_chips_engine(pools, soc, modes):
    for mode in modes:
        for errors in pools(EMULATED_ASCEND_SOC=soc).run(both, torch.bfloat16, False, mode):
            assert max(errors) < 1e-2, errors


def test_950_alone_takes_a_transposed_weight(pools):
    for errors in pools(EMULATED_ASCEND_SOC=A5).run(both, torch.bfloat16, True):
        assert max(errors) < 1e-2, errors
    for soc in ("", A3):
        with pytest.raises(AssertionError, match="on 950 alone x2 may be transposed"):
            pools(EMULATED_ASCEND_SOC=soc).run(both, torch.bfloat16, True)


def refused(operator, rows, k, n, dtype, options):
    """Call an operator; return what it, or the device at its end, says."""
    import torch_npu
    from emulated_ascend.kernels.table import library

    x = torch.zeros(rows, k, dtype=dtype, device=device())
    x2 = torch.zeros(k * (dist.get_world_size() if operator == "npu_all_to_all_matmul" else 1), n, dtype=dtype)
    bias = options.pop("bias", None)
    if bias is not None:
        options["bias"] = torch.zeros(n, dtype=bias, device=device())
    said = None
    try:
        getattr(torch_npu, operator)(x, x2.to(device()), name(), dist.get_world_size(), **options)
        torch.npu.synchronize()
    except RuntimeError as error:
        said = str(error)
    library().emulated_forget_failure()
    return said


AFTER, BEFORE = "npu_all_to_all_matmul", "npu_matmul_all_to_all"
BF16, FP32 = torch.bfloat16, torch.float32
REFUSED = {  # chip, ranks, operator, rows, K of a rank, N, dtype, options, words
    "fp32": ("", 2, AFTER, 8, 64, 16, FP32, {}, "fp16 and bf16"),
    "rows": (A3, 2, AFTER, 7, 64, 16, BF16, {}, "divisible by"),
    "columns": (A3, 2, BEFORE, 8, 64, 17, BF16, {}, "divisible by"),
    "K on A2": ("", 2, AFTER, 2, 17501, 8, BF16, {}, "K is 35002; allowed is 1 to 35000 on A2"),
    "K before": (A3, 2, BEFORE, 2, 65536, 8, BF16, {}, "K is 65536; allowed is 1 to 65535"),
    "columns on A2": ("", 2, BEFORE, 2, 8, 368642, BF16, {}, "368642 columns"),
    "a bias of bf16": (A3, 2, AFTER, 8, 64, 16, BF16, {"bias": BF16}, "a bias torch.bfloat16"),
    "axes": (A3, 2, AFTER, 8, 64, 16, BF16, {"all2all_axes": [-1, -2]}, r"allowed is \[-2, -1\]"),
    "axes before": (A3, 2, BEFORE, 8, 64, 16, BF16, {"all2all_axes": [-2, -1]}, r"allowed is \[-1, -2\]"),
    "aiv on A3": (A3, 2, AFTER, 8, 64, 16, BF16, {"comm_mode": "aiv"}, "allowed is ai_cpu on A3"),
    "ai_cpu on A2": ("", 2, BEFORE, 8, 64, 16, BF16, {"comm_mode": "ai_cpu"}, "allowed is aiv on A2"),
    "3 ranks": ("", 3, AFTER, 9, 64, 16, BF16, {}, r"world_size should be in \[2, 4, 8, 16\]"),
    "no rows": (A3, 2, AFTER, 0, 64, 16, BF16, {}, "an empty operand"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_pages_exclude_is_an_error(pools, case):
    soc, count, *given, words = REFUSED[case]
    for said in pools(count, EMULATED_ASCEND_SOC=soc).run(refused, *given):
        assert said is not None and re.search(words, said), said


def test_a_small_buffer_is_refused_on_a2(pools):
    for said in pools(HCCL_BUFFSIZE="100").run(refused, AFTER, 8, 64, 16, BF16, {}):
        assert "at least 200 are needed for aiv" in said


def ranks_differ():
    import torch_npu

    rows = 8 if dist.get_rank() else 16
    x = torch.zeros(rows, 64, dtype=BF16, device=device())
    torch_npu.npu_all_to_all_matmul(x, torch.zeros(128, 16, dtype=BF16, device=device()), name(), 2)
    torch.npu.synchronize()


def two_streams():
    """Two fused operators on two streams that nothing orders."""
    import torch_npu

    x, w = torch.zeros(1024, 512, dtype=BF16, device=device()), torch.zeros(512, 512, dtype=BF16, device=device())
    torch.npu.synchronize()
    other = torch.npu.Stream()
    for _ in range(20):
        torch_npu.npu_matmul_all_to_all(x, w, name(), 2)
        with torch.npu.stream(other):
            torch_npu.npu_matmul_all_to_all(x, w, name(), 2)
    torch.npu.synchronize()


def test_ranks_that_differ_and_operators_beside_each_other_are_errors():
    for function, words in ((ranks_differ, "rank 0 of a group is in"), (two_streams, "runs beside MatmulAlltoAll")):
        pool = Ranks(2, {"EMULATED_ASCEND_SOC": A3})
        try:
            with pytest.raises(AssertionError, match=words):
                pool.run(function)
        finally:
            pool.close()


def timed(operator):
    """Return the milliseconds of an operator, of its product alone and of its all-to-all alone."""
    import torch_npu

    ranks = dist.get_world_size()
    x = torch.empty(4096, 4096 // (ranks if operator == AFTER else 1), dtype=BF16, device=device())
    if operator == AFTER:
        x = torch.empty(4096 * ranks, 4096 // ranks, dtype=BF16, device=device())
    own_name = name()
    w, plain = (torch.empty(4096, 4096, dtype=BF16, device=device()) for _ in range(2))
    came = torch.empty_like(plain)

    def fused():
        getattr(torch_npu, operator)(x, w, own_name, ranks)

    times = []
    for each in (fused, lambda: plain @ w, lambda: dist.all_to_all_single(came, plain)):
        each()
        torch.npu.synchronize()
        rounds = []
        for _ in range(7):  # a rank whose host is late makes the others' device wait: the least of all counts
            begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
            for _ in range(10):  # they hide the launches of what is timed
                plain @ w
            begin.record()
            each()
            end.record()
            torch.npu.synchronize()
            rounds.append(begin.elapsed_time(end))
        times.append(min(rounds))
    return times


@pytest.mark.parametrize("operator", [AFTER, BEFORE])
def test_the_clock_runs_the_exchange_under_the_product(operator):
    device = DEVICES["910_93"]
    clock = {"EMULATED_ASCEND_CLOCK": "1", "EMULATED_ASCEND_FIGURES": device.text(1.0), "TASK_QUEUE_ENABLE": "0"}
    pool = Ranks(2, {"EMULATED_ASCEND_SOC": device.soc, "EMULATED_ASCEND_DELAY_US": None, **clock})
    try:
        for fused, product, exchange in pool.run(timed, operator):
            assert max(product, exchange) < fused < product + exchange
    finally:
        pool.close()
