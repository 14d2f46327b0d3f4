"""COC_PARALLEL_NUM=auto on emulated NPUs: whole steps of a tp_plan and of torch's styles run in turn."""

import importlib
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from programs import device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

STEPS = 104  # more than the turns of whole steps, with all finals


class Block(torch.nn.Module):
    """A gated feed-forward behind its norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = torch.nn.RMSNorm(64), torch.nn.Module()
        self.mlp.w1, self.mlp.w3 = (torch.nn.Linear(64, 128, bias=False) for _ in range(2))
        self.mlp.w2 = torch.nn.Linear(128, 64, bias=False)
        self.mlp.forward = lambda x: self.mlp.w2(torch.nn.functional.silu(self.mlp.w1(x)) * self.mlp.w3(x))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def of_torch():
    """Return a model of torch's styles, whose ranks share rows, and what runs it."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block(), Block()).to(device())
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    for block in model:
        plan = {
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    return model, lambda: model(x).square().mean()


def of_transformers():
    """Return a Llama with its tp_plan, and what runs it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import tensor_parallel

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(device())
    mesh = init_device_mesh("npu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tensor_parallel.apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(dict(model.tp_plan)))
    model.train()
    tokens = torch.randint(96, (2, 64), generator=torch.Generator().manual_seed(2)).to(device())
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


MODELS = {"torch_native.styles": of_torch, "transformers.layers": of_transformers}


def one_chunk_is_best(layer, operator, candidates, rounds):
    """Stand in for the clock's last word: the machine's other work must not decide."""
    return {sizes: [float(len(sizes))] * rounds for sizes in candidates}


def each_way(framework):
    """Train plain, then with auto; return the steps that differ, and the way of each step."""
    import ascend_parallel
    from ascend_parallel.ops import registry
    from ascend_parallel.tuning.measured import pass_times

    def train(steps):
        results, ways = [], []
        for _ in range(steps):
            model.zero_grad()
            loss = run()
            loss.backward()
            optimizer.step()  # changes nothing: it says where a step ends
            grads = [each.grad for each in model.parameters()]
            results.append([loss.detach(), *(each.to_local() if isinstance(each, DTensor) else each for each in grads)])
            if in_force.framework is not None:
                ways.append([each.way for each in in_force.framework.decider.groups.values()])
        return [[each.detach().cpu().clone() for each in step] for step in results], ways

    ascend_parallel.configure(num_chunks=4)  # forwards are installed while a model is parallelised
    model, run = MODELS[framework]()
    in_force = importlib.import_module(f"ascend_parallel.patches.{framework}").ACTIVE_PATCH
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    ascend_parallel.configure(num_chunks=1)
    (plain,), _ = train(1)
    with (
        patch.object(pass_times.TimedLinear, "time_sizes", one_chunk_is_best),
        patch.object(registry, "fills", lambda *_: True),  # so small matmuls leave units of an NPU without work
    ):
        ascend_parallel.configure(num_chunks="auto")
        found, ways = train(STEPS)
    undecided = in_force.framework.decider.undecided
    ascend_parallel.configure(num_chunks=1)
    same = [all(torch.equal(a, b) for a, b in zip(step, plain, strict=True)) for step in found]
    return [number for number, equal in enumerate(same) if not equal], ways, undecided


@pytest.mark.parametrize("framework", list(MODELS))
def test_whole_steps_of_a_framework_run_in_turn_with_plains_bits_on_all_ranks_alike(ranks, tmp_path, framework):
    found = ranks(XDG_CACHE_HOME=str(tmp_path)).run(each_way, framework)
    for unlike, ways, undecided in found:
        assert not unlike and not undecided
        assert ways == found[0][1]
        assert {way for (way,) in ways} == {0, 1, 2, 4}
        assert ways[-1] == ways[-4]
