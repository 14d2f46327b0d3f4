"""The npu kernel with the real torch_npu wheel, on CPU implementations of its operators.

Nothing here runs on an NPU. The tests show that this package's calls fit the wheel's schemas and the documented
limits, and that the layers are right if the operators match their documentation.
"""

import inspect
import itertools
from dataclasses import replace

import npu_wheel
import pytest
import torch
import torch.distributed as dist
from test_linear import check_column, check_row
from test_npu import A2, BF16, DTYPES
from tolerances import close

from ascend_parallel import (
    QuantisedWeight,
    Settings,
    column_linear,
    quantise_weight,
    quantised_row_linear,
    row_linear,
)
from ascend_parallel.ops import UnmetRequestError, npu, npu_limits
from ascend_parallel.ops.call import ExchangedMatmul
from ascend_parallel.process_groups import consistency

GRAINS = [("tensor", 0), ("channel", 0), ("group", 32), ("group", 192)]
MM_ALL_REDUCE = "npu_mm_all_reduce_base"


def of_all_reduce(comm_mode):
    """The all-reduce of plain torch_npu 2.7.1 has no such argument."""
    return None if npu_wheel.VERSION == "2.7.1" else comm_mode


def operands(group, m, k, n, dtype):
    """Every rank's x and w [R, ...] in float64 but of `dtype`'s precision, and this rank's in `dtype`."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((group.size(), m, k), (group.size(), k, n))
    x, w = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double() for size in sizes)
    return x, w, x[group.rank()].to(dtype), w[group.rank()].to(dtype)


def layouts(x, w):
    """The same operands in every layout that a layer may hand over."""
    yield x, w
    yield x, w.t().contiguous().t()  # a forward: the weight's transposed view
    yield x.t().contiguous().t(), w
    yield torch.cat([x, x], 1)[:, : x.shape[1]], torch.cat([w, w], 1)[:, : w.shape[1]]


def operators(kernels, group):
    ranks, rank = group.size(), group.rank()
    for dtype, (m, k, n) in itertools.product(DTYPES, [(40, 256, 24), (2, 384, 512)]):
        xs, ws, x_r, w_r = operands(group, m, k, n, dtype)
        total, y_gathered = (xs @ ws).sum(0), xs.flatten(0, 1) @ ws[rank]
        for x, w in layouts(x_r, w_r):
            meta = x.to("meta"), w.to("meta"), group, ()
            reduced = npu.matmul_all_reduce(x, w, group, ()).wait()
            close(reduced, total, dtype)
            assert npu.matmul_all_reduce(*meta).wait().shape == reduced.shape
            scattered = npu.matmul_reduce_scatter(x, w, group, ()).wait()
            close(scattered, total.chunk(ranks)[rank], dtype)
            assert npu.matmul_reduce_scatter(*meta).wait().shape == scattered.shape
            y, gathered = npu.all_gather_matmul(x, w, group, ())
            close(y, y_gathered, dtype)
            assert torch.equal(gathered.double(), xs.flatten(0, 1))
            assert [t.shape for t in npu.all_gather_matmul(*meta)] == [y.shape, gathered.shape]
    kernels.wrong = True  # the same checks notice one rank's missing part
    for wrong, truth in (
        (npu.matmul_all_reduce(x, w, group, ()).wait(), total),
        (npu.matmul_reduce_scatter(x, w, group, ()).wait(), total.chunk(ranks)[rank]),
    ):
        with pytest.raises(AssertionError, match="relative error"):
            close(wrong, truth, dtype)


@pytest.mark.slow
def test_operators_match_the_truth_in_every_layout(with_torch_npu):
    with_torch_npu(operators)


def arguments(kernels, group):
    import torch_npu

    _, _, x, w = operands(group, 8, 256, 16, BF16)
    for keep_gathered, comm_mode in itertools.product((True, False), (None, "ai_cpu", "aiv")):
        kernels.calls.clear()
        npu.matmul_all_reduce(x, w, group, (), comm_mode=of_all_reduce(comm_mode))
        npu.matmul_reduce_scatter(x, w, group, (), comm_mode=comm_mode)
        _, gathered = npu.all_gather_matmul(x, w, group, (), keep_gathered=keep_gathered, comm_mode=comm_mode)
        assert [operator for operator, _ in kernels.calls] == list(npu_wheel.ALLOWED)
        modes = [options.get("comm_mode") for _, options in kernels.calls]
        assert modes == [of_all_reduce(comm_mode), comm_mode, comm_mode]
        assert kernels.calls[2][1].get("gather_output", True) is keep_gathered
        assert (gathered is not None) is keep_gathered
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'chunks'"):  # the schemas are the wheel's own
        torch_npu.npu_mm_all_reduce_base(x, w, "tensor parallel", chunks=4)
    with pytest.raises(RuntimeError, match=r"missing value for argument 'input'"):
        torch_npu.npu_mm_reduce_scatter_base(x1=x, x2=w, hcom="tensor parallel", world_size=2)

    other = kernels.groups["another"] = dist.new_group()
    npu._HCCL_NAMES[other] = "another"
    assert npu.hccl_name(group) == "tensor parallel" and npu.hccl_name(other) == "another"
    npu.matmul_all_reduce(x, w, other, ())
    names_are_asked_once()
    graphs_and_events_have_the_names_that_are_asked()


def graphs_and_events_have_the_names_that_are_asked():
    """What tells of a captured graph, and what times a call, by the wheel's own names; nothing is captured here."""
    assert callable(torch.npu.NPUGraph)
    assert callable(torch.npu.is_current_stream_capturing)
    assert not consistency.is_capturing()
    assert {"enable_timing"} <= set(inspect.signature(torch.npu.Event.__new__).parameters)
    assert all(hasattr(torch.npu.Event, name) for name in ("record", "synchronize", "elapsed_time"))


def names_are_asked_once():
    class Backend:
        asked = 0

        def get_hccl_comm_name(self, rank):
            Backend.asked += 1
            return f"name of rank {rank}"

    class Group:
        def _get_backend(self, device):
            assert device.type == "npu"
            return Backend()

    group = Group()
    assert npu.hccl_name(group) is npu.hccl_name(group) == f"name of rank {dist.get_rank()}"
    assert Backend.asked == 1


@pytest.mark.slow
def test_arguments_are_what_the_schemas_and_the_documentation_ask_for(with_torch_npu):
    with_torch_npu(arguments)


def layers(kernels, group):
    """All four layers; every matmul next to a collective contracts over 256 at least."""
    as_if_on_an_npu()
    for dtype, sequence_parallel, shape in itertools.product(DTYPES, (False, True), [(64, 256), (36, 2, 256)]):
        for recompute in (True, False):
            settings = Settings(
                fused=True, strict=True, enable_coc_in_column_backward=True, recompute_all_gather=recompute
            )
            kernels.calls.clear()
            check_column(group, shape, dtype, settings, sequence_parallel, outputs=512)
            called = ["npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"]
            expected = called if sequence_parallel else ["npu_mm_all_reduce_base"]
            assert [operator for operator, _ in kernels.calls] == expected, kernels.calls
        kernels.calls.clear()
        check_row(group, shape, dtype, settings, sequence_parallel, inputs=512, outputs=256)
        expected = called[::-1] if sequence_parallel else ["npu_mm_all_reduce_base"]
        assert [operator for operator, _ in kernels.calls] == expected, kernels.calls


@pytest.mark.slow
def test_all_four_layers_match_the_truth_forward_and_backward(with_torch_npu):
    with_torch_npu(layers)


def as_if_on_an_npu():
    """Let every operator of this process choose as on an NPU; tensors stay on the CPU."""
    from ascend_parallel.ops import operators

    describe = operators.matmul_of
    operators.matmul_of = lambda *call: replace(describe(*call), device="npu")
    npu.soc_name = lambda: A2


def int8_weights(kernels, group):
    """Every grain, with and without offset, in both layouts: the operator alone, and the layer by its choice."""
    as_if_on_an_npu()
    for dtype, (grain, size), symmetric in itertools.product(DTYPES, GRAINS, (True, False)):
        xs, ws, x, w = operands(group, 40, 200, 24, dtype)
        weights = [quantise_weight(w.to(dtype), grain, group_size=size, symmetric=symmetric) for w in ws]
        truth = sum(x @ w.dequantise(torch.float64) for x, w in zip(xs, weights, strict=True))
        for laid_out in (w, w.t().contiguous().t()):
            w_r = quantise_weight(laid_out, grain, group_size=size, symmetric=symmetric)
            kernels.calls.clear()
            close(npu.matmul_all_reduce(x, w_r, group, ()).wait(), truth, dtype)
            assert npu.matmul_all_reduce(x.to("meta"), on_meta(w_r), group, ()).wait().shape == truth.shape
            x_r = x.clone().requires_grad_()
            settings = Settings(fused=True, strict=True)
            y = quantised_row_linear(x_r.view(4, 10, 200), w_r, group=group, settings=settings)
            y.sum().backward()
            close(y, truth.view(4, 10, 24), dtype)
            close(x_r.grad, torch.ones(40, 24).double() @ w_r.dequantise(torch.float64).t(), dtype)
            expected = {"antiquant_scale", *(() if symmetric else ("antiquant_offset",))}
            expected |= {"antiquant_group_size"} if size else set()
            assert [(call, expected <= set(options)) for call, options in kernels.calls] == [(MM_ALL_REDUCE, True)] * 2
    kernels.calls.clear()
    wide = [quantise_weight(w.float(), "channel") for w in ws]  # the operator takes no scales in fp32
    y = quantised_row_linear(x, wide[group.rank()], group=group, settings=Settings(fused=True))
    close(y, sum(x @ w.dequantise(torch.float64) for x, w in zip(xs, wide, strict=True)), dtype)
    assert kernels.calls == []


def on_meta(w):
    offset = None if w.offset is None else w.offset.to("meta")
    return QuantisedWeight(w.values.to("meta"), w.scale.to("meta"), offset, w.group_size)


@pytest.mark.slow
def test_int8_weights_reach_the_operator(with_torch_npu):
    with_torch_npu(int8_weights)


def exchanged_operators(kernels, group):
    """Both matmuls beside an all-to-all: the truth, the meta kernels' shapes, the schemas' arguments."""
    import torch_npu

    npu.soc_name = lambda: A2
    ranks, rank, m, n = group.size(), group.rank(), 6, 40
    for dtype in DTYPES:
        xs, ws, x, _ = operands(group, ranks * m, 64, ranks * n, dtype)
        whole = torch.cat([of_rank[rank * m : (rank + 1) * m] for of_rank in xs], 1)
        right, bias = torch.cat([*ws])[:, :n], ws[0, 0, :n]
        for laid_out in (right.to(dtype), right.to(dtype).t().contiguous().t()):  # 950 alone takes the second
            for added in (None, bias.to(dtype)):
                y, came = npu.all_to_all_matmul(x, laid_out, added, group)
                close(y, whole @ right + (0 if added is None else bias), dtype)
                assert torch.equal(came.double(), whole)
        meta = npu.all_to_all_matmul(x.to("meta"), laid_out.to("meta"), added.to("meta"), group)
        assert [each.shape for each in meta] == [y.shape, came.shape]
        of_rank = torch.cat([(of_rank @ ws[0]).chunk(ranks, 1)[rank] for of_rank in xs])
        same = ws[0].to(dtype)
        for laid_out in (same, same.t().contiguous().t()):
            close(npu.matmul_all_to_all(x, laid_out, group), of_rank, dtype)
        assert npu.matmul_all_to_all(x.to("meta"), same.to("meta"), group).shape == of_rank.shape
    for mode in ("aiv", "ai_cpu", "ccu"):
        kernels.calls.clear()
        npu.all_to_all_matmul(x, right.to(dtype), None, group, comm_mode=mode)
        npu.matmul_all_to_all(x, same, group, comm_mode=mode)
        assert [options.get("comm_mode") for _, options in kernels.calls] == [mode] * 2
    names = [npu.arguments_of(name) for name in npu_limits.EXCHANGED_OPERATORS.values()]
    for known, allowed in zip(names, npu_wheel.EXCHANGED.values(), strict=True):
        assert {"x1", "x2", "hcom", "world_size", *allowed} == known, known
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'heads'"):
        torch_npu.npu_all_to_all_matmul(x, right.to(dtype), "tensor parallel", ranks, heads=4)
    kernels.wrong = True
    for wrong, truth in (
        (npu.all_to_all_matmul(x, right.to(dtype), None, group)[0], whole @ right),
        (npu.matmul_all_to_all(x, same, group), of_rank),
    ):
        with pytest.raises(AssertionError, match="relative error"):
            close(wrong, truth, dtype)


def old_exchanged_operators(kernels, group):
    """torch_npu 2.7 has none of them, and the reason says it."""
    names = [npu.arguments_of(name) for name in npu_limits.EXCHANGED_OPERATORS.values()]
    assert names == [frozenset()] * 2
    asked = ExchangedMatmul("all_to_all_matmul", 64, 64, 64, BF16, "npu", 2, soc=A2, arguments=names[0])
    assert npu_limits.supports_exchanged(asked) == "the installed torch_npu has no operator npu_all_to_all_matmul"


@pytest.mark.slow
def test_matmuls_beside_an_all_to_all_match_the_truth_and_the_schemas(with_torch_npu):
    with_torch_npu(old_exchanged_operators if npu_wheel.VERSION.startswith("2.7") else exchanged_operators)


def comm_modes(kernels, group):
    """Settings.comm_mode from a layer's call to the operator's keyword argument; None is not passed at all."""
    as_if_on_an_npu()
    x, w = torch.randn(8, 512).to(BF16), torch.randn(256, 512).to(BF16)
    for comm_mode, sequence_parallel in itertools.product((None, "ai_cpu", "aiv"), (False, True)):
        if comm_mode == "aiv" and not sequence_parallel:
            continue  # the all-reduce of A2 has no such engine
        comm_mode = comm_mode if sequence_parallel else of_all_reduce(comm_mode)
        settings = Settings(fused=True, enable_coc_in_column_backward=True, strict=True, comm_mode=comm_mode)
        kernels.calls.clear()
        for layer in (column_linear, row_linear):
            x_r, w_r = x.clone().requires_grad_(), w.clone().requires_grad_()
            layer(x_r, w_r, group=group, settings=settings, sequence_parallel=sequence_parallel).sum().backward()
        called = [operator for operator, _ in kernels.calls]
        scatter, gather = "npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"
        assert called == ([gather, scatter, scatter, gather] if sequence_parallel else [MM_ALL_REDUCE] * 2), called
        for _, options in kernels.calls:
            assert options.get("comm_mode", "not passed") == (comm_mode or "not passed")


@pytest.mark.slow
def test_comm_mode_reaches_every_operator(with_torch_npu):
    with_torch_npu(comm_modes)


def looked_up_schemas(kernels, group):
    """The names of the arguments are the wheel's; without comm_mode a layer that asks for it is not fused."""
    for operator, name in npu_limits.FUSED_OPERATORS.items():
        names = npu.arguments(operator)
        assert {"x2", "hcom", *npu_wheel.ALLOWED[name]} - {"comm_mode"} <= names and "chunks" not in names, names
        assert ("comm_mode" in names) == (name != MM_ALL_REDUCE or of_all_reduce("aiv") == "aiv")
    as_if_on_an_npu()
    looked_up = npu.arguments
    npu.arguments = lambda operator: looked_up(operator) - {"comm_mode"}
    xs, ws, x, w = operands(group, 8, 256, 24, BF16)
    fused = Settings(fused=True, comm_mode="ai_cpu")
    close(row_linear(x, w.t(), group=group, settings=fused), (xs @ ws).sum(0), BF16)
    assert kernels.calls == []
    with pytest.raises(UnmetRequestError, match="has no argument comm_mode"):
        row_linear(x, w.t(), group=group, settings=replace(fused, strict=True))
    close(row_linear(x, w.t(), group=group, settings=replace(fused, comm_mode=None)), (xs @ ws).sum(0), BF16)
    assert [name for name, _ in kernels.calls] == [MM_ALL_REDUCE]


@pytest.mark.slow
def test_the_installed_schemas_decide(with_torch_npu):
    with_torch_npu(looked_up_schemas)
