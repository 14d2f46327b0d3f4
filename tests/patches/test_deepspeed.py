"""DeepSpeed AutoTP: losses and gradients, overlapped, plain, and of the whole model in float64; beside ZeRO."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backends import as_backend
from planted_clocks import auto_cuts_in_two
from planted_steps import DEVICE_BOUND, MOST_STEPS, Clock, PlantedMark
from pool import on_ranks

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.unfinished import is_unfinished
from ascend_parallel.tuning.measured import step_contest
from ascend_parallel.tuning.measured.step_contest import ALONE, WHOLE

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make compat-deepspeed")
pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import checked, count_of, launched_by, model_of, tokens, worst
from logged import logged


def engine_of(group, name, stage=0, dtype=torch.float32, **tensor_parallel):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": group.size(), **tensor_parallel},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    with launched_by(group):
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine, *_ = deepspeed.initialize(model=model_of(name).to(dtype), config=config)
    return engine


def steps(engine, count=2):
    """Return losses and gradients of some training steps."""
    with launched_by(dist.group.WORLD):  # ZeRO 3 reads LOCAL_RANK at every step
        return _steps(engine, count)


def _steps(engine, count):
    from deepspeed.utils import safe_get_full_grad

    found = {}
    for number in range(count):
        ids = tokens(number)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        found[f"loss {number}"] = loss.detach()
        for name, parameter in engine.module.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else safe_get_full_grad(parameter)
            if gradient is not None:
                found[f"{name} {number}"] = gradient.detach().clone()
        engine.step()
    return found


REGION = {"region": True, "region_rows": 4}


# ZeRO 3 puts a function of its own there for good, which would keep products of later tests from torch's.
@mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear)
def trained(group, name, stage, dtype, settings):
    """Return the names that differ from plain, the worst error against the whole model, and the overlapped calls."""
    ascend_parallel.configure(num_chunks=1)
    plain = steps(engine_of(group, name, stage, dtype))
    before = count_of("matmul_all_reduce")
    COUNTS.restore({name: count for name, count in COUNTS.as_dict().items() if not name.startswith("region")})
    ascend_parallel.configure(num_chunks=4, **settings)
    overlapped = steps(engine_of(group, name, stage, dtype))
    ascend_parallel.configure(num_chunks=1)
    calls = count_of("matmul_all_reduce") - before
    assert count_of("region") == (8 if settings else 0)  # o_proj and down_proj of two layers in two steps
    assert plain.keys() == overlapped.keys()
    assert len(plain) > 40
    different = [key for key in plain if not torch.equal(plain[key], overlapped[key])]
    return different, worst(*with_truth(group, overlapped, name)) if stage == 0 else None, calls


def with_truth(group, found, name):
    """Return the first step's results and, cut alike, those of the whole model in float64."""
    whole, ids = model_of(name).double(), tokens(0)
    loss = whole(input_ids=ids, labels=ids).loss
    loss.backward()
    expected = {"loss 0": loss.detach()}
    for key, parameter in whole.named_parameters():
        here = found.get(f"{key} 0")
        if here is None:
            continue
        right = parameter.grad
        for dim, (own, size) in enumerate(zip(here.shape, right.shape, strict=True)):
            if own != size:
                right = right.chunk(group.size(), dim)[group.rank()]
        expected[f"{key} 0"] = right
    return {key: found[key] for key in expected}, expected


@pytest.mark.parametrize("settings", [{}, REGION], ids=["layers", "regions"])
@pytest.mark.parametrize(("name", "count"), [("Llama", 2), ("Qwen2", 2), ("GPTNeoX", 2), ("Llama", 3), ("Qwen2", 4)])
def test_losses_and_gradients(ranks, name, count, settings):
    for different, (error, where), calls in ranks(count).run(trained, name, 0, torch.float32, settings):
        if count == 2:
            assert different == []
        assert error < 2e-5, where
        assert calls == ((4 if name == "GPTNeoX" else 7) * 2 + 1) * 2


@pytest.mark.parametrize("settings", [{}, REGION], ids=["layers", "regions"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_beside_zero(ranks, stage, settings):
    for different, _, calls in ranks(2).run(trained, "Qwen2", stage, torch.bfloat16, settings):
        assert different == []
        assert calls == (7 * 2 + 1) * 2


def conflicting(group):
    ascend_parallel.configure(num_chunks=4)
    engine = engine_of(group, "Llama", tp_overlap_comm=True)
    try:
        steps(engine, 1)
        return ""
    except ascend_parallel.ConflictError as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1)
        from deepspeed.module_inject.layers import TensorParallel_Layer

        TensorParallel_Layer.tp_overlap_comm = False


def test_deepspeeds_own_overlap_is_a_conflict(ranks):
    for error in ranks(2).run(conflicting):
        assert "tp_overlap_comm=true (DeepSpeed's own overlap" in error


def swapped(group):
    """Train with layers whose class adds an adapter; return the names that differ from plain, and the coverage."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    def forward(self, x):
        return super(type(self), self).forward(x) + torch.nn.functional.linear(x, self.adapter[0]) @ self.adapter[1].t()

    classes = {
        base: type(f"LoRA{base.__name__}", (base,), {"forward": forward}) for base in (LinearLayer, LinearAllreduce)
    }
    found = []
    for chunks in (1, 4):
        ascend_parallel.configure(num_chunks=chunks)
        engine = engine_of(group, "Llama")
        torch.manual_seed(0)
        for layer in engine.module.model.layers.modules():
            if type(layer) in classes:
                out, into = layer.weight.shape
                layer.adapter = [torch.randn(8, into) / into, torch.randn(out, 8)]
                layer.__class__ = classes[type(layer)]
        before = count_of("matmul_all_reduce")
        found.append(steps(engine, 1))
    covered = str(ascend_parallel.coverage(engine.module))
    ascend_parallel.configure(num_chunks=1)
    different = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    return different, covered, count_of("matmul_all_reduce") - before


def test_a_class_swap_is_overlapped_below_it(ranks):
    for different, covered, calls in ranks(2).run(swapped):
        assert different == []
        assert covered.startswith("15 of 15")
        assert calls == 7 * 2 + 1


class AdaptedLinear(torch.nn.Module):
    """A wrapper with an adapter, of which the part beside the layer's collective is DeepSpeed's, as the layer is."""

    def __init__(self, layer, group):
        super().__init__()
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

        self.base_layer, row = layer, isinstance(layer, LinearAllreduce)
        out, into = layer.weight.shape
        wide = torch.nn.Linear(into * group.size(), 8, bias=False) if row else torch.nn.Linear(into, 8, bias=False)
        back = torch.nn.Linear(8, out if row else out * group.size(), bias=False)
        self.a = LinearAllreduce(wide, layer.mp_group) if row else wide
        self.b = back if row else LinearLayer(back, layer.mp_group)

    def forward(self, x):
        y = self.base_layer(x)
        self.on_their_way = is_unfinished(y)
        return y + self.b(self.a(x))


def wrapped(group):
    """Train in regions with wrappers; return the names that differ from plain, the coverage, and who did not wait."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    found = []
    for settings in ({"num_chunks": 1}, {"num_chunks": 4, **REGION}):
        ascend_parallel.configure(**settings)
        engine = engine_of(group, "Llama")
        torch.manual_seed(0)
        wrappers = {}
        for path, parent in [*engine.module.model.layers.named_modules()]:
            for name, layer in [*parent.named_children()]:
                if isinstance(layer, (LinearLayer, LinearAllreduce)):
                    wrappers[f"{path}.{name}"] = AdaptedLinear(layer, group)
                    setattr(parent, name, wrappers[f"{path}.{name}"])
        found.append(steps(engine, 1))
    covered = str(ascend_parallel.coverage(engine.module))
    ascend_parallel.configure(num_chunks=1)
    waiting = {name.rpartition(".")[2] for name, wrapper in wrappers.items() if wrapper.on_their_way}
    different = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    return different, len(found[0]), covered, waiting


def test_an_adapter_in_a_wrapper_runs_under_the_rows_of_its_base(ranks):
    for different, count, covered, waiting in ranks(2).run(wrapped):
        assert different == []
        assert count > 40
        assert covered.startswith("29 of 29 linear layers covered; 14 replicated adapters communicate nothing")
        assert {"o_proj", "down_proj"} <= waiting


def compiled(group):
    """Train with compiled blocks; return the names that differ from plain, the coverage, what is logged, the calls."""
    found, calls = [], 0
    for chunks in (1, 4):
        ascend_parallel.configure(num_chunks=chunks)
        torch._dynamo.reset()
        engine = engine_of(group, "Llama")
        for block in engine.module.model.layers:
            block.compile(backend="eager")
        before, known = count_of("matmul_all_reduce"), str(ascend_parallel.coverage(engine.module))
        with logged() as lines:
            found.append(steps(engine))
        calls = count_of("matmul_all_reduce") - before
    covered = str(ascend_parallel.coverage(engine.module))
    ascend_parallel.configure(num_chunks=1)
    assert covered == known
    different = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
    return (
        different,
        covered,
        [line.split()[0] for line in lines if line.endswith("compiled: the original runs")],
        calls,
    )


def test_compiled_blocks_run_the_originals_and_are_not_counted(ranks):
    for rank, (different, covered, said, calls) in enumerate(ranks(2).run(compiled)):
        assert different == []
        assert covered.startswith("1 of 15 linear layers covered (")
        assert "10 LinearLayer: compiled: the original runs" in covered
        assert "4 LinearAllreduce: compiled: the original runs" in covered
        assert sorted(said) == (["LinearAllreduce", "LinearLayer"] if rank == 0 else [])
        assert calls == 2  # the output layer, in two steps


@on_ranks(2)
def test_coverage_names_what_is_left(group):
    ascend_parallel.configure(num_chunks=4)
    engine = engine_of(group, "Llama")
    from deepspeed.module_inject.layers import conv_LinearLayer

    layer = engine.module.model.layers[0]
    layer.self_attn.q_proj.__class__ = conv_LinearLayer
    layer.self_attn.k_proj.__class__ = type("Own", (type(layer.self_attn.k_proj),), {})
    layer.mlp.up_proj._partition_sizes = (575, 577)
    text = str(ascend_parallel.coverage(engine.module))
    ascend_parallel.configure(num_chunks=1)
    own = "1 conv_LinearLayer: how DeepSpeed's conv_LinearLayer shares its features among ranks is not known here"
    assert own in text
    assert "1 LinearLayer: its features are shared unevenly among ranks: [575, 577]" in text
    assert text.startswith("13 of 15")  # the vocabulary's layer, which gathers its output, too


@on_ranks(2)
def test_verification_finds_a_planted_fault(group):
    from ascend_parallel.patches import linear_call

    def wrong(right):
        return lambda *args, **kwargs: right(*args, **kwargs) + 1e-3 * group.rank()

    ascend_parallel.configure(num_chunks=4)
    _, error = checked(engine_of(group, "Qwen2"), lambda engine: steps(engine, 1), linear_call, "run_column", wrong)
    assert "is wrong on rank 1" in error


def in_turn(group):
    """Train plain and under auto as on NPUs; return the steps that differ, their ways, and whether it is decided."""
    ascend_parallel.configure(num_chunks=1)
    engine = engine_of(group, "Llama")
    plain = [steps(engine, 1) for _ in range(MOST_STEPS)]
    unlike, ways, Clock.now = [], [], 0.0
    with as_backend("hccl", group), auto_cuts_in_two(), mock.patch.object(step_contest, "Mark", PlantedMark):
        ascend_parallel.configure(auto=True)
        engine = engine_of(group, "Llama")
        row = next(each for each in engine.module.modules() if type(each).__name__ == "LinearAllreduce")
        decider = type(row).forward.ascend_parallel.decider
        for number, expected in enumerate(plain):
            found = steps(engine, 1)
            unlike += [(number, key) for key in expected if not torch.equal(found[key], expected[key])]
            ways.append(decider.groups[row.mp_group].way)
            Clock.now += DEVICE_BOUND[ways[-1]]
    undecided = decider.undecided
    ascend_parallel.configure(num_chunks=1)
    return unlike, ways, undecided


def test_whole_steps_run_in_turn_and_the_fastest_way_stays(ranks):
    found = ranks(2).run(in_turn)
    for unlike, ways, undecided in found:
        assert not unlike and not undecided
        assert ways == found[0][1]
        assert set(ways) == {ALONE, WHOLE, 2, 4} and ways[-1] == 4
