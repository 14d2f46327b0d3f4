"""The ZeRO optimizer: state, and at higher stages gradients and parameters, are partitioned among ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer import checks, state
from ascend_parallel.training.optimizer.factory import OptimizerFactory
from ascend_parallel.training.optimizer.reduce_scatter import GradientReduceScatter
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.shares import all_reduce_gradients, gather_updates, global_norm, partitioned
from ascend_parallel.training.optimizer.targets import OwnedParameter
from ascend_parallel.tuning.step_time.runtimes import BUCKET_BYTES

_NO_SETTINGS = ("params", "param_names")


class ParallelOptimizer(torch.optim.Optimizer):
    """An optimizer whose work is shared among ranks; parameters are updated as by the unpartitioned optimizer.

    Every rank of the job makes and calls the optimizer alike. `param_groups` holds this rank's parameters and the
    hyperparameters, so torch's learning rate schedulers work on it.

    norm
        Global norm of the last step's gradients before clipping; None without `max_norm` and `loss_scale`.
    divisor
        The next step divides gradients by this number, then resets it to 1.
    skipped
        Whether the last step was skipped because gradients overflowed in fp16.
    """

    def __init__(
        self,
        targets: Sequence[OwnedParameter],
        factory: OptimizerFactory,
        *,
        zero_stage: int = 1,
        partition_by: str = "slices",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        master_dtype: torch.dtype | None = None,
        unreduced: bool = False,
        loss_scale: LossScale | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        everybody: dist.ProcessGroup | None = None,
    ) -> None:
        """Partition the targets' updates.

        zero_stage
            0: every replica updates all. 1: the optimizer's state is partitioned. 2: the gradients too; they are summed
            while backward runs, and gone after a step. 3: parameters are partitioned already (`sharded_parameters`); a
            parameter that several ranks still hold is treated as at stage 2, or at stage 1 if its gradient is summed.
        partition_by
            "slices" of each parameter, or whole "parameters".
        max_norm, norm_type
            Gradients are clipped to this norm over the whole job, as by torch.nn.utils.clip_grad_norm_.
        master_dtype
            Parameters of another dtype are updated in this dtype (torch.float32), and rounded.
        unreduced
            `.grad` is still to be summed over a target's replicas. False: it is summed already.
        loss_scale
            For fp16: run backward on `scale(loss)`.
        everybody
            The ranks over which norms are taken and overflows decided; None: all ranks of the job.

        Raises `ValueError` for options that are not allowed or contradict each other, and `DisagreementError` on every
        rank if the ranks' options differ.
        """
        self._everybody = everybody or dist.group.WORLD
        options = checks.Options(zero_stage, partition_by, max_norm, norm_type, master_dtype, unreduced, bucket_bytes)
        checks.check_on_all_ranks(targets, factory, options, self._everybody)
        checks.confirm_same_arguments(targets, factory, options, loss_scale, self._everybody)
        self._options, self._factory, self.loss_scale = options, factory, loss_scale
        self._shares = partitioned(targets, zero_stage, partition_by, master_dtype)
        self._owned = [share.owned for share in self._shares if share.owned is not None]
        self._masters = [owned for owned in self._owned if owned.is_master]
        self._inner = factory.make(self._by_group((owned.target.name, owned.inner) for owned in self._owned))
        parameters = self._by_group((target.name, target.parameter) for target in targets)
        groups = [
            {**dict(settings), "params": mine} for (_, settings), mine in zip(factory.groups, parameters, strict=True)
        ]
        super().__init__(groups, dict(factory.settings))
        reduce_scatters = unreduced and zero_stage >= 2
        self._reduce_scatter = GradientReduceScatter(self._shares, bucket_bytes) if reduce_scatters else None
        self._summed: list[weakref.ref[torch.Tensor]] = []
        self.norm: float | None = None
        self.divisor, self.skipped = 1.0, False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale; run backward on it."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsummed gradients in backwards inside the context; at ZeRO stage 2: fewer sums, more memory."""
        if self._reduce_scatter is None:
            yield
        else:
            with self._reduce_scatter.paused():
                yield

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Sum unreduced gradients, clip, update this rank's share and gather the other ranks' updates."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for owned in self._owned:
            owned.refresh()
        self._take_gradients()
        factor = self._gradient_factor()
        if not self.skipped:
            self._multiply(factor)
            self._update()
        self.divisor = 1.0
        for owned in self._owned:
            owned.drop()
        if self._reduce_scatter is not None:
            super().zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those in flight."""
        if self._reduce_scatter is not None:
            self._reduce_scatter.drop()
        for owned in self._owned:
            owned.drop()
        self._summed = []
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups: the parameters are partitioned already."""
        if hasattr(self, "skipped"):
            raise ValueError("a ParallelOptimizer takes no more parameters: make it again with all of them")
        super().add_param_group(param_group)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return the state as tensor shards: "<parameter>.<key>", and "<parameter>.master" for master weights.

        The names never change; "<parameter>.stepped" tells whether the parameter has had a gradient.
        """
        return state.tensor_shards(self._owned, self._inner, self._factory)

    def empty_tensor_shards(self) -> dict[str, TensorShard]:
        """Return shards to fill from a checkpoint and pass to `load_tensor_shards`."""
        return state.empty_tensor_shards(self._owned, self._factory)

    def load_tensor_shards(self, shards: Mapping[str, TensorShard]) -> None:
        """Load a state with the names of `tensor_shards`. Raises `ValueError` for another rank's names or shapes.

        Load the parameters before: a later write to a parameter resets its master weights.
        """
        state.load_tensor_shards(self._owned, self._inner, self._factory, shards)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for the same layout; `tensor_shards` and `plain_state` fit any layout."""
        self._push()
        masters = [owned.inner for owned in self._masters]
        return {"optimizer": self._inner.state_dict(), "masters": masters, **self.plain_state()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank of the same layout.

        Raises `ValueError` for other parameter groups, or groups in another order: their state lies by position.
        """
        if state_dict.get("names", self._names()) != self._names():
            raise ValueError(
                "the state is of other parameter groups, or of these in another order: load it with load_tensor_shards "
                "and load_plain_state, which match names"
            )
        self._inner.load_state_dict(state_dict["optimizer"])
        for owned, tensor in zip(self._masters, state_dict["masters"], strict=True):
            owned.refresh()
            owned.inner.copy_(tensor)
        self.load_plain_state(state_dict)

    def plain_state(self) -> dict[str, Any]:
        """Return the state outside tensors: the current hyperparameters and the loss scale."""
        settings = [{key: group[key] for key in group if key not in _NO_SETTINGS} for group in self.param_groups]
        return {
            "settings": settings,
            "names": self._names(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def load_plain_state(self, plain: Mapping[str, Any]) -> None:
        """Load what `plain_state` returned, on any rank of any layout.

        A group takes the hyperparameters that its parameters had, by their names. Raises `ValueError` if these had
        different ones, or the state has none of them.
        """
        saved = plain["settings"]
        if "names" in plain:
            saved = state.settings_of_groups(self._names(), plain["names"], saved)
        for group, settings in zip(self.param_groups, saved, strict=True):
            group.update(settings)
        if self.loss_scale is not None and plain["loss_scale"] is not None:
            self.loss_scale.load_state_dict(plain["loss_scale"])

    def _names(self) -> list[list[str]]:
        """Return the names of each group's parameters."""
        return [sorted(names) for names, _ in self._factory.groups]

    def _by_group(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return tensors, each with its parameter's name, by parameter group."""
        groups: list[list[torch.Tensor]] = [[] for _ in self._factory.groups]
        for name, tensor in tensors:
            groups[self._factory.group_of(name)].append(tensor)
        return groups

    def _take_gradients(self) -> None:
        """Give each owned shard its summed gradient."""
        if self._reduce_scatter is not None:
            self._reduce_scatter.finish()
        elif self._options.unreduced:
            self._reduce()
        for share in self._shares:
            target, owned = share.target, share.owned
            is_scattered = self._reduce_scatter is not None and target.group is not None
            if owned is not None and not is_scattered and target.parameter.grad is not None:
                owned.take(target.parameter.grad)

    def _reduce(self) -> None:
        targets = [share.target for share in self._shares if share.target.group is not None]
        known = {id(gradient) for kept in self._summed if (gradient := kept()) is not None}
        if any(id(target.parameter.grad) in known for target in targets if target.parameter.grad is not None):
            raise RuntimeError(
                "a gradient was summed in the last step and is still there, so it would be summed twice: call "
                "zero_grad() of this optimizer after each step"
            )
        all_reduce_gradients(self._shares, self._options.bucket_bytes)
        self._summed = [weakref.ref(gradient) for target in targets if (gradient := target.parameter.grad) is not None]

    def _gradient_factor(self) -> float:
        """Return the factor for gradients; set their norm, and whether the step is skipped, alike on all ranks."""
        self.norm, self.skipped, factor = None, False, 1 / self.divisor
        if self._options.max_norm is None and self.loss_scale is None:
            return factor
        gradients = [(owned.inner.grad, owned.num_owners) for owned in self._owned if owned.inner.grad is not None]
        norm = global_norm(gradients, self._options.norm_type, self._everybody)
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
        for share in self._shares:
            target, owned = share.target, share.owned
            # If the owned gradient is a view of the whole gradient, multiply the whole: replicas stay equal.
            is_view = self._reduce_scatter is None or target.group is None
            whole = target.parameter.grad
            same_dtype = (self._options.master_dtype or target.parameter.dtype) == grad_dtype(target.parameter)
            if is_view and same_dtype and whole is not None:
                whole.mul_(factor)
            elif owned is not None and owned.inner.grad is not None:
                owned.inner.grad.mul_(factor)

    def _update(self) -> None:
        self._push()
        with _foreach_for_strided(self._inner):
            self._inner.step()
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update({key: value for key, value in inner.items() if key not in _NO_SETTINGS})
        for owned in self._masters:
            owned.write_back()
        if self._options.zero_stage:
            gather_updates(self._shares, self._options.bucket_bytes)
        for owned in self._owned:
            owned.done()

    def _push(self) -> None:
        """Give the inner optimizer the current hyperparameters."""
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in ours.items() if key not in _NO_SETTINGS})


@contextmanager
def _foreach_for_strided(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let groups with ``fused=True`` and a tensor that is not contiguous run the foreach kernels inside the context.

    The fused kernels on CPUs read a tensor's memory in a row, whatever its strides: parameters that are not contiguous
    get wrong values without an error (torch 2.7 to 2.13). ZeRO's slices along a later dimension are such views.
    """
    strided = [group for group in optimizer.param_groups if group.get("fused") and _has_strided(group)]
    kept = [(group["fused"], group.get("foreach")) for group in strided]
    for group in strided:
        group.update(fused=False, foreach=True)
    try:
        yield
    finally:
        for group, (fused, foreach) in zip(strided, kept, strict=True):
            group.update(fused=fused, foreach=foreach)


def _has_strided(group: dict[str, Any]) -> bool:
    tensors = [each for tensor in group["params"] for each in (tensor, tensor.grad) if each is not None]
    return not all(tensor.is_contiguous() for tensor in tensors)
