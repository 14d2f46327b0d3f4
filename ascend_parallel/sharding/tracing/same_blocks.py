"""Notes what a forward does, as a whole and in each block. Later blocks that did the same repeat the first.

Blocks are the modules of lists. While the forward runs, `ForwardNotes` notes the calls of torch's functions inside each
block: the function, the constants, where each tensor comes from (a parameter by name, an argument by place, the result
of an earlier call), the kinds of the results, the grad mode, the marks, and the modules that are entered. Two blocks
did the same if these notes are equal. Why, from which numbers, global variables and closures, needs no analysis: the
code has run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import named_tensors
from ascend_parallel.sharding.tracing.functionalize import memory_of
from ascend_parallel.sharding.tracing.model_files import is_of_fake_tensors
from ascend_parallel.sharding.tracing.strategy_marks import noting_marks

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
# Constants that `repr` describes in full. Calls with other constants cannot be compared.
BY_VALUE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
BY_VALUE = (*BY_VALUE, torch.memory_format, type(Ellipsis))  # type: ignore[assignment]


@dataclass
class _Scope:
    """What is noted of a block that runs, or of the forward itself.

    labels
        Where a tensor comes from, by the tensor's id.
    notes
        Calls, modules that are entered, and blocks inside.
    is_closed
        Whether stubs can repeat it for other tensors: no tensor from outside is read, nothing given is changed.
    """

    path: str
    labels: dict[int, Any] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    is_closed: bool = True


class ForwardNotes(TorchFunctionMode):
    """Notes the calls of a forward, while it runs in `noting`.

    kinds
        A number for each content of notes, shared by runs that are to be compared.
    kind
        The number of the forward's notes: equal for runs that did the same.
    """

    def __init__(self, kinds: dict[Any, int]) -> None:
        """Number contents by `kinds`, which grows."""
        super().__init__()
        self.kind = -1
        self.kinds = kinds
        self._scopes: list[_Scope] = []
        self._left: dict[int, Any] = {}  # labels that tensors had in blocks that have ended
        self._blocks: dict[str, list[int]] = defaultdict(list)  # the kinds of the calls of each block
        self._open: set[str] = set()  # blocks that no other block can repeat
        self._alive: list[Any] = []  # or another tensor would get the id of one

    def same_blocks(self) -> dict[str, str]:
        """Return {path of a block: path of the first block that did the same}, also for the first."""
        first: dict[int, str] = {}
        kinds = {path: kinds[0] for path, kinds in self._blocks.items() if len(kinds) == 1}
        same = {path: first.setdefault(kind, path) for path, kind in kinds.items()}
        count = Counter(same.values())
        return {path: like for path, like in same.items() if count[like] > 1}

    def run(self, model: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a model's forward and note what it does."""
        self._scopes, self._left, self._alive = [_Scope("")], {}, []
        self._blocks.clear()
        with torch._C.DisableTorchFunction():
            self._label_all((*named_tensors(model).items(), *enumerate(pytree.tree_leaves((args, kwargs)))))
        with self, noting_marks(self._note):
            returned = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.kind = self._close(returned)
        return returned

    def repeatable_blocks(self, model: torch.nn.Module) -> dict[str, str]:
        """Return those of `same_blocks` for which stubs can stand.

        Left out are blocks that read or write tensors from outside, blocks that share parameters or buffers with
        others, and all blocks of a model that has a module under two names: torch.export names the paths of such a
        model by how its code reads them.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        if len(set(map(id, modules.values()))) < len(modules):
            return {}
        uses = Counter(map(id, named_tensors(model, all_names=True).values()))
        same = {path: like for path, like in self.same_blocks().items() if path not in self._open}
        return {path: like for path, like in same.items() if _is_alone(modules[path], uses)}

    @contextmanager
    def noting_blocks(self, model: torch.nn.Module) -> Iterator[None]:
        """Note the blocks of a model, and their modules, whenever they run inside the context."""
        blocks = blocks_of(model)
        paths = {id(block): path for path, block in blocks.items()}
        with ExitStack() as stack:
            for path, block in blocks.items():
                for name, module in block.named_modules():
                    if id(module) not in paths:
                        paths[id(module)] = f"{path}.{name}"
                        stack.enter_context(replaced_forward(module, partial(self._enter, paths[id(module)])))
                stack.enter_context(replaced_forward(block, partial(self._run, path, block)))
            yield

    def skip(self, path: str, kind: int, arguments: Any, returned: Any) -> None:
        """Note a skipped block: it would have done what is noted as `kind`."""
        self._note_block(path, kind, [self._label(tensor) for tensor in tensors_in(arguments)], returned)

    def kind_of(self, path: str) -> int:
        """Return the record of a block's only call."""
        return self._blocks[path][0]

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note a call."""
        returned = function(*args, **(kwargs or {}))
        if self._scopes and not is_of_fake_tensors():
            with torch._C.DisableTorchFunction():
                self._note_call(function, args, kwargs or {}, returned)
        return returned

    def _note_call(self, function: Callable[..., Any], args: Any, kwargs: Any, returned: Any) -> None:
        results = tensors_in(returned)
        if not results and function.__name__ == "__get__":
            return  # x.shape: an attribute that is no tensor
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        labels = tuple(self._label(leaf) if isinstance(leaf, torch.Tensor) else self._constant(leaf) for leaf in leaves)
        made = self._label_made(results)
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self._note((function, labels, spec, modes, made, tuple(map(_kind_of, results))))

    def _note(self, note: Any) -> None:
        self._scopes[-1].notes.append(note)

    def _enter(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module inside of a block."""
        if len(self._scopes) < 2:
            return forward(*args, **kwargs)
        self._note(("enter", path.removeprefix(self._scopes[-1].path)))
        returned = forward(*args, **kwargs)
        self._note("leave")
        return returned

    def _run(self, path: str, block: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._scopes:
            return forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            given = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            labels = [self._label(leaf) for _, leaf in given]
            own = named_tensors(block)
            before = _state_of(own, given)
            self._scopes.append(_Scope(path))
            self._label_all((*own.items(), *given))
            modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            self._note((type(block), before[0], tuple(self._label(leaf) for _, leaf in given), spec, modes))
        returned = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            results, scope = tensors_in(returned), self._scopes[-1]
            if _state_of(named_tensors(block), given) != before or not results or self._shares(results, own, given):
                scope.is_closed = False
            kind = self._close(returned)
            self._blocks[path].append(kind)
            if not scope.is_closed:
                self._open.add(path)
            self._left |= {key: (path, label) for key, label in scope.labels.items() if isinstance(label, _Made)}
            self._note_block(path, kind, labels, returned)
        return returned

    def _note_block(self, path: str, kind: int, labels: Sequence[Any], returned: Any) -> None:
        made = self._label_made(tensors_in(returned))
        self._note((path.removeprefix(self._scopes[-1].path), kind, tuple(labels), made))

    def _close(self, returned: Any) -> int:
        """End a scope, and return the number of what it did."""
        leaves, spec = pytree.tree_flatten(returned)
        labels = [self._label(leaf) if isinstance(leaf, torch.Tensor) else self._constant(leaf) for leaf in leaves]
        scope = self._scopes.pop()
        return self.kinds.setdefault((tuple(scope.notes), spec, tuple(labels)), len(self.kinds))

    def _shares(self, results: Sequence[Any], own: Mapping[str, Any], given: Sequence[tuple[int, Any]]) -> bool:
        """Tell whether new results share memory with arguments, parameters or each other."""
        known = [*own.values(), *(leaf for _, leaf in given)]
        ids = set(map(id, known))
        made = {id(result): result for result in results if id(result) not in ids}
        memories = [memory_of(tensor) for tensor in made.values()]
        return len(set(memories)) < len(memories) or not set(memories).isdisjoint(map(memory_of, known))

    def _label_all(self, tensors: Sequence[tuple[Any, Any]]) -> None:
        for label, tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._scopes[-1].labels.setdefault(id(tensor), label)
                self._alive.append(tensor)

    def _label_made(self, results: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Label the tensors that a call made, and return where all its results come from."""
        scope = self._scopes[-1]
        for place, result in enumerate(results):
            if not any(id(result) in outer.labels for outer in self._scopes):
                scope.labels[id(result)] = _Made(len(scope.notes), place)
                self._alive.append(result)
        return tuple(map(self._label, results))

    def _label(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's origin, and the number of blocks between."""
        for depth, scope in enumerate(reversed(self._scopes)):
            if id(tensor) in scope.labels:
                for inner in self._scopes[len(self._scopes) - depth :]:
                    inner.is_closed = False
                return (depth, scope.labels[id(tensor)])
        for scope in self._scopes:
            scope.is_closed = False
        if id(tensor) in self._left:  # it left its block by other ways than as a result
            self._open.add(self._left[id(tensor)][0])
            return self._left[id(tensor)]
        root = self._scopes[0]
        root.labels[id(tensor)] = f"other {len(root.labels)}"
        self._alive.append(tensor)
        return root.labels[id(tensor)]

    def _constant(self, value: Any) -> Any:
        if type(value) is slice:
            return (slice, *map(self._constant, (value.start, value.stop, value.step)))
        if type(value) not in BY_VALUE:
            for scope in self._scopes:
                scope.is_closed = False
            return type(value)
        return (type(value), repr(value))


class _Made(NamedTuple):
    """The label of a tensor that a call made: the place of the call's note in its block, and among the results."""

    note: int
    place: int


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules in lists that hold several of their class, by path."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for prefix, parent in model.named_modules():
        if isinstance(parent, LISTS):
            classes = Counter(type(child) for child in parent.children())
            for name, child in parent.named_children():
                if classes[type(child)] > 1:
                    found.setdefault(id(child), (f"{prefix}.{name}" if prefix else name, child))
    return dict(found.values())


def _is_alone(block: torch.nn.Module, uses: Mapping[int, int]) -> bool:
    own = Counter(map(id, named_tensors(block, all_names=True).values()))
    return all(uses[tensor] == count for tensor, count in own.items())


@contextmanager
def replaced_forward(module: torch.nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Call ``run(forward, *args, **kwargs)`` in place of a module's forward inside the context."""
    attributes, forward = vars(module), module.forward
    before = attributes.get("forward")
    attributes["forward"] = wraps(forward)(partial(run, forward))
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results of any nesting."""
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _state_of(own: Mapping[str, torch.Tensor], given: Sequence[tuple[int, torch.Tensor]]) -> Any:
    """Return the kinds of a block's parameters, buffers and arguments; and what tells whether they were changed."""
    tensors = [*own.items(), *given]
    changes = [(id(t), t.requires_grad, -1 if t.is_inference() else t._version) for _, t in tensors]
    return tuple((name, _kind_of(tensor)) for name, tensor in tensors), changes


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
