"""Attention whose heads are exchanged in groups: bit for bit that of one rank that has the whole sequence."""

from dataclasses import dataclass, replace

import pytest
import torch
from marks import promise
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ascend_parallel import DisagreementError, Settings
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.arithmetic import TP
from ascend_parallel.ops.key_gather import GATHER, HEADS, choose_exchange, lent_pieces, pieces_of, sent_share
from ascend_parallel.overlap.context import attend_pieces, attend_rows, attention_in_turn, run_attention
from ascend_parallel.overlap.projected import ProjectedTensor, Projection


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sequence that `ranks` share, and how its attention is computed.

    heads: of queries, of keys.
    exchange: how keys and values reach the queries.
    """

    ranks: int = 2
    length: int = 96
    batch: int = 1
    heads: tuple[int, int] = (8, 8)
    width: int = 16
    values: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True
    eager: bool = False
    frozen: str = ""
    wrapped: str = ""  # how the call is wrapped
    groups: tuple[int, ...] = (1, 2, 4)
    exchange: str = HEADS
    lends: bool = False  # a rank has one stretch of the sequence, and lends half of its queries


def operands(case, dtype=None):
    """Return q, k, v and the gradient of the output, [S, B, heads, features] of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    query_heads, key_heads = case.heads
    sizes = ((query_heads, case.width), (key_heads, case.width), (key_heads, case.values), (query_heads, case.values))
    drawn = [torch.randn(case.length, case.batch, *size, generator=generator) for size in sizes]
    return [x.to(case.dtype).to(dtype or case.dtype) for x in drawn]


def attend(case):
    """Return the attention that is given to the exchange, of [S, B, heads, features]."""

    def attention(keys, q, k, v):
        if case.lends and keys is not None:
            pieces = lent_pieces(keys.rank, case.ranks, len(q))
            return attend_rows(rows_attention, pieces, q, k, v, causal=case.causal)
        if case.exchange == GATHER and keys is not None:
            return attend_pieces(rows_attention, keys, q, k, v, causal=case.causal)
        return rows_attention(None, q, k, v)

    def rows_attention(rows, q, k, v):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        readers, first = q.shape[1] // k.shape[1], 0 if rows is None else rows.start
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
        if not case.eager:
            how = {"attn_mask": mask} if case.causal and rows is not None else {"is_causal": case.causal}
            return scaled_dot_product_attention(q, k, v, **how, enable_gqa=readers > 1).permute(2, 0, 1, 3)
        k, v = (x.repeat_interleave(readers, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * case.width**-0.5
        if case.causal:
            scores = scores.masked_fill(~mask, float("-inf"))
        return (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v).permute(2, 0, 1, 3)

    return attention


def results(case, attention, parts, d_output):
    leaves = {name: x.clone().requires_grad_(name not in case.frozen) for name, x in zip("qkv", parts, strict=True)}
    if case.wrapped == "checkpoint":
        o = checkpoint(attention, *leaves.values(), use_reentrant=False)
    elif case.wrapped == "saved on the host":
        with torch.autograd.graph.save_on_cpu():
            o = attention(*leaves.values())
    else:
        o = attention(*leaves.values())
    if case.wrapped == "retained":
        o.backward(d_output, retain_graph=True)
        for x in leaves.values():
            x.grad = None
    o.backward(d_output)
    return {"output": o.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}


def own_tokens(case, group):
    """Return the numbers of this rank's tokens: two pieces where keys are gathered, else one."""
    share = case.length // group.size()
    if case.exchange == GATHER and not case.lends:
        return torch.cat([torch.arange(rows.start, rows.stop) for rows in pieces_of(group.rank(), group.size(), share)])
    return torch.arange(share * group.rank(), share * (group.rank() + 1))


def compared(group, case):
    """Return what differs from one rank's bits, the worst error against float64, and how many groups ran."""
    own = own_tokens(case, group)
    *parts, d_output = operands(case)
    plain = replace(case, wrapped="")
    one_rank = results(plain, lambda *x: attend(case)(None, *x), parts, d_output)
    truth = results(plain, lambda *x: attend(case)(None, *x), *split_off(operands(case, torch.float64)))
    operator = "key_gather" if case.exchange == GATHER else "head_exchange"
    different, ran, worst = [], [], 0.0
    for groups in (*case.groups, *(["in turn"] if not case.lends else [])):
        before = COUNTS.as_dict().get(operator, {"chunks": 0})["chunks"]

        def attention(q, k, v, groups=groups):
            how = {"group": group, "exchange": case.exchange}
            if groups == "in turn":
                return attention_in_turn(q, k, v, attend(case), **how)
            how |= {"borrower": case.ranks - 1 - group.rank()} if case.lends else {}
            return run_attention(q, k, v, attend(case), **how, settings=Settings(num_chunks=groups, mode=2))

        found = results(case, attention, [x[own] for x in parts], d_output[own])
        assert found.keys() == one_rank.keys()
        different += [(groups, name) for name, x in found.items() if not torch.equal(x, one_rank[name][own])]
        for name, x in found.items():
            scale = truth[name].abs().max()
            worst = max(worst, float((x.double() - truth[name][own]).abs().max() / scale))
        ran.append(COUNTS.as_dict().get(operator, {"chunks": 0})["chunks"] - before)
    return different, worst, ran


def split_off(every):
    *parts, d_output = every
    return parts, d_output


CASES = [
    Case(),
    Case(heads=(16, 8), batch=2, causal=False),
    Case(heads=(16, 8), dtype=torch.bfloat16),
    Case(ranks=4, length=120, heads=(16, 16), dtype=torch.bfloat16, causal=False),
    Case(ranks=4, heads=(32, 8), groups=(1, 2)),
    Case(ranks=4, heads=(12, 4), batch=3, groups=(1,)),
    Case(ranks=3, length=99, heads=(12, 6), groups=(1, 2)),
    Case(eager=True, heads=(16, 8), batch=2),
    Case(eager=True, causal=False, dtype=torch.bfloat16, values=24),
    Case(frozen="kv", heads=(16, 8)),
    Case(frozen="q"),
    Case(wrapped="checkpoint"),
    Case(wrapped="retained"),
    Case(wrapped="saved on the host", dtype=torch.bfloat16),
]


@promise("context-bits")
@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_of_heads_have_the_bits_of_one_rank(ranks, case):
    for different, worst, ran in ranks(case.ranks).run(compared, case):
        assert different == []
        assert worst < {torch.float32: 2e-5, torch.bfloat16: 3e-2}[case.dtype]
        assert [groups > 0 for groups in ran] == [True] * len(case.groups) + [False]
        passes = {"checkpoint": 3, "retained": 3}.get(case.wrapped, 2)
        assert ran[:-1] == [groups * passes for groups in case.groups]


@pytest.mark.parametrize(
    "case", [Case(ranks=4, heads=(8, 2), groups=(1,)), Case(ranks=2, heads=(6, 3), groups=(1, 3))], ids=str
)
def test_heads_of_keys_that_ranks_cannot_share_go_to_several(ranks, case):
    for different, worst, _ in ranks(case.ranks).run(compared, case):
        assert {name for _, name in different} <= {"k", "v"}  # sums over the ranks that have the head
        assert worst < 2e-5


GATHERS = [
    Case(heads=(8, 1), groups=(1,)),
    Case(heads=(8, 2), length=1280, batch=2, groups=(1, 2)),
    Case(heads=(8, 2), dtype=torch.bfloat16, length=1280, groups=(2,)),
    Case(ranks=4, heads=(6, 3), length=120, batch=2, groups=(1, 3)),
    Case(ranks=3, heads=(8, 4), length=1152, groups=(4,)),
    Case(heads=(8, 4), causal=False, values=24, eager=True, groups=(2,)),
    Case(heads=(8, 4), wrapped="checkpoint", groups=(2,)),
    Case(heads=(8, 4), wrapped="retained", groups=(2,)),
    Case(heads=(8, 4), wrapped="saved on the host", frozen="v", groups=(2,)),
    Case(heads=(8, 4), frozen="kv", groups=(2,)),
    Case(heads=(8, 4), frozen="q", groups=(4,)),
]


@promise("context-gather")
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", [replace(case, exchange=GATHER) for case in GATHERS], ids=str)
def test_gathered_keys_have_the_rows_of_one_rank(ranks, case):
    """Outputs and gradients of queries have its bits; gradients of keys and values are sums over the ranks."""
    for different, worst, ran in ranks(case.ranks).run(compared, case):
        assert {name for _, name in different} <= ({"k", "v"} if not case.eager else {"output", "q", "k", "v"})
        assert worst < {torch.float32: 2e-5, torch.bfloat16: 3e-2}[case.dtype]
        passes = 2 if case.frozen != "kv" else 1
        passes = {"checkpoint": 3, "retained": 3}.get(case.wrapped, passes)
        assert ran == [*(groups * passes for groups in case.groups), 0]


LENDING = [
    Case(heads=(8, 2), length=1280, batch=2, groups=(1, 2)),
    Case(ranks=4, heads=(6, 3), length=124, groups=(1, 3)),  # odd shares
    Case(ranks=3, heads=(8, 4), dtype=torch.bfloat16, length=96, groups=(4,)),
    Case(heads=(8, 4), wrapped="checkpoint", groups=(2,)),
    Case(heads=(8, 4), frozen="kv", groups=(2,)),
    Case(heads=(8, 4), frozen="q", groups=(4,)),
]


@promise("planned-context")
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [replace(case, exchange=GATHER, lends=True) for case in LENDING], ids=str)
def test_lent_queries_have_the_rows_of_one_rank(ranks, case):
    """Ranks that have one stretch of the sequence balance causal rows by lending half of their queries."""
    for different, worst, ran in ranks(case.ranks).run(compared, case):
        assert {name for _, name in different} <= {"k", "v"}
        assert worst < {torch.float32: 2e-5, torch.bfloat16: 3e-2}[case.dtype]
        assert ran == [groups * (3 if case.wrapped else 2) for groups in case.groups]


FEATURES = 40


def projected(group, case):
    """Return what differs from an exchange in one group and a linear layer behind it, and collectives by groups."""
    own = own_tokens(case, group)
    *parts, _ = operands(case)
    generator = torch.Generator().manual_seed(5)
    weight, bias, d_y = (
        torch.randn(shape, generator=generator).to(case.dtype)
        for shape in ((FEATURES, case.heads[0] * case.values), (FEATURES,), (case.batch, case.length, FEATURES))
    )

    def step(groups, projects):
        leaves = {
            name: x[own].clone().requires_grad_(name not in case.frozen) for name, x in zip("qkv", parts, strict=True)
        }
        leaves |= {"weight": weight.clone().requires_grad_("w" not in case.frozen)}
        leaves |= {"bias": bias.clone().requires_grad_()} if case.eager else {}

        def layer(q, k, v, weight, bias=None):
            projection = Projection(weight=weight, bias=bias) if projects else None
            how = {"group": group, "exchange": case.exchange, "settings": Settings(num_chunks=groups, mode=2)}
            how |= {"borrower": case.ranks - 1 - group.rank()} if case.lends else {}
            o = run_attention(q, k, v, attend(case), projection=projection, **how).transpose(0, 1).flatten(2)
            y = linear(o.contiguous(), weight, bias)
            assert isinstance(o, ProjectedTensor) == projects and (not projects or o.projected is None)
            return y

        COUNTS.clear()
        how = {"use_reentrant": False}
        y = checkpoint(layer, *leaves.values(), **how) if case.wrapped else layer(*leaves.values())
        y.backward(d_y[:, own])
        (count,) = COUNTS.as_dict().values()
        found = {"y": y.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}
        return found, count["collectives"]

    plain, _ = step(1, projects=False)
    different, ran = [], []
    for groups in case.groups:
        found, count = step(groups, projects=True)
        assert found.keys() == plain.keys()
        different += [(groups, name) for name, x in found.items() if not torch.equal(x, plain[name])]
        ran.append(count)
    return different, ran


PROJECTED = [
    Case(length=128),
    Case(length=128, heads=(16, 8), batch=2, eager=True, values=24),  # with a bias
    Case(ranks=4, length=256, heads=(16, 16), dtype=torch.bfloat16, causal=False),
    Case(ranks=3, length=99, heads=(12, 6), batch=2, groups=(1, 2), wrapped="checkpoint"),
    Case(length=128, frozen="qkv"),
    Case(length=128, frozen="w", dtype=torch.bfloat16),
    Case(length=128, heads=(8, 4), exchange=GATHER, batch=2),
    Case(length=128, heads=(8, 4), exchange=GATHER, frozen="kv", groups=(2,)),
    Case(length=128, heads=(8, 2), exchange=GATHER, lends=True, batch=2, groups=(1, 2)),
]


@promise("context-projection")
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", PROJECTED, ids=str)
def test_a_projection_under_the_exchange_has_the_bits_of_one_behind_it(ranks, case):
    """Output, and gradients of queries, keys, values, weight and bias."""
    of_ranks = ranks(case.ranks).run(projected, case)
    for different, ran in of_ranks:
        assert different == []
        assert ran == of_ranks[0][1]
    if case.exchange == HEADS and not case.frozen and not case.wrapped:
        assert of_ranks[0][1] == [8 * groups + groups - 1 for groups in case.groups]


def read_otherwise(group):
    """Return by name whether what a program does with an output that has a product is right."""
    q, k, v = (torch.randn(32, 2, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    weight, other = (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))
    how, found = {"group": group, "settings": Settings(num_chunks=2, mode=2)}, {}
    plain = run_attention(q, k, v, attend(Case()), **how).transpose(0, 1).flatten(2)

    def output(weight=weight):
        projection = Projection(weight=weight, bias=None)
        o = run_attention(q, k, v, attend(Case()), projection=projection, **how).transpose(0, 1).flatten(2)
        assert isinstance(o, ProjectedTensor)
        return o

    def right(name, y, expected):
        found[name] = type(y) is torch.Tensor and torch.equal(y, expected)

    right("another weight", linear(output(), other), linear(plain, other))
    right("a bias", linear(output(), weight, other[:, 0]), linear(plain, weight, other[:, 0]))
    right("a named weight", linear(output(), weight=weight), linear(plain, weight))
    right("some rows", linear(output()[:, :8], weight), linear(plain[:, :8], weight))
    right("rows in other places", linear(output().flip(1), weight), linear(plain.flip(1), weight))
    right("another function", output() * 2, plain * 2)
    o = output()
    right("the product", linear(o, weight), linear(plain, weight))
    right("the product again", linear(o, weight), linear(plain, weight))
    o = output()
    o.mul_(2)
    right("changed rows", linear(o, weight), linear(plain * 2, weight))
    changed = weight.clone()
    o = output(changed)
    changed.mul_(2)
    right("a changed weight", linear(o, changed), linear(plain, changed))
    o = output()
    with torch.autocast("cpu", torch.bfloat16):
        right("autocast", linear(o, weight), linear(plain, weight))
    return found


@promise("context-projection")
def test_who_reads_the_output_otherwise_gets_the_output(ranks):
    for found in ranks(2).run(read_otherwise):
        assert len(found) == 11 and [name for name, right in found.items() if not right] == []


def other_backs(group):
    q, k, v = (torch.randn(18, 1, 4, 8) for _ in range(3))
    try:
        settings = Settings(num_chunks=2, mode=2)
        run_attention(q, k, v, attend(Case()), group=group, settings=settings, by_rows=group.rank() == 0)
    except DisagreementError as error:
        return str(error)
    return ""


def test_ranks_whose_heads_come_back_otherwise_are_named(ranks):
    for error in ranks(2).run(other_backs):
        assert error.count("results in rows") == 1 and "rank 0: head_exchange of q, k, v" in error


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 8), (3, 5), (4, 6), (5, 2)])
def test_lent_queries_give_all_ranks_the_same_work(ranks, tokens):
    places = [lent_pieces(place, ranks, tokens) for place in range(ranks)]
    rows = [[row for piece in pieces for row in range(piece.start, piece.stop)] for pieces in places]
    assert sorted(row for of_rank in rows for row in of_rank) == list(range(ranks * tokens))
    work = [sum(of_rank) for of_rank in rows]
    assert max(work) - min(work) <= (tokens % 2) * ranks * tokens  # an odd share is lent by one row less or more


def repeated(group, case):
    """Return gradients of keys in each number of groups, twice."""
    own, found = own_tokens(case, group), []
    *parts, d_output = operands(case)
    for groups in (*case.groups, *case.groups):

        def attention(q, k, v, groups=groups):
            settings = Settings(num_chunks=groups, mode=2)
            return run_attention(q, k, v, attend(case), group=group, exchange=GATHER, settings=settings)

        found.append(results(case, attention, [x[own] for x in parts], d_output[own]))
    return found


def test_sums_of_gathered_keys_have_the_same_bits_in_any_groups(ranks):
    case = Case(ranks=4, heads=(8, 4), length=128, dtype=torch.bfloat16, exchange=GATHER)
    for first, *others in ranks(4).run(repeated, case):
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_heads_and_bytes_choose_the_exchange():
    assert choose_exchange(32, 8, 4) == ("heads", "32 heads of queries and 8 of keys on 4 ranks: each gets as many")
    assert choose_exchange(8, 2, 4)[0] == "gather"
    assert "a gather sends 0.67 of what heads would" in choose_exchange(8, 2, 4)[1]
    assert choose_exchange(16, 4, 8)[0] == "heads"  # a gather would send a third more
    assert choose_exchange(7, 7, 2) == (
        "gather",
        "7 heads of queries and 7 of keys on 2 ranks: heads cannot be exchanged",
    )
    assert choose_exchange(32, 8, 4, "gather")[0] == "gather" and choose_exchange(8, 2, 4, "heads")[0] == "heads"
    assert sent_share(32, 8, 4) == 32 / 40
    with pytest.raises(ValueError, match="exchange='ring' is not allowed: give one of heads, gather, or None"):
        choose_exchange(8, 8, 2, "ring")
    with pytest.raises(ValueError, match="7 heads of queries and 7 of keys cannot be shared by the 2 ranks"):
        choose_exchange(7, 7, 2, "heads")


def other_gradients(group, evaluated_first):
    """Return the error of ranks that need other gradients, at their first forward or at their backward."""
    shape = (14 if evaluated_first else 12, 1, 4, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    how = {"group": group, "settings": Settings(num_chunks=2, mode=2)}
    if evaluated_first:  # so that the shapes are known
        with torch.no_grad():
            run_attention(q, k, v, attend(Case()), **how)
    try:
        q.requires_grad_(group.rank() == 0)
        run_attention(q, k.requires_grad_(), v, attend(Case()), **how).sum().backward()
    except DisagreementError as error:
        return str(error)
    return ""


def test_ranks_that_need_other_gradients_are_named(ranks):
    for error in ranks(2).run(other_gradients, False):
        assert "rank 0: head_exchange of q, k, v [12, 1, 4, 8]" in error
        assert "; gradients of q, k; rank 1: " in error and error.count("gradients of k") == 1
    for error in ranks(2).run(other_gradients, True):
        assert "compute other gradients (rank 0: head_exchange: gradients of q, k; rank 1: head_exchange" in error


def refused(group, shape, heads, settings=None):
    q, k = torch.zeros(shape, 1, heads[0], 8), torch.zeros(shape, 1, heads[1], 8)
    try:
        run_attention(q, k, k, attend(Case()), group=group, settings=settings or Settings(num_chunks=2, mode=2))
    except (ValueError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_lengths(group):
    return refused(group, 10 + group.rank(), (4, 4))


def test_what_cannot_run_is_refused(ranks):
    for error in ranks(2).run(refused_lengths):
        assert error.startswith("DisagreementError: head_exchange: ranks of ")
        assert "rank 0: head_exchange of q, k, v [10, 1, 4, 8]" in error
        assert "rank 1: head_exchange of q, k, v [11, 1, 4, 8]" in error
    for error in ranks(2).run(refused, 10, (3, 3)):
        assert "3 heads of queries and 3 of keys cannot be shared by the 2 ranks" in error
    for error in ranks(2).run(refused, 10, (4, 3)):
        assert "4 heads of queries, no multiple of 3 heads of keys" in error
    for error in ranks(2).run(refused, 10, (4, 4), Settings(deterministic=TP)):
        assert error.startswith("DegreeError: COC_DETERMINISTIC=tp: context parallelism has no tree")
