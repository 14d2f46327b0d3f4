"""Operators on CPUs without tails: an element has the same bits wherever it lies, in forward and in backward."""

import pytest
import torch
import torch.nn.functional as F
from marks import promise

from ascend_parallel.ops.elementwise import (
    ELEMENTWISE,
    GRAIN,
    VECTOR,
    elements_in_whole_vectors,
)

# One of each kernel of the module, and those that other operators call.
COVERED = {
    "add": lambda x: torch.add(x, x * 3, alpha=0.3),
    "atan2": lambda x: torch.atan2(x, x * x + 1),
    "atanh": lambda x: torch.atanh(x.clamp(-0.9, 0.9)),
    "celu": F.celu,
    "cosh": torch.cosh,
    "elu": F.elu,
    "exp2": torch.exp2,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(torch.cat([x, x * 1.3]), 0),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "i0e": torch.special.i0e,
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "logaddexp2": lambda x: torch.logaddexp2(x, x * 2),
    "logit": lambda x: torch.logit(x.sigmoid().clamp(0.1, 0.9)),
    "loss of logits": lambda x: F.binary_cross_entropy_with_logits(x, x * 2, reduction="none"),
    "mish": F.mish,
    "power": lambda x: x.abs() ** 1.5,
    "power of a number": lambda x: 1.3**x,
    "power of tensors": lambda x: torch.pow(x.abs(), x),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "rsub": lambda x: torch.rsub(x, x * 0.3, alpha=0.7),
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1, inplace=True),
    "sinh": torch.sinh,
    "softplus": F.softplus,
    "sub": lambda x: torch.sub(x, x * 0.3, alpha=0.7),
}
# torch's own kernels compute these alike everywhere.
ALIKE = {
    "acos": lambda x: torch.acos(x.clamp(-0.9, 0.9)),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=1.3),
    "addcmul": lambda x: torch.addcmul(x, x, x * 3, value=1.3),
    "asin": lambda x: torch.asin(x.clamp(-0.9, 0.9)),
    "asinh": torch.asinh,
    "atan": torch.atan,
    "cos": torch.cos,
    "division": lambda x: x / (x.abs() + 1),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "lerp": lambda x: torch.lerp(x, x * 1.7, 0.3),
    "log": lambda x: torch.log(x.abs() + 0.1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": lambda x: torch.log2(x.abs() + 0.1),
    "logsigmoid": F.logsigmoid,
    "polynomial": lambda x: x * x * (x + 1.3) - 2.7 * x,
    "powers": lambda x: x**2 + x**3 + x**-1,
    "relu": F.relu,
    "sin": torch.sin,
    "softsign": F.softsign,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "tan": torch.tan,
    "tanh": torch.tanh,
}
# Reductions over rows, and what has one in backward.
OF_ROWS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "scale": lambda x: x * torch.ones_like(x[0], requires_grad=True),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def kernels():
    ELEMENTWISE.follow(True)
    yield
    ELEMENTWISE.follow(False)


def computed(function, x, dy):
    """A result and the gradient of x."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(dy)
    return y.detach(), x.grad


def equal_in_pieces(function, dtype, elements, piece):
    x, dy = ((torch.randn(elements, generator=torch.Generator().manual_seed(s)) * 2).to(dtype) for s in (1, 2))
    whole = computed(function, x, dy)
    parts = [computed(function, *given) for given in zip(x.split(piece), dy.split(piece), strict=True)]
    return all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))


@promise("degree-tails")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_has_the_same_bits_in_every_tensor(kernels, dtype):
    for name, function in {**COVERED, **ALIKE}.items():
        assert equal_in_pieces(function, dtype, 86 * 12, 43), name


def test_torchs_own_kernels_differ():
    """The comparison above can fail; what is not covered needs no kernel."""
    found = {name for name, function in COVERED.items() if not equal_in_pieces(function, torch.float32, 86 * 40, 43)}
    assert {"silu", "sigmoid", "gelu by tanh", "softplus", "power", "elu"} <= found
    for name, function in ALIKE.items():
        assert equal_in_pieces(function, torch.float32, 86 * 40, 43), name


@promise("degree-tails")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_of_threads_change_nothing(kernels, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for name in ("silu", "gelu", "gelu by tanh", "power", "glu", "sub"):
            assert equal_in_pieces(COVERED[name], dtype, 2 * 70_001, 70_001), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 96])
def test_every_share_is_whole_vectors(threads):
    for elements in (0, 1, VECTOR, GRAIN - 1, GRAIN + 1, 3 * GRAIN + 70, 1_000_003):
        whole = elements_in_whole_vectors(elements, threads)
        shares = max(1, min(threads, -(-whole // GRAIN)))
        assert whole % (shares * VECTOR) == 0
        assert 0 <= elements - whole < 2 * threads * VECTOR


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_rows_do_not_depend_on_other_columns(kernels, dtype):
    x, dy = (torch.randn(39, 344, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    for name in ("sum", "mean", "norm"):
        whole = OF_ROWS[name](x)
        assert torch.equal(whole, torch.cat([OF_ROWS[name](part) for part in x.split(43, 1)])), name
    scale = torch.ones(344, dtype=dtype, requires_grad=True)
    (x * scale).backward(dy)
    parts = [torch.ones(43, dtype=dtype, requires_grad=True) for _ in range(8)]
    for part, x_part, dy_part in zip(parts, x.split(43, 1), dy.split(43, 1), strict=True):
        (x_part * part).backward(dy_part)
    assert torch.equal(scale.grad, torch.cat([part.grad for part in parts]))


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adam": {"weight_decay": 0.01},
    "AdamW": {},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "weight_decay": 0.1, "centered": True},
    "NAdam": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
}


def stepped(kind, options, weights, gradients):
    """Weights after some steps."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = getattr(torch.optim, kind)(parameters, **options)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split([w.numel() for w in weights]), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@promise("degree-tails")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shard_is_updated_as_the_whole_weight(kernels, dtype):
    weight, *gradients = (torch.randn(43 * 20).to(dtype) for _ in range(4))
    for kind, options in OPTIMIZERS.items():
        fused = ({"fused": True},) if kind in ("SGD", "Adam", "AdamW", "Adagrad") else ()
        for variant in ({"foreach": False}, {"foreach": True}, *fused):
            found = [stepped(kind, {**options, **variant}, weight.split(size), gradients) for size in (860, 43)]
            assert torch.equal(*found), (kind, variant)


def results():
    """What torch computes of other dtypes, layouts, numbers and empty tensors."""
    generator = torch.Generator().manual_seed(0)
    x, whole, one = torch.randn(7, 3, generator=generator), torch.arange(5), torch.tensor(2.5)
    narrow = x.bfloat16()
    yield from (1 - x, x - 1, 2 + x, whole + 1.5, 1 - whole, narrow - 1.3, 1.3 - narrow, (x > 0) + 1, one + x)
    yield from (torch.add(narrow, 2.5, alpha=0.5), torch.rsub(narrow, 2, alpha=0.5), narrow.add(one, alpha=0.5))
    yield from (whole**2, 2**whole, 2.0**x, x.abs() ** narrow.abs(), torch.pow(one, x), whole.sigmoid(), one.sigmoid())
    yield from (torch.atan2(whole, whole), (x + 1j).sigmoid(), torch.empty(0, 3).sigmoid(), x.double().add(x))
    yield from (F.silu(x.t()), torch.ones(3, 1).expand(3, 9).sigmoid(), F.glu(x[:, :2], 1), F.silu(x[:, 1:]))
    yield from (x.sum(0), x.sum(0, keepdim=True), x.sum((0, 1)), whole.sum(0), (x > 0).sum(0), (x + 1j).sum(0))
    yield from (x.mean(0, dtype=torch.float64), x.mean(), x.norm(), torch.linalg.vector_norm(x + 1j), x.t().sum(1))
    yield from (torch.empty(0, 4).sum(0), narrow.sum(0, dtype=torch.float32), x.clone().sub_(whole[:3]))
    yield from (x.clone().sigmoid_(), narrow.clone().add_(narrow, alpha=0.2), x.clone().add_(1))


def test_what_torch_computes_stays():
    own = list(results())
    ELEMENTWISE.follow(True)
    try:
        ours = list(results())
    finally:
        ELEMENTWISE.follow(False)
    for index, (ours_, own_) in enumerate(zip(ours, own, strict=True)):
        torch.testing.assert_close(ours_, own_, check_stride=True, msg=lambda text, index=index: f"{index}: {text}")


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (lambda: torch.arange(5).sigmoid_(), "can't be cast"),
        (lambda: torch.ones(3).add_(torch.ones(2, 3)), "broadcast shape"),
        (lambda: torch.ones(3).sum(5), "out of range"),
        (lambda: F.glu(torch.ones(3)), "even"),
    ],
)
def test_errors_are_torchs(kernels, run, error):
    with pytest.raises((RuntimeError, IndexError), match=error):
        run()


def test_taken_out_torch_has_its_own_kernels():
    x = torch.randn(43)
    own = F.silu(x)
    ELEMENTWISE.follow(True)
    ELEMENTWISE.follow(True)
    ELEMENTWISE.follow(False)
    ELEMENTWISE.follow(False)
    assert torch.equal(F.silu(x), own)
