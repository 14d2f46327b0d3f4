"""The optimizer whose state, and at higher levels gradients and parameters, are divided among ranks (ZeRO)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer import checks, state
from ascend_parallel.training.optimizer.buckets import BUCKET_BYTES
from ascend_parallel.training.optimizer.factory import Recipe
from ascend_parallel.training.optimizer.norm import global_norm
from ascend_parallel.training.optimizer.reduce_scatter import GradientScatter
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.shares import reduce_whole, share, spread_updates
from ascend_parallel.training.optimizer.targets import Owned, Target

_NO_SETTINGS = ("params", "param_names")


class ParallelOptimizer(torch.optim.Optimizer):
    """An optimizer of which each rank does a part; the parameters come out as the whole optimizer's.

    Every rank of the job makes it and calls it alike. `param_groups` has this rank's parameters and the
    hyperparameters, so that torch's learning rate schedulers work on it.

    norm
        Global norm of the last step's gradients before they were clipped; None if nobody asked.
    divisor
        What the gradients are divided by in the next step; 1 again after it.
    skipped
        Whether the last step was left out because gradients overflowed in fp16.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        recipe: Recipe,
        *,
        level: int = 1,
        by: str = "slices",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        master_dtype: torch.dtype | None = None,
        unreduced: bool = False,
        loss_scale: LossScale | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        everybody: dist.ProcessGroup | None = None,
    ) -> None:
        """Divide the targets' updates.

        level
            0: every replica updates all. 1: the optimizer's state is divided. 2: the gradients too; they are summed
            as backward runs, and gone after a step. 3: parameters are divided already (`sharded_parameters`); what is
            still held by several is treated as at level 2, or if it is reduced at level 1.
        by
            "slices" of each parameter, or whole "parameters".
        max_norm, norm_type
            Gradients are clipped to this norm over the whole job, as by torch.nn.utils.clip_grad_norm_.
        master_dtype
            Parameters of another dtype are updated in this one (torch.float32), and rounded.
        unreduced
            `.grad` holds terms that are to be summed over a target's replicas; else it is summed already.
        loss_scale
            For fp16: run backward on `scale(loss)`.
        everybody
            The ranks over which norms are taken and overflows decided; None: all of the job.

        Raises `ValueError` for options that are not allowed or do not fit, and `DisagreementError` on every rank if
        ranks come with different ones.
        """
        self._everybody = everybody or dist.group.WORLD
        options = checks.Options(level, by, max_norm, norm_type, master_dtype, unreduced, bucket_bytes)
        checks.check_everywhere(targets, recipe, options, self._everybody)
        checks.confirm_alike(targets, recipe, options, loss_scale, self._everybody)
        self._options, self._recipe, self.loss_scale = options, recipe, loss_scale
        self._shares = share(targets, level, by, master_dtype)
        self._owned = [owned for _, _, owned in self._shares if owned is not None]
        self._inner = recipe.make(self._grouped(self._owned))
        groups = self._by_recipe(targets)
        given = [
            {**dict(settings), "params": group} for (_, settings), group in zip(recipe.groups, groups, strict=True)
        ]
        super().__init__(given, dict(recipe.settings))
        self._scatter = GradientScatter(self._shares, bucket_bytes) if unreduced and level >= 2 else None
        self._summed: list[weakref.ref[torch.Tensor]] = []
        self.norm: float | None = None
        self.divisor, self.skipped = 1.0, False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, to run backward on."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate in whole gradients, in backwards inside the context; at level 2 it saves sums and costs memory."""
        if self._scatter is None:
            yield
        else:
            with self._scatter.paused():
                yield

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Sum what is unreduced, clip, update this rank's share and give it to the replicas."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for owned in self._owned:
            owned.refresh()
        self._take_gradients()
        factor = self._factor()
        if not self.skipped:
            self._multiply(factor)
            self._update()
        self.divisor = 1.0
        for owned in self._owned:
            owned.drop()
        if self._scatter is not None:
            super().zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those on their way to their ranks."""
        if self._scatter is not None:
            self._scatter.drop()
        for owned in self._owned:
            owned.drop()
        self._summed = []
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups once the optimizer is made: parameters are divided then."""
        if hasattr(self, "skipped"):
            raise ValueError("a ParallelOptimizer takes no more parameters: make it again with all of them")
        super().add_param_group(param_group)

    def pieces(self) -> dict[str, TensorShard]:
        """Return the state as boxes of the whole one: "<parameter>.<key>", and "<parameter>.master" for weights.

        The names are the same at any time; "<parameter>.stepped" tells whether the parameter had a gradient yet.
        """
        return state.pieces(self._owned, self._inner, self._recipe)

    def empty_pieces(self) -> dict[str, TensorShard]:
        """Return pieces to be filled from a checkpoint and given to `load_pieces`."""
        return state.empty_pieces(self._owned, self._recipe)

    def load_pieces(self, pieces: Mapping[str, TensorShard]) -> None:
        """Take a state, as `pieces` has it. Raises `ValueError` for names or shapes that are not this rank's.

        Parameters are to be loaded before: writing to them afterwards makes master weights anew.
        """
        state.load_pieces(self._owned, self._inner, self._recipe, pieces)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for the same layout; `pieces` and `plain_state` are for any."""
        self._push()
        masters = [owned.inner for owned in self._owned if owned.is_master]
        return {"optimizer": self._inner.state_dict(), "masters": masters, **self.plain_state()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave on the same rank of the same layout."""
        self._inner.load_state_dict(state_dict["optimizer"])
        masters = [owned for owned in self._owned if owned.is_master]
        for owned, tensor in zip(masters, state_dict["masters"], strict=True):
            owned.refresh()
            owned.inner.copy_(tensor)
        self.load_plain_state(state_dict)

    def plain_state(self) -> dict[str, Any]:
        """Return what is no tensor of a parameter: hyperparameters as they are now, the loss scale."""
        settings = [{key: group[key] for key in group if key not in _NO_SETTINGS} for group in self.param_groups]
        return {"settings": settings, "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict()}

    def load_plain_state(self, plain: Mapping[str, Any]) -> None:
        """Take what `plain_state` gave, on any rank of any layout."""
        for group, settings in zip(self.param_groups, plain["settings"], strict=True):
            group.update(settings)
        if self.loss_scale is not None and plain["loss_scale"] is not None:
            self.loss_scale.load_state_dict(plain["loss_scale"])

    def _by_recipe(self, targets: Sequence[Target]) -> list[list[torch.Tensor]]:
        groups: list[list[torch.Tensor]] = [[] for _ in self._recipe.groups]
        for target in targets:
            groups[self._recipe.group_of(target.name)].append(target.parameter)
        return groups

    def _grouped(self, owned: Sequence[Owned]) -> list[list[torch.Tensor]]:
        groups: list[list[torch.Tensor]] = [[] for _ in self._recipe.groups]
        for one in owned:
            groups[self._recipe.group_of(one.target.name)].append(one.inner)
        return groups

    def _take_gradients(self) -> None:
        """Bring to each box its summed gradient."""
        if self._scatter is not None:
            self._scatter.finish()
        elif self._options.unreduced:
            self._reduce()
        for target, _, owned in self._shares:
            scattered = self._scatter is not None and target.group is not None
            if owned is not None and not scattered and target.parameter.grad is not None:
                owned.take(target.parameter.grad)

    def _reduce(self) -> None:
        targets = [target for target, _, _ in self._shares if target.group is not None]
        known = {id(one) for kept in self._summed if (one := kept()) is not None}
        if any(id(target.parameter.grad) in known for target in targets if target.parameter.grad is not None):
            raise RuntimeError(
                "a gradient was summed in the last step and is still there, so that it would be summed again: call "
                "zero_grad() of this optimizer after each step"
            )
        reduce_whole(self._shares, self._options.bucket_bytes)
        self._summed = [weakref.ref(one) for target in targets if (one := target.parameter.grad) is not None]

    def _factor(self) -> float:
        """Return what gradients are multiplied by; find their norm, and whether they overflowed, on all ranks alike."""
        self.norm, self.skipped, factor = None, False, 1 / self.divisor
        if self._options.max_norm is None and self.loss_scale is None:
            return factor
        given = [(owned.inner.grad, owned.held_by) for owned in self._owned if owned.inner.grad is not None]
        norm = global_norm(given, self._options.norm_type, self._everybody)
        if self.loss_scale is not None:
            factor /= self.loss_scale.scale
            self.skipped = not norm < float("inf")
            self.loss_scale.update(self.skipped)
        self.norm = norm * factor
        if self._options.max_norm is not None:
            factor *= min(1.0, self._options.max_norm / (self.norm + 1e-6)) if self.norm == self.norm else self.norm
        return factor

    def _multiply(self, factor: float) -> None:
        if factor == 1:
            return
        for target, _, owned in self._shares:
            # Where the box is a view of the whole gradient all of that is multiplied: it stays alike on the replicas.
            views = self._scatter is None or target.group is None
            whole = target.parameter.grad
            alike = (self._options.master_dtype or target.parameter.dtype) == grad_dtype(target.parameter)
            if views and alike and whole is not None:
                whole.mul_(factor)
            elif owned is not None and owned.inner.grad is not None:
                owned.inner.grad.mul_(factor)

    def _update(self) -> None:
        self._push()
        self._inner.step()
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key not in _NO_SETTINGS})
        for owned in self._owned:
            owned.write_back()
        if self._options.level:
            spread_updates(self._shares, self._options.bucket_bytes)
        for owned in self._owned:
            owned.done()

    def _push(self) -> None:
        """Give the optimizer inside the hyperparameters as they are now."""
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key not in _NO_SETTINGS})
