"""The cuts of rows, the choice of a kernel, and its reason."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_parallel import Settings, UnmetRequestError, explain
from ascend_parallel.devices import DEVICES
from ascend_parallel.ops import Exchange, Matmul, choose
from ascend_parallel.ops.bits import Question
from ascend_parallel.ops.multiply import align_operands, alignment_of
from ascend_parallel.ops.probing import TRANSPOSED
from ascend_parallel.ops.registry import cuts_to_time
from ascend_parallel.ops.rows import ROW_TILE, STEEPEST, even_rows, split_rows, uneven_rows
from ascend_parallel.tuning.cost_model.hardware import all_hardware


@given(st.integers(0, 5000), st.integers(1, 64))
def test_chunks_cover_all_rows_in_order(rows, chunks):
    sizes = split_rows(rows, chunks)
    assert sum(sizes) == rows
    assert len(sizes) == max(1, min(chunks, rows // ROW_TILE))
    assert all(size % ROW_TILE == 0 for size in sizes[:-1])
    if len(sizes) > 1:
        assert min(sizes) >= ROW_TILE


@given(st.integers(1, 64))
def test_ends_are_short_and_no_chunk_is_much_longer(chunks):
    sizes = split_rows(ROW_TILE * 4096, chunks)
    assert max(sizes) <= (STEEPEST + 1) * min(sizes)
    assert sizes[0] <= min(sizes[1:], default=sizes[0]) + ROW_TILE


def test_published_counts():
    assert split_rows(14 * ROW_TILE, 8) == (16, 32, 32, 32, 32, 32, 32, 16)
    assert split_rows(31, 8) == (31,)
    assert split_rows(33, 8) == (16, 17)


def problem(operator="matmul_all_reduce", m=512, device="cpu", ranks=2):
    return Matmul(operator, m, 64, 32, torch.float32, device, ranks)


@pytest.mark.parametrize(
    ("operator", "k", "n", "chunks"),
    [
        ("matmul_all_reduce", 2048, 16, 1),  # A of a row layer's adapter, and the input gradient of a column layer's B
        ("matmul_reduce_scatter", 2048, 16, 1),
        ("all_gather_matmul", 16, 2048, 1),  # B of a column layer's adapter with sequence parallelism
        ("matmul_all_reduce", 2048, 256, 1),
        ("matmul_all_reduce", 16, 2048, 4),  # wide collectives: B of an adapter that ends in a sum
        ("all_gather_matmul", 2048, 16, 4),
        ("matmul_all_reduce", 1024, 257, 4),
        ("matmul_all_reduce", 1024, 256, 4),
        ("matmul_all_reduce", 64128, 2048, 4),  # an output layer's backward
    ],
)
def test_calls_too_narrow_to_gain_stay_whole(operator, k, n, chunks):
    call = Matmul(operator, 4096, k, n, torch.bfloat16, "cpu", 2)
    for settings in (
        Settings(num_chunks=4),
        Settings(num_chunks=4, deterministic=True),
        Settings(num_chunks=4, strict=True),
    ):
        choice = choose(call, settings)
        assert len(choice.sizes) == chunks
        assert choice.unmet == ""
        assert ("narrow" in choice.codes) == (chunks == 1)


def test_a_narrow_call_that_is_named_is_cut():
    call = Matmul("matmul_all_reduce", 4096, 2048, 16, torch.bfloat16, "cpu", 2)
    for cut, sizes in ((8, 8), ((2048, 2048), 2)):
        assert len(choose(call, Settings(num_chunks=4, customized_coc={(4096, 2048, 16): cut})).sizes) == sizes


@pytest.mark.parametrize(
    ("settings", "m", "kernel", "chunks", "codes"),
    [
        (Settings(num_chunks=4), 512, "chunked", 4, ["number"]),
        (Settings(num_chunks=4), 40, "chunked", 2, ["number", "few_rows"]),
        (Settings(num_chunks=4), 31, "reference", 1, ["number", "few_rows"]),
        (Settings(num_chunks=4, mode=1), 512, "reference", 1, ["mode"]),
        (Settings(num_chunks=4, mode=0), 512, "reference", 1, ["mode"]),
        (Settings(num_chunks=4, customized_coc={(512, 64, 32): 8}), 512, "chunked", 8, ["count_of_shape"]),
        (
            Settings(num_chunks=4, customized_coc={(512, 64, 32): 1}),
            512,
            "reference",
            1,
            ["count_of_shape"],
        ),
        (Settings(num_chunks=4, customized_coc={(512, 32, 64): 8}), 512, "chunked", 4, ["number"]),
        (
            Settings(fused=True),
            512,
            "chunked",
            4,
            ["not_fused"],
        ),
        (Settings(fused=True, num_chunks=8), 512, "chunked", 8, ["not_fused"]),
    ],
)
def test_decisions_and_their_reasons(settings, m, kernel, chunks, codes):
    choice = choose(problem(m=m), settings)
    assert (choice.kernel, len(choice.sizes)) == (kernel, chunks)
    assert [*choice.codes] == codes
    assert choice.code == codes[-1]


def test_the_words_of_a_reason():
    """The log, `explain` and errors show them; programs read the codes."""
    few = choose(problem(m=40), Settings(num_chunks=4))
    assert few.reason == "COC_PARALLEL_NUM=4; 40 rows allow 2 (multiples of 16 rows)"
    refused = "npu: device cpu, not npu; shm: the group was not asked"
    fused = choose(problem(), Settings(fused=True))
    assert fused.reason == f"USE_COC_FUSED_KERNEL=1, but {refused}: 4 chunks instead"
    groups = choose(Exchange("head_exchange", 3, 64, 32, torch.float32, "cpu", 2), Settings(num_chunks=4))
    assert groups.reason == "COC_PARALLEL_NUM=4; 3 heads of keys a rank allow 3 groups"


def test_one_rank_has_nothing_to_overlap():
    choice = choose(problem(ranks=1), Settings(num_chunks=4))
    assert (choice.kernel, choice.codes) == ("reference", ("one_rank",))


@pytest.mark.parametrize(
    ("operator", "ranks", "device", "settings", "exact"),
    [
        ("matmul_all_reduce", 2, "cpu", Settings(num_chunks=4), None),  # needs a probe
        ("matmul_all_reduce", 2, "cuda", Settings(customized_coc={(512, 64, 32): 4}), None),
        ("matmul_reduce_scatter", 2, "cpu", Settings(num_chunks=4), None),
        ("all_gather_matmul", 4, "cpu", Settings(num_chunks=4), None),
        ("matmul_all_reduce", 2, "cpu", Settings(mode=1), True),
        ("matmul_all_reduce", 3, "cpu", Settings(mode=1), True),
        ("matmul_all_reduce", 3, "cpu", Settings(num_chunks=4), False),  # another order of sums
        ("matmul_reduce_scatter", 4, "cpu", Settings(num_chunks=4), False),
        ("matmul_reduce_scatter", 4, "cpu", Settings(mode=1), False),
        ("matmul_all_reduce", 2, "npu", Settings(customized_coc={(512, 64, 32): 4}), False),  # operands may be padded
        ("matmul_all_reduce", 2, "cpu", Settings(num_chunks=4, deterministic=True), False),  # tiles of rows
        ("matmul_all_reduce", 2, "cpu", Settings(mode=1, deterministic=True), False),
    ],
)
def test_what_is_known_of_the_bits_beforehand(operator, ranks, device, settings, exact):
    assert choose(problem(operator, 512, device, ranks), settings).exact is exact


@pytest.mark.parametrize(
    ("operator", "device", "m", "n", "sizes"),
    [
        ("matmul_all_reduce", "cuda", 8192, 4096, (1024,) * 8),  # 8 x 32 tiles of 128 x 128
        ("matmul_all_reduce", "cuda", 4096, 2048, (1024,) * 4),  # 128 tiles for 132 multiprocessors
        ("matmul_all_reduce", "cuda", 2048, 1024, (2048,)),  # half of it has 64
        ("matmul_all_reduce", "npu", 2048, 4096, (256,) * 8),  # 2 x 16 tiles of 128 x 256
        ("matmul_reduce_scatter", "cuda", 8192, 1024, (1024,) * 4),  # the rows of both ranks in one launch
        ("matmul_all_reduce", "cpu", 2048, 1024, split_rows(2048, 8)),
    ],
)
def test_no_chunk_leaves_units_of_a_device_without_a_tile(operator, device, m, n, sizes):
    call = Matmul(operator, m, 2048, n, torch.bfloat16, device, 2)
    choice = choose(call, Settings(num_chunks=8))
    assert choice.sizes == sizes
    assert ("unfilled" in choice.codes) == (len(sizes) < 8)
    # An explicit request for this call is met.
    named = choose(call, Settings(num_chunks=1, customized_coc={(m, 2048, n): 8}))
    assert len(named.sizes) == 8


def test_the_units_of_a_type_of_device_are_those_of_its_largest_chip():
    for device, row in DEVICES.items():
        chips = [chip for chip in all_hardware().values() if chip.device == device]
        assert row.units is None or row.units.number == max(chip.matmul.cores for chip in chips), device


def test_on_a_device_few_rows_are_cut_at_the_largest_tile_of_which_each_chunk_has_one():
    assert [even_rows(rows, 4) for rows in (1024, 512, 256)] == [(256,) * 4, (128,) * 4, (64,) * 4]
    assert even_rows(768, 4) == (128, 256, 128, 256)
    assert even_rows(128, 4) == split_rows(128, 4)
    assert uneven_rows(896, 4, short_first=True) == (128, 256, 256, 256)


def test_on_a_device_the_chunk_that_nothing_hides_is_short_and_a_gather_may_stay_whole():
    assert uneven_rows(8192, 4, short_first=True) == (1280, 2304, 2304, 2304)
    assert uneven_rows(8192, 4, short_first=False) == (2304, 2304, 2304, 1280)
    gather = Matmul("all_gather_matmul", 16384, 2048, 4096, torch.bfloat16, "cuda", 2)
    cuts = cuts_to_time(gather, (2, 4))
    assert cuts == [
        (0, 8192),
        (4096, 4096),
        (2048,) * 4,
        uneven_rows(8192, 2, short_first=True),
        uneven_rows(8192, 4, short_first=True),
    ]
    scatter = replace(gather, operator="matmul_reduce_scatter")
    assert cuts_to_time(scatter, (2,)) == [(4096, 4096), uneven_rows(8192, 2, short_first=False)]
    assert cuts_to_time(replace(gather, n=128), (8,)) == [(0, 8192)]  # 8 tiles a chunk
    assert cuts_to_time(replace(gather, device="cpu"), (2, 4)) == [split_rows(8192, 2), split_rows(8192, 4)]


@pytest.mark.parametrize("layout", ["weight", "row-major"])
@pytest.mark.parametrize(
    ("k", "dtype", "rows", "n", "padded_k"),
    [
        (512, torch.bfloat16, 256, 256, 512),  # K is a multiple of 512 bytes
        (512, torch.bfloat16, 250, 256, 512),  # and rows of a chunk are not: w by its columns
        (1030, torch.bfloat16, 256, 256, 1280),
        (1030, torch.bfloat16, 250, 256, 1030),  # rows of a chunk are not
        (1030, torch.bfloat16, 256, 250, 1030),  # N is not
        (1040, torch.bfloat16, 256, 256, 1040),  # K is a multiple of 32 bytes
        (1001, torch.bfloat16, 256, 256, 1001),  # below the window
        (4100, torch.bfloat16, 256, 256, 4100),  # above it
        (1030, torch.float32, 128, 128, 1152),
    ],
)
def test_operands_are_aligned_where_it_is_worth_it(k, dtype, rows, n, padded_k, layout):
    x, weight = torch.randn(64, k).to(dtype), torch.randn(n, k).to(dtype)
    w = weight.t() if layout == "weight" else weight.t().contiguous()
    x_made, w_made = align_operands(x, w, alignment_of(k, n, rows, x.element_size(), 1024, 4096))
    assert (x_made.shape, w_made.shape) == ((64, padded_k), (padded_k, n))
    torch.testing.assert_close(x_made.double() @ w_made.double(), x.double() @ w.double())
    if padded_k != k:
        assert w_made.stride(0) == 1  # numbers of K lie together
    else:
        assert x_made is x
        assert (w_made is w) == (layout == "weight" or rows != 250 or k != 512)


@pytest.mark.parametrize(
    ("settings", "m", "unmet"),
    [
        (Settings(fused=True, strict=True), 512, "USE_COC_FUSED_KERNEL=1, but npu: device cpu"),
        (Settings(num_chunks=4, strict=True), 31, "COC_PARALLEL_NUM=4; 31 rows allow 1"),
        (Settings(num_chunks=4, strict=True), 40, None),  # fewer chunks, but chunks
        (Settings(num_chunks=1, strict=True, mode=2), 31, None),
    ],
)
def test_strictness_makes_an_unmet_request_an_error(settings, m, unmet):
    if unmet is None:
        assert choose(problem(m=m), settings).unmet == ""
        return
    with pytest.raises(UnmetRequestError, match=rf"COC_STRICT=1: matmul_all_reduce \[{m}, 64, 32\] .*{unmet}"):
        choose(problem(m=m), settings)
    assert choose(problem(m=m), replace(settings, strict=False)).unmet.startswith(unmet)


def test_one_rank_is_no_unmet_request():
    assert choose(problem(ranks=1), Settings(fused=True, num_chunks=4, strict=True)).kernel == "reference"


def test_an_explanation_names_every_kernel():
    explanation = explain(problem(), Settings(fused=True, strict=True))
    assert explanation.kernels["chunked"] == "taken"
    assert explanation.kernels["npu"] == "cannot: device cpu, not npu"
    assert list(explanation.kernels) == ["npu", "shm", "chunked", "reference", "ordered", "tree"]
    text = str(explanation)
    assert text.startswith("matmul_all_reduce [512, 64, 32] float32 on 2 cpu ranks: chunked, chunks: 4")
    assert "COC_STRICT=1 makes this an error" in text
    ordered = explain(problem(ranks=4), Settings(num_chunks=4, deterministic=True)).kernels
    assert ordered["ordered"] == "taken"
    assert ordered["chunked"] == "cannot: the backend decides in which order it sums 4 cpu ranks"


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, (2, 3, 3, 2)), (2, (2, 4, 2, 2)), (3, (3, 3, 4)), (16, (10,)), (64, (10,))]
)
def test_the_least_rows_of_a_chunk_are_a_setting(rows, sizes):
    problem = Matmul("matmul_all_reduce", 10, 64, 48, torch.float32, "cpu", 2)
    choice = choose(problem, Settings(num_chunks=4, chunk_rows=rows))
    assert choice.sizes == sizes and all(size % rows == 0 for size in sizes[:-1])
    assert {size % rows for cut in Question.of(choice, TRANSPOSED).candidates for size in cut[:-1]} <= {0}
