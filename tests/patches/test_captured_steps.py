"""Megatron-core's GPT while a graph is captured, on CPUs: what a capture forbids does not run, or is an error."""

import contextlib
from unittest import mock

import pytest
import torch
from backends import as_backend
from captured import captured
from gpt_training import REGION, megatron
from megatron_cpu import next_token_loss, small_gpt
from pool import on_ranks

import ascend_parallel

SETTINGS = {"plain": {"num_chunks": 1}, "chunks": {"num_chunks": 4, "chunk_rows": 16}, "regions": REGION}
TOKENS = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(1))


def step(model):
    """Return the loss and every gradient."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    for parameter in model.parameters():
        parameter.grad = None
    # It reads the host's generator, which a capture allows; here the "device" is the host.
    with mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()):
        loss = next_token_loss(model, TOKENS)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@on_ranks(2)
def test_a_captured_step_of_a_gpt_has_the_bits_and_runs_nothing_that_a_capture_forbids(group):
    for sequence_parallel in (False, True):
        found = {}
        with megatron(group.size()):
            for name, settings in SETTINGS.items():
                ascend_parallel.configure(**settings)
                model = small_gpt(sequence_parallel=sequence_parallel)
                with as_backend("nccl", group):
                    for _ in range(2):  # ranks compare their settings, and ask which chunks keep the bits
                        step(model)
                    ascend_parallel.ops.COUNTS.clear()
                    with captured():
                        found[name] = step(model)
                counts = ascend_parallel.ops.COUNTS.as_dict()
                assert bool(counts) == (name != "plain") and ("region" in counts) == (name == "regions"), counts
        for name in ("chunks", "regions"):
            same = [torch.equal(*pair) for pair in zip(found["plain"], found[name], strict=True)]
            assert all(same), (name, sequence_parallel, same)


@on_ranks(2)
def test_a_capture_of_a_gpt_before_its_warm_up_is_an_error_that_says_so(group):
    with megatron(group.size()):
        ascend_parallel.configure(num_chunks=4)
        model = small_gpt()
        with captured(), pytest.raises(RuntimeError, match=r"while a graph is captured.* as a warm-up"):
            step(model)
