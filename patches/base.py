"""Replace methods on classes: describe, check, apply, revert and report patches.

A patch replaces a method on its class, never a name in a module: all references to the class see the change,
whatever the order of imports.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from ascend_parallel.ops.shm_extension import watched

Function = Callable[..., Any]
T = TypeVar("T")


class PatchError(RuntimeError):
    """A patch does not fit the installed framework; the message says what was expected and what was found."""


class ConflictError(RuntimeError):
    """Two enabled features cannot run together; the message names both."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The replacement of a method.

    target
        The full name of the replaced method: ``module.class.method``.
    replacement
        Returns the new method, given the original method.
    parameters
        Names of the original's parameters; the replacement was written for these. None: it hands all arguments on.
    reason
        What the replacement does, for `PatchSet.status`.
    gives_way_to
        A package that may put a method of its own in place of the replacement; the method then stays.
    inherited
        Whether the class inherits the method, as modules do ``__call__``, or finds it by ``__getattr__``; the
        replacement is then added to the class.
    may_be_wrapped
        Whether the original may be a wrapper of the framework's around its own method: the replacement hands all on.
    """

    target: str
    replacement: Callable[[Function], Function]
    parameters: tuple[str, ...] | None
    reason: str
    gives_way_to: str | None = None
    inherited: bool = False
    may_be_wrapped: bool = False

    @property
    def module(self) -> str:
        """The module that holds the class."""
        return self.target.rsplit(".", 2)[0]

    @property
    def owner(self) -> str:
        """The name of the class."""
        return self.target.rsplit(".", 2)[1]

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.target.rsplit(".", 2)[2]

    def holder(self) -> type:
        """Import the module and return the class that holds the method.

        A framework may have given the class's name to a subclass, as MindSpeed's flags do. The class is then its base.
        """
        try:
            owner = getattr(importlib.import_module(self.module), self.owner, None)
        except ImportError as error:
            raise PatchError(f"{self.target}: {self.module} cannot be imported: {error}") from error
        if not isinstance(owner, type):
            raise PatchError(f"{self.target}: expected a class, found {owner!r}")
        for kind in owner.__mro__:
            if (kind.__module__, kind.__name__) == (self.module, self.owner):
                return kind
        raise PatchError(f"{self.target}: expected the class of that module, found {full_name(owner)}")

    def named(self) -> object:
        """Return the present object of the class's name; None: the module has no such name."""
        return getattr(sys.modules[self.module], self.owner, None)

    def gave_way(self, method: object) -> bool:
        """Tell whether a method is that of `gives_way_to`, or a wrapper of its own around the replacement."""
        return written_in(method).partition(".")[0] == self.gives_way_to

    def present(self) -> object:
        """Import the module and return what the class has as the method; None: nothing of its own."""
        return vars(self.holder()).get(self.method)

    def check(self) -> None:
        """Raise `PatchError` unless the method exists, is the framework's own, and has the expected parameters.

        A method of `gives_way_to` is left in place, whatever it wraps.
        """
        holder = self.holder()
        attribute = vars(holder).get(self.method)
        if self.gave_way(attribute):
            return
        if self.inherited and attribute is None:
            if not hasattr(holder, self.method) and not hasattr(holder, "__getattr__"):
                raise PatchError(f"{self.target}: expected that the class inherits the method, found none")
            return
        method = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
        if self.inherited:
            raise PatchError(f"{self.target}: expected that the class inherits the method, found {method!r}")
        if not inspect.isfunction(method):
            raise PatchError(f"{self.target}: expected a method of this class, found {method!r}")
        if not defined_in(method, sys.modules[self.module], lambda wrapper: self.may_be_wrapped):
            raise PatchError(
                f"{self.target}: expected the original, found a replacement from {written_in(method)}; "
                "only one of the two can replace it: switch the other off (MindSpeed: --use-ascend-coc, "
                "--use-ascend-mc2) or unset COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL"
            )
        parameters = tuple(inspect.signature(method).parameters)
        if self.parameters is not None and parameters != self.parameters:
            expected = f"expected the parameters {', '.join(self.parameters)}"
            raise PatchError(f"{self.target}: {expected}, found {', '.join(parameters)}")


@dataclass(frozen=True, kw_only=True)
class RepeatedFunction:
    """A function of the framework whose work the replacements repeat without calling it.

    A version of the framework that adds a parameter to the function may pass what the replacements would ignore.

    module, name
        The function: ``module.name``.
    parameters
        All parameters that the replacements know, of all versions.
    """

    module: str
    name: str
    parameters: frozenset[str]

    def check(self) -> None:
        """Raise `PatchError` if the framework's own function has an unknown parameter; ignore a replaced function."""
        module = importlib.import_module(self.module)
        function = vars(module).get(self.name)
        if not callable(function) or not defined_in(function, module):
            return
        if unknown := [name for name in inspect.signature(function).parameters if name not in self.parameters]:
            raise PatchError(
                f"{self.module}.{self.name}: unknown parameters {', '.join(unknown)}; a replacement would ignore them; "
                f"known: {', '.join(sorted(self.parameters))}"
            )


@dataclass(frozen=True)
class PatchStatus:
    """Whether a patch is applied, with its reason, or the reason why it is not in force."""

    target: str
    applied: bool
    reason: str


@dataclass(frozen=True)
class _Applied:
    """An applied patch: the class, which another framework may rename later, and its two methods.

    original
        None: the class inherits the method.
    """

    holder: type
    original: Any
    replacement: Any

    def restore(self, method: str) -> None:
        """Put the original method in place of the replacement."""
        if self.original is None:
            delattr(self.holder, method)
        else:
            setattr(self.holder, method, self.original)


def _replace(patch: Patch) -> _Applied:
    """Put the replacement of a patch in place of the original, or in front of the method that the class inherits."""
    holder = patch.holder()
    original = vars(holder).get(patch.method)
    found = inspect.getattr_static(holder, patch.method, None)
    kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
    own: Any = getattr(original, "__func__", original)  # of a static or class method
    if original is None:
        own = _passed_on(patch.method) if found is None else _inherited(holder, patch.method)
    replacement = patch.replacement(own)
    applied = _Applied(holder, original, replacement if kind is None else kind(replacement))
    setattr(holder, patch.method, applied.replacement)
    return applied


def _inherited(holder: type, method: str) -> Function:
    """Return a function that calls the method that `holder` inherits when it is called; `bound`: an object or class."""

    def call(bound: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(holder, bound), method)(*args, **kwargs)

    return call


def _passed_on(method: str) -> Function:
    """Return a function that calls what an object's ``__getattr__`` gives for `method`."""

    def call(bound: Any, *args: Any, **kwargs: Any) -> Any:
        return bound.__getattr__(method)(*args, **kwargs)

    return call


class PatchSet:
    """A group of patches: either all are applied or none is."""

    def __init__(
        self,
        framework: str,
        versions: str | None,
        patches: Sequence[Patch],
        *,
        newest: str = "",
        package: str = "",
        repeated: Sequence[RepeatedFunction] = (),
    ) -> None:
        """Hold patches for `framework`.

        versions
            The supported range, for example ``">=0.10,<0.17"``; None: any version.
        newest
            The newest version on which the tests ran.
        package
            The name under which the framework is installed, if that is another.
        repeated
            Functions whose work the replacements repeat.
        """
        self.framework = framework
        self.versions = versions
        self.newest, self.package = newest, package or framework
        self.patches = tuple(patches)
        self.repeated = tuple(repeated)
        self._applied: dict[Patch, _Applied] = {}
        self._left: dict[Patch, str] = {}  # not applied, since a method of that module stays

    def check(self, version: str) -> None:
        """Raise `PatchError` if `version` is out of range, or a target or repeated function is not as expected."""
        if self.versions is not None and not in_range(version, self.versions):
            raise PatchError(
                f"{self.framework}: expected a version {self.versions}, found {version}; the newest tested version is "
                f"{self.newest}: install a supported version (pip install '{self.package}{self.versions}'), or run "
                "without overlap (unset COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL); if no release of ascend_parallel "
                "supports the version, report the version in an issue of ascend_parallel"
            )
        for patch in self.patches:
            patch.check()
        for function in self.repeated:
            function.check()

    def apply(self, version: str) -> None:
        """Check all targets, then replace them, but for those that give way; a second call does nothing."""
        if self._applied or self._left:
            return
        self.check(version)
        for patch in self.patches:
            if patch.gave_way(present := patch.present()):
                self._left[patch] = written_in(present)
            else:
                self._applied[patch] = _replace(patch)

    def refuse_if_covered(self) -> None:
        """Raise `PatchError` if another patch was put on top of one of these."""
        for patch, applied in self._applied.items():
            method = vars(applied.holder).get(patch.method)
            if method is not applied.replacement and not patch.gave_way(method):
                raise PatchError(
                    f"{patch.target}: cannot be reverted, since {getattr(method, '__qualname__', method)} of "
                    f"{written_in(method) or 'an unknown module'} was put on top; remove that patch first"
                )

    def revert(self) -> None:
        """Restore the original methods; raise `PatchError` if another patch was put on top."""
        self.refuse_if_covered()
        for patch, applied in self._applied.items():
            if not patch.gave_way(vars(applied.holder).get(patch.method)):
                applied.restore(patch.method)
        self._applied.clear()
        self._left.clear()

    def status(self) -> list[PatchStatus]:
        """Return the status of each patch."""
        return [self._status(patch) for patch in self.patches]

    def _status(self, patch: Patch) -> PatchStatus:
        applied = self._applied.get(patch)
        if applied is None:
            reason = f"left to {self._left[patch]}" if patch in self._left else "not applied"
            return PatchStatus(patch.target, False, reason)
        method = vars(applied.holder).get(patch.method)
        if method is not applied.replacement:
            return PatchStatus(patch.target, False, f"replaced in turn by {written_in(method) or method}")
        if inspect.getattr_static(patch.named(), patch.method, None) is not applied.replacement:
            text = f"left unused: the name {patch.owner} was given to {full_name(patch.named())}, which has its own"
            return PatchStatus(patch.target, False, text)
        return PatchStatus(patch.target, True, patch.reason)


class WatchedNames(Generic[T]):
    """What an inspection of names in modules and classes says, inspected anew once one of their objects has changed.

    Every call of a layer looks at the names, of which there are dozens: one loop, in C++ where the extension is built,
    compares the objects by identity.
    """

    def __init__(self, names: Iterable[tuple[Mapping[str, Any], str]], inspect: Callable[[], T]) -> None:
        """Watch each name in its namespace, which may lack it; ``inspect()`` judges the present objects."""
        self._seen: tuple[tuple[Mapping[str, Any], str, object], ...] = tuple((*name, self) for name in names)
        self._inspect = inspect
        self._watched: Any = None
        self.latest: T
        """What the last `look` returned."""

    def look(self) -> T:
        """Return the inspection's result for the present objects."""
        if self._watched is not None and self._watched.same():
            return self.latest
        for namespace, name, seen in self._seen:
            if namespace.get(name) is not seen:
                self._seen = tuple((namespace, name, namespace.get(name)) for namespace, name, _ in self._seen)
                self._watched = watched(self._seen)
                self.latest = self._inspect()
                break
        return self.latest


def names_of_method(kind: type, name: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return where a class and its bases may hold a method, for `WatchedNames`."""
    return [(vars(base), name) for base in kind.__mro__]


def written_in(method: object) -> str:
    """Return the name of the module in which a method was written; of a function `functools.wraps` changes another."""
    namespace = getattr(method, "__globals__", {})
    return str(namespace.get("__name__") or getattr(method, "__module__", None) or "")


def full_name(kind: object) -> str:
    """Return the module and name of a class."""
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', kind)}"


def defined_in(
    function: object, module: ModuleType, may_wrap: Callable[[Function], bool] = lambda wrapper: False
) -> bool:
    """Tell whether a function was defined in `module`, and wrapped by functions for which `may_wrap` is true alone."""
    while inspect.isfunction(function):
        if (wrapped := getattr(function, "__wrapped__", None)) is None:
            return function.__globals__ is vars(module)
        function = wrapped if may_wrap(function) else None
    return False


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``"0.12.0rc1"`` gives ``(0, 12, 0)``."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in matched.group().split(".")) if matched else ()


def in_range(version: str, versions: str) -> bool:
    """Tell whether `version` is in a range of the form ``">=LOWEST,<FIRST_NOT"``."""
    lowest, first_not = (version_tuple(bound.lstrip("<>=")) for bound in versions.split(","))
    return lowest <= version_tuple(version) < first_not
