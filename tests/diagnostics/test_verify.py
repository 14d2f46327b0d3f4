"""Checks inside a run: silent on every path, and without side effects."""

import itertools
import math

import pytest
import torch
from fused_gradients import Extension, install
from layer_verification import planted, run, verifying, with_and_without
from layers import same
from logged import logged
from pool import on_ranks

import ascend_parallel


def every_path(group):
    ranks, results = group.size(), {}
    for sequence_parallel, skip in itertools.product((False, True), repeat=2):
        options = {"config": {"sequence_parallel": sequence_parallel}, "skip_bias_add": skip}
        name = f"sequence_parallel={sequence_parallel} skip_bias_add={skip}"
        rows = 192 // ranks if sequence_parallel else 192
        results[f"column {name}"] = with_and_without(group, "ColumnParallelLinear", (rows, 2, 96), options, {})
        results[f"row {name}"] = with_and_without(group, "RowParallelLinear", (192, 2, 96 // ranks), options, {})
    column, row = ("ColumnParallelLinear", (192, 2, 96)), ("RowParallelLinear", (192, 2, 96 // ranks))
    results["gather_output"] = with_and_without(group, *column, {"gather_output": True}, {})
    results["input_is_parallel=False"] = with_and_without(
        group, "RowParallelLinear", (192, 2, 96), {"input_is_parallel": False}, {}
    )
    results["disable_grad_reduce"] = with_and_without(group, *column, {"disable_grad_reduce": True}, {})
    results["keep gathered"] = with_and_without(
        group,
        "ColumnParallelLinear",
        (192 // ranks, 2, 96),
        {"config": {"sequence_parallel": True}},
        {"recompute_all_gather": False},
    )
    results["no chunks"] = with_and_without(group, *row, {}, {"mode": 1})
    results["fused"] = with_and_without(group, *row, {}, {"fused": True})
    results["float64"] = with_and_without(
        group, *row, {"config": {"params_dtype": torch.float64}}, {}, dtype=torch.float64
    )
    for kind, shape in (column, row):
        results[f"bfloat16 {kind}"] = with_and_without(
            group, kind, shape, {"config": {"params_dtype": torch.bfloat16}}, {}, dtype=torch.bfloat16
        )
    return {name: (different, found.as_dict()) for name, (different, found) in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_path_is_verified_silently_and_keeps_its_bits(ranks, count):
    for results in ranks(count).run(every_path):
        for name, (different, found) in results.items():
            assert different == [], name
            assert found["passed"] and found["notes"] == [], (name, found)
            (layer,) = found["layers"]
            assert (layer["forwards"], layer["backwards"]) == (1, 1), name
            assert set(layer["errors"]) == {"output", "input gradient", "weight gradient"}, name
            assert layer["limit"] == (2e-2 if "bfloat16" in name else 1e-6), name
            assert max(layer["errors"].values()) <= layer["limit"], name


FUSED = {"gradient_accumulation_fusion": True}


def fused_main_grad(group, start, dtype):
    """gradient_accumulation_fusion: main_grad keeps its bits, and the added gradient is checked."""
    install()
    results = []
    for hooks, kind in itertools.product((False, True), ("ColumnParallelLinear", "RowParallelLinear")):

        def prepare(layer, hooks=hooks):
            layer.weight.main_grad = torch.full(layer.weight.shape, start)
            if hooks:
                layer.weight.grad_added_to_main_grad = False

        shape = (128, 2, 96 if kind == "ColumnParallelLinear" else 48)
        options = {"config": {**FUSED, "params_dtype": dtype}}
        different, found = with_and_without(group, kind, shape, options, {}, prepare=prepare, dtype=dtype)
        # The dummy that DDP's hooks get is uninitialised memory.
        results.append(([name for name in different if name != "weight" or not hooks], found.as_dict()))
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0.0, 1e5])
def test_gradients_added_to_main_grad_are_verified(ranks, start, dtype):
    """A main_grad of 1e5 rounds the added gradient by more than the limit; this is no error of the layer."""
    for results in ranks(2).run(fused_main_grad, start, dtype):
        for different, found in results:
            assert different == []
            assert found["passed"] and found["notes"] == []
            assert set(found["layers"][0]["errors"]) == {"output", "input gradient", "weight gradient"}


def wrong_main_grad(group):
    install()
    with verifying(group) as layers:
        layer = layers.make("RowParallelLinear", (96, 96), config=FUSED)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        run(layer, (128, 2, 48))
        Extension.wrong = 1.001 if group.rank() == 1 else 1.0
        with pytest.raises(ascend_parallel.VerificationError) as raised:
            run(layer, (128, 2, 48))
        Extension.wrong = 1.0
        return str(raised.value)


def test_a_wrong_addition_to_main_grad_is_caught(ranks):
    first, second = ranks(2).run(wrong_main_grad)
    assert first == second
    assert "the weight gradient of call 2 is wrong on rank 1" in first
    assert "its error is 1.00e-03 of the largest magnitude" in first


def deferred(group):
    """defer_embedding_wgrad_compute: buffers are unchanged, and a note says that the gradient is not checked."""
    install()
    with verifying(group) as layers, logged() as said:
        activations, gradients = [], []
        layer = layers.make(
            "ColumnParallelLinear",
            (64, 96),
            config=FUSED,
            bias=False,
            embedding_activation_buffer=activations,
            grad_output_buffer=gradients,
        )
        layer.config.defer_embedding_wgrad_compute, layer.config.wgrad_deferral_limit = True, 1
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        for seed in range(2):
            run(layer, (128, 2, 64), seed=seed)
        torch.manual_seed(0)
        untouched = torch.equal(activations[0], torch.randn(128, 2, 64))
        found = ascend_parallel.verification().as_dict()
        return (len(activations), len(gradients), untouched), found, said


def test_a_deferred_weight_gradient_is_said_once_and_checked_beyond_the_limit(ranks):
    for rank, (buffers, found, said) in enumerate(ranks(2).run(deferred)):
        assert buffers == (1, 1, True)
        (note,) = found["notes"]
        assert "the weight gradient is deferred (defer_embedding_wgrad_compute) and is not checked" in note
        assert sum("is deferred" in line for line in said) == (1 if rank == 0 else 0)
        assert "weight gradient" in found["layers"][0]["errors"]  # the second call's, beyond the limit of one


def special_calls(group):
    """Frozen weights, inputs without gradient, autocast, no gradients: every existing quantity is checked."""

    def frozen(layer, x):
        layer.weight.requires_grad_(False)
        return layer(x)

    def frozen_input(layer, x):
        return layer(x.detach())

    def given_weight(layer, x):
        torch.manual_seed(7)
        layer.given = torch.nn.Parameter(torch.randn(layer.weight.shape))
        return layer(x, weight=layer.given)

    def in_autocast(layer, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    def no_grad(layer, x):
        with torch.no_grad():
            return layer(x)

    def inference(layer, x):
        with torch.inference_mode():
            return layer(x)

    results = {}
    for sequence_parallel, kind in itertools.product((False, True), ("ColumnParallelLinear", "RowParallelLinear")):
        shape = (64 if sequence_parallel else 128, 2, 96) if kind[0] == "C" else (128, 2, 48)
        options = {"config": {"sequence_parallel": sequence_parallel}}
        calls = [frozen, frozen_input, in_autocast, no_grad, inference] + [given_weight] * (kind[0] == "C")
        for call in calls:
            different, found = with_and_without(
                group, kind, shape, options, {}, call=call, backward=call not in (no_grad, inference)
            )
            layer = found.layers[0]
            results[call.__name__, kind, sequence_parallel] = different, found.notes, sorted(layer.errors), layer.limit
    with verifying(group) as layers:  # int8 weights: the original reads them dequantised
        layer = ascend_parallel.quantise_row_parallel(layers.make("RowParallelLinear", (96, 96)), "channel")
        x = torch.randn(128, 2, 48, requires_grad=True)
        layer(x)[0].sum().backward()
        results["int8"] = ascend_parallel.verification().layers[0].errors
    return results


@pytest.mark.slow
def test_what_special_calls_have_is_verified(ranks):
    for results in ranks(2).run(special_calls):
        int8 = results.pop("int8")
        assert set(int8) == {"output", "input gradient"} and max(int8.values()) <= 1e-6
        for (call, kind, sequence_parallel), (different, notes, errors, limit) in results.items():
            case = call, kind, sequence_parallel
            assert (different, notes) == ([], []), case
            gradients = {
                "frozen": ["input gradient"],
                "frozen_input": ["weight gradient"],
                "no_grad": [],
                "inference": [],
            }
            wanted = gradients.get(call, ["input gradient", "weight gradient"])
            assert errors == sorted(["output", *wanted]), case
            assert limit == (2e-2 if call == "in_autocast" else 1e-6), case


def recomputed(group, kind):
    """Both kinds of recompute: every N-th call with gradients is checked, forward and backward."""
    from megatron.core import tensor_parallel
    from torch.utils.checkpoint import checkpoint

    from ascend_parallel.diagnostics.verify import LEDGER

    def run_once(layer, x):
        if kind == "megatron":
            return tensor_parallel.checkpoint(lambda x: layer(x)[0], False, x)
        return checkpoint(lambda x: layer(x)[0].tanh(), x, use_reentrant=False)

    found, gradients = {}, []
    with verifying(group) as layers:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for every in (0, 1, 2, 3):
            ascend_parallel.configure(num_chunks=4, verify_every=every)
            LEDGER.clear()
            layer = layers.make("RowParallelLinear", (96, 96))
            torch.manual_seed(group.rank())
            for _ in range(6):
                x = torch.randn(128, 2, 48, requires_grad=True)
                run_once(layer, x).square().sum().backward()
            gradients.append((layer.weight.grad, x.grad))
            checked = ascend_parallel.verification().layers
            found[every] = (checked[0].forwards, checked[0].backwards) if checked else None
    return found, all(same(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.slow
def test_recomputed_layers_are_verified(ranks):
    """Megatron's first pass has no gradients and is counted apart; torch's has, and its second may stop early."""
    for found, equal in ranks(2).run(recomputed, "megatron"):
        assert equal
        assert found == {0: None, 1: (12, 6), 2: (6, 3), 3: (4, 2)}
    for found, equal in ranks(2).run(recomputed, "torch"):
        assert equal
        assert found[0] is None
        for every in (1, 2, 3):
            assert found[every][1] >= 6 // every, found


@on_ranks(2)
def test_nothing_is_left_behind(group):
    """Random states, Megatron's tracker and buffer, and hooks: everything that a reference could change."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel import layers as module

    with verifying(group) as layers:
        model_parallel_cuda_manual_seed(5)
        layer = layers.make("ColumnParallelLinear", config={"sequence_parallel": True})
        fired = []
        layer.register_forward_hook(lambda *_: fired.append("forward"))
        layer.weight.register_hook(lambda _: fired.append("weight"))
        buffer = parallel_state.get_global_memory_buffer()
        sentinel = buffer.get_tensor((64 * group.size(), 2, 96), torch.float32, "mpu").fill_(3.0)
        states = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
        x = torch.randn(64, 2, 96, requires_grad=True)
        before = torch.get_rng_state()
        original, drawn = module.get_global_memory_buffer, []

        def drawing():  # Megatron-core's own forward and backward ask for the buffer, a patched layer does not
            drawn.append(torch.rand(3))
            return original()

        module.get_global_memory_buffer = drawing
        y = layer(x)[0]
        y.sum().backward()
        module.get_global_memory_buffer = original
        after = get_cuda_rng_tracker().get_states()
        kept = {
            "drawn": len(drawn) > 0 and torch.equal(before, torch.get_rng_state()),
            "tracker": all(torch.equal(state, after[name]) for name, state in states.items()),
            "buffer": parallel_state.get_global_memory_buffer() is buffer and bool((sentinel == 3).all()),
            "hooks": fired == ["forward", "weight"],
            "config": layer.gradient_accumulation_fusion is layer.config.gradient_accumulation_fusion is False,
            "attributes": not [name for name in vars(layer) if "verif" in name or "watch" in name],
            "checked": ascend_parallel.verification().layers[0].backwards == 1,
        }
    assert all(kept.values()), kept


@on_ranks(2)
def test_a_second_backward_of_one_graph(group):
    """A retained graph: only the first backward is checked."""
    with verifying(group) as layers:
        layer = layers.make("RowParallelLinear")
        x = torch.randn(64, 48, requires_grad=True)
        loss = layer(x)[0].sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
        assert torch.equal(x.grad, 2 * first)
        assert ascend_parallel.verification().layers[0].backwards == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(2)
def test_numbers_that_are_not_finite(group, value):
    """Non-finite reference values are not compared, with a note; non-finite values in the patched layer alone raise."""
    from ascend_parallel.ops.pending import Pending
    from ascend_parallel.overlap import linear

    def spoil(found):
        if found is not None:
            (found.wait() if isinstance(found, Pending) else found)[5, 3] = value
        return found

    with verifying(group) as layers:
        layer = layers.make("RowParallelLinear", bias=False)
        x = torch.randn(64, 48)
        x[7] = value
        layer(x)
        found = ascend_parallel.verification()
        with (
            planted(linear, "run_all_reduce", spoil),  # a loop in C++
            planted(linear, "start_matmul_all_reduce", spoil),
            pytest.raises(ascend_parallel.VerificationError) as error,
        ):
            layer(torch.randn(64, 48))
        notes, passed, message = found.notes, found.passed, str(error.value)
        assert passed and "where the original's output is not finite it is not compared" in notes[0]
        assert "worst at [5, 3]" in message
