"""What a program puts in place of Megatron's embeddings on one rank alone: in regions the ranks go on as always."""

import contextlib
import functools
import types
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_training import REGION, megatron
from hugging_face import worst
from marks import promise
from megatron_cpu import finalize_gradients, next_token_loss, small_gpt

import ascend_parallel
from ascend_parallel.ops import COUNTS

pytestmark = promise("one-rank-habits")


def looks_up(self, tokens):
    """Look up tokens as megatron-core does, in a function of the program's own."""
    from megatron.core.tensor_parallel import mappings

    others = (tokens < self.vocab_start_index) | (tokens >= self.vocab_end_index)
    rows = F.embedding((tokens - self.vocab_start_index).masked_fill(others, 0), self.weight)
    rows = rows.masked_fill(others.unsqueeze(-1), 0.0)
    if not self.reduce_scatter_embeddings:
        return mappings.reduce_from_tensor_model_parallel_region(rows)
    return mappings.reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous())


def embeds(self, input_ids, position_ids, directly=False):
    """Embed tokens as megatron-core does, in a function of the program's own."""
    from megatron.core.tensor_parallel import mappings

    words = self.word_embeddings
    rows = words.forward(input_ids) if directly else words(input_ids)
    if self.add_position_embedding:
        rows = rows + self.position_embeddings(position_ids)
    if self.reduce_scatter_embeddings:
        return rows
    rows = rows.transpose(0, 1).contiguous()
    return mappings.scatter_to_sequence_parallel_region(rows) if self.config.sequence_parallel else rows


@contextlib.contextmanager
def on_object(module, forward):
    module.forward = forward
    yield
    del module.forward


@contextlib.contextmanager
def other_class(words):
    kind = type(words)
    words.__class__ = type("Other", (kind,), {"forward": lambda self, tokens: kind.forward(self, tokens) * 1.0})
    yield
    words.__class__ = kind


def on_top(own):
    return functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))


HABITS = {
    "words": lambda outer, words: on_object(words, types.MethodType(looks_up, words)),
    "words, class": lambda outer, words: patch.object(type(words), "forward", looks_up),
    "words, on top": lambda outer, words: on_object(words, on_top(words.forward)),
    "words, class, on top": lambda outer, words: patch.object(type(words), "forward", on_top(type(words).forward)),
    "words, other class": lambda outer, words: other_class(words),
    "outer": lambda outer, words: on_object(outer, types.MethodType(embeds, outer)),
    "outer, class": lambda outer, words: patch.object(type(outer), "forward", embeds),
    "outer, class, on top": lambda outer, words: patch.object(type(outer), "forward", on_top(type(outer).forward)),
    "outer, directly": lambda outer, words: on_object(
        outer, types.MethodType(functools.partial(embeds, directly=True), outer)
    ),
}


@contextlib.contextmanager
def recorded():
    """Note the collectives of this rank, in order, with the numbers of their elements."""
    found = []

    def noting(name, own):
        def call(tensor, *args, **kwargs):
            parts = tensor if isinstance(tensor, list) else [tensor]
            found.append((name, *(part.numel() for part in parts)))
            return own(tensor, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "isend", "irecv"):
            stack.enter_context(patch.object(dist, name, noting(name, getattr(dist, name))))
        yield found


def two_steps(group, settings, options, habit, first=0):
    """Return losses and gradients, and the second step's collectives and chunks; rank 1 has a habit from a step on."""
    ascend_parallel.configure(**settings)
    model, found = small_gpt(num_layers=1, seq=24 * group.size(), **options), []
    for number in range(2):
        COUNTS.clear()
        model.zero_grad(set_to_none=True)
        has, outer = group.rank() == 1 and number >= first, model.embedding
        tokens = torch.randint(256, (4, 24 * group.size() + 1), generator=torch.manual_seed(number))
        with habit(outer, outer.word_embeddings) if has else contextlib.nullcontext(), recorded() as collectives:
            loss = next_token_loss(model, tokens)
            loss.backward()
        finalize_gradients(model)
        found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    chunks = COUNTS.as_dict().get("region embedding", {}).get("chunks")
    return {str(place): tensor for place, tensor in enumerate(found)}, collectives, chunks


def train(group, names, early, options):
    """Return for each habit of rank 1 alone the worst error of two steps, and the collectives of the second."""
    results = {}
    with megatron(group.size()):
        plain, *_ = two_steps(group, {"num_chunks": 1}, options, lambda *_: contextlib.nullcontext())
        for name in names:
            found, *seen = two_steps(group, REGION, options, HABITS[name], 0 if early else 1)
            results[name] = worst(found, plain), *seen
    return results


MODES = {
    "all-reduce": {},
    "sequence parallel": {"sequence_parallel": True, "rope": True},
    "sequence parallel, learned positions": {"sequence_parallel": True},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_run_the_same_collectives(ranks, mode, early, count):
    heads = {"heads": 6, "hidden": 96, "vocab": 258} if count == 3 else {}
    first, *others = ranks(count).run(train, list(HABITS), early, {**MODES[mode], **heads})
    for name, ((error, where), collectives, chunks) in first.items():
        assert error < 1e-5, (name, where)
        assert chunks == 4, name
        for other in others:
            assert other[name][1:] == (collectives, chunks), name
            assert other[name][0][0] < 1e-5, (name, other[name][0])
