"""Arithmetic, comparisons, activations, copies, clamps: one element in, one out."""

from typing import Any

import torch
import torch.nn.functional as F

from .table import inplace, kernel, result

aten = torch.ops.aten

result("Add", "ttst", lambda a, b, alpha: torch.add(a, b, alpha=alpha))
result("Adds", "tsst", lambda a, b, alpha: torch.add(a, b, alpha=alpha))
result("AddV3", "stst", lambda a, b, alpha: torch.add(torch.as_tensor(a), b, alpha=alpha))
inplace("InplaceAdd", "tts", lambda a, b, alpha: torch.add(a, b, alpha=alpha))
inplace("InplaceAdds", "tss", lambda a, b, alpha: torch.add(a, b, alpha=alpha))
result("Sub", "ttst", lambda a, b, alpha: torch.sub(a, b, alpha=alpha))
result("Subs", "tsst", lambda a, b, alpha: torch.sub(a, b, alpha=alpha))
inplace("InplaceSub", "tts", lambda a, b, alpha: torch.sub(a, b, alpha=alpha))
inplace("InplaceSubs", "tss", lambda a, b, alpha: torch.sub(a, b, alpha=alpha))
result("Rsub", "ttst", lambda a, b, alpha: torch.rsub(a, b, alpha=alpha))
result("Rsubs", "tsst", lambda a, b, alpha: torch.rsub(a, b, alpha=alpha))

for name, function in {"Mul": torch.mul, "Div": torch.div, "FloorDivide": torch.floor_divide}.items():
    result(name, "ttt", function)
    result(f"{name}s", "tst", function)
    inplace(f"Inplace{name}", "tt", function)
    inplace(f"Inplace{name}s", "ts", function)

ROUNDING = {0: None, 1: "trunc", 2: "floor"}
result("DivMod", "ttit", lambda a, b, mode: torch.div(a, b, rounding_mode=ROUNDING[mode]))
result("DivMods", "tsit", lambda a, b, mode: torch.div(a, b, rounding_mode=ROUNDING[mode]))
inplace("InplaceDivMod", "tti", lambda a, b, mode: torch.div(a, b, rounding_mode=ROUNDING[mode]))
inplace("InplaceDivMods", "tsi", lambda a, b, mode: torch.div(a, b, rounding_mode=ROUNDING[mode]))
result("RemainderTensorTensor", "ttt", torch.remainder)
result("RemainderTensorScalar", "tst", torch.remainder)
result("RemainderScalarTensor", "stt", torch.remainder)
inplace("InplaceRemainderTensorScalar", "ts", torch.remainder)
inplace("InplaceRemainderTensorTensor", "tt", torch.remainder)
result("FmodTensor", "ttt", torch.fmod)
result("FmodScalar", "tst", torch.fmod)

COMPARISONS = {"Eq": torch.eq, "Ne": torch.ne, "Gt": torch.gt, "Ge": torch.ge, "Lt": torch.lt, "Le": torch.le}
for name, function in COMPARISONS.items():
    result(f"{name}Tensor", "ttt", function)
    result(f"{name}Scalar", "tst", function)
    inplace(f"Inplace{name}Tensor", "tt", function)
    inplace(f"Inplace{name}Scalar", "ts", function)
result("LessScalar", "tst", torch.lt)

UNARY = (
    "rsqrt", "sqrt", "exp", "exp2", "expm1", "neg", "log", "log2", "log10", "log1p", "sigmoid", "tanh", "relu",
    "reciprocal", "abs", "sin", "cos", "tan", "sinh", "cosh", "floor", "ceil", "round", "trunc", "erf", "erfc",
    "erfinv", "sign",
)  # fmt: skip
for name in UNARY:
    result(name.capitalize(), "tt", getattr(torch, name))
    if name not in ("neg", "abs", "round", "trunc", "sign"):
        inplace(f"Inplace{name.capitalize()}", "t", getattr(torch, name))
result("LogicalNot", "tt", torch.logical_not)
result("BitwiseNot", "tt", torch.bitwise_not)
result("RightShift", "ttt", torch.bitwise_right_shift)
result("LeftShifts", "tst", torch.bitwise_left_shift)
result("Frac", "tt", torch.frac)
result("IsClose", "ttddbt", lambda a, b, rtol, atol, nan: torch.isclose(a, b, rtol, atol, nan))
result("IsFinite", "tt", torch.isfinite)
result("IsPosInf", "tt", torch.isposinf)
result("IsNegInf", "tt", torch.isneginf)
result("NanToNum", "tffft", torch.nan_to_num)

for name in ("And", "Or", "Xor"):
    logical, bitwise = getattr(torch, f"logical_{name.lower()}"), getattr(torch, f"bitwise_{name.lower()}")
    result(f"Logical{name}", "ttt", logical)
    if name != "Xor":
        inplace(f"InplaceLogical{name}", "tt", logical)
    result(f"Bitwise{name}Tensor", "ttt", bitwise)
    result(f"Bitwise{name}Scalar", "tst", bitwise)
    if name != "Or":
        inplace(f"InplaceBitwise{name}Tensor", "tt", bitwise)
        inplace(f"InplaceBitwise{name}Scalar", "ts", bitwise)

result("PowTensorScalar", "tst", torch.pow)
result("PowScalarTensor", "stt", torch.pow)
result("PowTensorTensor", "ttt", torch.pow)
inplace("InplacePowTensorScalar", "ts", torch.pow)
inplace("InplacePowTensorTensor", "tt", torch.pow)
result("Maximum", "ttt", torch.maximum)
result("Minimum", "ttt", torch.minimum)
result("Atan2", "ttt", torch.atan2)
result("Clamp", "tzzt", torch.clamp)
result("ClampMin", "tst", torch.clamp_min)
result("ClampMax", "tst", torch.clamp_max)
result("ClampTensor", "toot", torch.clamp)
result("ClampMinTensor", "ttt", torch.clamp_min)
result("ClampMaxTensor", "ttt", torch.clamp_max)
inplace("InplaceClampMax", "ts", torch.clamp_max)
inplace("InplaceClampMinTensor", "tt", torch.clamp_min)
inplace("InplaceClampMaxTensor", "tt", torch.clamp_max)
result("SWhere", "tttt", lambda condition, a, b: torch.where(condition.bool(), a, b))
result("Addcmul", "tttst", lambda a, b, c, value: torch.addcmul(a, b, c, value=value))
result("Addcdiv", "tttst", lambda a, b, c, value: torch.addcdiv(a, b, c, value=value))
inplace("InplaceAddcmul", "ttts", lambda a, b, c, value: torch.addcmul(a, b, c, value=value))
inplace("InplaceAddcdiv", "ttts", lambda a, b, c, value: torch.addcdiv(a, b, c, value=value))
result("Lerp", "tttt", torch.lerp)
result("Lerps", "ttst", torch.lerp)
inplace("InplaceLerp", "ttt", torch.lerp)
inplace("InplaceLerps", "tts", torch.lerp)

# Copies, fills, casts.
kernel("InplaceCopy", "tt", lambda into, source: into.copy_(source))
kernel("Cast", "tit", lambda x, dtype, out: out.copy_(x))
kernel("InplaceFillScalar", "ts", lambda into, value: into.fill_(value))
kernel("InplaceFillTensor", "tt", lambda into, value: into.fill_(value.item()))
kernel("InplaceZero", "t", lambda into: into.zero_())
kernel("InplaceOne", "t", lambda into: into.fill_(1))
kernel("InplaceMaskedFillScalar", "tts", lambda into, mask, value: into.masked_fill_(mask.bool(), value))
kernel("InplaceMaskedFillTensor", "ttt", lambda into, mask, value: into.masked_fill_(mask.bool(), value.reshape(())))

# Activations.
result("Silu", "tt", F.silu)
result("SiluBackward", "ttt", aten.silu_backward)
result("Gelu", "tt", F.gelu)
result("GeluV2", "tit", lambda x, mode: F.gelu(x, approximate="tanh" if mode & 1 else "none"))
result("GeluBackward", "ttt", aten.gelu_backward)
result("GeluBackwardV2", "ttct", lambda grad, x, approximate: aten.gelu_backward(grad, x, approximate=approximate))
result("SigmoidBackward", "ttt", aten.sigmoid_backward)
result("TanhBackward", "ttt", aten.tanh_backward)
result("ThresholdBackward", "ttst", aten.threshold_backward)
result("Softplus", "tsst", F.softplus)
result("SoftplusBackward", "ttsst", aten.softplus_backward)
result("LeakyRelu", "tst", F.leaky_relu)
result("LeakyReluBackward", "ttsbt", aten.leaky_relu_backward)
result("Elu", "tssst", aten.elu)
result("EluBackward", "tsssbtt", aten.elu_backward)
result("Mish", "tt", F.mish)
result("MishBackward", "ttt", aten.mish_backward)
result("Hardtanh", "tsst", F.hardtanh)
result("HardtanhBackward", "ttsst", aten.hardtanh_backward)
result("Glu", "tit", F.glu)
result("GluBackward", "ttit", aten.glu_backward)
kernel("LogSigmoidForward", "ttt", lambda x, out, buffer: out.copy_(F.logsigmoid(x)))
result("LogSigmoidBackward", "tttt", lambda grad, x, buffer: grad * torch.sigmoid(-x))
LOSSES = {0: "none", 1: "mean", 2: "sum"}
result("MseLoss", "ttit", lambda x, y, reduction: F.mse_loss(x, y, reduction=LOSSES[reduction]))
result("MseLossBackward", "tttit", aten.mse_loss_backward)
result("L1Loss", "ttit", lambda x, y, reduction: F.l1_loss(x, y, reduction=LOSSES[reduction]))


def l1_loss_grad(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return the gradient of the mean or the sum of distances."""
    return grad * torch.sign(x - y) / (x.numel() if LOSSES[reduction] == "mean" else 1)


result("L1LossBackward", "tttit", l1_loss_grad)
result("SmoothL1Loss", "ttift", aten.smooth_l1_loss)
result("SmoothL1LossBackward", "tttift", aten.smooth_l1_loss_backward)
result("KlDiv", "ttibt", lambda x, y, reduction, log: aten.kl_div(x, y, reduction, log_target=log))


def kl_div_grad(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int, log: bool) -> torch.Tensor:
    """Return the gradient of the logarithms."""
    return -grad * (y.exp() if log else y.clamp_min(0)) / (x.numel() if LOSSES[reduction] == "mean" else 1)


def logits_loss_grad(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weight: Any, positive: Any, reduction: int
) -> torch.Tensor:
    """Return the gradient of the logits."""
    true = y if positive is None else y * positive
    g = grad * ((true + 1 - y) * torch.sigmoid(x) - true) / (x.numel() if LOSSES[reduction] == "mean" else 1)
    return g if weight is None else g * weight


result("KlDivBackward", "tttibt", kl_div_grad)
result("BinaryCrossEntropyWithLogitsBackward", "tttooit", logits_loss_grad)
result(
    "BinaryCrossEntropyWithLogits", "ttooit",
    lambda x, y, weight, positive, reduction: aten.binary_cross_entropy_with_logits(x, y, weight, positive, reduction),
)  # fmt: skip


def swiglu(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Multiply silu of the first half by the second half."""
    gate, up = x.float().chunk(2, dim)
    return F.silu(gate) * up


def swiglu_grad(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the gradient of `swiglu`."""
    gate, up = x.float().chunk(2, dim)
    return torch.cat((aten.silu_backward(grad.float() * up, gate), grad.float() * F.silu(gate)), dim)


result("SwiGlu", "tit", swiglu)
result("SwiGluGrad", "ttit", swiglu_grad)
