"""What works row by row in training: fused norms and activations get rows as they arrive, with the bits of all rows.

The functions here are made as those of apex and Liger are: a kernel behind them reads memory by its address, which
torch refuses to unfinished rows. Rows that have not come yet are NaN.
"""

import functools
import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_unfinished import LateGradient, Sent, drawn, sent

from ascend_parallel.ops.row_wise import FUNCTIONS, OPERATORS
from ascend_parallel.ops.unfinished import UnfinishedTensor, finished, is_unfinished
from ascend_parallel.ops.unfinished_functions import CALL
from ascend_parallel.patches.row_wise import RowWiseFunctions, patch_set


def memory(x):
    """Return the memory of a tensor to a kernel: of all its rows, none of which may be on its way."""
    assert type(x) in (torch.Tensor, torch.nn.Parameter), f"{type(x).__name__} has no address for a kernel"
    values = x.detach().numpy()
    assert not np.isnan(values).any(), "read before it has arrived"
    return values


def norm_kernel(x, weight):
    x, weight = memory(x), memory(weight)
    scale = 1 / np.sqrt((x * x).mean(-1) + np.float32(1e-6))
    return torch.from_numpy(x * scale[..., None] * weight), torch.from_numpy(scale)


def norm_gradients(dy, x, weight, scale, in_place):
    dy, x, weight, scale = map(memory, (dy, x, weight, scale))
    n, dn = x * scale[..., None], dy * weight
    dx = scale[..., None] * (dn - n * (dn * n).mean(-1, keepdims=True))
    dw = (dy * n).reshape(-1, n.shape[-1]).sum(0)
    if in_place:
        dy[...] = dx
        dx = dy
    return torch.from_numpy(dx), torch.from_numpy(dw)


class ApexNorm(torch.autograd.Function):
    """As apex's FusedRMSNormAffineFunction and FastLayerNormFN: it keeps the input's shape, and the rows' scales."""

    @staticmethod
    def forward(ctx, x, weight, shape, eps):
        ctx.x_shape, ctx.normalized = x.shape, shape
        x_, weight_ = x.contiguous(), weight.contiguous()
        y, scale = norm_kernel(x_.view(-1, x.shape[-1]), weight_)
        ctx.save_for_backward(x_.view(-1, x.shape[-1]), weight_, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dx, dw = norm_gradients(dy.contiguous().view(x.shape), x, weight, scale, False)
        return dx.view(ctx.x_shape), dw, None, None


class LigerNorm(ApexNorm):
    """As LigerRMSNormFunction: its backward writes the input's gradient to the output's."""

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dx, dw = norm_gradients(dy.contiguous().view(x.shape), x, weight, scale, True)
        return dx.view(ctx.x_shape), dw if ctx.needs_input_grad[1] else None, None, None


class AddNorm(torch.autograd.Function):
    """As LigerFusedAddRMSNormFunction: two inputs and two results with rows, of which it saves one."""

    @staticmethod
    def forward(ctx, x, residual, weight):
        total = torch.from_numpy(memory(x) + memory(residual))
        y, scale = norm_kernel(total.view(-1, x.shape[-1]), weight)
        ctx.save_for_backward(total, weight, scale)
        return y.view(x.shape), total

    @staticmethod
    def backward(ctx, dy, d_total):
        total, weight, scale = ctx.saved_tensors
        rows = (-1, total.shape[-1])
        dx, dw = norm_gradients(dy.contiguous().view(rows), total.view(rows), weight, scale, False)
        dx = torch.from_numpy(memory(dx.view(total.shape)) + memory(d_total))
        return dx, dx, dw


class Gate(torch.autograd.Function):
    """As LigerSiLUMulFunction: its backward writes to the inputs that it has saved."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.from_numpy(memory(a) * memory(b))

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        ga, gb = memory(a), memory(b)
        ga[...], gb[...] = memory(dy) * gb, memory(dy) * ga
        return a, b


class CountsRows(torch.autograd.Function):
    """Not row by row: it divides by the number of rows, and keeps the number."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(memory(x))
        return torch.from_numpy(memory(x) / np.float32(ctx.rows))

    @staticmethod
    def backward(ctx, dy):
        return torch.from_numpy(memory(dy) / np.float32(ctx.rows))


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    """Put the functions of this file into the table, one line each, and patch them."""
    from ascend_parallel.ops.row_wise import RowWiseFunction

    lines = (
        RowWiseFunction(__name__, "ApexNorm"),
        RowWiseFunction(__name__, "LigerNorm", writes=True),
        RowWiseFunction(__name__, "AddNorm", rows=(0, 1)),
        RowWiseFunction(__name__, "Gate", rows=(0, 1), writes=True),
        RowWiseFunction(__name__, "CountsRows"),
    )
    monkeypatch.setattr("ascend_parallel.patches.row_wise.FUNCTIONS", (*lines, *FUNCTIONS))
    functions = RowWiseFunctions()
    functions.extend()
    assert all(status.applied for status in functions.status())
    yield functions
    functions.revert()


def norm(x, w):
    return ApexNorm.apply(x, w[0], (64,), 1e-6)


def in_place(x, w):
    return LigerNorm.apply(x, w[0], (64,), 1e-6)


CHAINS = {
    "norm": norm,
    "norm in place": in_place,
    "norms": lambda x, w: in_place(norm(x * 2, w) + w[1], w),
    "add, norm": lambda x, w: (lambda y, total: y + total * 2)(*AddNorm.apply(x, drawn(16, 4, 64, seed=9), w[0])),
    "gate": lambda x, w: Gate.apply(x * w[0], x + w[1]),
    "MLP": lambda x, w: Gate.apply(*(norm(x, w) @ w).chunk(2, -1)) @ w[:32],
    "frozen": lambda x, w: norm(x, w.detach()),
    "sequence first": lambda x, w: norm(x.view(4, 16, -1).transpose(0, 1), w),
    "heads": lambda x, w: norm((x @ w).view(64, 64), w),
    "not by rows": lambda x, w: CountsRows.apply(norm(x, w)),
}


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("chain", CHAINS)
def test_functions_have_the_bits_and_gradients_of_finished_tensors(chain, blocks):
    made = []
    for unfinished in (0, blocks):
        value, w = drawn(64, 64, seed=1).requires_grad_(), drawn(64, 64, seed=2).requires_grad_()
        y = CHAINS[chain](Sent.apply(value, unfinished), w)
        y.square().sum().backward()
        made.append([finished(y.detach()), value.grad, w.grad])
    for plain, mine in zip(*made, strict=True):
        assert (plain is None and mine is None) or torch.equal(plain, mine)


@pytest.mark.parametrize("chain", [name for name in CHAINS if name not in ("not by rows", "sequence first")])
def test_a_forward_stays_unfinished(chain):
    x, asked = sent(drawn(64, 64))
    y = CHAINS[chain](x.view(16, 4, 64), drawn(64, 64, seed=2).requires_grad_())
    assert is_unfinished(y) and y.requires_grad is (chain != "frozen") and asked == []
    y[:4].sum()
    assert asked == [0]


@pytest.mark.parametrize("from_arriving", [False, True])
@pytest.mark.parametrize("chain", ["norm", "norm in place", "norms", "add, norm", "gate", "frozen"])
def test_gradients_stay_unfinished(chain, from_arriving):
    """Of a forward that ran on all rows, and of one whose rows arrived; those of weights have the bits of all rows."""
    seen, made = [], []

    def see(gradient):
        seen.append(is_unfinished(gradient))

    for asked in (None, []):
        value, w = drawn(64, 64, seed=1).requires_grad_(), drawn(64, 64, seed=2).requires_grad_()
        rows = w.unbind()  # before x: whoever needs the gradient of a weight at once waits for all rows
        x = Sent.apply(value, 1 if from_arriving and asked is not None else 0) * 1
        x.register_hook(see)
        y = LateGradient.apply(CHAINS[chain](x, rows if chain != "frozen" else w), asked)
        y.sin().sum().backward()
        made.append([value.grad, w.grad])
    assert seen == [False, True]
    for plain, mine in zip(*made, strict=True):
        assert (plain is None and mine is None) or (torch.equal(plain, mine) and type(mine) is torch.Tensor)


def test_a_weight_may_change_before_the_rows_come():
    x, _ = sent(drawn(64, 64))
    weight = drawn(64, 64, seed=2)
    expected = norm_kernel(drawn(64, 64), weight[0])[0]
    y = norm(x, weight)
    weight.zero_()
    assert torch.equal(finished(y), expected)


def test_an_operand_that_has_changed_is_an_error():
    x, _ = sent(drawn(64, 64))
    residual = drawn(64, 64, seed=3)
    y, _ = AddNorm.apply(x, residual, drawn(64, seed=2))
    residual.add_(1)
    with pytest.raises(RuntimeError, match="AddNorm of a region reads a tensor of shape \\[64, 64\\]"):
        finished(y)


def test_autocast_of_the_call_is_that_of_rows_that_come_later(monkeypatch):
    """Rows may be asked for outside of the context."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return (x @ w).float()

        @staticmethod
        def backward(ctx, dy):
            return None, None

    from ascend_parallel.ops.unfinished_functions import RowFunction

    function = RowFunction("Product", Product.forward, Product.backward, (0,), writes=False)
    monkeypatch.setattr(Product, "forward", staticmethod(lambda ctx, *args: function.forward(ctx, *args)))
    w = drawn(64, 64, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        plain = (drawn(64, 64)[:16] @ w).float()
        y = Product.apply(sent(drawn(64, 64))[0], w)
        assert is_unfinished(y)
    assert torch.equal(finished(y)[:16], plain)


def test_a_function_that_refuses_such_rows_runs_on_all_rows(monkeypatch):
    """As apex's norms over the last two dimensions do: rows of one dimension do not end so."""

    class Joint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shape):
            if x.shape[-2:] != shape:
                raise RuntimeError(f"expected an input of shape [*, {shape}]")
            return x / x.square().mean((-2, -1), keepdim=True)

        @staticmethod
        def backward(ctx, dy):
            return None, None

    from ascend_parallel.ops.unfinished_functions import RowFunction

    function = RowFunction("Joint", Joint.forward, Joint.backward, (0,), writes=False)
    monkeypatch.setattr(Joint, "forward", staticmethod(lambda ctx, *args: function.forward(ctx, *args)))
    x = drawn(64, 64).view(16, 4, 64)
    y = Joint.apply(sent(drawn(64, 64))[0].view(16, 4, 64), (4, 64))
    assert torch.equal(finished(y), x / x.square().mean((-2, -1), keepdim=True))
    with pytest.raises(RuntimeError, match="expected an input of shape"):
        Joint.apply(sent(drawn(64, 64))[0].view(16, 4, 64), (2, 64))


def test_what_is_recomputed_by_a_checkpoint_and_saved_by_hooks():
    from torch.utils.checkpoint import checkpoint

    made = []
    for blocks in (0, 1):
        value, w = drawn(64, 64, seed=1).requires_grad_(), drawn(64, 64, seed=2).requires_grad_()
        x = Sent.apply(value, blocks)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: finished(t).clone(), lambda t: t):
            y = in_place(x, w)
        y = checkpoint(norm, y, w, use_reentrant=False) + checkpoint(norm, y, w, use_reentrant=True)
        y.square().sum().backward()
        made.append([value.grad, w.grad])
    assert all(map(torch.equal, *made))


def test_a_compiled_program_has_the_function_itself():
    def step(x):
        return Squared.apply(x) + 1

    functions = importlib.import_module("ascend_parallel.ops.unfinished_functions")
    assert functions.CALL == CALL
    x = drawn(64, 64).requires_grad_()
    y = torch.compile(step, backend="eager", fullgraph=True)(x)
    y.sum().backward()
    assert torch.equal(y, drawn(64, 64) ** 2 + 1) and torch.equal(x.grad, 2 * drawn(64, 64))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class Doubled(ApexNorm):
    """As apex's functions of mixed dtypes: its own forward, which calls the base's, and the backward of the base."""

    @staticmethod
    def forward(ctx, x, weight, shape, eps):
        return ApexNorm.forward(ctx, x * 2, weight, shape, eps)


@pytest.mark.parametrize("in_table", [True, False])
def test_a_subclass_with_a_method_of_its_own(in_table, patched, monkeypatch):
    """In the table it runs by rows with its own method; else it waits for all rows."""
    from ascend_parallel.ops.row_wise import RowWiseFunction

    if in_table:
        monkeypatch.setattr("ascend_parallel.patches.row_wise.FUNCTIONS", (RowWiseFunction(__name__, "Doubled"),))
        patched.extend()
    made = []
    for blocks in (0, 1):
        value, w = drawn(64, 64, seed=1).requires_grad_(), drawn(64, seed=2).requires_grad_()
        x = Sent.apply(value, blocks) * 1
        y = Doubled.apply(x if in_table or not blocks else finished(x), w, (64,), 1e-6)
        assert is_unfinished(y) is (in_table and bool(blocks))
        y.square().sum().backward()
        made.append([finished(y.detach()), w.grad])
    assert all(map(torch.equal, *made))


def test_what_another_package_has_replaced_is_left_to_it(monkeypatch, patched, caplog):
    patched.revert()
    monkeypatch.setattr(Gate, "forward", staticmethod(importlib.import_module("operator").add))
    patched.extend()
    status = {each.target.rsplit(".", 2)[1]: each.applied for each in patched.status() if "Gate" in each.target}
    assert status == {"Gate": False}
    assert "Gate waits for all rows" in caplog.text


# --- Megatron-core's own fused activations: real classes, whose kernels are compiled.
BIAS = {"fused_bias_swiglu.BiasSwiGLUFunction", "fused_bias_geglu.BiasGeGLUFunction", "fused_bias_gelu.GeLUFunction"}
MEGATRON = [line for line in FUNCTIONS if line.module.startswith("megatron")]


@pytest.mark.sample("SwiGLUFunction")
@pytest.mark.parametrize("line", MEGATRON, ids=lambda line: line.owner)
def test_megatron_fused_activations(line, patched):
    function = getattr(importlib.import_module(line.module), line.owner)
    patched.extend()
    constants = (False, False) if "swiglu" in line.module else ()
    made = []
    for blocks in (0, 1):
        value, bias = drawn(64, 64, seed=1).requires_grad_(), drawn(64, seed=2).requires_grad_()
        x = Sent.apply(value, blocks).view(64, 64)
        more = (bias,) if f"{line.module.rpartition('.')[2]}.{line.owner}" in BIAS else ()
        y = function.apply(x, *more, *constants)
        assert is_unfinished(y) is bool(blocks)
        asked = [] if blocks else None
        LateGradient.apply(y.view(16, 4, -1), asked).square().sum().backward()
        made.append([finished(y.detach()), value.grad, bias.grad])
    for plain, mine in zip(*made, strict=True):
        assert (plain is None and mine is None) or torch.equal(plain, mine)


@functools.lru_cache(maxsize=1)
def npu_operators():
    """Give torch the schemas of torch_npu's norm and gate, with kernels in plain torch on CPU and meta tensors."""
    if hasattr(torch.ops.npu, "npu_rms_norm_backward"):
        return None  # the wheel is installed
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
    library.define("npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)")
    library.define("npu_swiglu(Tensor self, int dim=-1) -> Tensor")
    library.define("npu_swiglu_backward(Tensor grad_output, Tensor self, int dim=-1) -> Tensor")

    def rms_norm(x, gamma, epsilon=1e-6):
        rstd = (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
        return x * rstd * gamma, rstd

    def rms_norm_backward(dy, x, gamma, rstd):
        n, dn = x * rstd, dy * gamma
        dx = rstd * (dn - n * (dn * n).mean(-1, keepdim=True))
        return dx, (dy * n).flatten(0, -2).sum(0)

    def swiglu(x, dim=-1):
        gate, up = x.chunk(2, dim)
        return F.silu(gate) * up

    def swiglu_backward(dy, x, dim=-1):
        gate, up = x.chunk(2, dim)
        return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)], dim)

    for kernel in (rms_norm, rms_norm_backward, swiglu, swiglu_backward):
        for key in ("CPU", "Meta"):
            library.impl(f"npu_{kernel.__name__}", kernel, key)
    return library


OPERATOR_CALLS = {
    "norm": lambda x, w: torch.ops.npu.npu_rms_norm(x, w[0], 1e-6),
    "norm's gradient": lambda x, w: torch.ops.npu.npu_rms_norm_backward(
        x, drawn(16, 4, 64, seed=3), w[0], drawn(16, 4, 1, seed=4)
    ),
    "gate": lambda x, w: torch.ops.npu.npu_swiglu(x),
    "gate of dim 2": lambda x, w: torch.ops.npu.npu_swiglu(x, 2),
    "gate's gradient": lambda x, w: torch.ops.npu.npu_swiglu_backward(x, drawn(16, 4, 128, seed=3), -1),
    "gate of dim 0": lambda x, w: torch.ops.npu.npu_swiglu(x, 0),
}


@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_operators_of_torch_npu(call):
    library = npu_operators()
    w = drawn(64, 64, seed=2)
    x, asked = sent(drawn(64, 64))
    mine, plain = (OPERATOR_CALLS[call](each.view(16, 4, 64), w) for each in (x, drawn(64, 64)))
    mine, plain = ((each,) if torch.is_tensor(each) else each for each in (mine, plain))
    if call != "gate of dim 0":
        assert all(isinstance(y, UnfinishedTensor) for y in mine) and asked == []
    assert all(torch.equal(finished(y), z) for y, z in zip(mine, plain, strict=True)) and library is not False


def test_a_line_names_its_class_once():
    names = [f"{line.module}.{line.owner}" for line in FUNCTIONS] + [line.name for line in OPERATORS]
    assert len(names) == len(set(names))
    assert all(patch_set(line).patches for line in MEGATRON)  # the installed version has them
