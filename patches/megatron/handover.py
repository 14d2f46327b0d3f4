"""Unfinished rows on their way: from a row-parallel layer to its norm, and from a transformer layer to the next."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.overlap.linear import column_linear
from ascend_parallel.overlap.region.column import PulledColumn
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.rows import LazyRows, PendingRows
from ascend_parallel.overlap.region.tail import Tail
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.base import Function, defined_in
from ascend_parallel.patches.check import CheckedCall
from ascend_parallel.patches.megatron.check import MegatronLinear, TailOperands, checked_tail
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import Output
from ascend_parallel.patches.megatron.region_checks import successor_reason
from ascend_parallel.settings import Settings

BLOCK = "megatron.core.transformer.transformer_block"
# Between a layer's forward and its block's stand at most this many frames: torch's and Megatron-core's calls.
MOST_FRAMES = 24

# Layer -> its block, and its place there.
_PLACES: WeakKeyDictionary[torch.nn.Module, tuple[ReferenceType[Any], int]] = WeakKeyDictionary()


class LeftRows:
    """The result y of a row-parallel layer whose collectives still run, and the sum and norm that take its rows."""

    def __init__(self, linear: Any, cut: RegionCut, stack: ExitStack, megatron: Megatron) -> None:
        """Expect the collectives of the layer `linear` in the chunks of `cut`; `stack` waits for them at last."""
        self.cut, self.sizes, self.verifier = cut, cut.sizes, megatron.verifier
        self._linear, self._group = linear, megatron.group_of(linear)
        self._checks: list[Callable[[], None]] = []
        self.pending = stack.enter_context(PendingRows(cut.sizes))
        self.y: torch.Tensor | None = None
        self.sum: torch.Tensor | None = None
        self.normed: torch.Tensor | None = None
        self.rows: LazyRows | None = None  # of sum and normed

    def finish(self) -> None:
        """Finish all rows, for a reader that does not ask for them."""
        for rows in (self.pending.rows, self.rows):
            if rows is not None:
                rows.finish()

    def checked(self, call: CheckedCall) -> Any:
        """Run a call that takes part in the region; if its check is due, `compare` compares it."""
        if self.verifier is None:
            return call.run(None)
        returned, compare = self.verifier.start(call)
        if compare is not None:
            self._checks.append(compare)
        return returned

    def compare(self) -> None:
        """Finish all rows, and compare the checked calls with Megatron-core's own code, in their order."""
        self.finish()
        checks, self._checks = self._checks, []
        for check in checks:
            check()

    def adding(self, add: Function, norm: Any) -> Function:
        """Return the stand-in for Megatron-core's `add`, followed by the module `norm`."""

        def run(output: Output, residual: torch.Tensor, prob: float) -> torch.Tensor:
            y, bias = output
            if y is not self.y or not _fits(y, residual) or self.pending.rows is None:
                self.finish()
                plain: torch.Tensor = add(output, residual, prob)
                return plain
            tail = Tail(
                lambda y_c, bias, residual_c: add((self._own(y_c), bias), residual_c, prob),
                functools.partial(type(norm).forward, _as_called(norm)),
                list(norm.parameters()),
                self.pending.rows,
                self.sizes,
            )
            operands = TailOperands(
                linear=self._linear,
                norm=norm,
                y=y,
                bias=bias,
                residual=residual,
                add=lambda y, bias, residual: add((y, bias), residual, prob),
            )
            call = checked_tail(operands, self.cut, self._group, lambda _: tail.apply(y, bias, residual))
            self.sum, self.normed = self.checked(call)
            self.rows = tail.rows
            return self.sum

        return run

    def _own(self, y_c: torch.Tensor) -> torch.Tensor:
        """Return rows that Megatron-core's addition may overwrite; those of y if they are not compared afterwards."""
        return y_c.clone() if self._checks else y_c

    def norm(self, norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Stand in for the module `norm`: the tail computes it."""
        if self.normed is not None and hidden is self.sum:
            return self.normed
        self.finish()
        normed: torch.Tensor = type(norm).forward(norm, hidden)
        return normed


class Handover:
    """Rows that a transformer layer has left to the next layer."""

    def __init__(self, successor: Any, left: LeftRows, stack: ExitStack, megatron: Megatron) -> None:
        """Hold the rows, whose collectives `stack` waits for."""
        self._successor, self._left, self._stack, self._megatron = successor, left, stack, megatron

    def is_for(self, layer: object, hidden: torch.Tensor) -> bool:
        """Tell whether `layer`, called with `hidden`, is the layer that pulls the rows."""
        return layer is self._successor and hidden is self._left.sum

    def finish(self) -> None:
        """Finish the rows: the layer that should pull them does not come."""
        with self._stack:
            self._left.compare()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in for the next layer's input norm and linear_qkv; on exit all rows are finished."""
        norm, qkv = self._successor.input_layernorm, self._successor.self_attention.linear_qkv
        COUNTS.add("region_across_layers", len(self._left.sizes), 0)
        with self._stack as stack:
            stack.enter_context(replaced(norm, "forward", functools.partial(self._left.norm, norm)))
            stack.enter_context(replaced(qkv, "forward", functools.partial(self._column, qkv)))
            yield
            self._left.compare()

    def _column(self, layer: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Output:
        """Stand in for linear_qkv: pull the rows."""
        megatron, weight = self._megatron, layer.weight
        group, settings = megatron.prepare(layer, "column", input_, weight, reduce_input_grad=True)
        if input_ is not self._left.normed or args or kwargs or not settings.enabled or self._left.rows is None:
            self._left.finish()
            output: Output = type(layer).forward(layer, input_, *args, **kwargs)
            return output
        call = MegatronLinear(
            layer=layer,
            kind="column",
            x=input_,
            weight=weight,
            original=type(layer).forward.__wrapped__,
            settings=lambda: settings,
            sequence_parallel=layer.sequence_parallel,
            cut=self._left.cut,
        )
        run = functools.partial(self._pull, layer, input_, group, settings)
        output = self._left.checked(call.checked(group, run))
        self._left.compare()
        return output

    def _pull(
        self, layer: Any, input_: torch.Tensor, group: dist.ProcessGroup, settings: Settings, begin: Begin | None
    ) -> Output:
        """Run linear_qkv on rows that it pulls."""
        megatron, weight, source = self._megatron, layer.weight, self._left.rows
        assert source is not None
        bias = None if layer.skip_bias_add else layer.bias
        keep = not settings.recompute_all_gather and weight.requires_grad
        pulled = PulledColumn(group, self._left.sizes, source, layer.sequence_parallel, keep)
        y = column_linear(
            input_,
            weight,
            bias,
            group=group,
            settings=settings,
            sequence_parallel=layer.sequence_parallel,
            before_communicating=megatron.confirm(group),
            weight_gradient=megatron.weight_gradient(layer, weight, begin, deferrable=False),
            forward_wrapper=lambda _: pulled.forward(input_.detach(), weight.detach(), bias),
        )
        return y, layer.bias if layer.skip_bias_add else None


def successor_of(layer: Any, megatron: Megatron) -> Any:
    """Return the next layer of the block that calls `layer`, if it can pull rows; else None."""
    block = importlib.import_module(BLOCK)
    loop = block.TransformerBlock.forward
    if not defined_in(loop, block) or not _called_by(loop.__code__):
        return None
    if layer not in _PLACES:
        running = _running_block(block.TransformerBlock)
        places = [] if running is None else [place for place, held in enumerate(running.layers) if held is layer]
        if not places:
            return None
        _PLACES[layer] = ref(running), places[0]
    found, place = _PLACES[layer]
    owner = found()
    layers = () if owner is None else owner.layers
    if place + 1 >= len(layers) or layers[place] is not layer:  # the last layer, or the block was changed since
        return None
    if sum(held is layer for held in layers) > 1:  # a layer with two places may be called at either
        return None
    successor = layers[place + 1]
    return None if successor_reason(megatron, layer, successor) is not None else successor


def _called_by(code: object) -> bool:
    """Tell whether a function with this code is among the nearest callers."""
    frame: FrameType | None = sys._getframe()
    for _ in range(MOST_FRAMES):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _running_block(kind: type) -> Any:
    """Return the innermost running module of exactly this class, or None."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Reading a frame's locals keeps them alive, so read only torch's frames, which end with the forward.
        if frame.f_code is torch.nn.Module._call_impl.__code__ and type(frame.f_locals["self"]) is kind:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _fits(y: torch.Tensor, residual: torch.Tensor) -> bool:
    """Tell whether the sum of both has the dtype, shape and device of each."""
    return (y.dtype, y.shape, y.device) == (residual.dtype, residual.shape, residual.device)


def _as_called(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the parameters of now: in backward, `torch.func.functional_call` has put others back.

    Without the stand-in for its forward, which would keep the whole region alive.
    """
    held = copy.copy(module)
    vars(held).pop("forward", None)
    held._parameters = dict(module._parameters)
    return held


@contextmanager
def replaced(owner: Any, name: str, value: Callable[..., object]) -> Iterator[None]:
    """Give one object another attribute inside this context, without its class's say.

    It has the marks of the class's method, so that `coverage` still knows a linear layer.
    """
    held = vars(owner)
    before = {name: held[name]} if name in held else {}
    held[name] = functools.partial(value)
    vars(held[name]).update(getattr(getattr(type(owner), name, None), "__dict__", {}))
    try:
        yield
    finally:
        del held[name]
        held.update(before)
