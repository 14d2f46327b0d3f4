"""Context parallelism beside what users run: data parallelism, accumulation, recompute, habits of one rank alone."""

import contextlib
import functools
import importlib.metadata
import time
from dataclasses import dataclass
from unittest import mock

import hugging_face
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hugging_face import load, model_of, write
from marks import promise
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.exchanged_attention import exchanged_attention
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(
    version_tuple(importlib.metadata.version("transformers")) < (5, 18),
    reason="older versions were not tried",
)

VOCABULARY, LENGTH, SHARING = 96, 64, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """How two replicas of two ranks train, which share sequences.

    wrapper: torch's DistributedDataParallel; or FSDP2 over all ranks ("fsdp"), or over those that share ("hsdp").
    reentrant: the kind of recompute; None: none.
    documents: lengths of packed documents. padded: how many tokens of each sequence are padding.
    """

    wrapper: str = "ddp"
    micro_batches: int = 1
    exchange: str | None = None
    reentrant: bool | None = None
    documents: tuple[int, ...] = ()
    padded: int = 0


def built(dtype=torch.float32):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    return model_of("Llama", **shape, vocab_size=VOCABULARY, use_cache=False).to(dtype).train()


def batch_of(case, replica, number):
    """Return a micro-batch of a replica, whole."""
    generator = torch.Generator().manual_seed(11 + 10 * replica + number)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.documents:
        batch["position_ids"] = torch.cat([torch.arange(length) for length in case.documents]).expand(2, -1)
    if case.padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -case.padded :] = 0
        batch["labels"][:, -case.padded :] = -100
    return batch


def truth_of(case, replicas):
    """Return the weight gradients of one rank that has all batches, in float64."""
    model = built(torch.float64)
    for replica in range(replicas):
        for number in range(case.micro_batches):
            (model(**batch_of(case, replica, number)).loss / (replicas * case.micro_batches)).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def wrapped(model, case, mesh):
    if case.wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = mesh if case.wrapper == "hsdp" else init_device_mesh("cpu", (mesh.size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def synchronizing(model, last):
    """Have the wrapper reduce gradients in the last micro-batch alone."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def trained(group, case):
    """Return the worst error of a weight gradient, and the groups of heads that each exchange had."""
    from ascend_parallel.patches.transformers import context_parallel

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (group.size() // SHARING, SHARING), mesh_dim_names=("replicas", "sequence"))
    truth = truth_of(case, mesh.size(0))
    model = built()
    context = context_parallel(model, mesh["sequence"].get_group(), exchange=case.exchange)
    if case.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.reentrant})
    ascend_parallel.configure(num_chunks=2)
    COUNTS.clear()
    try:
        parallel = wrapped(model, case, mesh)
        for number in range(case.micro_batches):
            with synchronizing(parallel, number == case.micro_batches - 1):
                loss = parallel(**context.cut(**batch_of(case, mesh.get_local_rank(0), number))).loss
                (loss * context.group.size() / case.micro_batches).backward()
    finally:
        ascend_parallel.configure(num_chunks=1)
    gradients = {name: full_tensor(weight.grad) for name, weight in model.named_parameters()}
    worst = max(float((gradients[name] - truth[name]).abs().max() / truth[name].abs().max()) for name in truth)
    count = COUNTS.as_dict()["key_gather" if case.exchange == "gather" else "head_exchange"]
    return worst, count["chunks"] / count["calls"], count["calls"]


def full_tensor(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


CASES = [
    Case(micro_batches=2),
    Case(wrapper="fsdp", reentrant=False),
    Case(wrapper="fsdp", micro_batches=2, exchange="gather", documents=(30, 20, 14)),
    Case(wrapper="hsdp", micro_batches=2, padded=10),
    Case(reentrant=True, exchange="gather", padded=10),
    Case(wrapper="hsdp", reentrant=True, documents=(30, 34)),
    Case(reentrant=False, micro_batches=2, documents=(64,)),
]


@promise("context-data-parallel")
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradients_are_those_of_one_rank_with_all_batches(ranks, case):
    for worst, groups, calls in ranks(4).run(trained, case):
        assert worst < 1e-5
        assert groups == 2
        passes = 2 if case.reentrant is None else 3
        assert calls == passes * 2 * case.micro_batches


def beside_tensor_parallelism(group, path):
    """Return the worst error of a weight gradient on two by two ranks, tensor parallel and sharing sequences."""
    from ascend_parallel.patches.transformers import context_parallel

    ids = hugging_face.tokens()
    truth_model = load(group, path, torch.float64, tensor_parallel=False)
    truth_model(input_ids=ids, labels=ids).loss.backward()
    truth = {name: weight.grad for name, weight in truth_model.named_parameters()}
    model = load(group, path, tp_size=2, fsdp_size=2).train()  # transformers' FSDP averages over those that share
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tensor"))
    context = context_parallel(model, mesh["sequence"].get_group())
    COUNTS.clear()
    try:
        (model(**context.cut(ids, ids)).loss * context.group.size()).backward()
    finally:
        ascend_parallel.configure(num_chunks=1)
    gradients = {name: full_tensor(weight.grad) for name, weight in model.named_parameters()}
    worst = max(float((gradients[name] - truth[name]).abs().max() / truth[name].abs().max()) for name in truth)
    return worst, context.exchange, sorted(COUNTS.as_dict())


@promise("context-data-parallel")
def test_weight_gradients_beside_a_tensor_parallel_plan(ranks, tmp_path):
    path = write(tmp_path, "Llama", num_hidden_layers=1)
    for worst, exchange, operators in ranks(4).run(beside_tensor_parallelism, path):
        assert worst < 1e-5
        assert exchange == "heads"  # 6 heads of a tensor-parallel rank, of which each rank that shares has 3
        assert {"head_exchange", "matmul_all_reduce"} <= set(operators)


class Watching(TorchFunctionMode):
    """Sees every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooked(model):
    """Hooks that read outputs of all modules, and gradients of inputs."""
    seen = []

    def read(module, *values):
        for value in values:
            each = value[0] if isinstance(value, tuple) and value else value
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                seen.append(float(each.detach().double().norm()))

    handles = [module.register_forward_hook(read) for module in model.modules()]
    handles += [module.register_full_backward_hook(read) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()
    assert seen


@contextlib.contextmanager
def wrapped_attention(model):
    """Forwards of attention in wrappers, and torch's function of attention in another."""
    layers, calls, own = [layer.self_attn for layer in model.model.layers], [], F.scaled_dot_product_attention
    for layer in layers:
        layer.forward = functools.partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), layer.forward)
    with mock.patch.object(F, "scaled_dot_product_attention", lambda *x, **y: calls.append(1) or own(*x, **y)):
        yield
    for layer in layers:
        del layer.forward
    assert calls


@contextlib.contextmanager
def changed_by_hooks(model):
    """Hooks that write to what the projections of attention read, and put it back behind them."""
    layers, written = [layer.self_attn.o_proj for layer in model.model.layers], []

    def double(module, given):
        written.append(given[0].mul_(2))

    handles = [layer.register_forward_pre_hook(double) for layer in layers]
    handles += [layer.register_forward_hook(lambda module, given, y: y / 2) for layer in layers]
    yield
    for handle in handles:
        handle.remove()
    assert len(written) == len(layers)


HABITS = {
    "hooks": hooked,
    "hooks that write": changed_by_hooks,
    "wrappers": wrapped_attention,
    "a mode": lambda model: Watching(),
    "CommDebugMode": lambda model: CommDebugMode(),
    "save_on_cpu": lambda model: torch.autograd.graph.save_on_cpu(),
    "anomalies": lambda model: torch.autograd.detect_anomaly(check_nan=False),
}


def step_of(model, batch, habit=None):
    """Return the loss and gradients of a step, and the collectives of exchanges."""
    model.zero_grad()
    COUNTS.clear()
    with habit(model) if habit else contextlib.nullcontext():
        loss = model(**batch).loss
        loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return {"loss": loss.detach(), **found}, COUNTS.as_dict()


def with_habits(group, exchange):
    """Return, for each habit of rank 1 alone, the largest change of a result, and whether other collectives ran."""
    from ascend_parallel.patches.transformers import context_parallel

    model, found = built(), {}
    context = context_parallel(model, group, exchange=exchange)
    batch = context.cut(**batch_of(Case(), 0, 0))
    ascend_parallel.configure(num_chunks=2)
    try:
        plain, counts = step_of(model, batch)
        for name, habit in HABITS.items():
            results, again = step_of(model, batch, habit if group.rank() == 1 else None)
            error = max(float((results[each] - plain[each]).abs().max() / plain[each].abs().max()) for each in plain)
            found[name] = error, again == counts
    finally:
        ascend_parallel.configure(num_chunks=1)
    return found


@promise("one-rank-habits")
@pytest.mark.parametrize("exchange", ["heads", "gather"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_one_rank_does_changes_no_collective(ranks, exchange):
    for found in ranks(2).run(with_habits, exchange):
        assert {name: (error, same) for name, (error, same) in found.items() if error > 1e-5 or not same} == {}


class Doubled(torch.nn.Linear):
    """A projection of the program's own, which changes what it reads."""

    def forward(self, x):
        return super().forward(x * 2)


def with_lora(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    return adapted.double()


def with_doubled(model):
    for layer in model.model.layers:
        layer.self_attn.o_proj.__class__ = Doubled
    return model


def of_projections(group):
    """Return, for each kind of projection, the worst error of a gradient, and how many were multiplied beforehand."""
    from ascend_parallel.patches.transformers import context_parallel

    found = {}
    for name, make in {"Linear": lambda model: model, "LoRA": with_lora, "another class": with_doubled}.items():
        torch.manual_seed(0)
        truth, batch = make(built(torch.float64)), batch_of(Case(), 0, 0)
        truth(**batch).loss.backward()
        torch.manual_seed(0)
        model = make(built(torch.float64))
        context = context_parallel(model, group)
        ascend_parallel.configure(num_chunks=2)
        try:
            model(**context.cut(**batch)).loss.backward()
        finally:
            ascend_parallel.configure(num_chunks=1)
        worst = 0.0
        for weight, of_one_rank in zip(model.parameters(), truth.parameters(), strict=True):
            if weight.grad is not None:
                dist.all_reduce(weight.grad, group=group)
                worst = max(worst, float((weight.grad - of_one_rank.grad).abs().max() / of_one_rank.grad.abs().max()))
        found[name] = worst, len(context.projecting), sum(weight.grad is not None for weight in model.parameters())
    return found


@promise("context-projection")
def test_adapters_and_other_classes_of_the_projection_are_right(ranks):
    for found in ranks(2).run(of_projections):
        assert {name: error for name, (error, *_) in found.items() if not error < 1e-10} == {}
        assert {name: count for name, (_, count, _) in found.items()} == {"Linear": 2, "LoRA": 2, "another class": 0}
        assert found["LoRA"][2] == 4  # of the adapters alone


def wrong_product(group):
    """Return what a check says of a product that is off by a tenth on one rank."""
    from ascend_parallel.overlap import context as overlapped
    from ascend_parallel.patches.transformers import context_parallel

    model, own = built(), overlapped.project
    context = context_parallel(model, group)
    batch = context.cut(**batch_of(Case(), 0, 0))
    ascend_parallel.configure(num_chunks=2, verify_every=1)
    wrong = (lambda *x: own(*x) * 1.1) if group.rank() == 1 else own
    try:
        with mock.patch.object(overlapped, "project", wrong):
            model(**batch)
    except ascend_parallel.VerificationError as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1, verify_every=0)
    return ""


def test_a_check_compares_the_projection(ranks):
    for error in ranks(2).run(wrong_product):
        assert "the projection of call 1 is wrong on rank 1" in error


def without_gradients(group):
    """Return by name whether logits are right where one rank alone computes no gradients."""
    from ascend_parallel.patches.transformers import context_parallel

    plain, model, found = built(), built(), {}
    context = context_parallel(model, group)

    def right(length, graded):
        ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected = plain(input_ids=ids).logits.chunk(group.size(), 1)[group.rank()]
        with contextlib.nullcontext() if graded else torch.no_grad():
            return torch.equal(model(**context.cut(ids)).logits, expected)

    first = group.rank() == 0
    for overlapped in (1, 2):
        ascend_parallel.configure(num_chunks=overlapped)
        length = 32 * overlapped
        try:
            found[f"of a new shape, {overlapped}"] = right(length, graded=first)
            found[f"the other rank, {overlapped}"] = right(length, graded=not first)
            found[f"after all ranks trained, {overlapped}"] = right(length + 8, graded=True)
            found[f"and evaluated, {overlapped}"] = right(length + 8, graded=first)
            found[f"without gradients at first, {overlapped}"] = right(length + 16, graded=False)
            found[f"and then with them, {overlapped}"] = right(length + 16, graded=first)
        finally:
            ascend_parallel.configure(num_chunks=1)
    return found


@promise("one-rank-habits")
def test_one_rank_may_evaluate_without_gradients(ranks):
    for found in ranks(2).run(without_gradients):
        assert [name for name, right in found.items() if not right] == []


def kept(group, folder):
    """Return how often the framework's own exchange ran where it is fast, where it is slow, and with each plan."""
    importlib.import_module("transformers.distributed.tensor_parallel")
    found = {}
    q, k, v = (torch.randn(16, 1, 8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))

    def attention(heads, q, k, v):
        time.sleep(0.01)
        return q + k + v

    def times_run(name, seconds, **settings):
        calls, module = [], torch.nn.Identity()

        def own(q, k, v):
            calls.append(1)
            time.sleep(seconds)
            return q + k + v

        dist.barrier(group)  # rank 0 has written the plan
        ascend_parallel.configure(**settings)
        operands = [x.clone().requires_grad_() for x in (q, k, v)]
        exchanged_attention(module, operands, attention, group, ACTIVE_PATCH.framework, own=own)  # measures
        calls.clear()
        o = exchanged_attention(module, operands, attention, group, ACTIVE_PATCH.framework, own=own)
        found[name] = len(calls), torch.equal(o, q + k + v), str(ascend_parallel.coverage(module)).partition("; ")[2]

    try:
        for name, seconds in (("fast", 0), ("slow", 0.5)):
            times_run(name, seconds, tune=f"{folder}/{name}.json")
            times_run(f"{name}, planned", seconds, plan=f"{folder}/{name}.json")
            times_run(f"{name}, watched", seconds, plan=f"{folder}/{name}.json", timeline=f"{folder}/spans")
    finally:
        ascend_parallel.configure(num_chunks=1)
    return found


LEFT = "attention of 1 layers: not overlapped: groups of heads gain nothing over the framework's own exchange"


@promise("auto-context")
def test_a_frameworks_own_exchange_stays_where_groups_gain_nothing(ranks, tmp_path):
    for found in ranks(2).run(kept, str(tmp_path)):
        assert found["fast"] == found["fast, planned"] == (1, True, LEFT)
        assert found["fast, watched"] == (0, True, "attention of 1 layers: exchanged in 1 group")
        for name in ("slow", "slow, planned", "slow, watched"):
            assert found[name] == (0, True, "attention of 1 layers: exchanged in 2 groups"), name
