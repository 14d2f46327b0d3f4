"""Tensors whose rows are still on their way: values, bits, order of work, and what reads memory.

`sent` makes a tensor whose rows are NaN until they are asked for, and notes which chunks were.
"""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from marks import promise

from ascend_parallel.ops import lazy_rows
from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.pending import IDLE_WORK, FinishingWork, Pending
from ascend_parallel.ops.unfinished import (
    UnfinishedTensor,
    at_end_of_backward,
    finished,
    is_unfinished,
    plain_tensor,
    postponed,
)
from ascend_parallel.ops.unfinished_modules import by_rows

pytestmark = promise("unfinished-rows")

SIZES = {1: (16, 32, 16), 2: (8, 16, 8), 4: (4, 8, 4)}


def sent(value, blocks=1, lead=1):
    """Return an unfinished copy of value [64, N], and the list of the chunks that were asked for."""
    memory, asked = torch.full_like(value, torch.nan), []
    stops = [0, *torch.tensor(SIZES[blocks]).cumsum(0).tolist()]
    rows = [each.view(blocks, -1, *value.shape[1:]) for each in (memory, value)]

    def fill(index):
        asked.append(index)
        mine = slice(stops[index], stops[index + 1])
        rows[0][:, mine] = rows[1][:, mine]

    return UnfinishedTensor(memory, Rows(LazyRows(SIZES[blocks], fill), blocks, lead)), asked


class Sent(torch.autograd.Function):
    """Stands for a layer's collective; the result has the shape [16, 4, N]."""

    @staticmethod
    def forward(ctx, value, blocks):
        y = sent(value.clone(), blocks)[0] if blocks else value.clone()
        return torch.ops.aten._unsafe_view(y, [16, 4, value.shape[1]])

    @staticmethod
    def backward(ctx, dy):
        return dy.reshape(-1, dy.shape[-1]), None


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(x):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


CHAINS = {
    "norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w[0], w[1]),
    "rms norm in operators": lambda x, w: rms(x) * w[0],
    "rms norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w[0]),
    "residual": lambda x, w: (x + w[1]) + drawn(16, 4, 64, seed=3),
    "linear": lambda x, w: F.linear(x, w, w[:, 0]),
    "MLP": lambda x, w: F.gelu(x @ w + w[0]) @ w.t(),
    "gated": lambda x, w: (lambda a, b: F.silu(a) * b)(*(x @ w).chunk(2, -1)),
    "heads": lambda x, w: (x @ w).view(16, 4, 8, 8).transpose(1, 2) * 2,
    "in place": lambda x, w: F.relu_((x * 2).add_(w[0])),
    "casts": lambda x, w: (x.double() * 2).float(),
    "another order": lambda x, w: x.flip(0) + x,
    "along rows": lambda x, w: x.softmax(0),
    "batch": lambda x, w: x.transpose(0, 1) * 3,
    "sequence first": lambda x, w: F.layer_norm(x.view(4, 16, -1).transpose(0, 1).contiguous(), x.shape[-1:], w[0]) @ w,
    "shares of it": lambda x, w: ((x + w[1]).view(2, 32, -1).transpose(0, 1).contiguous()[16:] * 2).view(32, -1) @ w,
    "rows": lambda x, w: torch.cat([x[:5] * 2, x[5:]]),
    "one row": lambda x, w: x[3] + x[-1],
    "columns": lambda x, w: x[..., ::2] * 2,
    "merged": lambda x, w: x.reshape(64, -1).view(16, -1).cos(),
    "masked": lambda x, w: torch.where(x > 0, x, w[0]).clamp(max=1),
    "random": lambda x, w: F.dropout(x, 0.5, True),
    "sum": lambda x, w: x.sum((0, 2)),
    "mean of all": lambda x, w: x.mean(),
    "complex": lambda x, w: torch.view_as_complex(x.reshape(16, 4, 32, 2)).abs(),
    "loss": lambda x, w: F.cross_entropy(x.view(64, -1), torch.arange(64)),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        *(x.view(16, 4, 4, 16).permute(1, 2, 0, 3) for _ in "qkv")
    ),
}


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("chain", CHAINS)
def test_functions_have_the_bits_and_gradients_of_finished_tensors(chain, blocks):
    found = []
    for unfinished in (0, blocks):
        torch.manual_seed(7)
        value, w = drawn(64, 64, seed=1).requires_grad_(), drawn(64, 64, seed=2).requires_grad_()
        y = CHAINS[chain](Sent.apply(value, unfinished), w)
        y.square().sum().backward()
        found.append([finished(y.detach()), value.grad, w.grad])
    for plain, mine in zip(*found, strict=True):
        assert (plain is None and mine is None) or torch.equal(plain, mine)


def test_a_chain_runs_chunk_by_chunk_in_the_order_of_its_reads():
    x, asked = sent(drawn(64, 64))
    h = F.gelu(x @ drawn(64, 64, seed=1)) + 1
    assert asked == []
    first = h[:10] * 1
    assert asked == [] and isinstance(first, UnfinishedTensor)
    finished(first)
    assert asked == [0]
    finished(h[20:40])
    assert asked == [0, 1]
    finished(h)
    assert asked == [0, 1, 2]


def test_rows_of_several_sequences_come_together_and_stay_unfinished_sequence_first():
    x, asked = sent(drawn(64, 64), 4)
    h = F.gelu(F.layer_norm(x.view(4, 16, 64).transpose(0, 1).contiguous(), (64,)) @ drawn(64, 64, seed=1))
    finished(h[:4])
    assert asked == [0]
    finished(h[4:5])
    assert asked == [0, 1]


def test_rows_of_every_rank_come_together():
    x, asked = sent(drawn(64, 8), blocks=2)
    by_rank = x.view(2, 32, 8)
    pieces = [torch.split_with_sizes(block, SIZES[2]) for block in by_rank.unbind()]
    finished(pieces[1][0])
    assert asked == [0]
    assert torch.equal(finished(pieces[0][2]), drawn(64, 8)[24:32])
    assert asked == [0, 1, 2]


def saved(x):
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    return torch.load(stream)


READERS = {
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: torch.from_numpy(__import__("numpy").asarray(x)),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: torch.tensor([[value.item() for value in row] for row in x]),
    "copy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
    "dlpack": torch.from_dlpack,
    "storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (64, 8), (8, 1)),
    "data": lambda x: x.data * 1,
    "detach": lambda x: x.detach().clone(),
    "out": lambda x: torch.add(x, 0, out=torch.empty(64, 8)),
    "compiled": torch.compile(lambda x: x * 1, backend="eager"),
    "jit": lambda x: torch.jit.trace(lambda y: y * 1, torch.ones(2, 8))(x),
    "vmap": lambda x: torch.vmap(lambda row: row * 1)(x),
    "plain": plain_tensor,
    "foreach": lambda x: torch._foreach_mul([x], 1.0)[0],
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_waits(reader):
    x, _ = sent(drawn(64, 8))
    assert torch.equal(finished(READERS[reader](x)), drawn(64, 8))


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "activation"])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_what_requires_a_gradient_gets_what_a_plain_tensor_gives(reader, leaf):
    def read(unfinished):
        if leaf:
            x = (sent(drawn(64, 8))[0] if unfinished else drawn(64, 8)).requires_grad_()
        else:
            x = Sent.apply(drawn(64, 8).requires_grad_(), int(unfinished)).view(64, 8)
        try:
            result = READERS[reader](x)
        except (RuntimeError, BufferError) as error:  # a plain activation has no array, no capsule and no copy
            return type(error), str(error)
        return result.requires_grad, result.is_leaf, finished(result.detach())

    plain, mine = read(unfinished=False), read(unfinished=True)
    assert plain[:2] == mine[:2]
    assert len(plain) == 2 or torch.equal(plain[2], mine[2])


def test_the_plain_tensor_of_an_activation_is_in_its_graph():
    value = drawn(64, 8).requires_grad_()
    with torch.no_grad():
        x = Sent.apply(value.detach(), 1)
    assert not plain_tensor(x).requires_grad
    x = Sent.apply(value, 1)
    plain = plain_tensor(x)
    assert not isinstance(plain, UnfinishedTensor)
    plain.square().sum().backward()
    assert torch.equal(value.grad, 2 * value.detach())


def test_a_pointer_is_that_of_finished_rows_or_an_error():
    x, asked = sent(drawn(64, 8))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.Tensor.data_ptr(x)
    assert asked == []
    assert x.data_ptr() == finished(x).data_ptr()
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("by_view", [False, True])
def test_a_change_in_place_comes_after_earlier_readers(by_view, blocks):
    x, asked = sent(drawn(64, 8), blocks)
    before = x * 2
    changed = (x.view(16, 4, 8) if by_view else x).add_(1)
    assert asked == [0, 1, 2]  # rows with another reader are finished before the change
    after = x + 0
    assert torch.equal(finished(before), drawn(64, 8) * 2)
    assert torch.equal(finished(after), drawn(64, 8) + 1)
    assert torch.equal(finished(changed).view(64, 8), drawn(64, 8) + 1)


def test_a_change_by_a_function_that_is_not_known_comes_after_earlier_readers():
    x, _ = sent(drawn(64, 8))
    before = x * 2
    x.copy_(torch.zeros(64, 8)).cumsum_(0)
    assert torch.equal(finished(before), drawn(64, 8) * 2)
    assert torch.equal(finished(x), torch.zeros(64, 8))


@pytest.mark.parametrize(
    "change", [lambda residual: residual.mul_(2), lambda residual: residual.untyped_storage().resize_(0)]
)
def test_another_operand_that_changes_before_the_rows_come_is_an_error(change):
    x, _ = sent(drawn(64, 8))
    residual = drawn(64, 8, seed=1)
    y = x + residual
    change(residual)
    with pytest.raises(RuntimeError, match="aten::add of a region reads a tensor of shape \\[64, 8\\]"):
        y.sum()


def test_an_operand_that_was_finished_and_changes_before_the_rows_come_is_an_error():
    x, _ = sent(drawn(64, 8))
    residual, _ = sent(drawn(64, 8, seed=1))
    finished(residual)
    y = x + residual
    residual.mul_(2)
    with pytest.raises(RuntimeError, match="aten::add of a region reads a tensor of shape \\[64, 8\\]"):
        y.sum()


PARTS = {
    "some rows": lambda x: x[:5].mul_(3),
    "rows that were asked for": lambda x: (x[:5].sum(), x[:5].mul_(3)),
    "a row": lambda x: x[3].zero_(),
    "columns": lambda x: x[:, :2].mul_(3),
    "an index": lambda x: x.__setitem__(slice(2, 9), 7.0),
    "a mask": lambda x: x.masked_fill_(x > 0, 0.5),
    "another order": lambda x: x.t().mul_(3),
    "the array": lambda x: x.detach().numpy().fill(2),
    "the data": lambda x: x.data.mul_(3),
    "a chunk": lambda x: x.view(2, 32, 8).unbind()[1].split(8)[0].add_(1),
}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_change_of_some_rows_is_seen_by_later_readers_alone(part, blocks):
    x, _ = sent(drawn(64, 8), blocks)
    plain, before = drawn(64, 8), x * 2
    PARTS[part](x)
    PARTS[part](plain)
    assert torch.equal(finished(before), drawn(64, 8) * 2)
    assert torch.equal(finished(x + 1), plain + 1)


def arriving(value, blocks=1, beside=lambda: None):
    """Return unfinished rows that a collective has written: a second wait for a chunk changes nothing.

    beside: what runs in a wait.
    """
    return UnfinishedTensor(value.clone(), Rows(LazyRows(SIZES[blocks], lambda _: beside()), blocks, 1))


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_change_that_fails_is_not_made_again_with_the_next_read(blocks):
    first, second = drawn(64, 8, seed=1), drawn(64, 8, seed=2)
    kept, size = second.clone(), second.untyped_storage().nbytes()
    for made in (lambda x: x, lambda x: x * 2):
        x = made(arriving(drawn(64, 8), blocks))
        x.add_(first).mul_(second)
        second.untyped_storage().resize_(0)  # as FSDP frees a parameter, until it is needed again
        for _ in range(2):
            with pytest.raises(RuntimeError, match="aten::mul_ of a region reads a tensor of shape \\[64, 8\\]"):
                finished(x)
        second.untyped_storage().resize_(size)
        second.data.copy_(kept)
        assert torch.equal(finished(x), (made(drawn(64, 8)) + first) * kept)


@pytest.mark.parametrize("made", [lambda x: x, lambda x: x * 2, lambda x: by_rows(F.silu, F.silu, x)])
def test_a_change_is_made_once_where_work_beside_a_wait_reads_the_same_rows(made):
    idle = []
    x = made(arriving(drawn(64, 8), beside=lambda: idle and idle.pop()()))
    y = x.add_(1)
    idle.append(lambda: finished(x))
    assert torch.equal(finished(y * 1), made(drawn(64, 8)) + 1) and not idle


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("shape", [(64,), (16, 4), (64, 1)])
def test_an_operand_of_one_element_promotes_rows_as_it_promotes_the_whole_tensor(shape, dims):
    """torch promotes a tensor without dimensions as a number, and one with a dimension as a tensor."""
    value, operand = drawn(64, seed=5).bfloat16(), torch.full((1,) * min(dims, len(shape)), 1.001)
    for use in (torch.mul, lambda a, b: b - a, lambda a, b: torch.where(a > 0, a, b), lambda a, b: a.mul_(b)):
        mine = use(sent(value)[0].view(shape), operand)
        plain = use(value.clone().view(shape), operand)
        assert is_unfinished(mine) and mine.dtype == plain.dtype
        assert torch.equal(finished(mine), plain)


def test_operators_that_read_the_same_rows_cut_them_once():
    x, _ = sent(drawn(64, 8))
    y, z = x + 1, x * 2
    pieces = x._cut.pieces
    w = y * 3
    assert x._cut.pieces is pieces and len(pieces) == 3 and y._cut.pieces[0].data_ptr() == y._value.data_ptr()
    x.data = torch.ones(32, 4)
    assert torch.equal(finished(x + 1), torch.full((32, 4), 2.0))
    assert torch.equal(finished(w), (drawn(64, 8) + 1) * 3) and torch.equal(finished(z), drawn(64, 8) * 2)


class StandInGroup:
    """Stands for a process group, which nothing asks anything here."""


@pytest.mark.parametrize("between", [False, True], ids=["of the rows", "of finished rows made of them"])
def test_an_optimizer_finds_no_rows_that_are_still_made_of_its_parameters(between):
    from ascend_parallel.ops.unfinished import unfinished

    weight, memory = drawn(8, 4, seed=1).requires_grad_(), torch.full((64, 8), torch.nan)
    pending = Pending(memory, "a test", StandInGroup(), 2, (32, 32))
    for index, rows in enumerate(memory.chunk(2)):
        pending.launch(FinishingWork, [], functools.partial(rows.fill_, index + 1), None, memory)
    x = unfinished(pending, 1)
    assert x._value.isnan().all()
    expected = torch.tensor([1.0, 2.0]).repeat_interleave(32)[:, None].expand(64, 8) @ weight.detach()
    with torch.no_grad():
        if between:
            x = x * 1
            y = x @ weight
            finished(x)
            del x
        else:
            y = x @ weight
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    assert torch.equal(finished(y), expected)


def sums_of(memory, works):
    """Return unfinished rows of memory [64, 8] in 4 chunks, a work for each."""
    from ascend_parallel.ops.unfinished import unfinished

    pending = Pending(memory, "a test", StandInGroup(), 4, (16,) * 4)
    for work in works:
        pending.launch(lambda work=work: work)
    return unfinished(pending, 1)


class FillingWork:
    """A collective that fills rows with a number when it is waited for; it fails the first time if `fails`."""

    def __init__(self, rows, number, waited, fails=False):
        self.rows, self.number, self.waited, self.fails = rows, number, waited, fails

    def is_completed(self):
        return False

    def wait(self):
        self.waited.append(self.number)
        if self.fails:
            self.fails = False
            raise ValueError("planted")
        self.rows.fill_(self.number)


def filling_works(memory, failing=None):
    waited = []
    return [FillingWork(rows, i, waited, i == failing) for i, rows in enumerate(memory.chunk(4))], waited


def test_a_whole_read_asks_each_collective_once():
    memory = torch.full((64, 8), torch.nan)
    works, waited = filling_works(memory)
    x = sums_of(memory, works)
    finished(x[:20])
    assert waited == [0, 1]
    assert finished(x).data_ptr() == memory.data_ptr()
    assert torch.equal(x * 1, torch.arange(4.0).repeat_interleave(16)[:, None].expand(64, 8))
    assert waited == [0, 1, 2, 3]


def test_rows_behind_a_collective_that_fails_stay_unread():
    memory = torch.full((64, 8), torch.nan)
    works, waited = filling_works(memory, failing=2)
    x = sums_of(memory, works)
    y = x + 1
    for read in (lambda: finished(x), lambda: y.sum()):
        works[2].fails = True
        with pytest.raises(ValueError, match="planted"):
            read()
    assert is_unfinished(x) and is_unfinished(y)
    assert waited == [0, 1, 2, 2]


def test_collectives_whose_rows_nobody_holds_are_waited_for_before_an_optimizer_steps():
    memory = torch.full((64, 8), torch.nan)
    works, waited = filling_works(memory)
    sums_of(memory, works)
    assert waited == []
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight]).step()
    assert waited == [0, 1, 2, 3]


RESHAPED = {
    "transposed": lambda x: x.transpose_(0, 1),
    "unsqueezed": lambda x: x.unsqueeze_(0),
    "resized": lambda x: x.resize_(32, 8),
    "set": lambda x: x.set_(torch.ones(3)),
    "data": lambda x: setattr(x, "data", torch.ones(1)) or x,
}


@pytest.mark.parametrize("change", RESHAPED)
def test_a_change_of_shape_or_memory_is_seen(change):
    """As Megatron-core's pipeline gives up an output's memory: ``output.data = torch.empty(1)``."""
    x, _ = sent(drawn(64, 8))
    plain = RESHAPED[change](drawn(64, 8))
    y = RESHAPED[change](x)
    assert y is x and (x.shape, x.stride()) == (plain.shape, plain.stride())
    assert torch.equal(x * 2, plain * 2)


def test_the_memory_of_another_tensor_can_be_these_rows():
    x, _ = sent(drawn(64, 8))
    y = torch.empty(1)
    y.data = x.data
    assert type(y) is torch.Tensor and torch.equal(y, drawn(64, 8))


def test_tensors_of_inference_mode_may_stand_beside():
    with torch.inference_mode():
        residual = drawn(64, 8, seed=1)
    x, _ = sent(drawn(64, 8))
    with torch.no_grad():
        assert torch.equal(finished(x + residual), drawn(64, 8) + residual)


def test_threads_read_the_same_rows_once():
    from concurrent.futures import ThreadPoolExecutor

    x, asked = sent(drawn(64, 8))
    y = (x * 2).add_(1)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: y.sum().item(), range(8)))
    assert asked == [0, 1, 2]
    assert set(found) == {(drawn(64, 8) * 2 + 1).sum().item()}


class Stream:
    """A stream of an accelerator; `running` is the current one."""

    running = None

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.fixture
def streams(monkeypatch):
    """Two streams, the first of them current."""
    made, side = Stream(), Stream()
    monkeypatch.setattr(lazy_rows, "has_streams", lambda: True)
    monkeypatch.setattr(Stream, "running", made)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: Stream.running)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(Stream, "running", stream))
    return made, side


def test_rows_are_filled_in_the_stream_in_which_their_tensor_was_made(streams):
    made, side = streams
    filled_in = []
    rows = LazyRows((2, 2), lambda _: filled_in.append(Stream.running))
    Stream.running = side
    rows.up_to(2)
    assert Stream.running is side and side.waited_for == [made]
    Stream.running = made
    rows.finish()
    assert filled_in == [made, made] and made.waited_for == []


def test_a_reader_in_another_stream_waits_for_rows_that_were_filled_for_an_earlier_reader(streams):
    made, side = streams
    tensor = UnfinishedTensor(torch.ones(4, 2), Rows(LazyRows((2, 2), lambda _: None), 1, 1))
    assert tensor.sum() == 8
    Stream.running = side
    assert tensor.finished().sum() == 8
    assert side.waited_for == [made]
    assert tensor.sum() == 8
    assert side.waited_for == [made, made]


def test_memory_for_rows_is_made_in_their_stream(streams):
    made, side = streams
    made_in = []
    rows = LazyRows((2, 2), lambda _: None)
    Stream.running = side
    rows.make(lambda: made_in.append(Stream.running))
    assert made_in == [made] and Stream.running is side and side.waited_for == [made]


def test_a_fill_that_fails_gives_the_readers_stream_back(streams):
    def fail(_):
        raise ValueError

    rows = LazyRows((2,), fail)
    Stream.running = streams[1]
    with pytest.raises(ValueError):
        rows.finish()
    assert Stream.running is streams[1]


def test_small_operands_may_change_at_once():
    """As a norm's weight does that FSDP frees behind the norm."""
    x, _ = sent(drawn(64, 8))
    bias = torch.ones(8)
    y = x + bias
    bias.zero_()
    assert torch.equal(finished(y), drawn(64, 8) + 1)


def test_a_bias_of_a_matmul_may_change_at_once():
    x, _ = sent(drawn(64, 64))
    w, bias = drawn(64, 64, seed=1), torch.ones(64)
    with torch.no_grad():
        expected = F.linear(drawn(64, 64), w, bias)
        y = F.linear(x, w, bias)
        bias.zero_()
    assert is_unfinished(y) and torch.equal(finished(y), expected)


def test_rows_that_nobody_reads_are_freed_at_once():
    import weakref

    x, _ = sent(drawn(64, 8))
    held = weakref.ref((x + 1)._rows.progress)
    assert held() is None


def test_finished_rows_let_go_of_what_they_are_made_of():
    import weakref

    x, _ = sent(drawn(64, 8))
    residual = drawn(64, 8, seed=1)
    held = weakref.ref(residual)
    y = x + residual
    del residual
    assert held() is not None
    finished(y)
    assert held() is None


class LateGradient(torch.autograd.Function):
    """Stands for a column layer, whose input gradient comes by rows: x [16, 4, N]; `asked` notes the chunks."""

    @staticmethod
    def forward(ctx, x, asked):
        ctx.asked = asked
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if ctx.asked is None:
            return dy, None
        y, asked = sent(dy.reshape(64, -1).clone())
        at_end_of_backward(y._rows.progress.settle)
        ctx.asked.append(asked)
        return y.view(dy.shape), None


class Seen(torch.autograd.Function):
    """Notes which chunks were asked for when the gradient passes."""

    @staticmethod
    def forward(ctx, x, asked, seen):
        ctx.asked, ctx.seen = asked, seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.seen.append([list(each) for each in ctx.asked or []])
        return dy, None, None


BACKWARDS = {
    "norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w[0], w[1]),
    "rms norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w[0]),
    "rms norm in operators": lambda x, w: rms(x) * w[0],
    "residual, bias": lambda x, w: F.layer_norm(x + w[0] + drawn(16, 4, 64, seed=3), (64,)),
    "dropout": lambda x, w: F.layer_norm(x * w[0] + F.dropout(x, 0.5, True), (64,), w[1]),
    "casts": lambda x, w: F.layer_norm(x.double(), (64,)).float() + w[0],
    "activation": lambda x, w: F.silu(F.gelu(x + w[0])),
}


@promise("unfinished-gradients")
@pytest.mark.parametrize("chain", BACKWARDS)
def test_gradients_pass_by_rows_up_to_the_next_matmul(chain):
    found, seen = [], []
    for asked in (None, []):
        torch.manual_seed(7)
        v, x, *w = (drawn(*size, seed=len(size)).requires_grad_() for size in [(64, 64)] * 2 + [(64,)] * 2)
        rows = (x @ v).view(16, 4, 64)
        y = LateGradient.apply(BACKWARDS[chain](Seen.apply(rows, asked, seen), w), asked)
        (y.sin().sum() + rows.square().sum()).backward()
        found.append([each.grad for each in (v, x, *w) if each.grad is not None])
    assert seen == [[], [[]]]  # nothing was asked for before the matmul
    for plain, mine in zip(*found, strict=True):
        assert type(mine) is torch.Tensor
        assert torch.equal(plain, mine)


def norm_and_loss(asked, w, b, x):
    n = F.layer_norm(x * 1, (64,), w, b)
    return n, LateGradient.apply(n, asked).sin().sum()


def by_hook(register):
    def run(asked, w, b, x):
        read = []
        getattr(w, register)(lambda value: read.append(value if value.grad is None else value.grad))
        norm_and_loss(asked, w, b, x)[1].backward()
        return [*map(finished, read), w.grad, b.grad, x.grad]

    return run


def by_autograd_grad(asked, w, b, x):
    n, loss = norm_and_loss(asked, w, b, x)
    return [finished(each) for each in torch.autograd.grad(loss, [w, b, x, n])]


def retained(asked, w, b, x):
    n, loss = norm_and_loss(asked, w, b, x)
    n.retain_grad()
    loss.backward()
    return [n.grad, w.grad, b.grad, x.grad]


def accumulated(asked, w, b, x):
    for _ in range(2):
        norm_and_loss(asked, w, b, x)[1].backward()
    return [w.grad, b.grad, x.grad]


def optimizer_in_backward(asked, w, b, x):
    for parameter in (w, b):
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step() or optimizer.zero_grad()
        )
    norm_and_loss(asked, w, b, x)[1].backward()
    return [w.detach(), b.detach(), x.grad]


def doubled(asked, w, b, x):
    w.register_hook(lambda gradient: gradient * 2)
    norm_and_loss(asked, w, b, x)[1].backward()
    return [w.grad, b.grad, x.grad]


def anomalous(asked, w, b, x):
    with pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        norm_and_loss(asked, w, b, x)[1].backward()
    return [w.grad, b.grad, x.grad]


def failed(asked, w, b, x):
    """An exception in the middle: what had come to ``.grad`` is finished by then, or for the optimizer."""

    def fail(gradient):
        raise ValueError("planted")

    handle = x.register_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        norm_and_loss(asked, w, b, x)[1].backward()
    handle.remove()
    torch.optim.SGD([w, b], lr=0.1).step()
    return [w.grad, b.grad, w.detach(), b.detach()]


def twice(asked, w, b, x):
    loss = norm_and_loss(asked, w, b, x)[1]
    loss.backward(retain_graph=True)
    loss.backward()
    return [w.grad, b.grad, x.grad]


def compiled(asked, w, b, x):
    torch._dynamo.reset()
    norm = torch.compile(lambda x, w, b: F.layer_norm(x * 1, (64,), w, b), backend="aot_eager")
    LateGradient.apply(norm(x, w, b), asked).sin().sum().backward()
    return [w.grad, b.grad, x.grad]


USERS = {
    "compiled": compiled,
    "hook": by_hook("register_hook"),
    "hook after accumulation": by_hook("register_post_accumulate_grad_hook"),
    "autograd.grad": by_autograd_grad,
    "retained gradient": retained,
    "accumulation": accumulated,
    "optimizer in backward": optimizer_in_backward,
    "a hook that changes": doubled,
    "anomaly mode": anomalous,
    "an exception": failed,
    "two backwards": twice,
}


@promise("unfinished-gradients")
@pytest.mark.parametrize("user", USERS)
def test_whoever_gets_a_gradient_gets_a_plain_finished_one(user):
    found = []
    for asked in (None, []):
        w, b, x = (drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(64,), (64,), (16, 4, 64)]))
        found.append(USERS[user](asked, w, b, x))
    assert asked and len(found[0]) == len(found[1])
    for plain, mine in zip(*found, strict=True):
        assert type(mine) is torch.Tensor
        assert torch.equal(plain, mine)


class OnItsWay:
    """A collective that is done once it is waited for, or was done before."""

    def __init__(self, done=False):
        self.done = done

    def is_completed(self):
        return self.done

    def wait(self):
        self.done = True


@pytest.mark.parametrize(
    ("work", "runs"),
    [
        (OnItsWay(), True),
        (OnItsWay(done=True), False),
        (FinishingWork([], lambda: None, None, torch.empty(1)), False),  # it does not tell, and may be done
    ],
    ids=["on its way", "done", "does not tell"],
)
def test_a_wait_runs_idle_work_only_if_it_is_known_to_take_time(work, runs):
    pending, ran = Pending(torch.empty(4), "a test", None), []
    pending.launch(lambda: work)
    IDLE_WORK.append(lambda: ran.append(1))
    pending.wait()
    assert bool(ran) is runs
    IDLE_WORK.clear()


def test_a_postponed_gradient_is_computed_in_an_idle_wait():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.sum()

        @staticmethod
        def backward(ctx, dy):
            dw, written = torch.full((4,), torch.nan), []
            made = postponed(dw, lambda: written.append(dw.fill_(3)), (), "a test")
            assert not written
            IDLE_WORK[0]()  # as a wait does
            assert len(written) == 1
            return made

    w = torch.ones(4, requires_grad=True)
    Function.apply(w).backward()
    assert type(w.grad) is torch.Tensor and torch.equal(w.grad, torch.full((4,), 3.0))
    IDLE_WORK.clear()
