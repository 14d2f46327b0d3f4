"""A rank's part of a planned model: its slices of the parameters and its part of each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ascend_parallel.ops.bits import AHEAD
from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.decision import Decision
from ascend_parallel.overlap.known import decisions_ahead
from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.graph import BUFFER, CONSTANT, PARAMETER, Graph, OpCall, Value
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.overlap_pass import Fusion
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.edges import convert
from ascend_parallel.sharding.rules.axes import arguments
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.every_degree import refuse_sums_without_tree
from ascend_parallel.sharding.runtime.gradient_plan import Bucket
from ascend_parallel.sharding.runtime.gradient_reduction import GradientReducer
from ascend_parallel.sharding.runtime.input_checks import confirm_same_plan, input_tensors
from ascend_parallel.sharding.runtime.instructions import Program, Step
from ascend_parallel.sharding.runtime.local_parameters import check_model, hold, local_slice, tensor_at
from ascend_parallel.sharding.runtime.prefetch import PrefetchGroup
from ascend_parallel.sharding.runtime.randomness import Randomness
from ascend_parallel.sharding.runtime.rank_plan import plan_for_rank
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.segments import SEGMENTS
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.tuning.step_time.runtimes import BUCKET_BYTES

# Operators that compute different results in training mode.
MODE_DEPENDENT = ("dropout", "batch_norm", "instance_norm", "rrelu")


def is_modal(call: OpCall) -> bool:
    """Tell whether a call depends on the training mode: a `MODE_DEPENDENT` operator, or attention with dropout."""
    return any(word in call.name for word in MODE_DEPENDENT) or bool(arguments(call).get("dropout_p"))


class ShardedModule(torch.nn.Module):
    """This rank's part of a model; see `parallelize`.

    Parameters are slices under the model's own names. After backward their gradients are slices too, summed over ranks,
    so an optimizer needs no communication. The module runs the traced graph; train() and eval() change nothing unless
    `evaluation` is set.

    evaluation
        The graph that runs after eval() if the model was traced in training mode (`in_evaluation` of its graph). If
        None, eval() raises where an operator depends on the mode.
    randomness
        Seeds dropout and other random operators (`manual_seed`).
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
        prefetch: bool = True,
        compile: str | None = None,
    ) -> None:
        """Slice the model's parameters and choose the overlapped operators. Every rank must call this alike.

        model
            The traced model, with the same values on every rank; it is not changed.
        overlap
            Use the overlapped operators where possible (`fused`).
        settings
            Settings of these operators. Default: the current settings (`ascend_parallel.configure`).
        local_inputs
            Every rank passes its local part of the inputs, laid out as in the plan, instead of the global inputs.
        recompute
            What backward recomputes, by default the modules marked by `ascend_parallel.training.recompute`.
        group
            For a plan of a part of the model: only the ranks of this group call this, and only tensors that the plan
            lays out are held. All ranks of the job must have called `plan.mesh.device_mesh()` before.
        bucket_bytes
            The size of a gradient bucket. Buckets are all-reduced while backward runs, and redistributions are
            prefetched, small ones coalesced. 0: each collective runs at its node.
        prefetch
            False: each redistribution runs at its reader, alone. Autograd can then split the backward of inputs from
            the backward of weights, as zero-bubble schedules need.
        compile
            "segments": torch.compile compiles the operators between two collectives; None: every operator runs alone.

        Raises `DisagreementError` on every rank if plans or settings differ or a rank is missing; `DegreeError` on
        every rank if the bits are to be the same at every degree and the plan has others; `ValueError` for a rank
        outside of the plan's mesh, a model other than the plan's, and a group with other ranks than the mesh;
        `RuntimeError` if the mesh has no groups.
        """
        super().__init__()
        _check_options(model, plan, settings, bucket_bytes, group, compile)
        settings = settings or current_settings()
        recompute = Recompute.of(model) if recompute is None else recompute
        seed = confirm_same_plan(
            plan,
            model,
            settings,
            overlap=overlap,
            group=group,
            bucket_bytes=bucket_bytes,
            recompute=recompute,
            compile=compile,
            in_tree=overlap and group is None and compile is None,
        )
        for refuse in settings.arithmetic.tree_needs(refuse_sums_without_tree):
            refuse(plan, settings)  # the ranks have the same plan and settings: all refuse alike
        self.randomness = Randomness(seed)
        plan.mesh.device_mesh()  # makes missing process groups: every rank must call it
        coordinate = plan.mesh.own_coordinate()
        self.plan, self.training = plan, plan.graph.training
        self.evaluation: Graph | None = None
        self.coordinate, self.local_inputs = coordinate, local_inputs
        self.rank_plan = plan_for_rank(
            plan,
            coordinate,
            settings if overlap else None,
            recompute=recompute,
            bucket_bytes=bucket_bytes,
            prefetch=prefetch,
            local_inputs=local_inputs,
            part=group is not None,
        )
        self.gradients = GradientReducer(self, plan.mesh, self.rank_plan.summed, bucket_bytes, self.rank_plan.counts)
        self._hold(model, rest=group is None)
        self._paths: dict[str, tuple[str, ...]] = {}
        self._returned = pytree.tree_flatten(plan.graph.outputs)
        self._segments = compile == SEGMENTS
        self._programs: dict[tuple[bool, bool], Program] = {}
        self.instructions(gradients=True)
        self._groups = [ref(plan.mesh.group(dim)) for dim in range(plan.mesh.ndim)]
        AHEAD.add(self)

    def calls_ahead(self, group: dist.ProcessGroup, matmul: Matmul) -> list[tuple[Decision, str]]:
        """Return the overlapped operators on `group`, for the probe of bits (ops/bits.py): a plan has one shape."""
        calls: list[tuple[Decision, str]] = []
        for kernel in self.rank_plan.kernels.values():
            if self._groups[kernel.fused.mesh_dim]() is group:
                shape, settings = self.rank_plan.shape(kernel, matmul.device), kernel.settings
                known, leaves = kernel.layer.known, kernel.leaves_rows > 0
                calls += decisions_ahead(
                    settings, known, shape, backward=kernel.fused.differentiable, leaves_rows=leaves
                )
        return calls

    def _hold(self, model: torch.nn.Module, rest: bool) -> None:
        """Register this rank's slices of parameters, buffers and constants; `rest` as for `hold`."""
        plan, returned = self.plan, self.plan.graph.kept
        # torch.export reads a tied tensor under one of its names and lists the other names as unread.
        read = {value.node for value, readers in plan.graph.readers().items() if readers or value in returned}
        nodes = [node for node in plan.graph.of_kind(PARAMETER, BUFFER) if node.name in read]
        check_model(model, nodes)
        layouts = {node.source: plan.layouts[Value(node.name)] for node in nodes}
        self.held = hold(self, model, layouts, plan.mesh.shape, self.coordinate, rest=rest)
        for node in plan.graph.of_kind(CONSTANT):
            layout = plan.layouts[Value(node.name)]
            local = local_slice(plan.graph.constants[node.source], layout, plan.mesh.shape, self.coordinate)
            self.register_buffer(node.name, local, persistent=False)

    @property
    def graph(self) -> Graph:
        """The graph that runs: the traced graph, or `evaluation` after eval()."""
        return self.plan.graph if self.training or self.evaluation is None else self.evaluation

    @property
    def collective_counts(self) -> Counter[CollectiveEvent]:
        """How often each collective has run. The caller may clear the counter."""
        return self.rank_plan.counts

    @property
    def fused(self) -> tuple[Fusion, ...]:
        """The result of the overlap pass for each matmul next to a collective."""
        return self.rank_plan.fused_plan.fused

    @property
    def prefetches(self) -> tuple[PrefetchGroup, ...]:
        """The collectives of forward that start before their readers, with the tensors of each."""
        return tuple(group for groups in self.rank_plan.prefetches.values() for group in groups)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The gradient buckets, in the order in which backward fills them."""
        return self.gradients.buckets

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler cannot trace process groups
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, global on every rank, for global inputs (or local, with `local_inputs`).

        Every rank must call this alike. Raises `ValueError` for arguments that differ from the traced arguments: in
        number, shape, dtype, or the values of arguments that are not tensors.
        """
        inputs = input_tensors(self.plan, self.coordinate if self.local_inputs else None, args, kwargs)
        program = self.instructions(gradients=torch.is_grad_enabled())
        step = Step(self, self.randomness.begin(), gradients=self.gradients)
        outputs = iter(program.run(list(inputs.values()), step))
        leaves, spec = self._returned
        return pytree.tree_unflatten([next(outputs) if isinstance(leaf, Value) else leaf for leaf in leaves], spec)

    def instructions(self, *, gradients: bool) -> Program:
        """Return the instructions of a forward in the present mode, with or without autograd."""
        graph = self.graph
        key = graph is self.plan.graph, gradients
        if key not in self._programs:
            self._programs[key] = compile_plan(self.rank_plan, graph, gradients=gradients, segments=self._segments)
        return self._programs[key]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which compiles its own programs: programs count into their module's counter."""
        return {**self.__dict__, "_programs": {}}

    def local_tensor(self, name: str) -> torch.Tensor:
        """Return the rank's part of a parameter, buffer or constant by its node."""
        if name not in self._paths:
            node = self.plan.graph.nodes[name]
            self._paths[name] = (name,) if node.kind == CONSTANT else tuple(node.source.split("."))
        return tensor_at(self, self._paths[name])

    def write_buffer(self, name: str, value: torch.Tensor) -> None:
        """Write a buffer. A new tensor: autograd may have saved the old tensor for backward."""
        path, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(path), leaf, value.clone())

    def train(self, mode: bool = True) -> ShardedModule:
        """Set the mode; raises `ValueError` if an operator depends on the mode and the other mode was traced."""
        calls = (node.call for node in self.plan.graph.nodes.values() if node.call is not None)
        other = mode != self.plan.graph.training and (mode or self.evaluation is None)
        if other and any(map(is_modal, calls)):
            traced = "training" if self.plan.graph.training else "evaluation"
            raise ValueError(
                f"the model was traced in {traced} mode, and has dropout or running statistics: trace it again"
            )
        return super().train(mode)

    @contextmanager
    def no_sync(self, *mesh_dims: str) -> Iterator[None]:
        """Defer the sums of gradients over these mesh dimensions, or over all, in every backward inside.

        The `.grad` of a parameter that is replicated on such a mesh dimension is then this rank's term of the sum, and
        the terms of several backwards add up. `reduce_gradients` sums them. So does the next backward outside, for the
        parameters that it reaches; if that fails, what was deferred is in `.grad` again, as before it.

        Raises `ValueError` for a name that is not a mesh dimension and with bucket_bytes=0; `RuntimeError` in backward
        if a term would be added to a gradient that is summed already, or deferred over other mesh dimensions.
        """
        with self.gradients.no_sync(mesh_dims):
            yield

    def reduce_gradients(self, *mesh_dims: str) -> None:
        """Sum the gradients that `no_sync` deferred, over these mesh dimensions or all. Every rank must call this."""
        self.gradients.reduce(mesh_dims)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shard of each parameter and persistent buffer, by its name in the model."""
        state = self.state_dict(keep_vars=True)
        mesh_shape, coordinate = self.plan.mesh.shape, self.coordinate
        return {name: self.held[name].piece(local, mesh_shape, coordinate) for name, local in state.items()}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the global state of the model. Every rank must call this."""
        return {name: self._whole(name, local) for name, local in self.state_dict().items()}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the global gradient of each parameter that has a gradient. Every rank must call this."""
        return {
            name: self._whole(name, parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's slices of a global state."""
        shape, coordinate = self.plan.mesh.shape, self.coordinate
        self.load_state_dict(
            {name: local_slice(whole, self.held[name].layout, shape, coordinate) for name, whole in state.items()}
        )

    def _whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        held, mesh = self.held[name], self.plan.mesh
        replicated = (REPLICATE,) * mesh.ndim
        return convert(local.detach(), held.shape, mesh, held.layout, replicated, self.plan.costs).clone()


def _check_options(
    model: torch.nn.Module,
    plan: ShardingPlan,
    settings: Settings | None,
    bucket_bytes: int,
    group: dist.ProcessGroup | None,
    compile: str | None,
) -> None:
    if compile not in (None, SEGMENTS):
        raise ValueError(f"compile={compile!r}: give {SEGMENTS!r}, or None to run every operator alone")
    if bucket_bytes < 0:
        raise ValueError(f"bucket_bytes={bucket_bytes}: give 0 or more")
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings={settings!r}: give ascend_parallel.Settings, or None for the current settings")
    if group is not None:
        ranks, mesh = sorted(dist.get_process_group_ranks(group)), plan.mesh
        if ranks != sorted(mesh.process_ids):
            raise ValueError(f"group has the ranks {ranks}, and {mesh} has others: give a group of the mesh's ranks")
        if not mesh.has_groups:
            raise RuntimeError(
                f"{mesh} has no process groups: every rank of the job must call its device_mesh() before"
            )
    if plan.graph.only_in_python:
        raise ValueError(
            f"the forward of {type(model).__name__} {plan.graph.only_in_python}, which a graph leaves out: remove "
            "this from the forward, or use parallelize(), which runs the model's own Python"
        )
