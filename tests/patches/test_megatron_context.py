"""Megatron-core's own attention with context parallelism: ranks that share sequences beside one rank."""

import contextlib
import importlib.metadata
import inspect
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import promise

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from gpt_training import LLAMA, REGION
from megatron_cpu import end_model_parallel, finalize_gradients, megatron_on_cpu, small_gpt

VERSION = version_tuple(importlib.metadata.version("megatron-core"))
pytestmark = pytest.mark.skipif(VERSION < (0, 13), reason="its local attention has no context parallelism before 0.13")
LENGTH = 56  # 8 pieces on 4 ranks, and no multiple of 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """A GPT, its ranks, and how its attention is exchanged.

    masked: documents of the given lengths, by an attention mask; (): a causal mask, by none.
    habits: hooks on every module of rank 0, and its attention's forward wrapped.
    """

    ranks: int = 2
    tensor_parallel: int = 1
    masked: tuple[int, ...] = ()
    batch: int = 2
    groups: tuple[int | str, ...] = (1, 2)
    options: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    habits: bool = False


CASES = [
    Case(),
    Case(options={**LLAMA, "rope": True, "num_query_groups": 2}, groups=(1,)),
    Case(masked=(40, 16), options={"recompute": True}),
    Case(options={"heads": 6, "hidden": 96}, batch=3, groups=(1, 3), habits=True),
    Case(
        masked=(56,),
        options={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        groups=("auto",),
    ),
    Case(ranks=4, tensor_parallel=2, options={"sequence_parallel": True, "heads": 8}),
    Case(ranks=4, tensor_parallel=2, options={"sequence_parallel": True, "heads": 8}, settings=REGION),
    Case(ranks=4, tensor_parallel=2, options={"heads": 8, "rope": True}, groups=(2,)),
    Case(ranks=4, options={"heads": 8, "num_query_groups": 4, "rope": True, "window_size": (20, 0)}, groups=(1,)),
]


REFUSED = [
    ({"num_query_groups": 1, "heads": 3, "hidden": 48, "cp_comm_type": "a2a"}, {}, "cannot be shared by the 2 ranks"),
    ({"attention_dropout": 0.1}, {}, "attention_dropout is not allowed with context_parallel_size=2"),
    ({}, {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "attention_mask [1, 1, 8, 8] is not allowed"),
    ({}, {"length": 63}, "give a sequence that is a multiple of 4"),
]


def start(case, context, stages=1):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor_parallel,
        context_parallel_size=context,
        pipeline_model_parallel_size=stages,
    )
    model_parallel_cuda_manual_seed(1234)


def batch_of(case, seed=7):
    """Return the whole batch, as a loader of Megatron makes it."""
    tokens = torch.randint(256, (case.batch, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    document = torch.repeat_interleave(torch.arange(len(case.masked)), torch.tensor(case.masked, dtype=torch.int64))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = mask | (document[:, None] != document) if case.masked else mask
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "attention_mask": mask.expand(case.batch, 1, LENGTH, LENGTH) if case.masked else None,
        "position_ids": torch.arange(LENGTH).expand(case.batch, LENGTH),
    }


def cut(batch):
    """Return this rank's part of a whole batch, by Megatron's own function."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    # Since 0.18 it asks for these two, and without the group takes all ranks.
    asked = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    return get_batch_on_this_cp_rank(batch, **{name: value for name, value in asked.items() if name in known})


def results(case, context, dtype=torch.float32):
    """Return this rank's losses of tokens, gradients of the embedded tokens, and gradients of weights, summed."""
    from megatron.core import parallel_state

    model = small_gpt(seq=LENGTH, context_parallel_size=context, dtype=dtype, **case.options)
    kept = []
    if case.habits and context > 1 and dist.get_rank() == 0:
        take_habits(model)
    model.embedding.register_forward_hook(lambda *call: kept.append(call[-1]) or call[-1].retain_grad())
    batch = cut(batch_of(case)) if context > 1 else batch_of(case)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    (losses.sum() / (case.batch * LENGTH)).backward()
    finalize_gradients(model)
    weights = {name: weight.grad.double() for name, weight in model.named_parameters()}
    if context > 1:
        for gradient in weights.values():
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return losses.detach(), kept[0].grad, weights


def take_habits(model):
    """Have hooks see every output and its gradient, and wrap the forward of each attention."""

    def watch(module, inputs, output):
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: None)

    for module in model.modules():
        module.register_forward_hook(watch)
    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention
        inner = attention.forward
        attention.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)


def own_part(whole, dim, rank, ranks):
    """Return pieces `rank` and 2 R - 1 - rank of 2 R along `dim`."""
    pieces = whole.chunk(2 * ranks, dim)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim)


def beside_one_rank(group, case):
    """Return what differs between the ranks that share sequences and one rank, and the exchanges counted."""
    from megatron.core import parallel_state

    context, found = group.size() // case.tensor_parallel, {}
    with megatron_on_cpu(schedules=True):  # the default causal mask is made on "cuda"
        ascend_parallel.configure(num_chunks=2)
        start(case, 1)
        ascend_parallel.configure(num_chunks=1)
        losses, d_embedded, _ = results(case, 1)
        truth = results(case, 1, torch.float64)[2]
        end_model_parallel()
        start(case, context)
        rank = parallel_state.get_context_parallel_rank()
        for groups in case.groups:
            number = {"auto": True} if groups == "auto" else {"num_chunks": groups, "mode": 2}
            ascend_parallel.configure(**{**number, **case.settings})
            COUNTS.clear()
            own_losses, own_d_embedded, weights = results(case, context)
            # With sequence parallelism the embedding's output is a rank's part of these rows.
            expected = own_part(d_embedded, 0, rank, context) if case.tensor_parallel == 1 else own_d_embedded
            found[groups] = {
                "losses": torch.equal(own_losses, own_part(losses, 1, rank, context)),
                "near": torch.allclose(own_losses, own_part(losses, 1, rank, context), rtol=1e-5),
                "embedded": torch.equal(own_d_embedded, expected),
                "weights": max(
                    ((weights[name] - truth[name]).abs().max() / truth[name].abs().max()).item() for name in truth
                ),
                "exchanges": COUNTS.as_dict().get("head_exchange", {}),
                "gathers": COUNTS.as_dict().get("key_gather", {}).get("chunks", 0),
            }
        end_model_parallel()
        ascend_parallel.configure(num_chunks=1)
    return found


@promise("megatron-context-bits")
@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_gpt_whose_ranks_share_sequences_has_the_bits_of_one_rank(ranks, case):
    if "window_size" in case.options and VERSION < (0, 15):
        pytest.skip("its own attention has no windows")
    for found in ranks(case.ranks).run(beside_one_rank, case):
        for groups, parts in found.items():
            assert parts["exchanges"], groups
            assert parts["losses"] and parts["embedded"], (groups, parts)
            assert parts["weights"] < 2e-5, (groups, parts)


GATHERS = [
    Case(options={**LLAMA, "rope": True, "num_query_groups": 1}, groups=(1,)),
    Case(options={"cp_comm_type": "all_gather", "recompute": True}, groups=(1, 2), masked=(40, 16), habits=True),
    Case(ranks=4, tensor_parallel=2, options={"sequence_parallel": True, "heads": 8, "cp_comm_type": "all_gather"}),
]


@promise("context-gather")
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", GATHERS, ids=range(len(GATHERS)))
def test_a_gpt_whose_ranks_gather_keys_has_the_losses_of_one_rank(ranks, case):
    """Losses are within rounding, as Megatron's own attention sums rows of other lengths; gradients are sums."""
    for found in ranks(case.ranks).run(beside_one_rank, case):
        for groups, parts in found.items():
            passes = 3 if case.options.get("recompute") else 2
            assert (parts["gathers"], parts["exchanges"]) == (groups * passes * 2, {}), groups
            assert parts["near"] and parts["weights"] < 2e-5, (groups, parts)


def in_stages(context, dtype=torch.float32):
    """Return the losses of two micro-batches on the last stage, and this stage's weight gradients."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    case = Case()
    start(case, context, stages=2)
    model = small_gpt(num_layers=4, tied=False, seq=LENGTH, context_parallel_size=context, dtype=dtype)

    def step(iterator, model):
        batch = next(iterator)
        batch = cut(batch) if context > 1 else batch
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return losses, lambda losses: (losses.sum() / (case.batch * LENGTH), {"losses": losses.detach()})

    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([batch_of(case, seed) for seed in range(2)]),
        model=model,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=case.batch,
        forward_only=False,
    )
    finalize_gradients(model)
    losses = [each["losses"] for each in found]
    gradients = {name: weight.grad.double() for name, weight in model.named_parameters()}
    place = parallel_state.get_context_parallel_rank()
    for gradient in gradients.values():  # averaged, as Megatron's DDP does: the schedule multiplies losses by the ranks
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        gradient /= context
    end_model_parallel()
    return losses, gradients, place


def pipelined(group):
    """Return whether losses are those of stages whose ranks have whole sequences, and the worst weight gradient."""
    with megatron_on_cpu(schedules=True):
        ascend_parallel.configure(num_chunks=2)
        try:
            _, truth, _ = in_stages(1, torch.float64)
            expected, _, _ = in_stages(1)
            COUNTS.clear()
            losses, gradients, rank = in_stages(2)
            exchanges = COUNTS.as_dict()["head_exchange"]["chunks"]
        finally:
            ascend_parallel.configure(num_chunks=1)
    alike = [torch.equal(x, own_part(whole, 1, rank, 2)) for x, whole in zip(losses, expected, strict=True)]
    worst = max(((gradients[name] - x).abs().max() / x.abs().max()).item() for name, x in truth.items())
    return alike, worst, exchanges


@promise("megatron-context-bits")
def test_the_stages_of_a_pipeline_share_sequences(ranks):
    found = ranks(4).run(pipelined)
    assert [alike for alike, _, _ in found] == [[]] * 2 + [[True, True]] * 2
    for _, worst, exchanges in found:
        assert worst < 2e-5
        assert exchanges == 16  # 2 layers, forward and backward, in 2 groups, of 2 micro-batches


def with_replicas(group):
    """Return the worst weight gradient of Megatron's DDP over two replicas of two ranks, beside one rank in float64."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    case, truth = Case(), {}

    def loss_of(model, batch):
        losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        return losses.sum() / (case.batch * LENGTH)

    with megatron_on_cpu(schedules=True):
        ascend_parallel.configure(num_chunks=2)
        try:
            start(case, 1)
            model = small_gpt(seq=LENGTH, dtype=torch.float64)
            for seed in range(4):
                (loss_of(model, batch_of(case, seed)) / 4).backward()
            finalize_gradients(model)
            truth = {name: weight.grad for name, weight in model.named_parameters()}
            end_model_parallel()
            start(case, 2)
            model = small_gpt(seq=LENGTH, context_parallel_size=2)
            config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=20000)
            wrapped = DistributedDataParallel(model.config, config, model)
            replica = parallel_state.get_data_parallel_rank()
            for last in (False, True):  # two micro-batches, as many as ranks share a sequence: the factors cancel
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    loss_of(wrapped, cut(batch_of(case, 2 * replica + last))).backward()
            wrapped.finish_grad_sync()
            gradients = {name: weight.main_grad for name, weight in model.named_parameters()}
            end_model_parallel()
        finally:
            ascend_parallel.configure(num_chunks=1)
    return max(((gradients[name] - x).abs().max() / x.abs().max()).item() for name, x in truth.items())


@promise("context-data-parallel")
def test_weight_gradients_of_replicas_are_those_of_one_rank_with_all_batches(ranks):
    assert max(ranks(4).run(with_replicas)) < 2e-5


def wrapper():
    """Put a function on the forward of the attention's class that says nothing of what it calls."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    forward = DotProductAttention.forward
    return mock.patch.object(DotProductAttention, "forward", lambda *args, **options: forward(*args, **options))


def switched_off(group, settings, wrapped=False):
    """Return the error of a model that was built with overlap, and is called with other settings."""
    with megatron_on_cpu(schedules=True):
        ascend_parallel.configure(num_chunks=2)
        start(Case(), 2)
        try:
            model = small_gpt(seq=LENGTH, context_parallel_size=2)
            batch = cut(batch_of(Case()))
            ascend_parallel.configure(**settings)
            with wrapper() if wrapped else contextlib.nullcontext():
                model(batch["tokens"], batch["position_ids"], None)
        except (ValueError, RuntimeError) as error:
            return str(error)
        finally:
            ascend_parallel.configure(num_chunks=1, deterministic=False)
            end_model_parallel()
    return None


@pytest.mark.parametrize("settings", [{"num_chunks": 1}, {"num_chunks": 2, "deterministic": "tp"}], ids=str)
def test_a_model_that_shares_sequences_never_runs_without_the_exchange(ranks, settings):
    for error in ranks(2).run(switched_off, settings):
        assert "the overlap that this model was built with has been switched off" in error


def test_a_wrapper_around_the_exchange_is_not_taken_for_megatrons_forward(ranks):
    assert ranks(2).run(switched_off, {"num_chunks": 2}, True) == [None, None]


def refusal(group, options, changes):
    """Return the error of a GPT whose ranks share sequences."""
    with megatron_on_cpu(schedules=True):
        ascend_parallel.configure(num_chunks=2)
        start(Case(), 2)
        try:
            model = small_gpt(seq=LENGTH, context_parallel_size=2, **options)
            length = changes.get("length", LENGTH) // 2
            tokens = torch.zeros(1, length, dtype=torch.int64)
            model(tokens, tokens, changes.get("attention_mask"))
        except (ValueError, ascend_parallel.ops.DegreeError) as error:
            return str(error)
        finally:
            end_model_parallel()
            ascend_parallel.configure(num_chunks=1)
    return None


@pytest.mark.parametrize(("options", "changes", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_ranks_cannot_share_is_an_error(ranks, options, changes, words):
    for found in ranks(2).run(refusal, options, changes):
        assert words in found


def without_overlap(group):
    """Return the error of Megatron-core itself."""
    with megatron_on_cpu():
        start(Case(), 2)
        try:
            small_gpt(seq=LENGTH, context_parallel_size=2)
        except AssertionError as error:
            return str(error)
        finally:
            end_model_parallel()
    return None


def test_without_the_variable_megatron_says_what_it_said_before(ranks):
    for found in ranks(2).run(without_overlap):
        assert "only supported by TEDotProductAttention" in found


def at_every_degree(group):
    with megatron_on_cpu():
        start(Case(), 2)
        try:
            ascend_parallel.configure(num_chunks=2, deterministic="tp")
            small_gpt(seq=LENGTH, context_parallel_size=2)
        except (ascend_parallel.ops.DegreeError, ascend_parallel.PatchError) as error:
            return str(error)
        finally:
            end_model_parallel()
            ascend_parallel.configure(num_chunks=1, deterministic=False)
    return None


def test_the_same_bits_at_every_degree_are_refused(ranks):
    for found in ranks(2).run(at_every_degree):
        # Megatron-core 0.18 and later have other sums, which the setting refuses first.
        assert "context parallelism has no tree" in found or "VocabParallelCrossEntropy" in found
