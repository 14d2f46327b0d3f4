"""Products: linear, matmul and similar operators, einsum, convolutions.

Sharding the contracted axis gives partial sums. Only the first rank then adds the bias: the bias's gradient is whole
there and zero elsewhere, a partial sum, so the bias is "partial_grad".
"""

from __future__ import annotations

from typing import Any

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import SUM
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, lettered, linear_in, place
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Rule, register_all, register_rule

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Operators on two tensors, and those that add a bias (their first input) to the product of the next two.
PRODUCTS = {"mm": ("mk", "kn", "mn"), "bmm": ("bmk", "bkn", "bmn"), "mv": ("mk", "k", "m"), "outer": ("m", "n", "mn")}
PRODUCTS |= {"dot": ("k", "k", "")}
BIASED = {"addmm": ("mk", "kn", "mn"), "baddbmm": ("bmk", "bkn", "bmn"), "addmv": ("mk", "k", "m")}


def linear(call: OpCall) -> list[OpPlacements]:
    """x [..., K], w [N, K], bias [N]: shard leading dimensions (rows), N (columns) or K (partial sums)."""
    if len(call.inputs[1].shape) != 2:
        return []
    rows = LETTERS[: len(call.inputs[0].shape) - 1]
    bias = ["N"] if len(call.inputs) == 3 else []
    return cut(call, lettered(call, [rows + "K", "NK", *bias], rows + "N")) + linear_in(call, [0])


def matmul(call: OpCall) -> list[OpPlacements]:
    """torch.matmul of vectors, matrices or broadcast batches: shard any axis."""
    left, right = (len(meta.shape) for meta in call.inputs)
    batch = LETTERS[: max(left, right, 2) - 2]
    first = "K" if left == 1 else batch[len(batch) - (left - 2) :] + "MK"
    second = "K" if right == 1 else batch[len(batch) - (right - 2) :] + "KN"
    output = batch + ("M" if left > 1 else "") + ("N" if right > 1 else "")
    return cut(call, lettered(call, [first, second], output)) + linear_in(call, [0], [1])


def product_of(letters: tuple[str, str, str]) -> Rule:
    """Return the rule of a product of two tensors, also with a bias before them, which is broadcast to the output."""

    def rule(call: OpCall) -> list[OpPlacements]:
        *bias, first, second = range(len(call.inputs))
        of_bias = [letters[2][len(letters[2]) - len(call.inputs[index].shape) :] for index in bias]
        return cut(call, lettered(call, [*of_bias, *letters[:2]], letters[2])) + linear_in(call, [first], [second])

    return rule


def einsum(call: OpCall) -> list[OpPlacements]:
    """Shard any letter of the equation; an ellipsis stands for broadcast dimensions."""
    left, arrow, output = str(arguments(call)["equation"]).replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        unrepeated = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        output = ("..." if "." in left else "") + "".join(unrepeated)
    unused = [letter for letter in LETTERS + LETTERS.upper() if letter not in left]
    widths = [len(meta.shape) - len(term.replace("...", "")) for term, meta in zip(inputs, call.inputs, strict=True)]
    rest = "".join(unused[: max(widths)])
    inputs = [term.replace("...", rest[len(rest) - width :]) for term, width in zip(inputs, widths, strict=True)]
    output = output.replace("...", rest)
    return cut(call, lettered(call, inputs, output)) + linear_in(call, *([index] for index in range(len(inputs))))


def run_biased(part: Part) -> Any:
    """Add the bias on the first of the ranks whose outputs are summed."""
    named = arguments(part.call)
    name = "bias" if "bias" in named else "self"
    index = place(named[name])
    return part.run() if index is None else part.run(**{name: part.only_first(part.inputs[index])})


def grouped(call: OpCall) -> list[OpPlacements]:
    """Rows [S, K] in groups, each times its own matrix of [E, K, N]: shard N or K; the groups' ends count all rows."""
    shapes = [len(meta.shape) for meta in call.inputs]
    if shapes != [2, 3, 1]:
        return []
    axes = lettered(call, ["sk", "ekn", "o"], "sn")
    return cut(call, [axis for letter, axis in zip("skeno", axes, strict=True) if letter in "kn"]) + linear_in(
        call, [0], [1]
    )


def convolution(call: OpCall) -> list[OpPlacements]:
    """Shard batch, output channels or input channels (partial sums); in a depthwise convolution all channels."""
    named = arguments(call)
    weight = place(named["weight"])
    assert weight is not None
    dims = len(call.inputs[weight].shape)
    if len(call.inputs[0].shape) != dims:
        return []  # without a batch
    groups, transposed = named.get("groups", 1), bool(named.get("transposed")) or "transpose" in call.name
    rest = (None,) * (len(call.inputs) - 2)
    axes = [Axis((0, None, *rest), (0,))]
    if groups == 1:
        into, out = (0, 1) if transposed else (1, 0)
        axes += [Axis((None, out, *(0 for _ in rest)), (1,)), Axis((1, into, *rest), (None,), SUM)]
    elif groups == call.inputs[0].shape[1]:
        axes.append(Axis((1, 0, *(0 for _ in rest)), (1,)))
    return cut(call, axes) + linear_in(call, [0])


def run_convolution(part: Part) -> Any:
    """Convolve with the bias on the first rank of a sum, and with the groups of the local channels."""
    named = arguments(part.call)
    changed: dict[str, Any] = {}
    if named.get("groups", 1) > 1:
        changed["groups"] = named["groups"] * part.inputs[0].shape[1] // part.call.inputs[0].shape[1]
    bias = place(named.get("bias"))
    if bias is not None:
        changed["bias"] = part.only_first(part.inputs[bias])
    return part.run(**changed)


def register() -> None:
    """Register this file's rules."""
    register_rule("aten.linear", linear, run_biased)
    register_rule("aten.matmul", matmul)
    register_rule("aten.einsum", einsum)
    for name, letters in PRODUCTS.items():
        register_rule(f"aten.{name}", product_of(letters))
    for name, letters in BIASED.items():
        register_rule(f"aten.{name}", product_of(letters), run_biased)
    for name in ("aten._grouped_mm", "transformers.grouped_mm_fallback"):
        register_rule(name, grouped)
    names = "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"
    register_all(names, convolution, run_convolution)
