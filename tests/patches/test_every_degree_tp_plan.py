"""COC_DETERMINISTIC=tp with transformers' tp_plan and torch's own styles: the same bits at every degree, 1 included."""

import gc

import pytest
import torch
from every_degree import at_degrees, digest, refused_in_the_tree
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ascend_parallel

pytest.importorskip("transformers", reason="transformers is not installed")

import torch_parallel
from hugging_face import full_tensor, load, step, tokens, write
from marks import promise

from ascend_parallel.patches.dtensor_norm import install_norms, remove_norms
from ascend_parallel.patches.transformers import on_one_rank

STEPS = 3
TREE = {"deterministic": "tp"}
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 16, "num_key_value_heads": 8}


def clip(gradients, limit):
    """Clip by torch's own norm; its own scaling takes no DTensors beside plain tensors, as transformers has them."""
    norm = float(full_tensor(torch.nn.utils.get_total_norm(gradients)))
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / norm))
    return norm


def trained(model, loss_of, clips=True):
    """Losses, norms and digests of whole weights of some steps, with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, norms = [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        if clips:
            norms.append(clip([p.grad for p in model.parameters()], 0.1))
        optimizer.step()
        losses.append(loss.item().hex())
    return {"losses": losses, "norms": norms, **{name: digest(full_tensor(p)) for name, p in model.named_parameters()}}


def llama(group, path, dtype, settings):
    model = load(group, path, dtype, tensor_parallel=group.size() > 1).train()
    model = model if group.size() > 1 else on_one_rank(model)
    ascend_parallel.configure(**settings)
    try:
        clips = settings == TREE or "num_chunks" in settings  # torch has no norm of DTensors beside plain tensors
        return trained(model, lambda model, step: model(input_ids=tokens(step), labels=tokens(step)).loss, clips)
    finally:
        ascend_parallel.configure(num_chunks=1)


def native_loss(model, step):
    ids = torch.randint(torch_parallel.VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(step))
    return torch.nn.functional.cross_entropy(full_tensor(model(ids)).float().flatten(0, 1), ids.flatten())


def native(group, dtype, settings, plan="plain"):
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(**settings)
    model = torch_parallel.decoder(dtype, bias=True, heads=16)
    try:
        return trained(torch_parallel.parallel(model, mesh, plan), native_loss)
    except ascend_parallel.DegreeError as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models"), "Llama", **SIZES)


PACKED = {
    "Phi3": {**SIZES, "pad_token_id": 0},
    "Glm": {**SIZES, "pad_token_id": 0, "eos_token_id": 1, "head_dim": 16, "attention_bias": True},
}


# Here and below each model in one dtype, and the Llama in both: sums in 16 bits are others, whatever the model.
@promise("degree-packed")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("Phi3", torch.bfloat16), ("Glm", torch.float32)], ids=str)
def test_packed_weights_train_alike_at_every_degree(ranks, tmp_path, name, dtype):
    """gate_up_proj and qkv_proj: transformers cuts them as they are, and gathers their features."""
    one, two, four = at_degrees(ranks, llama, write(tmp_path, name, **PACKED[name]), dtype, TREE)
    assert two == one
    assert four == one
    assert any(key.endswith("gate_up_proj.weight") for key in one)
    assert len(set(one["losses"])) == STEPS


@promise("degree-head-norms")
@pytest.mark.slow
def test_norms_of_queries_and_keys_train_alike_at_every_degree(ranks, tmp_path):
    path = write(tmp_path, "Qwen3", **SIZES, head_dim=16)
    one, two, four = at_degrees(ranks, llama, path, torch.bfloat16, TREE)
    assert two == one
    assert four == one
    assert any(key.endswith("q_norm.weight") for key in one)


TIED = {
    "Llama": {"tie_word_embeddings": True},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Cohere": {},
    "Starcoder2": {},
    "SmolLM3": {"pad_token_id": 0},
    "Ernie4_5": {},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}


def step_of_tied(group, path):
    """Return the loss and digests of gradients, or the error with which the model is refused."""
    model = load(group, path, tensor_parallel=group.size() > 1)
    model = model if group.size() > 1 else on_one_rank(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    found = {}
    return refused_in_the_tree(lambda: found.update(step(model))) or {key: digest(found[key]) for key in found}


@promise("degree-tied")
@pytest.mark.sample("Gemma2", "Lfm2")
@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_train_alike_at_every_degree(ranks, tmp_path, name):
    """Of models that tie them by default: transformers' plan names their weight twice."""
    one, two = at_degrees(ranks, step_of_tied, write(tmp_path, name, **{**SMALL, **TIED[name]}), degrees=(1, 2))
    assert two == one
    if name == "Lfm2":  # whose embedding transformers' plan leaves whole
        assert "lm_head (Linear) cannot run in the tree: its weight is no DTensor" in one
    else:
        assert "model.embed_tokens.weight" in one


def refusal(model):
    return refused_in_the_tree(lambda: model(input_ids=tokens()))


def others_beside(group, path, refused_path):
    """Refusals of a model, and of one beside it that needs no tree of theirs; of a dropped one rank 0 has garbage."""
    beside = load(group, refused_path).train()
    text, of_layers = refusal(beside), load(group, path).train()
    beside_alive = refusal(of_layers)
    again = refusal(beside)
    gc.disable()
    try:
        del beside
        wrapper = torch.nn.Sequential(of_layers, torch.nn.Dropout(0.5))
        wrapper.itself = [wrapper]
        del wrapper
        if group.rank() == 1:
            gc.collect()
        return text, again, beside_alive, refusal(of_layers)
    finally:
        gc.enable()


@promise("degree-head-norms")
def test_norms_of_another_class_are_an_error_in_their_own_model_alone(ranks, path, tmp_path):
    """How they are called is not known. Which models live, and what was not collected, is no matter."""
    refused_path = write(tmp_path, "Gemma3Text", **SIZES, head_dim=16)
    for text, again, *others in ranks(2).run(others_beside, path, refused_path):
        assert "the gradients of Gemma3RMSNorm, summed over ranks, have no tree" in text
        assert again == text
        assert others == ["", ""]


@promise("degree-llama")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_llama_trains_alike_at_every_degree(ranks, path, dtype):
    one, two, four = at_degrees(ranks, llama, path, dtype, TREE)
    assert two == one
    assert four == one
    assert len(set(one["losses"])) == STEPS
    assert all(norm > 0.1 for norm in one["norms"])


@pytest.mark.slow
def test_without_it_a_llama_differs(ranks, path):
    one, two = at_degrees(ranks, llama, path, torch.float32, {"deterministic": True}, degrees=(1, 2))
    assert one["losses"] != two["losses"]


@promise("degree-llama")
@pytest.mark.slow
def test_torchs_own_styles_train_alike_at_every_degree(ranks):
    one, two, four = at_degrees(ranks, native, torch.float32, TREE)
    assert two == one
    assert four == one
    assert len(set(one["losses"])) == STEPS


@promise("degree-llama")
@pytest.mark.slow
def test_chunks_and_eight_ranks_change_nothing(ranks, path):
    (one,) = at_degrees(ranks, llama, path, torch.float32, TREE, degrees=(1,))
    assert at_degrees(ranks, llama, path, torch.float32, {**TREE, "num_chunks": 4}, degrees=(2, 8)) == [one, one]


def norms(group):
    """The norm of a sharded DTensor in fp32 and in float64, each asked for in every way in which torch does."""
    x = torch.randn(512, 96, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(x, init_device_mesh("cpu", (group.size(),)), [Shard(0)])
    install_norms()
    try:
        narrow = [torch.linalg.vector_norm(sharded), torch.linalg.vector_norm(sharded, 2.0)]
        narrow += [torch.nn.utils.get_total_norm([sharded], foreach=foreach) for foreach in (None, False)]
        wide = [torch.linalg.vector_norm(sharded, dtype=torch.float64)]
        wide += torch._foreach_norm([sharded], 2, torch.float64)
        wide += torch._foreach_norm([sharded], 2, dtype=torch.float64)
        assert {norm.dtype for norm in narrow} == {torch.float32}
        assert {norm.dtype for norm in wide} == {torch.float64}
        return [[norm.full_tensor().item().hex() for norm in found] for found in (narrow, wide)]
    finally:
        remove_norms()


def test_a_norm_has_the_same_bits_however_it_is_asked_for(ranks):
    of_ranks = [found for count in (2, 4) for found in ranks(count).run(norms)]
    assert [len({norm for found in kind for norm in found}) for kind in zip(*of_ranks, strict=True)] == [1, 1]


ORDERS = (1, 1.5, 3, -1, float("inf"))


def norms_of_orders(group):
    """The norms of other orders with which torch clips, and a true one."""
    x = torch.randn(520, 43, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(x, init_device_mesh("cpu", (group.size(),)), [Shard(0)])
    ascend_parallel.configure(**TREE)
    try:
        found = {}
        for order in ORDERS:
            ways = [torch.nn.utils.get_total_norm([sharded], order, foreach=foreach) for foreach in (None, False)]
            ways.append(torch.linalg.vector_norm(sharded, order))
            found[order] = {full_tensor(norm).item().hex() for norm in ways}
            torch.testing.assert_close(
                full_tensor(ways[0]), torch.linalg.vector_norm(x.double(), order).float(), rtol=1e-5, atol=0
            )
        return found
    finally:
        ascend_parallel.configure(num_chunks=1)


def test_norms_of_all_orders_have_the_same_bits_at_every_degree(ranks):
    one, two, four = at_degrees(ranks, norms_of_orders)
    assert one == two == four
    assert all(len(values) == 1 for values in one.values())


@promise("degree-torch-sequence")
@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        pytest.param("sequence", torch.float32),
        pytest.param("layers", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sequence_parallelism_trains_alike_at_every_degree(ranks, plan, dtype):
    one, two, four = at_degrees(ranks, native, dtype, TREE, plan)
    assert two == one
    assert four == one
    assert len(set(one["losses"])) == STEPS


def dropping(group, path):
    model = load(group, path)
    model.config.attention_dropout = 0.1
    evaluated = refused_in_the_tree(lambda: model.eval()(input_ids=tokens()))
    return evaluated, refused_in_the_tree(lambda: model.train()(input_ids=tokens()))


def test_dropout_is_an_error(ranks, path):
    for evaluated, text in ranks(2).run(dropping, path):
        assert evaluated == ""
        assert "trains with dropout (config attention_dropout=0.1)" in text


@promise("degree-refusals")
@on_ranks(2)
def test_a_parallel_loss_is_an_error(group):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
    from torch.distributed.tensor.parallel import loss as torch_loss

    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(**TREE)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, styles)

    def run():
        with loss_parallel():
            torch.nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(64, (16,))).backward()

    try:
        assert "loss_parallel()" in refused_in_the_tree(run)
    finally:
        torch_loss._disable_custom_loss_ops()  # torch's context does not where an error leaves it


@on_ranks(2)
def test_compiled_norms_of_shared_rows_are_an_error(group):
    from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(**TREE)
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64))
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))})
    text = refused_in_the_tree(lambda: torch.compile(model, backend="aot_eager")(torch.randn(2, 16, 64)))
    assert "0 (RMSNorm) cannot run in the tree: it is being compiled" in text


@promise("degree-refusals")
@on_ranks(2)
def test_a_compiled_layer_is_an_error_or_runs_in_the_tree(group):
    """Where torch breaks the graph at the layer, it runs as uncompiled; a whole graph cannot have it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(**TREE)
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 688), torch.nn.Linear(688, 64))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
    x, found = torch.randn(2, 16, 64), []
    for fullgraph in (False, True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        try:
            text = refused_in_the_tree(lambda compiled=compiled: found.append(compiled(x)))
        except RuntimeError as error:
            text = str(error)
        assert found or "it is being compiled" in text or "Attempted to call function marked as skipped" in text
        refused_in_the_tree(lambda: [torch.testing.assert_close(y, model(x), rtol=0, atol=0) for y in found])


def compiled_llama(group, path):
    model = torch.compile(load(group, path).train(), backend="eager")
    return refused_in_the_tree(lambda: model(input_ids=tokens()))


@pytest.mark.slow
def test_a_compiled_llama_is_an_error(ranks, path):
    for text in ranks(2).run(compiled_llama, path):
        assert "(Linear) cannot run in the tree: it is being compiled" in text
