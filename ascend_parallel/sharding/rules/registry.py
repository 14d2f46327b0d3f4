"""The registry of rules: the package's own rules and users' rules register in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ascend_parallel.process_groups.collectives import ALL_TO_ALL
from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import Layout, Placement
from ascend_parallel.sharding.rules.local import Part


@dataclass(frozen=True)
class OpPlacements:
    """Placements of an operator's tensors on one mesh dimension: a strategy.

    inputs, outputs
        One placement per tensor of `OpCall.inputs` and `OpCall.outputs`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Reduction:
    """An all-reduce that a rule's implementation runs inside the operator, along one mesh dimension.

    nbytes
        The bytes of each rank's tensor.
    op
        "sum" or "max".
    backward
        Whether it runs in backward, which a second run of the forward does not repeat.
    """

    mesh_dim: int
    nbytes: int
    op: str
    backward: bool = False


@dataclass(frozen=True)
class Exchange:
    """A collective of an exchange that a rule's implementation runs inside the operator, along one mesh dimension.

    nbytes
        The bytes of the slices of all ranks together; of "send" those of a rank.
    kind
        "all_to_all", "all_gather", "reduce_scatter" or "send".
    backward
        As in `Reduction`.
    """

    mesh_dim: int
    nbytes: float
    kind: str = ALL_TO_ALL
    backward: bool = False


Rule = Callable[[OpCall], Iterable[OpPlacements]]
"""Returns an operator's strategies on one mesh dimension, besides running whole on every rank."""
Run = Callable[[Part], Any]
"""Runs a rank's part, where the operator's call on local tensors would be wrong."""

OpCollectives = Callable[[OpCall, Sequence[Layout], Sequence[int]], Sequence[Reduction | Exchange]]
"""Returns the collectives of a step that an operator runs itself, from its inputs' layouts and the mesh's shape."""

Allows = Callable[[OpCall, Sequence[Layout]], bool]
"""Tells whether an operator's strategies on single mesh dimensions go together, from the layouts of its inputs."""


@dataclass(frozen=True)
class RegisteredRule:
    """A rule; how a rank runs its part (None: the operator on the local tensors); the operator's own collectives.

    allows
        None: all strategies of single mesh dimensions go together.
    """

    rule: Rule
    run: Run | None = None
    op_collectives: OpCollectives | None = None
    allows: Allows | None = None


ENTRIES: dict[str, RegisteredRule] = {}


@overload
def register_rule(
    target: Any,
    rule: Rule,
    run: Run | None = None,
    inside: OpCollectives | None = None,
    allows: Allows | None = None,
) -> Rule: ...
@overload
def register_rule(
    target: Any,
    rule: None = None,
    run: Run | None = None,
    inside: OpCollectives | None = None,
    allows: Allows | None = None,
) -> Callable[[Rule], Rule]: ...
def register_rule(
    target: Any,
    rule: Rule | None = None,
    run: Run | None = None,
    inside: OpCollectives | None = None,
    allows: Allows | None = None,
) -> Rule | Callable[[Rule], Rule]:
    """Register a rule for an operator, replacing any earlier rule. Without `rule`: return a decorator.

    target
        ``torch.ops.aten.linear.default``, ``torch.ops.aten.linear`` (all its overloads), or the name of either
        ("aten.linear"). An overload's rule precedes its operator's. An in-place operator ("aten.add_") without a rule
        takes the rule of the out-of-place operator ("aten.add").
    rule
        Takes an `OpCall` and returns strategies. It may omit the strategies with every tensor whole on every rank. It
        may ignore sizes, but must not shard a dimension of size 1.
    run
        Takes a `Part`, the local tensors and their position in the whole tensors, and returns the local outputs.
        On all ranks or on none, the outputs' autograd graph must contain a floating-point input, if only with a zero
        gradient: in backward the input's conversion may wait for all ranks.
    inside
        Returns the collectives that `run` runs (`Part.reduced`), which the plan counts; the same on all ranks.
    allows
        Tells from the inputs' layouts whether strategies of several mesh dimensions go together; None: all do.

    Raises `ValueError` for a target without a namespace.
    """
    name = str(target)
    if "." not in name:
        raise ValueError(f"target is {name!r}; give an operator of torch.ops or its name, such as 'aten.linear'")

    def register(new_rule: Rule) -> Rule:
        ENTRIES[name] = RegisteredRule(new_rule, run, inside, allows)
        return new_rule

    return register if rule is None else register(rule)


def register_all(names: str, rule: Rule, run: Run | None = None) -> None:
    """Register a rule for several aten operators; `names` are separated by blanks and lack "aten."."""
    for name in names.split():
        register_rule(f"aten.{name}", rule, run)


def find(call: OpCall) -> RegisteredRule | None:
    """Return the entry of a call's overload, else of its operator, else of the out-of-place operator, or None."""
    packet = call.name.rpartition(".")[0]
    for name in (call.name, packet, packet.removesuffix("_")):
        if name in ENTRIES:
            return ENTRIES[name]
    return None
