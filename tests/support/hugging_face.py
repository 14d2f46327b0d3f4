"""Small random models of Hugging Face transformers on a tensor-parallel group, and what a training step computes."""

import contextlib
import os
import warnings
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.decision import OF_GROUPS

VOCABULARY, ROWS = 480, (2, 96)
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}
GROUPED = {"num_key_value_heads": 12}
HEADS_OF_LATENTS = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
EXPERTS = {
    "Mixtral": {**GROUPED, "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {**GROUPED, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 32},
    "DeepseekV3": {
        **{**HEADS_OF_LATENTS, "v_head_dim": 32, "num_key_value_heads": 12},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1},
    },
}
MODELS = {
    **EXPERTS,
    "Phi3": {**GROUPED, "pad_token_id": 0},
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Mistral": GROUPED,
    "GPTNeoX": {},
    "Glm": {},
    "Qwen3": {**GROUPED, "head_dim": 32},
    "Gemma3Text": {**GROUPED, "head_dim": 32},
}


def model_of(name, **changes):
    """Return a random model from its Config class."""
    import transformers

    torch.manual_seed(len(name))
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **MODELS.get(name, {}), **changes})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms begin as zeros and ones
        parameter.data += torch.randn_like(parameter) * 0.02
    return model


def write(folder, name, **changes):
    """Write a random model; return its path."""
    path = str(folder / name)
    model_of(name, **changes).save_pretrained(path)
    return path


class Written:
    """Random models, each written to a folder once for all tests of a module."""

    def __init__(self, folder):
        self.folder, self.paths = folder, {}

    def __call__(self, name, **changes):
        """Return a model's path."""
        key = (name, *changes.items())
        if key not in self.paths:
            self.paths[key] = write(self.folder / str(len(self.paths)), name, **changes)
        return self.paths[key]


@contextlib.contextmanager
def launched_by(group):
    """Set the variables that torchrun sets."""
    values = {"RANK": group.rank(), "LOCAL_RANK": group.rank(), "WORLD_SIZE": group.size()}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def load(group, path, dtype=torch.float32, tensor_parallel=True, **distributed):
    """Load the model with its tp_plan, or whole."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    ascend_parallel.configure(num_chunks=4)  # the forwards are installed while the model is loaded
    options = {}
    if tensor_parallel:
        options["distributed_config"] = DistributedConfig(**{"tp_size": group.size(), "tp_plan": "auto", **distributed})
    with launched_by(group), warnings.catch_warnings(action="ignore"):
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


def tokens(seed=1):
    return torch.randint(VOCABULARY, ROWS, generator=torch.Generator().manual_seed(seed))


def full_tensor(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model, micro_batches=1):
    """Return the loss and every gradient, whole, of one training step."""
    model.train()
    model.zero_grad()
    for seed in range(micro_batches):
        ids = tokens(seed)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    gradients = {name: full_tensor(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **{name: gradient.detach().clone() for name, gradient in gradients.items()}}


def both(model, run, **settings):
    """Return what `run(model)` gives plain and with overlap."""
    settings = settings or {"num_chunks": 4}
    ascend_parallel.configure(num_chunks=1)
    plain = run(model)
    ascend_parallel.configure(**settings)
    try:
        return plain, run(model)
    finally:
        ascend_parallel.configure(num_chunks=1)


def count_of(operator, what="calls"):
    """Return how often an overlapped operator was called in this process, or in how many chunks."""
    return COUNTS.as_dict().get(operator, {what: 0})[what]


def checked(model, run, module, name, change):
    """Return the report of a checked step, and the error of one with `change` around a function of a module."""
    ascend_parallel.configure(num_chunks=4, verify_every=1)
    run(model)
    report = str(ascend_parallel.verification())
    try:
        with mock.patch.object(module, name, change(getattr(module, name))):
            run(model)
        return report, ""
    except ascend_parallel.VerificationError as error:
        return report, str(error)
    finally:
        ascend_parallel.configure(num_chunks=1, verify_every=0)


def unequal(plain, overlapped):
    """Return the names whose bits differ; on a machine whose matmuls change bits in chunks, whose values do."""
    assert plain.keys() == overlapped.keys()
    alike = torch.equal if chunks_keep_bits() else _close
    return [name for name in plain if not alike(plain[name], overlapped[name])]


def chunks_keep_bits():
    """Tell whether the probes of this process found chunks with the whole matmul's bits for every shape."""
    answers = (answer for decided in OF_GROUPS.values() for answer in decided.bits.items())
    return all(index < len(question.candidates) for question, index in answers)


def _close(left, right):
    if not left.is_floating_point():
        return torch.equal(left, right)
    rounding = 100 * torch.finfo(left.dtype).eps
    return bool((left - right).abs().max() <= rounding * right.abs().max())


def worst(found, expected):
    """Return the largest difference, as a share of the largest magnitude, and its name.

    Gradients that are zero but for rounding, as of the bias of keys, are compared with the largest gradient.
    """
    assert found.keys() == expected.keys()
    least = 1e-4 * max(float(right.abs().max()) for right in expected.values())
    apart = {
        name: float((found[name].double() - right.double()).abs().max()) / max(least, float(right.abs().max()))
        for name, right in expected.items()
    }
    name = max(apart, key=apart.get)
    return apart[name], name
