"""Models that were written elsewhere, whose own Python runs by a plan (`train_step(static=False)`): as on one card."""

import copy
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from marks import promise
from one_card import losses_of
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding import TraceError, trace
from ascend_parallel.training import Strategy, train_step

ROWS, LENGTH, VOCABULARY = 4, 12, 96
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
HALVES = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))}
HALVES |= {f"{half}_attention_heads": 4 for half in ("encoder", "decoder")} | {"decoder_start_token_id": 1}
IMAGE = {"image_size": 32, "patch_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
EXPERTS |= {"shared_expert_intermediate_size": 16, "num_key_value_heads": 2}
LAYER_TYPES = ["linear_attention", "full_attention"]
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": LAYER_TYPES}
LINEAR_ATTENTION |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
GEMMA4 = {"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 8, "num_kv_shared_layers": 0}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_key_value_heads": 2}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"]}
# The prefix of the configuration's name, the class, and the configuration's options; the others are 0 for dropout.
MODELS = {
    "T5": ("ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "Bart": ("ForConditionalGeneration", {**TOKENS, **HALVES, "d_model": 32, "max_position_embeddings": 64}),
    "Whisper": (
        "ForConditionalGeneration",
        {**TOKENS, **HALVES, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 30},
    ),
    "Swin": (
        "ForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "ViTMAE": ("ForPreTraining", {**SIZES, **IMAGE, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}),
    "CLIP": ("Model", {"text_config": {**SIZES, **TOKENS}, "vision_config": {**SIZES, **IMAGE}, "projection_dim": 16}),
    "ModernBert": ("ForMaskedLM", {**SIZES, **TOKENS, "cls_token_id": 1, "sep_token_id": 2}),
    "Gemma3Text": ("ForCausalLM", {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}),
    "Llama": ("ForCausalLM", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "Mixtral": (
        "ForCausalLM",
        {**SIZES, **TOKENS, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    ),
    "Qwen3Moe": ("ForCausalLM", {**SIZES, **TOKENS, **EXPERTS, "norm_topk_prob": True}),
    "Qwen3Next": ("ForCausalLM", {**SIZES, **TOKENS, **EXPERTS, **LINEAR_ATTENTION}),
    "Qwen3_5MoeText": ("ForCausalLM", {**SIZES, **TOKENS, **EXPERTS, **LINEAR_ATTENTION}),
    "Gemma4Text": ("ForCausalLM", {**SIZES, **TOKENS, **EXPERTS, **GEMMA4}),
}
TRACED = ("Qwen3Next", "Qwen3_5MoeText")  # many small operators: planning takes minutes
OWN = {
    "T5": {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "decoder_num_heads": 4},
    "ViTMAE": {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 48},
}
WITHOUT = "dropout attention_dropout activation_dropout dropout_rate drop_path_rate hidden_dropout_prob"
WITHOUT += " attention_probs_dropout_prob"


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def tokens():
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))


def batch_of(name):
    """Return the arguments of the forward by name."""
    pictures = {"pixel_values": drawn(ROWS, 3, 32, 32).double()}
    return {
        "Whisper": {"input_features": drawn(ROWS, 8, 40).double(), "labels": tokens()},
        "Swin": {**pictures, "labels": torch.arange(ROWS) % 2},
        "ViTMAE": {**pictures, "noise": drawn(ROWS, 16).sigmoid().double()},
        "CLIP": {"input_ids": tokens().index_fill(1, torch.tensor([LENGTH - 1]), 2), **pictures},
    }.get(name, {"input_ids": tokens(), "labels": tokens()})


def of_transformers(name):
    """Return a model with random weights, a batch and a loss."""
    kind, options = MODELS[name]
    known = dict.fromkeys(WITHOUT.split(), 0.0) | options | OWN.get(name, {})
    config = getattr(transformers, f"{name}Config")(**known)
    config._experts_implementation = "batched_mm"
    model = getattr(transformers, f"{name.removesuffix('Text')}{kind}")(config)
    batch = batch_of(name)
    more = {"return_loss": True} if name == "CLIP" else {}
    return (
        model,
        tuple(batch.values()),
        lambda model, *values: model(**dict(zip(batch, values, strict=True)), **more).loss,
    )


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Written(MLP):
    """Writes to rows, columns and single elements of tensors that nothing else views."""

    def forward(self, x):
        y = super().forward(x)
        y[:, 0] = 0.5
        y[1:3, 2:4] *= 2
        mask = x.new_zeros(ROWS, 8)
        mask[0, 1:] = y[1, :7]
        mask[..., 3] = 1
        rows = mask[2:]
        rows[0].mul_(3)
        rows[1, 2:] = 5
        y = y + 0 * rows.sum()
        mask.masked_fill_(mask == 1, 2.0)
        mask += y.flip(0)
        return y * mask


def losses(y, target):
    found = [F.mse_loss(y, target), F.l1_loss(y, target), F.smooth_l1_loss(y, target), F.huber_loss(y, target)]
    return sum(found) + nn.MSELoss()(y.to(target.device), target.to(y.device)) + y.mean()


def of_this_file(kind):
    batch = drawn(ROWS, 16).double(), drawn(ROWS, 8).double()
    return kind(), batch, lambda model, x, target: losses(model(x), target)


def trained(group, made, argument):
    """Return the losses of two steps, and those of one card."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    model, batch, loss = made(argument)
    model = model.double().train()
    whole, strategy = copy.deepcopy(model), Strategy(mode="auto", mesh={"dp": 1, "tp": group.size()})
    step = train_step(model, batch, torch.optim.SGD(model.parameters(), lr=0.5), strategy, loss=loss, static=False)
    found = [step(*batch).item() for _ in range(2)]
    step.close()
    return found, losses_of(whole, torch.optim.SGD(whole.parameters(), lr=0.5), [batch] * 2, loss)


@promise("eager-models")
@pytest.mark.sample("ViTMAE")
@pytest.mark.parametrize("name", sorted(MODELS.keys() - TRACED))
def test_a_model_of_transformers_trains_by_its_own_python(ranks, name):
    for found, expected in ranks(2).run(trained, of_transformers, name):
        assert found == pytest.approx(expected, rel=1e-7)  # some compute norms in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_the_calls_of_a_model_of_transformers_can_be_followed(name):
    model, batch, _ = of_transformers(name)
    model.config.use_cache = False  # a graph returns tensors
    assert not isinstance(trace(model, (), dict(zip(batch_of(name), batch, strict=True))).calls, str)


@promise("eager-models")
@pytest.mark.parametrize("kind", [MLP, Written])
def test_losses_and_written_rows(ranks, kind):
    for found, expected in ranks(2).run(trained, of_this_file, kind):
        assert found == pytest.approx(expected, rel=1e-12)


class OfABuffer(MLP):
    """Writes to a buffer, and to a part of it, and reads it after each write."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x):
        y = super().forward(x)
        before = y + self.seen
        self.seen[1:] += y.detach().mean(0)[1:]
        self.seen.mul_(0.5)
        return before + self.seen + self.seen[2:5].sum()


class ViewedBefore(MLP):
    """Writes to tensors of which other views are read later, and to views of another shape."""

    def forward(self, x):
        y = super().forward(x)
        row, square, turned = y[0], y.view(2, 2, 8), y.transpose(0, 1)
        y[:, 1:] *= 3.0
        y = y + row + square.sum() * turned.mean()
        y.t()[2].mul_(2.0)
        y.flatten()[5:].add_(y.mean())
        y.unsqueeze(0).squeeze(0).contiguous().to(y.dtype).sub_(1)
        return y


class OfTopk(MLP):
    """Writes to outputs of operators that have several, and of composite operators."""

    def forward(self, x):
        y = super().forward(x)
        values, places = y.topk(4, dim=-1)
        values /= values.sum(dim=-1, keepdim=True)
        most, _ = y.max(0)
        most[1:] += 1
        weights = y @ y.t() @ y
        weights *= most
        y = y.scatter(1, places % 8, values)
        y += F.cross_entropy(weights, places[:, 0] % 8)
        dropped = F.dropout(y, 0.0, training=self.training)
        dropped += weights
        return y * dropped


class NormTwice(MLP):
    """Calls a batch norm twice in a forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return super().forward(self.norm(self.norm(x).square()))


class Spectral(MLP):
    """Normalizes its weights, with `out=` buffers."""

    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)
        self.down = nn.utils.spectral_norm(self.down)


@pytest.mark.parametrize("kind", [OfABuffer, ViewedBefore, OfTopk, NormTwice, Spectral])
def test_writes_whose_aliases_are_known(ranks, kind):
    for found, expected in ranks(2).run(trained, of_this_file, kind):
        assert found == pytest.approx(expected, rel=1e-12)


class Diagonal(MLP):
    def forward(self, x):
        y = super().forward(x)
        y.diagonal().add_(1.0)  # HERE
        return y


class Detached(MLP):
    def forward(self, x):
        y = super().forward(x)
        y.detach().mul_(2.0)  # HERE
        return y


class Outside(MLP):
    def forward(self, x):
        return super().forward(x) * ONES  # HERE


class Mapped(MLP):
    def forward(self, x):
        return torch.vmap(super().forward)(x)  # HERE


ONES = torch.ones(8)


@promise("eager-models")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Diagonal, r"aten\.add_\.Tensor writes to a tensor with aliases: write it out of place"),
        (Detached, r"aten\.mul_\.Tensor writes to a tensor with aliases: write it out of place"),
        (Outside, r"reads a tensor of shape \[8\] that is no parameter, buffer or input: register it as a buffer"),
        (Mapped, r"runs torch\.vmap, whose functions do not see their tensors: write them out for all"),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_line(kind, reason):
    lines = Path(__file__).read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    line = next(place for place in range(start, len(lines)) if lines[place].endswith("# HERE")) + 1
    graph = trace(kind(), (drawn(ROWS, 16),))
    assert re.fullmatch(rf"{re.escape(__file__)}:{line}:? {reason}", graph.calls)


class OwnExperts(MLP):
    """Experts of transformers that do not read experts_implementation."""

    def __init__(self, implementation):
        super().__init__()
        self.config = transformers.PretrainedConfig()
        self.config._experts_implementation = implementation

    def forward(self, x):
        return super().forward(x[x.sum(1).gt(0).nonzero().squeeze(1)])


@pytest.mark.parametrize(
    ("implementation", "advice"),
    [
        ("eager", 'experts_implementation="batched_mm" or "grouped_mm"'),
        ("grouped_mm", "these do not read experts_implementation, which is 'grouped_mm': write them so"),
    ],
)
def test_what_is_set_is_not_advised(implementation, advice):
    with pytest.raises(TraceError, match=advice):
        trace(OwnExperts(implementation), (drawn(ROWS, 16),))


def test_the_advice_names_both_ways_to_run_the_graph(ranks):
    for message in ranks(2).run(refused, Diagonal):
        assert re.search(
            r"write it out of place.*ShardedModule\(\.\.\.\), or by train_step\(\.\.\., static=True\)", message
        )


def refused(group, kind):
    model, batch, loss = of_this_file(kind)
    model, strategy = model.double(), Strategy(mode="auto", mesh={"dp": 1, "tp": group.size()})
    with pytest.raises(ValueError, match="cannot be run eagerly") as error:
        train_step(model, batch, torch.optim.SGD(model.parameters(), lr=0.5), strategy, loss=loss, static=False)
    return str(error.value)
