"""Mixed precision by operator: casts inserted into a traced graph and its plan, as torch.autocast casts at run time.

low precision   matmuls, convolutions, attention: their floating-point inputs are cast to `amp.dtype`
fp32            exponentials, norms, losses, means: cast to fp32
others          run in the dtype of their inputs; the wider dtype if an operator takes no mixed dtypes

The planner sees the graph without casts, so a plan is that of the model's own dtype. Then `with_casts` inserts the
casts: tensors are converted between layouts in the narrower of the two dtypes, parameters and their gradients in the
parameters' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_parallel.sharding.graph import CALL, Graph, Node, OpCall, Ref, TensorMeta, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.operator_strategy import operator_name, path_matches
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.text import nearest
from ascend_parallel.training.options import AmpOptions, StrategyOptionError

# The lists of torch.autocast (torch/docs, "CUDA Ops that can autocast"), with means, batch norms and RMS norms in fp32.
LOW_PRECISION = """
    linear matmul mm bmm mv addmm addbmm baddbmm addmv addr einsum chain_matmul linalg_multi_dot prelu conv1d conv2d
    conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc scaled_dot_product_attention
"""
FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus softmax log_softmax
    cumsum cumprod prod sum mean norm linalg_vector_norm linalg_matrix_norm logsumexp renorm layer_norm
    native_layer_norm group_norm native_group_norm batch_norm native_batch_norm rms_norm cosine_similarity
    _native_batch_norm_legit _native_batch_norm_legit_functional _fused_rms_norm nll_loss nll_loss_nd nll_loss2d
    cross_entropy_loss l1_loss mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div poisson_nll_loss cosine_embedding_loss hinge_embedding_loss
    margin_ranking_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss cdist pdist dist
"""
WIDE = torch.float32
CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Cast:
    """A cast that was inserted before a node.

    reader
        (node name, index among its inputs) if the cast is of this input alone; None: all readers of the dtype share it.
    """

    node: Node
    reader: tuple[str, int] | None


def autocast(graph: Graph, amp: AmpOptions) -> tuple[Graph, tuple[Cast, ...]]:
    """Return the graph with the casts of `amp`, and the casts; the graph itself if no operator is cast by name.

    Raises `StrategyOptionError` for an entry of `amp.low_precision` or `amp.keep_fp32` that names no operator.
    """
    if amp.dtype is None or not amp.casts_operators:
        return graph, ()
    caster = _Caster(graph, amp)
    for node in graph.nodes.values():
        caster.add(node)
    return caster.finished(), tuple(caster.casts)


def with_casts(plan: ShardingPlan, amp: AmpOptions) -> ShardingPlan:
    """Return a plan whose graph has the casts of `amp`: each cast has the layout of its tensor on both sides."""
    graph, casts = autocast(plan.graph, amp)
    if not casts:
        return replace(plan, graph=graph)
    layouts, inputs, shared = dict(plan.layouts), dict(plan.inputs), dict(plan.shared_layouts)
    readers, kept, differentiable = graph.readers(), graph.kept, set(plan.differentiable)
    for cast in casts:
        (value,), result = cast.node.inputs, Value(cast.node.name)
        its_readers = readers[result]
        if cast.reader is not None:  # converted before the cast
            layout = plan.inputs[cast.reader[0]][cast.reader[1]]
        elif (
            value in shared and len(readers[value]) == 1 and value not in kept
        ):  # the cast is converted once, in place of its tensor
            layout, shared[result] = layouts[value], shared.pop(value)
        else:
            layout = shared.get(value, layouts[value])
        if result not in shared and len(its_readers) > 1:
            shared[result] = _shared_layout(plan, layout, its_readers)
        inputs[cast.node.name], layouts[result] = (layout,), layout
        differentiable |= {result} if value in differentiable else set()
    return replace(
        plan,
        graph=graph,
        layouts=layouts,
        inputs=inputs,
        shared_layouts=shared,
        differentiable=differentiable,
        single=plan.single | {cast.node.name for cast in casts},
    )


def _shared_layout(plan: ShardingPlan, layout: Layout, readers: Sequence[tuple[str, int]]) -> Layout:
    """Return the one layout in which all readers read a cast tensor, else the layout of the cast."""
    read = {plan.inputs[name][index] for name, index in readers}
    return read.pop() if len(read) == 1 else layout


@dataclass
class _Caster:
    """A graph with casts, under construction."""

    graph: Graph
    amp: AmpOptions
    casts: list[Cast] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.amp.dtype is not None
        self._low: torch.dtype = getattr(torch, self.amp.dtype)
        self._eligible = {self._low, torch.float16, torch.bfloat16, torch.float32}
        self._shared: dict[tuple[Value, torch.dtype], Value] = {}
        self._fakes = FakeTensorMode()
        calls = [node for node in self.graph.nodes.values() if node.kind == CALL]
        for option in ("low_precision", "keep_fp32"):
            for entry in getattr(self.amp, option):
                if not any(_names(entry, node) for node in calls):
                    known = sorted({operator_name(node) for node in calls})
                    raise StrategyOptionError(
                        f"amp.{option}: {entry!r} names no operator{nearest(entry, known)} Give an operator's name, or "
                        f"path:operator as in 'layers.*.norm:*'; the graph has {', '.join(known)}"
                    )

    def add(self, node: Node) -> None:
        """Add a node, with casts of its inputs before it and with the dtypes that then follow."""
        if node.call is None:
            self.nodes[node.name] = node
            return
        wanted = self._wanted(node)
        inputs = tuple(
            self._cast(value, wanted, node, index) if wanted is not None and self._is_eligible(value) else value
            for index, value in enumerate(node.inputs)
        )
        metas = self._metas(inputs)
        if metas == node.call.inputs:
            self.nodes[node.name] = replace(node, inputs=inputs)
            return
        outputs = self._outputs(node.call, metas)
        if outputs is None:  # the operator takes no mixed dtypes
            widest = self._widest(inputs)
            inputs = tuple(
                self._cast(value, widest, node, index) if self._is_eligible(value) else value
                for index, value in enumerate(inputs)
            )
            metas = self._metas(inputs)
            outputs = self._outputs(node.call, metas)
            if outputs is None:
                raise StrategyOptionError(
                    f"amp.level={self.amp.level!r}: {operator_name(node)} in {node.module or 'the model'} cannot run "
                    f"in {', '.join(str(meta.dtype) for meta in metas)}: name it in amp.keep_fp32"
                )
        call = replace(node.call, inputs=metas, outputs=outputs)
        self.nodes[node.name] = replace(node, call=call, inputs=inputs, outputs=outputs)

    def finished(self) -> Graph:
        """Return the graph; new values of buffers have the buffers' dtypes."""
        updates = {}
        for name, value in self.graph.updates.items():
            before = self.graph.meta(value).dtype
            node = self.nodes[value.node]
            same = node.outputs[value.index].dtype == before
            updates[name] = value if same else self._cast(value, before, node, 0, ahead=False)
        why = f"amp.level={self.amp.level!r} casts operators of the graph"
        calls = why if isinstance(self.graph.calls, tuple) else self.graph.calls
        return replace(self.graph, nodes=self.nodes, updates=updates, calls=calls)

    def _wanted(self, node: Node) -> torch.dtype | None:
        """Return the dtype in which an operator computes by its lists; None: in that of its inputs."""
        floats = {self._dtype(value) for value in node.inputs if self._dtype(value).is_floating_point}
        if not floats <= self._eligible:
            return None  # fp64, as in torch.autocast
        name, lists = operator_name(node), self.amp.level == "O1"
        if any(_names(entry, node) for entry in self.amp.keep_fp32):
            return WIDE
        if any(_names(entry, node) for entry in self.amp.low_precision) or name in LOW_PRECISION.split():
            return self._low
        return WIDE if lists and name in FP32.split() else None

    def _cast(self, value: Value, dtype: torch.dtype, reader: Node, index: int, *, ahead: bool = True) -> Value:
        """Return the tensor in another dtype, by a cast before its first reader; the tensor itself if it has it."""
        meta = self.nodes[value.node].outputs[value.index]
        if meta.dtype == dtype:
            return value
        narrows, held = dtype.itemsize <= meta.dtype.itemsize, self.nodes[value.node].call is None
        is_shared = narrows and not held and ahead
        if is_shared and (value, dtype) in self._shared:
            return self._shared[value, dtype]
        name = f"{reader.name}_cast_{index}"
        while name in self.graph.nodes or name in self.nodes:
            name += "_"
        output = replace(meta, dtype=dtype)
        call = OpCall(CAST, (Ref(0),), {"dtype": dtype}, (meta,), (output,))
        node = Node(name, CALL, (output,), call, (value,), reader.module)
        self.nodes[name] = node
        self.casts.append(Cast(node, None if is_shared or not ahead else (reader.name, index)))
        if is_shared:
            self._shared[value, dtype] = Value(name)
        return Value(name)

    def _dtype(self, value: Value) -> torch.dtype:
        return self.nodes[value.node].outputs[value.index].dtype

    def _is_eligible(self, value: Value) -> bool:
        return self._dtype(value) in self._eligible

    def _widest(self, inputs: Sequence[Value]) -> torch.dtype:
        floats = [self._dtype(value) for value in inputs if self._is_eligible(value)]
        widest = floats[0]
        for dtype in floats:
            widest = torch.promote_types(widest, dtype)
        return widest

    def _metas(self, inputs: Sequence[Value]) -> tuple[TensorMeta, ...]:
        return tuple(self.nodes[value.node].outputs[value.index] for value in inputs)

    def _outputs(self, call: OpCall, metas: Sequence[TensorMeta]) -> tuple[TensorMeta, ...] | None:
        """Return a call's outputs for inputs of these dtypes; None if it does not take them."""
        with self._fakes:
            tensors = [torch.empty(meta.shape, dtype=meta.dtype) for meta in metas]
            try:
                returned = call.run(tensors)
            except RuntimeError:
                return None
        leaves = returned if isinstance(returned, (tuple, list)) else (returned,)
        found = [TensorMeta(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        assert len(found) == len(call.outputs), f"{call.name} returns {len(found)} tensors of {len(call.outputs)}"
        return tuple(found)


def is_cast(node: Node) -> bool:
    """Tell whether a node changes only the dtype of a tensor."""
    return node.call is not None and node.call.target is CAST


def _names(entry: str, node: Node) -> bool:
    """Tell whether an entry of a list names a call: "softmax", or "layers.*.norm:*" for calls inside a module."""
    path, colon, operator = entry.rpartition(":")
    inside = ".".join(node.module.split(".")[: len(path.split("."))])
    return fnmatchcase(operator_name(node), operator) and (not colon or path_matches(inside, path))
