"""Where rules are kept: one door for ours and for those that users add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import Layout, Placement
from ascend_parallel.sharding.rules.local import Part


@dataclass(frozen=True)
class OpPlacements:
    """States of an operator's tensors on one mesh dimension.

    inputs, outputs
        One state per tensor of `OpCall.inputs` and `OpCall.outputs`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Reduction:
    """An all-reduce ("sum" or "max") along a mesh dimension that an operator runs itself, in forward.

    nbytes
        Of what each rank gives.
    """

    mesh_dim: int
    nbytes: int
    op: str


Rule = Callable[[OpCall], Iterable[OpPlacements]]
"""What an operator can do on one mesh dimension beside running whole on every rank."""
Run = Callable[[Part], Any]
"""How a rank runs its part, where the operator's own call on local tensors is not it."""

Inside = Callable[[OpCall, Sequence[Layout], Sequence[int]], list[Reduction]]
"""The collectives of an operator itself, from the layouts of its inputs and the mesh's shape."""


@dataclass(frozen=True)
class Entry:
    """A rule, how a rank runs its part (None: the operator itself on the local tensors), and its own collectives."""

    rule: Rule
    run: Run | None = None
    inside: Inside | None = None


ENTRIES: dict[str, Entry] = {}


@overload
def register_rule(target: Any, rule: Rule, run: Run | None = None, inside: Inside | None = None) -> Rule: ...
@overload
def register_rule(
    target: Any, rule: None = None, run: Run | None = None, inside: Inside | None = None
) -> Callable[[Rule], Rule]: ...
def register_rule(
    target: Any, rule: Rule | None = None, run: Run | None = None, inside: Inside | None = None
) -> Rule | Callable[[Rule], Rule]:
    """Register a rule for an operator, in place of the one that it has. Without `rule`: a decorator.

    target
        ``torch.ops.aten.linear.default``, ``torch.ops.aten.linear`` (all its overloads), or the name of either
        ("aten.linear"). An overload's rule goes before its operator's. An in-place operator ("aten.add_") takes the
        rule of the other ("aten.add") unless it has its own.
    rule
        Takes a `OpCall` and returns strategies. Those in which every tensor is whole on every rank need not be among
        them. Sizes are not its business, but a dimension of size 1 must not be cut.
    run
        Takes a `Part`, the local tensors and where they are in the whole ones, and returns the local outputs.
        A floating-point input must have a part in the outputs' autograd graph on every rank or on none, if with a zero
        gradient: its conversion may wait for all ranks in backward.
    inside
        Says which all-reduces `run` runs (`Part.reduced`), for the plan to count; alike on all ranks.

    Raises `ValueError` for a target without a namespace.
    """
    name = str(target)
    if "." not in name:
        raise ValueError(f"target is {name!r}; give an operator of torch.ops or its name, such as 'aten.linear'")

    def register(given: Rule) -> Rule:
        ENTRIES[name] = Entry(given, run, inside)
        return given

    return register if rule is None else register(rule)


def register_all(names: str, rule: Rule, run: Run | None = None) -> None:
    """Register one rule for several operators of aten, named without it and parted by blanks."""
    for name in names.split():
        register_rule(f"aten.{name}", rule, run)


def find(call: OpCall) -> Entry | None:
    """Return the rule of a call's overload, of its operator, or of the operator that does the same out of place."""
    packet = call.name.rpartition(".")[0]
    for name in (call.name, packet, packet.removesuffix("_")):
        if name in ENTRIES:
            return ENTRIES[name]
    return None
