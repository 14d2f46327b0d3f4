"""The lines of docs/frameworks.md that train a LoRA with PEFT on a tp_plan: plain, overlapped, and whole in float64."""

import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ascend_parallel

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", "5.17", reason="peft shards adapters beside transformers 5.17 and later")

import peft
import transformers
from hugging_face import Written, both, count_of, full_tensor, launched_by, step, tokens, unequal, worst
from marks import promise
from torch.overrides import TorchFunctionMode

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BATCHES = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("models"))


def lines():
    (block,) = re.findall(r"```python\n([^`]*get_peft_model.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return block


def known(model):
    """Give the adapters weights that do not depend on the ranks or the type; LoRA's B begins as zeros."""
    for name, weight in model.named_parameters():
        if "lora_" in name:
            draw = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
            if isinstance(weight, DTensor):
                draw = distribute_tensor(draw, weight.device_mesh, weight.placements)
            with torch.no_grad():
                weight.copy_(draw / 8)
    return model


def run(path, targets, dtype=torch.float32, plan=True):
    """Run the page's lines; return losses and gradients of all steps, and the coverage of the model."""

    def loaded(folder, tp_plan):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, **({"tp_plan": tp_plan} if plan else {})
        )

    def wrapped(model, config):
        config.target_modules = set(targets) or config.target_modules
        return known(peft.get_peft_model(model, config))

    seen = {}

    def batches():
        for number in range(BATCHES):
            ids = tokens(number)
            yield {"input_ids": ids, "labels": ids}
            seen[f"loss {number}"] = space["loss"].detach()

    def stepped(optimizer, *_):
        named = [(name, weight.grad) for name, weight in space["model"].named_parameters() if weight.requires_grad]
        seen.update({f"{name} {len(seen)}": full_tensor(gradient).clone() for name, gradient in named})

    space = {
        "torch": torch,
        "folder": path,
        "batches": batches(),
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=loaded),
        "get_peft_model": wrapped,
        "LoraConfig": peft.LoraConfig,
    }
    hook = register_optimizer_step_pre_hook(stepped)
    try:
        with warnings.catch_warnings(action="ignore"):
            exec(compile(lines(), str(PAGE), "exec"), space)
    finally:
        hook.remove()
    return seen, str(ascend_parallel.coverage(space["model"]))


def trained(group, path, targets, also_plain):
    """Return the names that differ from plain, the error against the truth, the overlapped calls, and the coverage."""
    with launched_by(group):
        ascend_parallel.configure(num_chunks=1)
        plain = run(path, targets)[0] if also_plain else None
        ascend_parallel.configure(num_chunks=4)
        before = count_of("matmul_all_reduce")
        overlapped, covered = run(path, targets)
        calls = count_of("matmul_all_reduce") - before
    ascend_parallel.configure(num_chunks=1)
    truth, _ = run(path, targets, torch.float64, plan=False)
    return unequal(plain or overlapped, overlapped), worst(overlapped, truth), calls, covered


# A step: the outputs of o_proj and down_proj, and input gradients of q, k, v, gate and up, of two layers, but for the
# first q, k and v, whose input needs none; those of six column adapters; the vocabulary layer's own.
def test_the_lines_of_the_page_have_the_bits_of_the_plain_run(ranks, path):
    for different, (error, where), calls, covered in ranks(2).run(trained, path("Llama"), (), True):
        assert different == []
        assert error < 2e-5, (error, where)
        assert covered == "21 of 21 linear layers covered; 6 replicated adapters communicate nothing"
        assert calls == 2 * 18


@pytest.mark.slow
def test_row_parallel_targets_have_the_gradients_of_the_whole_model(ranks, path):
    """Overlapped alone: peft 0.21.2 fails in the plain run. The second step's bits follow the optimizer's rounding."""
    targets = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for _, (error, where), _, covered in ranks(2).run(trained, path("Llama"), targets, False):
        assert error < 5e-4, (error, where)
        assert covered == "25 of 25 linear layers covered; 10 replicated adapters communicate nothing"


def states(group, path):
    """Return for each state of two adapters the names whose bits differ from plain, the loss, and the gradients."""
    found = {}
    with launched_by(group), warnings.catch_warnings(action="ignore"):
        ascend_parallel.configure(num_chunks=4)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, tp_plan="auto")
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
        model = peft.get_peft_model(model, config)
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])
        known(model)

        def compared_in(state):
            plain, overlapped = both(model, seeded)
            found[state] = unequal(plain, overlapped), float(plain["loss"]), len(plain) - 1

        compared_in("two adapters, dropout")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        compared_in("checkpointed")
        model.gradient_checkpointing_disable()
        with model.disable_adapter():
            model.get_input_embeddings().weight.requires_grad_(True)  # something has to be trained
            compared_in("disabled")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        compared_in("no dropout")
        with pytest.raises(RuntimeError, match=r"mixed .* and DTensor"):  # peft's own limit
            model.base_model.merge_adapter()
    return found


def seeded(model):
    torch.manual_seed(5)  # dropout alike on all ranks, plain and overlapped
    return step(model)


def test_states_of_adapters_keep_the_bits(ranks, path):
    for found in ranks(2).run(states, path("Llama")):
        assert {state: different for state, (different, _, _) in found.items() if different} == {}
        losses = {state: loss for state, (_, loss, _) in found.items()}
        assert losses["checkpointed"] == losses["two adapters, dropout"] != losses["no dropout"]
        assert losses["disabled"] != losses["no dropout"]
        counts = {state: count for state, (_, _, count) in found.items()}
        # layers, targets, adapters, A and B
        assert counts["two adapters, dropout"] == counts["checkpointed"] == 2 * 2 * 2 * 2
        assert counts["disabled"] == 1


class Watching(TorchFunctionMode):
    """Sees every function of torch, and changes none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched(group, path):
    """Return the names that differ from plain in regions, rank 1 alone under a mode; and the regions' counts."""
    with launched_by(group), warnings.catch_warnings(action="ignore"):
        ascend_parallel.configure(num_chunks=4)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, tp_plan="auto")
        model = known(peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["k_proj", "o_proj", "up_proj"])))
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                a = module.lora_A["default"]
                a.in_features = a.weight.shape[1]  # the plain run fails on this rank's number

        def run(model):
            with Watching() if group.rank() == 1 else nullcontext():
                return step(model)

        before = count_of("region")
        found = unequal(*both(model, run, num_chunks=4, region=True, region_rows=4))
        ascend_parallel.configure(num_chunks=1)
        return found, count_of("region") - before


@promise("one-rank-habits")
def test_a_mode_on_one_rank_changes_no_collective_of_adapters_in_regions(ranks, path):
    (different, regions), (others, _) = ranks(2).run(watched, path("Llama"))
    assert different == others == []
    assert regions > 0
