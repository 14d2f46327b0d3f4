"""Megatron-core's vocabulary-parallel embedding in regions: values, gradients, readers, and what comes behind it."""

import pytest
import torch
import torch.nn.functional as F
from delayed_collectives import DelayedWork, delayed_collectives
from gpt_training import REGION, megatron
from pool import on_ranks
from refused_plan import REFUSED, refused_plan

import ascend_parallel
from ascend_parallel.process_groups.consistency import DisagreementError

VOCAB, HIDDEN, TOKENS = 1200, 256, 768


def embedding(group, batch, **options):
    """Return the embedding of a rank, behind it a norm and a linear layer, and their gradients beside the truth's."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    hook, scatters = options.pop("hook", None), options.pop("scatters", False)
    config = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False, **options)
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, init_method=None, reduce_scatter_embeddings=scatters, config=config)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    linear = torch.randn(HIDDEN, HIDDEN, generator=generator).requires_grad_()
    ids = torch.randint(VOCAB, (batch, TOKENS), generator=generator)
    dy = torch.randn(TOKENS, batch, HIDDEN, generator=generator)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(group.size())[group.rank()])
    if hook is not None:
        layer.register_forward_hook(hook)
    looked_up = layer(ids)
    x = looked_up if scatters else looked_up.transpose(0, 1).contiguous()
    dy = dy.chunk(group.size())[group.rank()] if scatters else dy
    y = F.layer_norm(x, (HIDDEN,)) @ linear
    y.backward(dy)
    whole, truth = weight.double().requires_grad_(), linear.detach().double().requires_grad_()
    rows = F.layer_norm(F.embedding(ids, whole).transpose(0, 1), (HIDDEN,)) @ truth
    rows = rows.chunk(group.size())[group.rank()] if scatters else rows
    gathered = [torch.empty_like(dy) for _ in range(group.size())]
    torch.distributed.all_gather(gathered, dy, group=group)
    torch.autograd.backward(rows, dy.double(), inputs=[truth])
    again = F.layer_norm(F.embedding(ids, whole).transpose(0, 1), (HIDDEN,)) @ truth
    torch.autograd.backward(again, (torch.cat(gathered) if scatters else dy).double(), inputs=[whole])
    expected = [rows, whole.grad.chunk(group.size())[group.rank()], truth.grad]
    return [y.detach() * 1, layer.weight.grad, linear.grad], expected


def against_truth(group, batch, options, hooked=None, late=False):
    """Return the bits that differ from plain, the worst error, the chunks, and the shapes that a hook has seen."""
    found, seen = [], []
    with megatron(group.size()):
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            ascend_parallel.ops.COUNTS.clear()
            if hooked == group.rank():
                options["hook"] = lambda _, __, y: seen.append((tuple(y.view(-1, HIDDEN).shape), y.isfinite().all()))
            if late and settings is REGION:
                with delayed_collectives():
                    found.append(embedding(group, batch, **options))
            else:
                found.append(embedding(group, batch, **options))
        counts = ascend_parallel.ops.COUNTS.as_dict()
    (plain, truth), (mine, _) = found
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, truth, strict=True))
    different = [index for index, (a, b) in enumerate(zip(plain, mine, strict=True)) if not torch.equal(a, b)]
    return different, worst, counts.get("region embedding", {}).get("chunks"), seen, DelayedWork.unfinished


CASES = {
    "all-reduce": (3, {}),
    "a single sequence": (1, {}),
    "deterministic": (2, {"deterministic_mode": True}),
    "sequence parallel": (3, {"scatters": True}),
    "a single sequence, sequence parallel": (1, {"scatters": True}),
}


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.stress)]
)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(ranks, case, count):
    """At every degree with the bits of plain: the sums over ranks are exact."""
    for different, worst, chunks, _, _ in ranks(count).run(against_truth, *CASES[case]):
        assert worst < 1e-5
        assert different == []
        assert chunks == 4


@pytest.mark.parametrize("case", ["all-reduce", "sequence parallel"])
def test_nothing_reads_rows_that_are_not_there_yet(ranks, case):
    for different, _, chunks, _, unfinished in ranks(2).run(against_truth, *CASES[case], None, True):
        assert (different, chunks, unfinished) == ([], 4, 0)


@pytest.mark.parametrize("case", ["all-reduce", "sequence parallel"])
def test_a_hook_on_one_rank_sees_finished_rows_and_changes_no_collective(ranks, case):
    found = ranks(2).run(against_truth, *CASES[case], 1)
    rows = 3 * TOKENS // (2 if case == "sequence parallel" else 1)
    for rank, (different, _, chunks, seen, _) in enumerate(found):
        assert (different, chunks) == ([], 4)
        assert seen == ([((rows, HIDDEN), True)] * 2 if rank else [])


@on_ranks(2)
def test_where_no_rows_can_be_left_the_original_runs(group):
    """Without regions, with too few rows or COC_MODE=1, the original runs."""
    counts = []
    with megatron(group.size()):
        from megatron.core import parallel_state

        for settings in ({"num_chunks": 4}, {**REGION, "region_rows": 1000}, {**REGION, "mode": 1}):
            ascend_parallel.configure(**settings)
            ascend_parallel.ops.COUNTS.clear()
            found, truth = embedding(parallel_state.get_tensor_model_parallel_group(), 1)
            counts.append(ascend_parallel.ops.COUNTS.as_dict().get("region embedding"))
            assert torch.allclose(found[0], truth[0].float(), atol=1e-4)
    assert counts == [None] * 3


@on_ranks(2)
def test_a_plan_that_one_rank_refuses_is_an_error_on_every_rank(group):
    """Ranks compare settings once: whoever refuses the plan has to say so then, or raises alone."""
    with megatron(group.size()), refused_plan(group.rank() == 1) as plan:
        from megatron.core import parallel_state

        ascend_parallel.configure(**REGION, plan=plan)
        with pytest.raises(DisagreementError, match=REFUSED):
            embedding(parallel_state.get_tensor_model_parallel_group(), 1)
