"""A tensor whose rows are still on their way: what is not finished cannot be read.

`UnfinishedTensor` has no storage. Operators that work row by row, such as an addition, a norm or a matmul, give another
unfinished tensor: they run chunk by chunk, once somebody needs their rows. Views of rows wait for their own rows. Every
other function, also one that is not known here, waits for all rows and goes on with the whole tensor; so hooks,
wrappers, `print` and NumPy see finished numbers. A kernel that takes a raw pointer gets torch's error. Correctness
depends on no list: the lists below only say what overlaps.

Which rows are finished may differ between ranks: no collective starts here, so none can be missing.

Autograd records every operator as without chunks, since all this happens below autograd. Gradients are unfinished in
the same way: a sum over rows, such as the gradient of a norm's weight, is computed once all rows are there, and the
weight gradient of a layer when a wait has nothing else to do. They may lie unfinished in a parameter's ``.grad`` until
backward ends, or until somebody reads them.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ascend_parallel.ops.call import ALL_REDUCE, Matmul
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.lazy_rows import LazyRows, RowPieces, Rows, finish_all, unfinished_rows
from ascend_parallel.ops.pending import IDLE_WORK, Pending
from ascend_parallel.ops.probing import (
    ROW_MAJOR,
    TRANSPOSED,
    Pieces,
    first_with_same_bits,
    log_time,
)
from ascend_parallel.ops.record import RECORDING, compute_rows
from ascend_parallel.ops.row_operator import (
    CASTS,
    Argument,
    Constant,
    Cut,
    CutRows,
    Like,
    Named,
    Result,
    RowOperator,
    RowPlan,
    Unchanged,
    listed,
    plan_of,
    plan_of_change,
    results_of,
)
from ascend_parallel.ops.row_views import rows_of_view
from ascend_parallel.ops.row_wise import OPERATORS, RowWiseOperator
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.without_modes import without_grad_and_modes
from ascend_parallel.process_groups.backend import usual_backend
from ascend_parallel.process_groups.consistency import is_capturing

aten = torch.ops.aten


# ``mm(x, w)`` and ``addmm(bias, x, w)``: the place of the rows.
MATMULS = {aten.mm.default: 0, aten.addmm.default: 1}
# They read the shape, dtype and device of their argument alone.
FACTORIES = (
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
)
RESHAPES = (aten.view.default, aten._unsafe_view.default)
# With one of them autograd stores a gradient.
STORES = (aten.detach.default, aten.clone.default)
# The operators that work on each row alone, besides elementwise ones and matmuls.
_LINES = {line.name: line for line in OPERATORS}
_ACCUMULATE_GRAD: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

# The classes whose objects hold a captured graph, by their modules in torch.
GRAPHS = (("cuda", "CUDAGraph"), ("npu", "NPUGraph"))

# A postponed gradient keeps its operands.
MOST_POSTPONED = 2

ENDS: Counter[str] = Counter()
"""The functions that waited for all rows of an unfinished tensor, with their number, for display."""


_UNREAD: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Pending]] = weakref.WeakKeyDictionary()
"""The collectives of each group that nobody has waited for: the latest that left rows unfinished."""


class UnfinishedTensor(torch.Tensor):
    """A tensor of which some rows are still to come; see the module."""

    _value: torch.Tensor
    _rows: Rows
    _pieces: RowPieces
    _holder: object
    _cut: CutRows | None = None  # what the operators that read it share

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[UnfinishedTensor], value: torch.Tensor, rows: Rows) -> UnfinishedTensor:
        """Return the tensor; `value` is the memory that `rows` fills, which nobody else reads before."""
        made: UnfinishedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=value.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._value, made._rows = value, rows
        return made

    @classmethod
    def in_pieces(cls, pieces: RowPieces, rows: Rows) -> UnfinishedTensor:
        """Return the tensor of rows that lie in pieces, until somebody asks for its memory."""
        made: UnfinishedTensor = torch.Tensor._make_wrapper_subclass(
            cls, pieces.shape, dtype=pieces.dtype, device=pieces.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._rows, made._pieces = rows, pieces
        made._holder = pieces.held()
        return made

    def __getattr__(self, name: str) -> Any:
        """Return `_value` of rows in pieces, in one memory from now on."""
        if name != "_value" or "_pieces" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._value = self._rows.progress.make(self._pieces.joined)
        return self._value

    @property
    def pieces(self) -> RowPieces | None:
        """The pieces in which the rows lie; None: they have one memory, which others may have too."""
        return None if "_value" in vars(self) else vars(self).get("_pieces")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of unfinished tensors: by rows if it is known to work so, else on the whole tensors."""
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):  # elsewhere autograd has taken it to pieces
            return func.decompose(*args, **kwargs)
        by_rows = _by_rows(func) if set(types) == _ALONE else None
        if by_rows is not None and (result := by_rows(func, args, kwargs)) is not NotImplemented:
            if func in STORES and in_backward():
                _note_gradient()
            return result
        return _whole(func, args, kwargs)

    def finished(self) -> torch.Tensor:
        """Return the whole tensor, with torch's own memory, to read; waits for its rows."""
        value, progress = self._value, self._rows.progress  # before rows are filled, so that they get their place
        progress.up_to(progress.count)
        return value

    def _given_away(self) -> torch.Tensor:
        """Return the whole tensor to somebody who may write to its memory."""
        self._rows.progress.finish_readers()
        return self.finished()

    # What reads or replaces memory and passes by the dispatcher.

    @property
    def data(self) -> torch.Tensor:
        """The finished tensor, detached."""
        return self._given_away().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._given_away()
        self._hold(value)

    def _hold(self, value: torch.Tensor) -> None:
        """Take finished memory of another shape or place."""
        rows = Rows(LazyRows((), _nothing), 1, 0)
        torch._C.TensorBase.data.__set__(self, UnfinishedTensor(value, rows))  # type: ignore[attr-defined]
        self._value, self._rows, self._cut = value, rows, None

    def data_ptr(self) -> int:
        """Return the address of the finished tensor."""
        return self._given_away().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the finished tensor as an array."""
        return self._plain().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """Return the finished tensor as an array."""
        return self._plain().__array__(dtype)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """Return the finished values."""
        return self.finished().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the finished tensor."""
        return self._given_away().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        """Return the finished tensor as a capsule."""
        return self._plain().__dlpack__(**options)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a copy of the finished tensor."""
        return self._plain().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the finished tensor."""
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected_type: Any = None) -> torch.Tensor | None:
        """Return the finished gradient for the backward of a compiled function."""
        return self.finished() if expected_type is torch.Tensor else None

    def _plain(self) -> torch.Tensor:
        """Return the finished tensor, with gradients as this one has them."""
        value = self._given_away()
        if not self.requires_grad:
            return value
        if self.is_leaf:
            return value.view_as(value).requires_grad_()
        with torch.enable_grad():
            plain: torch.Tensor = _Plain.apply(self)  # type: ignore[no-untyped-call]
        return plain


_ALONE = {UnfinishedTensor}


class _Plain(torch.autograd.Function):
    """An operator on an unfinished tensor gives another one, so a plain tensor in its graph needs a function."""

    @staticmethod
    def forward(ctx: Any, x: UnfinishedTensor) -> torch.Tensor:
        return x.finished().detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def plain_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its rows and torch's own memory, in the same autograd graph: for compiled functions."""
    return x._plain() if isinstance(x, UnfinishedTensor) else x


def _hide_from_compiler() -> None:
    """Have torch.compile leave functions of unfinished tensors alone, which run between its graphs."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        code = vars(UnfinishedTensor)["__torch_dispatch__"].__func__.__code__
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


_hide_from_compiler()


def _nothing(index: int) -> None:
    """Fill no rows."""


def finished(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its rows; below autograd."""
    return x.finished() if isinstance(x, UnfinishedTensor) else x


def given_away(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its rows to somebody who may write to its memory; below autograd."""
    return x._given_away() if isinstance(x, UnfinishedTensor) else x


def is_unfinished(x: torch.Tensor) -> bool:
    """Tell whether rows of a tensor are still to come."""
    return isinstance(x, UnfinishedTensor) and not x._rows.progress.finished


def arriving(x_m: torch.Tensor, blocks: int = 1) -> tuple[torch.Tensor, Callable[[int], object] | None]:
    """Return the memory of rows [M, K], and ``up_to(stop)``: it waits for the rows before `stop` of each block.

    None: all rows are there.
    """
    if not isinstance(x_m, UnfinishedTensor):
        return x_m, None
    up_to, before = x_m._rows.progress.up_to, (blocks - 1) * (x_m.shape[0] // blocks)
    if x_m._rows.blocks == blocks or not before:
        return x_m._value, up_to
    return x_m._value, lambda stop: up_to(before + stop)


def may_stay_unfinished(sizes: Sizes, least_rows: int) -> bool:
    """Tell whether results in these chunks may stay unfinished."""
    return len(sizes) > 1 and sum(sizes) >= least_rows * len(sizes) and may_be_filled_later()


def may_be_filled_later() -> bool:
    """Tell whether a tensor that is made now may be filled later: not in functorch."""
    return torch._C._functorch.peek_interpreter_stack() is None


def unfinished(pending: Pending, least_rows: int, counted: str = "region", blocks: int = 1) -> torch.Tensor:
    """Return the result of started collectives without waiting for them, if its chunks have `least_rows` rows.

    Else, and where no tensor may be changed later (functorch), wait. `counted`: the name in `COUNTS`.
    blocks: as in `Rows`; the sizes of `pending` are those of a block. Who calls has asked `LEADS` (ops/host_lead.py).
    """
    if not may_stay_unfinished(pending.sizes, least_rows):
        return pending.wait()
    settle_around_captures()
    sizes = pending.sizes
    COUNTS.add(counted, len(sizes), 0)
    unread = _UNREAD.setdefault(pending.group, set())
    _wait_for(unread)
    unread.add(pending)
    progress = LazyRows(sizes, pending.wait_for, at_once=True, done=partial(unread.discard, pending))
    if in_backward():  # a gradient; or a recomputed layer, whose rows may have no reader
        at_end_of_backward(progress.settle)
    _register_optimizer_step_pre_hook()
    return UnfinishedTensor(pending.tensor, Rows(progress, blocks, 1))


def _wait_for(unread: set[Pending]) -> None:
    """Wait for collectives whose rows nobody has asked for, or nobody holds any more."""
    while unread:
        pending = unread.pop()
        with without_grad_and_modes(pending.tensor.is_inference()):
            pending.wait()


def in_backward() -> bool:
    """Tell whether this thread runs a node of autograd."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(run: Callable[[], object]) -> None:
    """Run a function at the end of the running backward; if that fails, never."""
    torch.autograd.Variable._execution_engine.queue_callback(run)  # type: ignore[arg-type]


_GRADIENTS: dict[int, list[torch.Tensor]] = {}
"""The leaves whose ``.grad`` a running backward has left unfinished, by its number."""


def _note_gradient() -> None:
    """Have a gradient that autograd stores now in a leaf replaced by a plain tensor at the end of backward."""
    node = torch._C._current_autograd_node()
    if not isinstance(node, _ACCUMULATE_GRAD):
        return
    task = torch._C._current_graph_task_id()
    if task not in _GRADIENTS:
        _register_optimizer_step_pre_hook()
        _GRADIENTS[task] = []
        at_end_of_backward(lambda: _finish_gradients(_GRADIENTS.pop(task, [])))
    _GRADIENTS[task].append(node.variable)


def _finish_gradients(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        gradient: Any = leaf.grad
        if isinstance(gradient, UnfinishedTensor):
            value = gradient.finished()
            if leaf.shape == value.shape:  # DeepSpeed's ZeRO 3 has freed its weight before it takes the gradient
                leaf.grad = value
        elif isinstance(local := getattr(gradient, "_local_tensor", None), UnfinishedTensor):  # of a DTensor
            gradient._local_tensor = local.finished()


def settle(*_: object) -> None:
    """Finish all rows of this process: what is not finished now would read parameters that an optimizer changes."""
    for rows in unfinished_rows():
        rows.finish()
    for unread in list(_UNREAD.values()):
        _wait_for(unread)
    while _GRADIENTS:  # of a backward that failed
        _finish_gradients(_GRADIENTS.popitem()[1])


@lru_cache(maxsize=1)
def _register_optimizer_step_pre_hook() -> None:
    register_optimizer_step_pre_hook(settle)


class Captures:
    """Counts the graphs that are being captured: a question whether something is done would end a capture."""

    running: ClassVar[int] = 0


@lru_cache(maxsize=1)
def settle_around_captures() -> None:
    """Have all rows finished before a graph's capture begins, and before it ends: a replay fills no others."""
    kinds = {getattr(getattr(torch, device, None), name, None) for device, name in GRAPHS}
    for kind in kinds - {None}:
        for name in ("capture_begin", "capture_end"):
            setattr(kind, name, _settling(getattr(kind, name), ends=name == "capture_end"))
    Captures.running += is_capturing()


def _settling(original: Callable[..., Any], ends: bool) -> Callable[..., Any]:
    @wraps(original)
    def capture(*args: Any, **kwargs: Any) -> Any:
        if not ends:
            settle()  # if that fails nothing begins: nobody would end it
            Captures.running += 1
            try:
                return original(*args, **kwargs)
            except BaseException:
                Captures.running -= 1
                raise
        try:
            settle()
        finally:  # a capture that fails ends all the same
            try:
                result = original(*args, **kwargs)
            finally:
                Captures.running = max(0, Captures.running - 1)
        return result

    return capture


def postponed(
    value: torch.Tensor, write: Callable[[], object], reads: Sequence[torch.Tensor], name: str
) -> torch.Tensor:
    """Return the gradient `value`, which ``write()`` fills: in an idle wait, when it is read, or when backward ends.

    reads: the tensors that ``write()`` reads. `name`: of the gradient, for the error if one of them has changed before.
    """
    progress = LazyRows((1,), lambda _: write(), check=Unchanged(name, list(map(_with_memory, reads))).check)
    reference = weakref.ref(progress)
    while len(IDLE_WORK) >= MOST_POSTPONED:
        IDLE_WORK.popleft()()
    IDLE_WORK.append(lambda: finish_all([reference]))
    at_end_of_backward(progress.finish)
    return UnfinishedTensor(value, Rows(progress, 1, 0))


def _with_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tensor, tensor._value if isinstance(tensor, UnfinishedTensor) else tensor


def _whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on finished tensors."""
    given: dict[int, UnfinishedTensor] = {}
    args, kwargs = list(args), dict(kwargs)
    for place, value in enumerate(args):
        if isinstance(value, (UnfinishedTensor, list, tuple)):
            args[place] = _read_by(func, value, given)
    for name, value in kwargs.items():
        kwargs[name] = _read_by(func, value, given)
    recorded = RECORDING.recorder is not None and func in MATMULS
    results = compute_rows(func._schema.name, func, *args, **kwargs) if recorded else func(*args, **kwargs)
    if not given or not may_write(func):
        return results
    for value, leaf in ((leaf._value, leaf) for leaf in given.values()):
        if (value.shape, value.stride()) != (leaf.shape, leaf.stride()):
            leaf._hold(value)  # transpose_, resize_ and their like
    return pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), results)  # a function in place returns its argument


def _read_by(func: Any, value: Any, given: dict[int, UnfinishedTensor]) -> Any:
    """Return an argument of a function, or a list of them, with finished tensors; note in `given` whose they are."""
    if isinstance(value, (list, tuple)):
        return type(value)([_read_by(func, each, given) for each in value])
    if not isinstance(value, UnfinishedTensor):
        return value
    progress = value._rows.progress
    if may_write(func):
        progress.finish_readers()
    memory = value._value
    if not progress.finished:
        ENDS[str(func)] += 1
    progress.up_to(progress.count)
    given[id(memory)] = value
    return memory


@lru_cache(maxsize=512)
def _by_rows(func: Any) -> Callable[..., Any] | None:
    """Return the method that runs a function of unfinished rows without waiting for all of them; None: there is none.

    It takes the function, its arguments and keyword arguments, and may return NotImplemented.
    """
    if func in MATMULS:
        return _matmul
    if func in FACTORIES:
        return lambda func, args, kwargs: func(args[0]._value, *args[1:], **kwargs)
    if func is aten.detach.default or func is aten.alias.default:
        return lambda func, args, kwargs: UnfinishedTensor(func(args[0]._value), args[0]._rows)
    if _is_view(func):
        return _view
    if func in CASTS:
        return _cast
    if torch.Tag.pointwise in func.tags and not _draws(func):
        return _changed if func._schema.is_mutable else _rowwise
    line = _LINES.get(func._schema.name)
    if line is None or func._schema.is_mutable:
        return None
    return partial(_with_sums if line.summed else _along_rows, line)


@lru_cache(maxsize=512)
def may_write(func: Any) -> bool:
    """Tell whether an operator may write to memory that it is given, or hand it on to who may."""
    return bool(func._schema.is_mutable) or func.namespace != "aten" or _is_view(func)


def _is_view(func: Any) -> bool:
    """Tell whether an operator returns views of its first argument."""
    schema = func._schema
    return func in RESHAPES or (
        any(result.alias_info is not None for result in schema.returns) and not schema.is_mutable
    )


@lru_cache(maxsize=512)
def _is_composite(func: Any) -> bool:
    """Tell whether an operator is made of others: one of a linear layer is a matmul, which works by rows."""
    return bool(func._can_decompose())


def _draws(func: Any) -> bool:
    """Tell whether an operator draws random numbers, which belong to whole tensors."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Return views of an unfinished tensor, unfinished too: of all rows, or of some."""
    x = args[0]
    if not isinstance(x, UnfinishedTensor):
        return NotImplemented
    views = func(x._value, *args[1:], **kwargs)
    made: list[UnfinishedTensor] = []
    for view in listed(views):
        if (rows := rows_of_view(x._value, x._rows, view)) is None:
            return NotImplemented
        made.append(UnfinishedTensor(view, rows))
    return made[0] if isinstance(views, torch.Tensor) else made


def _described(args: Any, kwargs: Any) -> tuple[list[Any], tuple[Argument, ...], Named] | None:
    """Return an operator's arguments as plain tensors, and descriptions of the positional and the named arguments.

    None: there are tensors in lists, or by name.
    """
    memory = list(args)
    likes: list[Argument] = []
    named: list[tuple[str, Constant]] = []
    for place, value in enumerate(args):
        at: tuple[Any, ...] = ()
        if isinstance(value, UnfinishedTensor):
            progress, blocks, lead = value._rows
            memory[place] = value._value
            if progress.finished:
                progress.up_to(progress.count)  # a read, maybe in another stream
            else:
                at = (blocks, lead, progress.sizes)
        if isinstance(value, torch.Tensor):
            likes.append(Like(value.shape, value.stride(), value.dtype, *at))
        elif (constant := Constant.of(value)) is None:
            return None
        else:
            likes.append(constant)
    for name, value in kwargs.items():
        if (constant := Constant.of(value)) is None:
            return None
        named.append((name, constant))
    return memory, tuple(likes), tuple(named)


def _rowwise(func: Any, args: Any, kwargs: Any, trailing: int | None = None) -> Any:
    """Run an operator chunk by chunk: elementwise, or along the last `trailing` dimensions of its first argument."""
    if (described := _described(args, kwargs)) is None:
        return NotImplemented
    memory, likes, named = described
    if (plan := plan_of(func, likes, named, trailing)) is None:
        return NotImplemented
    return _started(func._schema.name, plan, args, memory, kwargs, args[plan.like]._rows.progress.sizes)


def _started(
    name: str, plan: RowPlan, args: Sequence[Any], memory: Sequence[Any], kwargs: dict[str, Any], sizes: Sizes
) -> Any:
    """Return the results of an operator that runs in chunks of `sizes` rows, unfinished."""
    operator = RowOperator(name, plan, args, memory, kwargs, sizes)
    progress = LazyRows(sizes, operator.fill, check=operator.check)
    for source in operator.sources:
        operator.pulls.append(source.read_by(progress))
    rows = Rows(progress, plan.blocks, plan.lead)
    made: list[UnfinishedTensor] = []
    for result, cut in zip(operator.results, operator.cuts, strict=True):
        tensor = UnfinishedTensor(result, rows)
        tensor._cut = cut
        made.append(tensor)
    return made if plan.several else made[0]


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Cast or copy unfinished rows, on their device."""
    if kwargs.get("device") == args[0].device:  # as autograd writes a cast
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if kwargs.get("device") is not None or (func is aten.clone.default and _retains()):
        return NotImplemented
    return _rowwise(func, args, kwargs)


def _along_rows(line: RowWiseOperator, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator of the table by rows; in backward one that is along other dimensions runs once all are there."""
    if line.dim is None:
        return _rowwise(func, args, kwargs, line.trailing(args))
    x, arguments = args[0], func._schema.arguments[: line.dim + 1]
    dims = args[line.dim] if line.dim < len(args) else arguments[-1].default_value
    if not isinstance(dims, int) and not dims:
        return NotImplemented
    ends = [
        dim % x.dim() - x.dim() for dim in ([dims] if isinstance(dims, int) else dims)
    ]  # a chunk has fewer leading dimensions
    given = ends[0] if isinstance(dims, int) else ends
    made = _rowwise(func, (*args[: line.dim], given, *args[line.dim + 1 :]), kwargs, -min(ends))
    return _once_all(func, args, kwargs) if made is NotImplemented and in_backward() else made


@dataclass(frozen=True)
class _SomeResults:
    """An operator that returns some of its results; `masked`: it is called without the mask that says which."""

    func: Any
    wanted: tuple[bool, ...]
    masked: bool

    @property
    def _schema(self) -> Any:
        return self.func._schema

    def __call__(self, *args: Any) -> list[torch.Tensor]:
        """Return the wanted results."""
        results = self.func(*args, list(self.wanted)) if self.masked else self.func(*args)
        return [result for result, wanted in zip(results, self.wanted, strict=True) if wanted]


def _with_sums(line: RowWiseOperator, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the gradients of a norm: the input's by rows, the others once all rows are there."""
    if kwargs or not isinstance(args[0], UnfinishedTensor):
        return NotImplemented
    *operands, mask = args if line.masked else (*args, [True] * len(func._schema.returns))
    of_rows = tuple(wanted and place not in line.summed for place, wanted in enumerate(mask))
    of_all = tuple(wanted and place in line.summed for place, wanted in enumerate(mask))
    made: list[Any] = []
    if any(of_rows):
        by_rows = _rowwise(_SomeResults(func, of_rows, line.masked), operands, {}, line.trailing(args))
        if by_rows is NotImplemented:
            return NotImplemented
        made += by_rows
    if any(of_all):
        summed = _once_all(_SomeResults(func, of_all, line.masked), operands, {})
        if summed is NotImplemented:
            return NotImplemented
        made += summed
    rest = iter(made)  # in this order: the sums come last
    return tuple(next(rest) if wanted else None for wanted in mask)


def _once_all(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator over all rows as soon as they are there, or its result is read: a sum over rows, in backward.

    The whole operator runs, so that its bits stay.
    """
    if (described := _described(args, kwargs)) is None or not any(map(is_unfinished, args)):
        return NotImplemented
    if (found := results_of(func, *described[1:])) is None:
        return NotImplemented
    shapes, several = found
    dims = args[0].dim()
    # What is as small as a row may change before, such as a weight that a hook updates.
    kept = [leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.dim() != dims else leaf for leaf in args]

    def run(*given: Any) -> Sequence[torch.Tensor]:
        return listed(func(*given, **kwargs))

    read = [leaf for leaf in args if isinstance(leaf, torch.Tensor) and leaf.dim() == dims]
    made = once_all(func._schema.name, run, kept, shapes, read)
    return made if several else made[0]


def once_all(
    name: str,
    run: Callable[..., Sequence[torch.Tensor]],
    args: Sequence[Any],
    shapes: Sequence[tuple[Sizes, torch.dtype]],
    read: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return ``run(*args)``, called with finished tensors as soon as all rows are there, or its results are read.

    args: rows of one of them are to come.
    shapes: shape and dtype of each result.
    read: those of `args` that may not change before.
    """
    sources = [leaf._rows.progress for leaf in args if isinstance(leaf, UnfinishedTensor) and is_unfinished(leaf)]
    buffers = [torch.empty(shape, dtype=dtype, device=args[0].device) for shape, dtype in shapes]

    def fill(_: int) -> None:
        given = [finished(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in args]
        if (made_here := itself()) is None or made_here.finished:
            return  # work beside a wait has asked for them, and somebody may have changed them
        results = compute_rows(name, run, *given)
        for buffer, result in zip(buffers, results, strict=True):
            buffer.copy_(result)

    progress = LazyRows((1,), fill, check=Unchanged(name, list(map(_with_memory, read))).check)
    itself = weakref.ref(progress)  # rows that nobody reads go at once
    for source in sources:
        source.read_by(progress)
    if len(sources) == 1:  # a second one would be waited for
        sources[0].followed_by(progress)
    return [UnfinishedTensor(buffer, Rows(progress, 1, 0)) for buffer in buffers]


def _retains() -> bool:
    """Tell whether a copy made now may be a gradient that the user has asked autograd to retain."""
    return in_backward() and not isinstance(torch._C._current_autograd_node(), _ACCUMULATE_GRAD)


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """Change an unfinished tensor in place, chunk by chunk."""
    x = args[0]
    if (
        not isinstance(x, UnfinishedTensor)
        or x._rows.progress.finished
        or x._rows.progress.is_part  # the readers of the other rows would not see the change
        or (described := _described(args, kwargs)) is None
    ):
        return NotImplemented
    memory, likes, _ = described
    if (plan := plan_of_change(func, likes)) is None:
        return NotImplemented
    progress = x._rows.progress
    operator = RowOperator(func._schema.name, plan, args, memory, kwargs, progress.sizes)

    def act(index: int) -> None:
        operator.check()
        operator.fill(index)

    progress.change(act)
    return x


def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply unfinished rows [M, K] by a matrix [K, N], in the chunks that keep the bits of the whole matmul."""
    place = MATMULS[func]
    x, w = args[place], args[place + 1]
    if kwargs or not is_unfinished(x) or isinstance(w, UnfinishedTensor) or x._rows.lead != 1:
        return NotImplemented
    if place and (isinstance(args[0], UnfinishedTensor) or args[0].dim() != 1):
        return NotImplemented
    if x._rows.blocks != 1 or w.dtype != x.dtype or w.device != x.device or w.is_inference():
        return NotImplemented  # what is no parameter, and has no version, may change before the rows come
    k, n = w.shape
    layout = TRANSPOSED if w.stride(0) == 1 and n > 1 else ROW_MAJOR
    rows = x._rows.progress.sizes
    sizes = _exact_sizes(func, k, n, x.dtype, x.device, layout, rows, torch.get_num_threads())
    if len(sizes) < 2:
        return NotImplemented
    plan = _matmul_plan(func, sum(rows), k, n, x.dtype, tuple(args[0].shape) if place else None)
    return _started(func._schema.name, plan, args, (*args[:place], x._value, w, *args[place + 2 :]), {}, sizes)


@lru_cache(maxsize=1024)
def _matmul_plan(func: Any, m: int, k: int, n: int, dtype: torch.dtype, bias: Sizes | None) -> RowPlan:
    """Return how unfinished rows [m, k] are multiplied by a matrix [k, n], which has to stay as it is."""
    place = MATMULS[func]
    return RowPlan(
        run=_OUT[func],
        like=place,
        blocks=1,
        lead=1,
        cut=(Cut(place, (m, k), unfinished=True),),
        small=() if bias is None else ((0, bias),),
        kept=(place + 1,),
        results=(Result((m, n), (m, n), dtype),),
        outs=("out",),
    )


_OUT: dict[Any, Callable[..., Any]] = {aten.mm.default: torch.mm, aten.addmm.default: torch.addmm}


@lru_cache(maxsize=1024)
def _exact_sizes(
    func: Any, k: int, n: int, dtype: torch.dtype, device: torch.device, layout: str, sizes: Sizes, threads: int
) -> Sizes:
    """Return chunks, made of the given ones, in which a matmul has the bits of the whole on this machine.

    No rank needs to know what another takes: no collective depends on it. `threads` is part of the key alone.
    """
    if len(sizes) < 2:
        return sizes
    candidates, backend = [sizes], usual_backend(device.type)
    while len(sizes) > 1:
        sizes = tuple(sum(sizes[place : place + 2]) for place in range(0, len(sizes), 2))
        candidates.append(sizes)
    matmul = Matmul(ALL_REDUCE, sum(sizes), k, n, dtype, device.type, 2)
    cuts = [RowChunks(func, matmul, chunks, backend.launches) for chunks in candidates[:-1]]
    if not backend.blocks_host and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)  # as `bits` does, and for the same reason
    begin, first = time.perf_counter(), first_with_same_bits(cuts, (layout,), device)
    log_time(f"{func._schema.name} {matmul.product_in_words} of unfinished rows", begin)
    return candidates[first]


@dataclass(frozen=True)
class RowChunks:
    """A matmul of rows in chunks, as `_matmul` multiplies unfinished ones; `launches` as in `CutProduct`."""

    func: Any
    matmul: Matmul
    sizes: Sizes
    launches: bool

    def pieces(self, x: torch.Tensor, w: torch.Tensor) -> Pieces:
        """Multiply x [m, k] and w [k, n] whole and in chunks of rows."""
        # A larger bias would hide the order of the sums.
        more = (w[0] * 1e-6,) if self.func is aten.addmm.default else ()
        whole = self.func(*more, x, w)
        for x_c, whole_c in zip(
            torch.split_with_sizes(x, self.sizes), torch.split_with_sizes(whole, self.sizes), strict=True
        ):
            yield self.func(*more, x_c, w), whole_c
