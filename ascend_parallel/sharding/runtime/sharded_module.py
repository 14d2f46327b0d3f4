"""A rank's part of a planned model: its slices of the parameters, its part of each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.current import current_settings
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, CALL, CONSTANT, PARAMETER, Graph, Node, OpCall, Value
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules.axes import arguments
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.gradient_plan import BUCKET_BYTES, Bucket, Summed, read_as_copies
from ascend_parallel.sharding.runtime.gradient_reduction import Gradients
from ascend_parallel.sharding.runtime.graph_forward import Forward
from ascend_parallel.sharding.runtime.input_checks import confirm_same_plan, given_tensors
from ascend_parallel.sharding.runtime.local_parameters import check_model, hold, local_slice
from ascend_parallel.sharding.runtime.overlap_pass import Fusion, Schedule, fuse
from ascend_parallel.sharding.runtime.prefetch import PrefetchGroup, start_ahead
from ascend_parallel.sharding.runtime.randomness import Randomness
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.recompute_regions import regions
from ascend_parallel.sharding.runtime.redistribute_autograd import convert
from ascend_parallel.sharding.tensor_shard import TensorShard

# Operators that work otherwise in training.
OF_MODES = ("dropout", "batch_norm", "instance_norm", "rrelu")


def is_modal(call: OpCall) -> bool:
    """Tell whether a call works otherwise in training: it is of such an operator, or attention with dropout."""
    return any(word in call.name for word in OF_MODES) or bool(arguments(call).get("dropout_p"))


class ShardedModule(torch.nn.Module):
    """This rank's part of a model; see `parallelize`.

    Parameters are slices, under the model's own names, and so are their gradients after backward: whole for what is
    replicated, so that an optimizer needs no communication. It runs what was traced: train() and eval() change nothing,
    but for `evaluation`.

    evaluation
        What eval() runs of a plan traced in training mode (`in_evaluation` of its graph); None: it refuses where an
        operator works otherwise in evaluation.
    collective_counts
        How often each collective ran so far; to be looked at, and cleared.
    randomness
        What seeds dropout and other random operators (`manual_seed`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: ShardingPlan,
        *,
        overlap: bool = True,
        settings: Settings | None = None,
        local_inputs: bool = False,
        recompute: Recompute | None = None,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        ahead: bool = True,
    ) -> None:
        """Take the rank's slices of the model, and choose the overlapped operators.

        group
            The plan is of a part of the model, which the ranks of this group run: only they come here, and only what
            the plan lays out is held. The mesh's groups, for which all ranks of the job are needed, have to be there
            (`plan.mesh.device_mesh()`).
        bucket_bytes
            Gradients of parameters that are summed over ranks are summed in buckets of as many bytes, under backward,
            and what is gathered or moved starts ahead of its reader, small tensors together; 0: each where it stands.
        ahead
            Without it what is gathered or moved starts where it stands, alone: autograd can then take apart the
            backward of inputs and of weights, as the zero-bubble schedules do.

        Raises as `parallelize` does, and `ValueError` for a group of other ranks than the mesh's, `RuntimeError` if
        that has no groups.
        """
        super().__init__()
        if bucket_bytes < 0:
            raise ValueError(f"bucket_bytes={bucket_bytes}: give 0 or more")
        _check_group(plan.mesh, group)
        if plan.graph.only_in_python:
            raise ValueError(
                f"the forward of {type(model).__name__} {plan.graph.only_in_python}, which a graph leaves out: take it "
                "out of the forward, or parallelize(..., static=False), which runs the model's own Python"
            )
        settings = settings or current_settings()
        recompute = Recompute.of(model) if recompute is None else recompute
        seed = confirm_same_plan(
            plan, model, settings, overlap=overlap, group=group, bucket_bytes=bucket_bytes, recompute=recompute
        )
        self.randomness = Randomness(seed)
        plan.mesh.device_mesh()  # makes the groups, for which all ranks are needed, if they are not there
        rank = dist.get_rank()
        place = plan.mesh.coordinate(rank)
        if place is None:
            raise ValueError(f"rank {rank} is not in {plan.mesh}, so it has no part of the model")
        self.plan, self.collective_counts, self.training = plan, Counter[CollectiveEvent](), plan.graph.training
        self.evaluation: Graph | None = None
        self.coordinate, self.local_inputs = place, local_inputs
        self.schedule = Schedule(plan.layouts, plan.inputs, plan.shared_layouts)
        if overlap:
            self.schedule = fuse(plan, settings)
        summed: tuple[Summed, ...] = ()
        if bucket_bytes:
            self.schedule, summed = read_as_copies(self.schedule, plan)
        self.gradients = Gradients(self, plan.mesh, summed, bucket_bytes, self.collective_counts)
        returned = plan.graph.kept
        # Of a tied tensor's names torch.export has one read, and lists the others beside it.
        read = {value.node for value, readers in plan.graph.readers().items() if readers or value in returned}
        given = [node for node in self._given(PARAMETER, BUFFER) if node.name in read]
        check_model(model, given)
        layouts = {node.source: plan.layouts[Value(node.name)] for node in given}
        self.held = hold(self, model, layouts, plan.mesh.shape, place, rest=group is None)
        for node in self._given(CONSTANT):
            layout = plan.layouts[Value(node.name)]
            local = local_slice(plan.graph.constants[node.source], layout, plan.mesh.shape, place)
            self.register_buffer(node.name, local, persistent=False)
        self.last_reads = plan.graph.last_reads()
        self.regions = regions(plan, self.schedule, recompute, part=group is not None)
        again = {name for region in self.regions.values() for name in region.nodes}
        self.starts = start_ahead(self.schedule, plan, again, bucket_bytes) if bucket_bytes and ahead else {}

    @property
    def graph(self) -> Graph:
        """What runs: what was traced, or what stands for it in evaluation mode."""
        return self.plan.graph if self.training or self.evaluation is None else self.evaluation

    @property
    def fused(self) -> tuple[Fusion, ...]:
        """What the overlap pass did with each matmul next to a collective."""
        return self.schedule.fused

    @property
    def ahead(self) -> tuple[PrefetchGroup, ...]:
        """The collectives of forward that start ahead of what reads them, and for which tensors together."""
        return tuple(one for starts in self.starts.values() for one in starts)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The parameters whose gradients are summed as one, in the order in which backward sums them."""
        return self.gradients.buckets

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # groups are not for a compiler to look at
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, whole on every rank, for whole (or local) inputs.

        Every rank has to call it alike. Raises `ValueError` for arguments unlike those that were traced: their number,
        shapes, dtypes, and the values of those that are no tensors.
        """
        given = given_tensors(self.plan, self.coordinate if self.local_inputs else None, args, kwargs)
        return Forward(self, given).outputs()

    def train(self, mode: bool = True) -> ShardedModule:
        """Refuse another mode than was traced, where an operator works otherwise in it."""
        calls = (node.call for node in self._given(CALL) if node.call is not None)
        other = mode != self.plan.graph.training and (mode or self.evaluation is None)
        if other and any(map(is_modal, calls)):
            traced = "training" if self.plan.graph.training else "evaluation"
            raise ValueError(
                f"the model was traced in {traced} mode, and has dropout or running statistics: trace it again"
            )
        return super().train(mode)

    @contextmanager
    def no_sync(self, *mesh_dims: str) -> Iterator[None]:
        """Hold back the sums of gradients over these mesh dimensions, or over all, in backward inside.

        A parameter's `.grad` is then this rank's term of a sum over each of them on which the parameter is whole, and
        terms of several backwards add up. `reduce_gradients` sums them, as does the next backward outside, for the
        parameters that it reaches.

        Raises `ValueError` for a name that is no mesh dimension, and with bucket_bytes=0, `RuntimeError` in backward
        where terms would be added to a gradient that is summed already, or over others.
        """
        with self.gradients.no_sync(mesh_dims):
            yield

    def reduce_gradients(self, *mesh_dims: str) -> None:
        """Sum what `no_sync` held back over these mesh dimensions, or over all. Every rank has to call it alike."""
        self.gradients.reduce(mesh_dims)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return what this rank holds of each parameter and persistent buffer, by its name in the model."""
        state = self.state_dict(keep_vars=True)
        mesh_shape, place = self.plan.mesh.shape, self.coordinate
        return {name: self.held[name].piece(local, mesh_shape, place) for name, local in state.items()}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state. Every rank has to call it."""
        return {name: self._whole(name, local) for name, local in self.state_dict().items()}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradient of each parameter that has one. Every rank has to call it."""
        return {
            name: self._whole(name, parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's slices of a whole model's state."""
        shape, place = self.plan.mesh.shape, self.coordinate
        self.load_state_dict(
            {name: local_slice(whole, self.held[name].layout, shape, place) for name, whole in state.items()}
        )

    def _whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        held, mesh = self.held[name], self.plan.mesh
        whole = (REPLICATE,) * mesh.ndim
        return convert(local.detach(), held.shape, mesh, held.layout, whole, self.plan.costs).clone()

    def _given(self, *kinds: str) -> Iterator[Node]:
        return (node for node in self.plan.graph.nodes.values() if node.kind in kinds)

    def update_buffers(self, values: Mapping[Value, torch.Tensor]) -> None:
        """Take what the forward computed for buffers, running statistics."""
        for name, value in self.graph.updates.items():
            shape, source = self.plan.graph.meta(value).shape, self.schedule.layouts[value]
            with torch.no_grad():
                new = convert(values[value], shape, self.plan.mesh, source, self.held[name].layout, self.plan.costs)
            # A tensor of its own: the old one may be kept for backward.
            path, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(path), leaf, new.clone())


def _check_group(mesh: ProcessMesh, group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    ranks = sorted(dist.get_process_group_ranks(group))
    if ranks != sorted(mesh.process_ids):
        raise ValueError(f"group has the ranks {ranks}, and {mesh} has others")
    if not mesh.has_groups:
        raise RuntimeError(f"{mesh} has no process groups: every rank of the job has to call its device_mesh() before")
