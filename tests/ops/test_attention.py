"""Attention and log-softmax of COC_DETERMINISTIC=invariant: the right numbers, and bits that no neighbour changes."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from marks import promise

import ascend_parallel
from ascend_parallel.ops import row_tiles
from ascend_parallel.ops.attention import (
    KeyBlocks,
    Sequence,
    attend,
    attend_last,
    attend_sequence,
    key_blocks,
    sum_in_order,
)
from ascend_parallel.ops.log_softmax import log_softmax

SHAPES = [(8, 4, 64), (6, 6, 32), (4, 1, 80)]  # queries, keys, width


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(q, k, v, scale):
    """In float64, of one sequence: q [n, H, D], the last of the positions of k and v [m, G, D]."""
    q, k, v = (each.double().transpose(0, 1) for each in (q, k, v))
    n, m = q.shape[1], k.shape[1]
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize(("heads", "groups", "width"), SHAPES)
def test_attention_and_its_gradients_are_right(heads, groups, width):
    """Packed sequences, one with more keys than queries."""
    spans = (Sequence(0, 5, 0, 5), Sequence(5, 200, 5, 330), Sequence(205, 1, 335, 65))
    q, k, v = drawn(206, heads, width), drawn(400, groups, width, seed=1), drawn(400, groups, width, seed=2)
    operands = [each.double().requires_grad_() for each in (q, k, v)]
    expected = torch.cat(
        [truth(operands[0][f : f + n], *(each[s : s + m] for each in operands[1:]), 0.2) for f, n, s, m in spans]
    )
    dout = drawn(*expected.shape, seed=3)
    expected.backward(dout.double())
    q, k, v = (each.requires_grad_() for each in (q, k, v))
    out = attend(q, k, v, spans, 0.2)
    out.backward(dout)
    for found, right in ((out, expected), *((a.grad, b.grad) for a, b in zip((q, k, v), operands, strict=True))):
        assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-5)


@promise("invariant-attention")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_has_the_same_bits_in_any_call(dtype):
    """In a prefill, in parts of it, in decoding; with fewer heads, as on a rank of several; beside other sequences."""
    heads, groups, width, length = 8, 4, 64, 300
    q, k, v = drawn(length, heads, width), drawn(length, groups, width, seed=1), drawn(length, groups, width, seed=2)
    q, k, v = (each.to(dtype) for each in (q, k, v))
    whole = attend(q, k, v, (Sequence(0, length, 0, length),), 0.125)
    for first, last in ((0, 1), (0, 5), (17, 64), (63, 65), (100, 300), (128, 129), (299, 300), (255, 257)):
        part = attend(q[first:last], k, v, (Sequence(0, last - first, 0, last),), 0.125)
        assert torch.equal(part, whole[first:last]), (first, last)
        blocks = key_blocks(k[:last], v[:last])
        assert torch.equal(attend_sequence(q[first:last], blocks, last, 0.125).to(dtype), part)
    for ranks in (2, 4):
        for rank in range(ranks):
            own_q, own_k = (slice(rank * n // ranks, (rank + 1) * n // ranks) for n in (heads, groups))
            part = attend(q[:, own_q], k[:, own_k], v[:, own_k], (Sequence(0, length, 0, length),), 0.125)
            assert torch.equal(part, whole[:, own_q])
    other, more = (torch.cat([drawn(90, each.shape[1], width, seed=9).to(dtype), each]) for each in (q, k))
    spans = (Sequence(0, 90, 0, 90), Sequence(90, length, 90, length))
    values = torch.cat([v[:90], v])
    assert torch.equal(attend(other, more, values, spans, 0.125)[90:], whole)


@promise("invariant-attention")
def test_sequences_that_are_decoded_together_have_the_bits_of_each_alone():
    """Grouped queries; the keys behind a shorter sequence are of others, and may be anything but in its values."""
    heads, groups, width, lengths = 8, 4, 32, [7, 130, 64, 192]
    q, blocks, alone = drawn(len(lengths), heads, width), [], []
    for index, length in enumerate(lengths):
        k, v = (drawn(length, groups, width, seed=10 * index + seed) for seed in (1, 2))
        own = key_blocks(k, v)
        alone.append(attend_sequence(q[index : index + 1], own, length, 0.2)[0])
        more = max(lengths) - own.keys.shape[1]
        blocks.append([F.pad(own.keys, (0, 0, 0, more), value=torch.nan), F.pad(own.values, (0, 0, 0, more))])
    together = KeyBlocks(*(torch.cat(each) for each in zip(*blocks, strict=True)))
    assert torch.equal(attend_last(q, together, lengths, 0.2), torch.stack(alone))


def test_gradients_of_a_head_do_not_depend_on_the_heads_beside_it():
    q, k, v = drawn(150, 8, 32).requires_grad_(), drawn(150, 4, 32, seed=1).requires_grad_(), drawn(150, 4, 32, seed=2)
    v.requires_grad_()
    dout = drawn(150, 8, 32, seed=3)
    attend(q, k, v, (Sequence(0, 150, 0, 150),), 0.2).backward(dout)
    own = [
        each.detach()[:, rows].requires_grad_() for each, rows in ((q, slice(4, 6)), (k, slice(2, 3)), (v, slice(2, 3)))
    ]
    attend(*own, (Sequence(0, 150, 0, 150),), 0.2).backward(dout[:, 4:6])
    assert torch.equal(own[0].grad, q.grad[:, 4:6])
    assert all(torch.equal(part.grad, each.grad[:, 2:3]) for part, each in ((own[1], k), (own[2], v)))


@pytest.mark.parametrize("rows", [4, 8, 16, 32])
def test_a_batched_product_that_has_other_bits_is_not_made(monkeypatch, rows):
    """Also where one of its rows alone has them."""
    x, w, multiply = drawn(3, rows, 40), drawn(3, 40, 64, seed=1), torch.bmm
    expected = torch.empty(3, rows, 64)
    for operands in zip(x, w, expected, strict=True):
        row_tiles.multiply_tiles(*operands)
    assert torch.equal(row_tiles.multiply_batches(x, w), expected)

    def uneven(a, b):
        y = multiply(a, b)
        y[-1, -1] *= 1.000001
        return y

    row_tiles.in_one_call.cache_clear()
    monkeypatch.setattr(torch, "bmm", uneven)
    assert torch.equal(row_tiles.multiply_batches(x, w), expected)
    row_tiles.in_one_call.cache_clear()


@pytest.mark.parametrize("shared", [1, 4, 5, 8])
def test_a_decoded_token_multiplies_few_rows_and_has_the_bits_of_whole_tiles(monkeypatch, shared):
    q, made, multiply = drawn(3, 2 * shared, 32), [], torch.bmm
    blocks = KeyBlocks(drawn(6, 128, 32, seed=1), drawn(6, 128, 32, seed=2))
    expected = attend_last(q, blocks, [128, 70, 65], 0.2)

    def in_tiles(x, w):
        made.append(x.shape[1])
        return multiply(x, w) * (1 if x.shape[1] >= row_tiles.ROWS else 1.000001)

    row_tiles.in_one_call.cache_clear()
    monkeypatch.setattr(torch, "bmm", in_tiles)
    assert torch.equal(attend_last(q, blocks, [128, 70, 65], 0.2), expected)
    assert made[0] == next(rows for rows in (4, 8) if rows >= shared)
    row_tiles.in_one_call.cache_clear()


def test_zeros_at_the_end_change_no_sum():
    x = drawn(3, 7, 5)
    assert torch.equal(sum_in_order(x, 1), sum_in_order(torch.cat([x, torch.zeros(3, 4, 5)], 1), 1))
    assert torch.allclose(sum_in_order(x, 1), x.sum(1))


@promise("invariant-logprobs")
@pytest.mark.parametrize("vocabulary", [1000, 1003])
def test_a_row_of_logits_has_the_same_logprobs_beside_any_rows(vocabulary):
    logits = 5 * drawn(70, vocabulary)
    table = log_softmax(logits)
    assert torch.allclose(table.double(), logits.double().log_softmax(-1), rtol=0, atol=1e-5)
    tokens = torch.randint(vocabulary, (70,), generator=torch.Generator().manual_seed(0))
    chosen = table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(ascend_parallel.logprobs(logits, tokens), chosen)
    for rows in ([3], [69, 3], random.Random(0).sample(range(70), 33)):
        assert torch.equal(log_softmax(logits[rows]), table[rows])
    cold = ascend_parallel.logprobs(logits, tokens, temperature=0.7)
    assert torch.equal(cold, ascend_parallel.logprobs(logits / 0.7, tokens))


def shared_logprobs(group, vocabulary):
    logits, tokens = 5 * drawn(20, vocabulary), torch.arange(20) * 7
    own = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    made = ascend_parallel.logprobs(own, tokens, group=group, temperature=0.9)
    made.sum().backward()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.grad, group=group)
    return made.detach(), torch.cat(parts, -1)


@promise("invariant-logprobs")
def test_ranks_that_share_the_vocabulary_have_the_logprobs_of_one(ranks):
    (one, gradient), *_ = ranks(1).run(shared_logprobs, 512)
    logits = (5 * drawn(20, 512)).double().requires_grad_()
    right = (logits / 0.9).log_softmax(-1).gather(-1, (torch.arange(20) * 7).unsqueeze(-1)).squeeze(-1)
    right.sum().backward()
    assert torch.allclose(one.double(), right, atol=1e-5)
    assert torch.allclose(gradient.double(), logits.grad, atol=1e-5)
    for count in (2, 4):
        for made, part in ranks(count).run(shared_logprobs, 512):
            assert torch.equal(made, one)
            assert torch.equal(part, gradient)


def test_what_logprobs_refuses(ranks):
    with pytest.raises(ValueError, match="one token for each row"):
        ascend_parallel.logprobs(torch.randn(3, 8), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="larger than 0"):
        ascend_parallel.logprobs(torch.randn(3, 8), torch.zeros(3, dtype=torch.long), temperature=0)
