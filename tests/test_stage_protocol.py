"""The protocol of ops/csrc/communicator.h as a small model, tried in every order in which ranks can act.

A rank is a list of actions; a state is how far each rank has come. What a counter says and what a stage
holds follows from that, as each is written by one rank. In every state that can be reached, what a
rank reads has to be what was written for that step, complete and not written again; and as long as not all
ranks are done, one of them can go on. The planted faults show that the model finds both kinds of error.
"""

import itertools

import pytest

# One step of each kind that communicator.cpp has; the operators are made of them.
DIRECT, PARTS, SCATTER, GATHER = "all_reduce, direct", "all_reduce, in parts", "reduce_scatter", "all_gather"
KINDS = (DIRECT, PARTS, SCATTER, GATHER)


def program(rank, ranks, kinds, halves=2, waits_for=None):
    """The actions of `rank` for steps 1, 2, 3 ... of the given kinds.

    Actions: write a cell (begun), publish (written, and the counter says so), wait for a counter, read cells
    (begun), done reading. A cell is a part of a rank's stage: (rank, half, rows or sum).
    """
    others = [(rank + next_one) % ranks for next_one in range(1, ranks)]
    others = others[:waits_for]
    actions = []
    for step, kind in enumerate(kinds, 1):
        half = step % halves

        def cells(what, owners, half=half, step=step):
            return tuple(((owner, half, what), step) for owner in owners)

        actions += [("write", (rank, half, "rows"), step), ("publish", ("ready", rank), step)]
        if kind == GATHER:  # reads each rank's rows as they come
            for owner in others:
                actions += [("wait", ("ready", owner), step), ("read", cells("rows", [owner])), ("done",)]
            continue
        actions += [("wait", ("ready", owner), step) for owner in others]
        actions += [("read", cells("rows", [*others, rank])), ("done",)]
        if kind == PARTS:
            actions[-1:] = [("write", (rank, half, "sum"), step), ("publish", ("reduced", rank), step), ("done",)]
            for owner in others:
                actions += [("wait", ("reduced", owner), step), ("read", cells("sum", [owner])), ("done",)]
    return actions


class Rank:
    """What follows from how far a rank has come: its counters, its cells, and what it is reading."""

    def __init__(self, actions):
        self.actions = actions
        self.counters, self.cells, self.reading = [{}], [{}], [()]
        for action, *rest in actions:
            counters, cells, reading = dict(self.counters[-1]), dict(self.cells[-1]), self.reading[-1]
            if action == "write":
                cells[rest[0]] = ("being written for", rest[1])
            elif action == "publish":
                counters[rest[0]] = rest[1]
                cells |= {cell: ("holds", step) for cell, (_, step) in cells.items() if step == rest[1]}
            elif action == "read":
                reading = rest[0]
            elif action == "done":
                reading = ()
            self.counters.append(counters)
            self.cells.append(cells)
            self.reading.append(reading)


def states(programs, reached=lambda counter, step: counter >= step):
    """Try every interleaving; return how many states there are, or raise on the first wrong one."""
    ranks = [Rank(actions) for actions in programs]
    end = tuple(len(actions) for actions in programs)
    seen, waiting = {(0,) * len(ranks)}, [(0,) * len(ranks)]
    while waiting:
        state = waiting.pop()
        check_reads(ranks, state)
        following = [tuple(n + (i == rank) for i, n in enumerate(state)) for rank in movable(ranks, state, reached)]
        assert following or state == end, f"deadlock: {where(ranks, state)}"
        for new in following:
            if new not in seen:
                seen.add(new)
                waiting.append(new)
    return len(seen)


def movable(ranks, state, reached):
    """The ranks whose next action can be done."""
    for number, (rank, done) in enumerate(zip(ranks, state, strict=True)):
        if done == len(rank.actions):
            continue
        action, *rest = rank.actions[done]
        if action == "wait":
            (_, owner), step = counter, _ = rest
            if not reached(ranks[owner].counters[state[owner]].get(counter, 0), step):
                continue
        yield number


def check_reads(ranks, state):
    for reader, (rank, done) in enumerate(zip(ranks, state, strict=True)):
        for cell, step in rank.reading[done]:
            found = ranks[cell[0]].cells[state[cell[0]]].get(cell, ("holds", 0))
            assert found == ("holds", step), f"rank {reader} reads {cell} of step {step}, which is {found}"


def where(ranks, state):
    return [rank.actions[done] if done < len(rank.actions) else "done" for rank, done in zip(ranks, state, strict=True)]


def programs(ranks, kinds, **faults):
    return [program(rank, ranks, kinds, **faults) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 3)])
def test_every_interleaving_of_every_mixture_is_right(ranks, calls):
    found = [states(programs(ranks, kinds)) for kinds in itertools.product(KINDS, repeat=calls)]
    assert len(found) == len(KINDS) ** calls
    assert min(found) > 10 * calls  # ranks do run ahead of one another


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=2)], ids=" then ".join)
def test_one_half_instead_of_two_is_found(kinds):
    with pytest.raises(AssertionError, match="reads"):
        states(programs(2, (*kinds, *kinds), halves=1))


@pytest.mark.parametrize(("ranks", "kind"), [(3, DIRECT), (3, SCATTER), (3, GATHER), (4, PARTS)])
def test_not_waiting_for_everyone_is_found(ranks, kind):
    """Each rank waits for the next one only, and reads of that one only, as a ring would.

    With two waits a step, each hears of two others in the end, so that it takes four ranks to go wrong.
    """
    with pytest.raises(AssertionError, match="reads"):
        states(programs(ranks, (kind,) * 4, waits_for=1))


def test_a_wait_for_the_very_number_is_found():
    """A counter that has gone on before the reader looked would be missed by == instead of >=."""
    with pytest.raises(AssertionError, match="deadlock"):
        states(programs(2, (GATHER, DIRECT, GATHER, DIRECT)), reached=lambda counter, step: counter == step)
