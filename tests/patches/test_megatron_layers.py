"""Megatron-core's real layers, patched and unpatched, bit for bit in fp32 on 2 ranks."""

import contextlib
import itertools
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fused_gradients import install
from layers import Layers, same
from logged import logged
from loops import PYTHON, REASON, loop_of
from marks import promise
from pool import on_ranks

import ascend_parallel

KERNELS = pytest.mark.parametrize(
    "settings",
    [
        {"num_chunks": 4},
        {"fused": True, "enable_coc_in_column_backward": True},
        {"num_chunks": 3, "deterministic": True},
    ],
    ids=["chunked", "fused", "deterministic"],
)


def every_option(group, settings):
    """Return the differences for every option of both layers, by option; the counts show that overlap ran."""
    found = {}
    with Layers(group.size(), settings) as layers:
        for sequence_parallel, skip, bias in itertools.product((False, True), repeat=3):
            options = {"config": {"sequence_parallel": sequence_parallel}, "skip_bias_add": skip, "bias": bias}
            rows = (128, 2) if not sequence_parallel else (64, 2)
            name = f"sequence_parallel={sequence_parallel} skip_bias_add={skip} bias={bias}"
            found["column " + name] = layers.compare("ColumnParallelLinear", (*rows, 64), **options)
            found["row " + name] = layers.compare("RowParallelLinear", (128, 2, 32), **options)
        for gather in (True, False):
            found[f"gather_output={gather}"] = layers.compare(
                "ColumnParallelLinear", (128, 2, 64), gather_output=gather
            )
            found[f"runtime_gather_output={gather}"] = layers.compare(
                "ColumnParallelLinear",
                (128, 2, 64),
                gather_output=not gather,
                forward=lambda layer, x, gather=gather: layer(x, runtime_gather_output=gather),
            )
        found["input_is_parallel=False"] = layers.compare("RowParallelLinear", (128, 2, 64), input_is_parallel=False)
        found["square"] = layers.compare("ColumnParallelLinear", (128, 2, 64), sizes=(64, 128))
        found["two dimensions"] = layers.compare("RowParallelLinear", (256, 32))
        found["keep the gathered input"] = layers.compare(
            "ColumnParallelLinear",
            (64, 2, 64),
            settings={"recompute_all_gather": False},
            config={"sequence_parallel": True},
        )
        found["compute first"] = layers.compare(
            "ColumnParallelLinear", (64, 2, 64), settings={"order": "compute_first"}, config={"sequence_parallel": True}
        )
        found["gather_output with sequence_parallel"] = (
            layers.compare("ColumnParallelLinear", (64, 2, 64), gather_output=True, config={"sequence_parallel": True})
            if hasattr(layers.make("ColumnParallelLinear"), "tp_group")
            else ([], {})
        )
    return found


@pytest.mark.sample(2)
@KERNELS
def test_every_option_has_megatrons_bits(ranks, settings):
    for found in ranks(2).run(every_option, settings):
        assert {name: different for name, (different, _) in found.items() if different} == {}
        uncounted = [name for name, (_, counts) in found.items() if not counts]
        assert uncounted in ([], ["gather_output with sequence_parallel"])


def frozen(layer, x):
    layer.weight.requires_grad_(False)
    if layer.bias is not None:
        layer.bias.requires_grad_(False)
    return layer(x)


def frozen_input(layer, x):
    return layer(x.detach())


def given_weight(layer, x):
    torch.manual_seed(7)
    layer.given = torch.nn.Parameter(torch.randn(48, 64))
    return layer(x, weight=layer.given)


def in_autocast(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def special_calls(group, settings):
    found = {}
    with Layers(group.size(), settings) as layers:
        for sequence_parallel in (False, True):
            options = {"config": {"sequence_parallel": sequence_parallel}}
            rows = (64, 2) if sequence_parallel else (128, 2)
            for forward in (frozen, frozen_input, given_weight):
                allocates = {"skip_weight_param_allocation": True} if forward is given_weight else {}
                name = f"column {forward.__name__} sequence_parallel={sequence_parallel}"
                found[name] = layers.compare(
                    "ColumnParallelLinear", (*rows, 64), forward=forward, **options, **allocates
                )
            for forward in (frozen, frozen_input):
                name = f"row {forward.__name__} sequence_parallel={sequence_parallel}"
                found[name] = layers.compare("RowParallelLinear", (128, 2, 32), forward=forward, **options)
        found["disable_grad_reduce"] = layers.compare("ColumnParallelLinear", (128, 2, 64), disable_grad_reduce=True)
    return found


@KERNELS
def test_frozen_weights_frozen_inputs_and_a_given_weight(ranks, settings):
    for found in ranks(2).run(special_calls, settings):
        assert {name: different for name, (different, _) in found.items() if different} == {}


def fusion(group, hooks, zero_out):
    """gradient_accumulation_fusion with main_grad, with and without DDP's flag."""
    install()
    results = []
    with Layers(group.size(), gradient_accumulation_fusion=True) as layers:
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            for kind, shape in (("ColumnParallelLinear", (128, 2, 64)), ("RowParallelLinear", (128, 2, 32))):
                layer = layers.make(kind, (64, 96))
                layer.weight.main_grad = torch.ones_like(layer.weight)
                if hooks:
                    layer.weight.grad_added_to_main_grad = False
                    layer.weight.zero_out_wgrad = zero_out
                fired = []
                layer.weight.register_hook(lambda grad, fired=fired: fired.append(grad is not None))
                torch.manual_seed(5)
                x = torch.randn(shape, requires_grad=True)
                layer(x)[0].square().sum().backward()
                zeros = bool(layer.weight.grad is not None and (layer.weight.grad == 0).all())
                flag = getattr(layer.weight, "grad_added_to_main_grad", None)
                results.append((layer.weight.main_grad, flag, fired, layer.weight.grad is None, zeros or not zero_out))
    half = len(results) // 2
    for plain, patched in zip(results[:half], results[half:], strict=True):
        assert torch.equal(plain[0], patched[0])
        assert plain[1:] == patched[1:], (plain[1:], patched[1:])
    return results[-1][1], any(results[-1][2])


@pytest.mark.parametrize(("hooks", "zero_out"), [(False, False), (True, False), (True, True)])
def test_gradient_accumulation_fusion(ranks, hooks, zero_out):
    flag, fired = ranks(2).run(fusion, hooks, zero_out)[0]
    assert (flag, fired) == ((True, True) if hooks else (None, False))


def deferred(group):
    """defer_embedding_wgrad_compute: activations and gradients are kept up to the limit."""
    install()
    outcomes = []
    with Layers(group.size(), gradient_accumulation_fusion=True) as layers:
        for chunks, limit in itertools.product((1, 4), (0, 1)):
            ascend_parallel.configure(num_chunks=chunks)
            activations, gradients = [], []
            layer = layers.make(
                "ColumnParallelLinear",
                (64, 96),
                embedding_activation_buffer=activations,
                grad_output_buffer=gradients,
                bias=False,
            )
            layer.config.defer_embedding_wgrad_compute, layer.config.wgrad_deferral_limit = True, limit
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
            torch.manual_seed(5)
            for _ in range(2):
                layer(torch.randn(128, 2, 64, requires_grad=True))[0].square().sum().backward()
            outcomes.append(
                (limit, activations, gradients, layer.weight.main_grad, layer.weight.grad_added_to_main_grad)
            )
    for plain, patched in zip(outcomes[:2], outcomes[2:], strict=True):
        for name in (1, 2):
            assert len(plain[name]) == len(patched[name])
            assert all(map(torch.equal, plain[name], patched[name]))
        assert torch.equal(plain[3], patched[3])
        assert plain[4] == patched[4]
    return [len(outcome[2]) for outcome in outcomes]


def test_deferred_embedding_weight_gradient(ranks):
    assert ranks(2).run(deferred)[0] == [2, 1, 2, 1]


@on_ranks(2)
def test_autocast_as_megatron(group):
    """Forward equals Megatron's. Megatron's row layer fails in backward under CPU autocast; the patched layer runs."""
    results = []
    with Layers(group.size()) as layers:
        for kind, shape, bias in itertools.product(("Column", "Row"), [(128, 2)], (False, True)):
            outputs = []
            for chunks in (1, 4):
                ascend_parallel.configure(num_chunks=chunks)
                layer = layers.make(kind + "ParallelLinear", (64, 96), bias=bias)
                torch.manual_seed(5)
                x = torch.randn(*shape, 64 if kind == "Column" else 32, requires_grad=True)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs.append(layer(x)[0])
            outputs[1].float().square().sum().backward()
            results.append(same(*outputs) and x.grad.dtype == layer.weight.grad.dtype == torch.float32)
    assert results == [True] * 4


def uncovered(group):
    """A call that is not covered runs the original forward, and the reason is logged once."""
    with Layers(group.size()) as layers, logged() as lines:
        ascend_parallel.configure(num_chunks=4)
        ascend_parallel.ops.COUNTS.clear()
        expert = layers.make("RowParallelLinear", (64, 96), is_expert=True, skip_bias_add=True)
        expert.explicit_expert_comm = True
        for _ in range(2):
            expert(torch.randn(64, 2, 32))
        offloading = layers.make("ColumnParallelLinear", (64, 96))
        offloading.config._cpu_offloading_context = types.SimpleNamespace(inside_context=True)
        offloading.config.cpu_offloading = True
        with pytest.raises(AssertionError, match="CPU Offloading"):
            offloading(torch.randn(64, 2, 64))
        no_weight = layers.make("ColumnParallelLinear", (64, 96), skip_weight_param_allocation=True)
        for weight, message in ((None, "weight was not supplied"), (torch.randn(3, 3), "not .* as expected")):
            with pytest.raises(RuntimeError, match=message):
                no_weight(torch.randn(64, 2, 64), weight=weight)
        return {"counts": ascend_parallel.ops.COUNTS.as_dict(), "lines": lines}


@promise("uncovered-original")
def test_what_is_not_covered_goes_to_the_original(ranks):
    first, second = ranks(2).run(uncovered)
    assert first["counts"] == {}
    assert [line.split(": ")[1] for line in first["lines"]] == [
        "expert layers communicate outside the layer",
        "CPU offloading of activations is active",
        "there is no weight of the layer's shape",
    ]
    assert second["lines"] == []


@on_ranks(2)
def test_conflicting_features_are_refused_by_name(group):
    import sys

    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        for name in ("tp_comm_overlap", "use_ascend_mc2", "optimize_recomp_communication_level"):
            layer = layers.make("ColumnParallelLinear")
            setattr(layer.config, name, 2)
            with pytest.raises(ascend_parallel.ConflictError, match=f"config {name}=2 .*cannot be used together"):
                layer(torch.randn(128, 96))
        program = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(tp_2d=True))
        sys.modules["megatron.training.global_vars"] = program
        try:
            with pytest.raises(ascend_parallel.ConflictError, match="argument tp_2d=True"):
                layers.make("RowParallelLinear")(torch.randn(128, 96 // group.size()))
        finally:
            del sys.modules["megatron.training.global_vars"]


@on_ranks(2)
def test_state_dict_and_deepcopy_as_unpatched(group):
    """state_dict, deepcopy and pickling as unpatched: the patch adds nothing to the layers."""
    import copy

    outcomes = []
    with Layers(group.size()) as layers:
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            layer = layers.make("ColumnParallelLinear", (64, 96))
            layer(torch.randn(128, 64))
            state = layer.state_dict()
            try:
                copied = copy.deepcopy(layer)
            except (TypeError, RuntimeError) as error:
                copied = type(error)
            layer.load_state_dict(state)
            outcomes.append((sorted(state), sorted(vars(layer)), copied if isinstance(copied, type) else "copied"))
    plain, patched = outcomes
    assert plain == patched


def covered(group):
    class TELinear(torch.nn.Linear):
        """Stands for a TransformerEngine layer, which derives from no layer of Megatron."""

    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        column, row = layers.make("ColumnParallelLinear"), layers.make("RowParallelLinear")
        both = torch.nn.ModuleList([column, row, torch.nn.Linear(4, 4), TELinear(4, 4)])
        te_only = torch.nn.ModuleList([TELinear(4, 4)])
        found = [str(ascend_parallel.coverage(module)) for module in (both, te_only)]
        ascend_parallel.configure(num_chunks=1)
        return [*found, str(ascend_parallel.coverage(column))]


def test_coverage_is_said(ranks):
    both, te_only, off = ranks(2).run(covered)[0]
    assert both.startswith("2 of 4 linear layers covered (1 of torch Linear")
    assert te_only.startswith("0 of 1 linear layers covered (1 TransformerEngine's TELinear")
    why = "not patched, overlap is off: COC_PARALLEL_NUM=4 or auto switches it on"
    assert off == f"0 of 1 linear layers covered (1 ColumnParallelLinear: {why})"


def frames_below(module, *names):
    """Run a row and a column layer; return the names of the frames from the layer's forward to each function."""
    steps = {}

    def stepped(name, original):
        def run(*args, **kwargs):
            frame, frames = sys._getframe(1), [name]
            while frames.count("forward") < 2:  # of the autograd function, then of Megatron-core's layer
                frames.append(frame.f_code.co_name)
                frame = frame.f_back
            steps.setdefault(name, []).append(frames[::-1])
            return original(*args, **kwargs)

        return mock.patch.object(module, name, run)

    with Layers(dist.get_world_size()) as layers, contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(stepped(name, getattr(module, name)))
        ascend_parallel.configure(num_chunks=4)
        layers.make("RowParallelLinear")(torch.randn(64, 2, 48))
        layers.make("ColumnParallelLinear", config={"sequence_parallel": True})(torch.randn(64, 2, 96))
    return steps


OF_LAYERS = [
    ["forward", "run_linear", "run_covered", "_run", f"run_{kind}", "apply", "forward", f"{kind}_forward"]
    for kind in ("row", "column")
]


@on_ranks(2)
def test_nothing_stands_between_a_layer_and_its_kernel(_group):
    """Ten frames, `apply` is torch's: no wrapper and no closure in which a reader loses the input."""
    from ascend_parallel.ops import chunked, loop_operators

    with loop_of(PYTHON):
        steps = frames_below(chunked, "matmul_all_reduce", "all_gather_matmul")
    row, column = OF_LAYERS
    assert steps == {
        "matmul_all_reduce": [[*row, "start_matmul_all_reduce", "matmul_all_reduce"]],
        "all_gather_matmul": [[*column, "run_all_gather_matmul", "all_gather_matmul"]],
    }
    if not REASON:  # the loop in C++ is called by the last frame
        steps = frames_below(loop_operators, "run_in_loops")
        assert steps == {
            "run_in_loops": [[*row, "run_all_reduce", "run_in_loops"], [*column, "run_all_gather", "run_in_loops"]]
        }
