"""Regions in Megatron-core: the replacement of MLP.forward, and what it shares with that of TransformerLayer.forward.

An MLP runs in chunks of rows (`ascend_parallel.overlap.region`): Megatron-core's own MLP.forward runs once for each
chunk, with stand-ins for fc1 and fc2, so that its activation code is never copied. If a module or call does not allow
this, the layers run one by one, and rank 0 logs why, once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ascend_parallel.ops import UnmetRequestError
from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.operators import rows_of
from ascend_parallel.ops.pending import Pending
from ascend_parallel.overlap.region.cuts import RegionCut, RegionMatmul, region_cut
from ascend_parallel.overlap.region.mlp import Activate, ChunkedMlp, chunked_mlp
from ascend_parallel.overlap.region.rows import LazyRows
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.check import CheckedCall
from ascend_parallel.patches.coverage import RegionKind
from ascend_parallel.patches.megatron.check import checked_mlp
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import AttributeOverlay, Output
from ascend_parallel.patches.megatron.region_checks import configured_reason, mlp_reason
from ascend_parallel.patches.tuned import overlapped

log = logging.getLogger("ascend_parallel")


class Handed(Protocol):
    """Rows that a layer has left to the next; `handover.Handover` implements it."""

    def is_for(self, layer: object, hidden: torch.Tensor) -> bool:
        """Tell whether `layer`, called with `hidden`, is the layer that pulls the rows."""

    def in_place(self) -> AbstractContextManager[None]:
        """Have the layer pull the rows inside this context."""

    def finish(self) -> None:
        """Finish the rows."""


class Regions:
    """Decides which calls run as a region, alike on every rank."""

    def __init__(self, megatron: Megatron) -> None:
        """Hold the patched layers' settings."""
        self.megatron = megatron
        self.choice = megatron.region_choice
        self._logged: set[str] = set()
        self._handed: Handed | None = None
        self._running: set[torch.nn.Module] = set()

    def timed(self, module: Any, hidden: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Return ``run()``, a call of `module` with `hidden`; COC_REGION=auto times the first ones, and decides."""
        if not self.choice.undecided:
            return run()
        excluded = "COC_VERIFY takes time of its own" if self.megatron.verifier else configured_reason(module.config)
        return self.choice.call(module, hidden, run, excluded)

    @contextmanager
    def running(self, layer: Any) -> Iterator[None]:
        """Note that stand-ins take the place of parts of `layer` and its MLP inside this context."""
        modules = {layer, layer.mlp}
        self._running |= modules
        try:
            yield
        finally:
            self._running -= modules

    def excluded(self, module: Any, reason: Callable[[Any], str | None]) -> str | None:
        """Return why a module cannot run as a region in any call, or None; ``reason(module)`` judges the module."""
        if module in self._running:
            return None
        if self.choice.decision is not None and not self.choice.on:
            return "COC_REGION=auto keeps the layers"
        if self.megatron.with_options(module, self.megatron.settings).deterministic:
            return "one chunk: the deterministic mode has chunks of its own"
        return reason(module)

    def mlp_reason(self, mlp: Any) -> str | None:
        """Return why an MLP cannot run as a region in any call, or None."""
        return mlp_reason(self.megatron, mlp, next(mlp.parameters(), torch.empty(0)), None)

    def hand_over(self, handed: Handed) -> None:
        """Keep rows for the next layer."""
        self._handed = handed

    @contextmanager
    def received(self, layer: Any, hidden: torch.Tensor) -> Iterator[None]:
        """Have `layer` pull the rows that the layer before has left, if it is called with these; else finish them."""
        handed, self._handed = self._handed, None
        if handed is None:
            yield
        elif handed.is_for(layer, hidden):
            with handed.in_place():
                yield
        else:
            handed.finish()
            yield

    def skip(self, module: Any, reason: str) -> None:
        """Log once, on rank 0, why a module runs without a region; with strict settings raise instead."""
        text = f"{type(module).__name__} runs without a region: {reason}"
        settings = self.megatron.settings
        if settings.strict and settings.region is True:
            raise UnmetRequestError(f"COC_STRICT=1: {text}")
        if text not in self._logged:
            self._logged.add(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("%s", text)

    def cut(self, mlp: Any, like: torch.Tensor, rows: int, more: Sequence[torch.Tensor] = ()) -> RegionCut:
        """Return the chunks of a region of `rows` rows of a rank, with the dtype and device of `like`.

        more: the weights of further layers whose forward is cut at the same rows.
        """
        w1, w2 = mlp.linear_fc1.weight, mlp.linear_fc2.weight
        group, sequence_parallel = self.megatron.group_of(mlp.linear_fc2), mlp.linear_fc2.sequence_parallel
        # fc2's input is not there yet; the choice of its chunks reads its shape, device and need of a gradient.
        like_a = like.new_empty(1).expand(rows * (group.size() if sequence_parallel else 1), w2.shape[1])
        like_a.requires_grad_(like.requires_grad)
        _, settings = self.megatron.prepare(mlp.linear_fc2, "row", like_a, w2)
        if not settings.enabled:  # tuning leaves the layer alone to Megatron-core
            settings = overlapped(settings)
        forward = [(w2.shape[1], w2.shape[0]), (w1.shape[1], w1.shape[0])]
        forward += [(weight.shape[1], weight.shape[0]) for weight in more]
        matmuls = [RegionMatmul(k, n, TRANSPOSED) for k, n in forward]
        matmuls += [RegionMatmul(n, k, ROW_MAJOR) for k, n in forward[:2]]
        self.megatron.confirm(group)()
        return region_cut(matmuls, rows, like, group, settings, sequence_parallel)

    def run_mlp(
        self,
        mlp: Any,
        original: Function,
        hidden: torch.Tensor,
        cut: RegionCut,
        source: LazyRows | None,
        finish: Callable[[Pending], torch.Tensor] = Pending.wait,
        begin: Begin | None = None,
    ) -> Output:
        """Run an MLP in chunks; `source` finishes the rows of `hidden`, None: they are finished.

        begin: observes the start of the backward of a call that is checked.
        """
        COUNTS.add("mlp_region" if source is None else "layer_region", len(cut.sizes), 0)
        fc1, fc2, megatron = mlp.linear_fc1, mlp.linear_fc2, self.megatron
        group, w1, w2 = megatron.group_of(fc1), fc1.weight, fc2.weight
        self.choice.ran(group)
        chunked = ChunkedMlp(
            group=group,
            cut=cut,
            activate=_activation(original, mlp),
            sequence_parallel=fc1.sequence_parallel,
            source=source,
            fc1_gradient=megatron.weight_gradient(fc1, w1, None, deferrable=False),
            fc2_gradient=megatron.weight_gradient(fc2, w2, begin, deferrable=False),
            before_communicating=megatron.confirm(group),
            finish=finish,
        )
        return chunked_mlp(hidden, w1, fc1.bias, w2, chunked), fc2.bias


def _activation(original: Function, mlp: Any) -> Activate:
    """Return Megatron-core's own MLP.forward without its two matmuls."""

    def activate(h_c: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        activated: list[torch.Tensor] = []

        def keep(a_c: torch.Tensor) -> Output:
            activated.append(a_c)
            return a_c, None

        original(AttributeOverlay(mlp, linear_fc1=lambda _: (h_c, bias), linear_fc2=keep), h_c)
        return activated[0]

    return activate


def region_call(
    mlp: Any,
    original: Function,
    hidden: torch.Tensor,
    cut: RegionCut,
    regions: Regions,
    source: LazyRows | None = None,
    **options: Any,
) -> CheckedCall:
    """Return the call of an MLP in chunks; `source` and `options` as in `Regions.run_mlp`."""
    group = regions.megatron.group_of(mlp.linear_fc2)
    run = functools.partial(regions.run_mlp, mlp, original, hidden, cut, source, **options)
    return checked_mlp(mlp, original, hidden, cut, group, lambda begin: run(begin=begin))


def _run_alone(mlp: Any, original: Function, hidden: torch.Tensor, cut: RegionCut, regions: Regions) -> Output:
    """Run an MLP in chunks; if its check is due, compare it with Megatron-core's own."""
    verifier = regions.megatron.verifier
    if verifier is None:
        return regions.run_mlp(mlp, original, hidden, cut, None)
    output: Output = verifier.run(region_call(mlp, original, hidden, cut, regions))
    return output


def mlp_forward(original: Function, regions: Regions) -> Function:
    """Make the method that replaces ``MLP.forward``."""

    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> Output:
        found: Output = regions.timed(self, hidden_states, lambda: run(self, hidden_states, per_token_scale, kwargs))
        return found

    def run(self: Any, hidden_states: torch.Tensor, per_token_scale: Any, kwargs: dict[str, Any]) -> Output:
        scale = {} if per_token_scale is None else {"per_token_scale": per_token_scale}
        if not regions.choice.on:
            whole: Output = original(self, hidden_states, **scale, **kwargs)
            return whole
        reason = mlp_reason(regions.megatron, self, hidden_states, per_token_scale)
        if reason is None:
            cut = regions.cut(self, hidden_states, rows_of(hidden_states).shape[0])
            if len(cut.sizes) > 1:
                return _run_alone(self, original, hidden_states, cut, regions)
            reason = f"one chunk: {cut.reason}"
        regions.skip(self, reason)
        found: Output = original(self, hidden_states, **scale, **kwargs)
        return found

    vars(forward)["ascend_parallel"] = regions
    vars(forward)["region_kind"] = RegionKind("MLPs", lambda mlp: regions.excluded(mlp, regions.mlp_reason))
    vars(forward)["original"] = original
    return forward
