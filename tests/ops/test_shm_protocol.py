"""The protocol of ops/csrc/communicator.h as a small model, with every interleaving of the ranks.

A rank is a list of actions; a state is the position of each rank in its list. Each counter and stage is written by a
single rank, so the state determines their values. Two properties must hold in every reachable state: a rank reads
only cells that are complete and not yet overwritten; and unless all ranks are done, some rank can act. A rank that
finds a different call beside a counter reads all ranks' calls and then raises. The planted faults show that the model
finds violations of both properties.
"""

import itertools

import pytest

# One step of each kind that communicator.cpp has; the operators are made of them.
DIRECT, PARTS, SCATTER, GATHER = "all_reduce, direct", "all_reduce, in parts", "reduce_scatter", "all_gather"
KINDS = (DIRECT, PARTS, SCATTER, GATHER)
GROW = "for a larger segment"  # a step without rows, of ranks that all have a call too large for theirs
ACTING = (DIRECT, PARTS, GATHER, GROW)


def program(rank, ranks, calls, halves=2, call_halves=2, waits_for=None):
    """The actions of `rank` for steps 1, 2, 3 ...; `calls` has the kinds of all ranks' steps, rank by rank.

    Actions: write a cell (begun), publish (written, and the counter says so), wait for a counter, read cells
    (begun), done reading. A cell is a part of a rank's stage: (rank, half, rows or sum); or what call it came with.
    It is over with the first step in which a rank that it waits for has another call.
    """
    others = [(rank + next_one) % ranks for next_one in range(1, ranks)]
    others = others[:waits_for]
    actions = []
    for step, kind in enumerate(calls[rank], 1):

        def cells(what, owners, step=step):
            half = step % (call_halves if what == "call" else halves)
            return tuple(((owner, half, what), step) for owner in owners)

        def wait_for(owner, step=step, cells=cells):
            return [("wait", ("ready", owner), step), ("read", cells("call", [owner]))]

        actions += [("write", *cells("rows", [rank])[0])] if kind != GROW else []
        actions += [("write", *cells("call", [rank])[0]), ("publish", ("ready", rank), step)]
        for owner in others:
            actions += wait_for(owner)
            if calls[owner][step - 1] != kind:
                return actions + [action for peer in range(ranks) for action in wait_for(peer)] + [("done",)]
            if kind == GATHER:  # reads each rank's rows as they come
                actions += [("read", cells("rows", [owner])), ("done",)]
        if kind in (GATHER, GROW):
            actions += [("done",)]
            continue
        actions += [("read", cells("rows", [*others, rank])), ("done",)]
        if kind == PARTS:
            actions[-1:] = [("write", *cells("sum", [rank])[0]), ("publish", ("reduced", rank), step), ("done",)]
            for owner in others:
                actions += [("wait", ("reduced", owner), step), ("read", cells("sum", [owner])), ("done",)]
    return actions


class Rank:
    """The values that a rank's position determines: its counters, its cells, and the cells that it is reading."""

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
    """Try every interleaving; return the number of states, or raise on the first wrong state."""
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
    return [program(rank, ranks, [kinds] * ranks, **faults) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 3)])
def test_every_interleaving_of_every_mixture_is_right(ranks, calls):
    found = [states(programs(ranks, kinds)) for kinds in itertools.product(KINDS, repeat=calls)]
    assert len(found) == len(KINDS) ** calls
    assert min(found) > 10 * calls  # ranks run ahead of each other


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_for_a_larger_segment_may_come_between_any_others(ranks):
    for kinds in itertools.product(ACTING, repeat=2):
        states(programs(ranks, (kinds[0], GROW, kinds[1])))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_come_with_different_calls_all_see_what_each_came_with(ranks):
    """Different calls in the first or a later step; every mixture of kinds (a scatter acts as a direct all-reduce)."""
    for before, last in itertools.product([(), (PARTS,), (GATHER,)], itertools.product(ACTING, repeat=ranks)):
        if len(set(last)) == 1:
            continue
        found = [program(rank, ranks, [(*before, own, own) for own in last]) for rank in range(ranks)]
        states(found)  # every rank ends after it has read all ranks' calls
        step = len(before) + 1
        for actions in found:
            seen = [cells[0] for action, *rest in actions[-2 * ranks - 1 :] if action == "read" for cells in rest]
            assert seen == [((rank, step % 2, "call"), step) for rank in range(ranks)]


@pytest.mark.parametrize("kinds", sorted({*itertools.product(ACTING, repeat=2)} - {(PARTS, PARTS)}), ids=" then ".join)
def test_one_place_for_a_call_instead_of_two_is_found(kinds):
    """Except if every step has two waits, which keep two ranks close enough together."""
    with pytest.raises(AssertionError, match=r"reads \(\d, 0, 'call'\)"):
        states(programs(2, (*kinds, *kinds), call_halves=1))


def test_a_rank_that_goes_for_a_larger_segment_alone_is_found():
    """Without a separate step, ranks with a different call would wait for the growing rank."""
    with pytest.raises(AssertionError, match="deadlock"):
        states([program(0, 2, [(DIRECT, DIRECT)] * 2), program(1, 2, [(DIRECT,)] * 2)])


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=2)], ids=" then ".join)
def test_one_half_instead_of_two_is_found(kinds):
    with pytest.raises(AssertionError, match=r"reads .*(rows|sum)"):
        states(programs(2, (*kinds, *kinds), halves=1))


@pytest.mark.parametrize(("ranks", "kind"), [(3, DIRECT), (3, SCATTER), (3, GATHER), (4, PARTS)])
def test_not_waiting_for_everyone_is_found(ranks, kind):
    """Each rank waits for the next one only, and reads of that one only, as a ring would.

    With two waits a step, each hears of two others in the end, so that it takes four ranks to go wrong.
    """
    with pytest.raises(AssertionError, match="reads"):
        states(programs(ranks, (kind,) * 4, waits_for=1))


def test_a_wait_for_the_very_number_is_found():
    """With == instead of >= a reader would miss a counter that has advanced further."""
    with pytest.raises(AssertionError, match="deadlock"):
        states(programs(2, (GATHER, DIRECT, GATHER, DIRECT)), reached=lambda counter, step: counter == step)
