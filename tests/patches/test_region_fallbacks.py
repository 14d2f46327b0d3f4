"""What cannot run as a region in megatron-core runs layer by layer, with the same bits, and says why."""

import contextlib
import logging

import pytest
import torch
from late import LateWork, late_collectives
from trained import REGION, megatron


def reasons(group, options, change, settings):
    """Return the logged reasons, the counts of regions, and whether the loss has the plain bits."""
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ascend_parallel").addHandler(handler)
    losses = []
    with megatron(group.size()):
        for overlap in ({"num_chunks": 1}, {**REGION, **settings}):
            ascend_parallel.configure(**overlap)
            ascend_parallel.ops.COUNTS.clear()
            model = small_gpt(**{"num_layers": 1, **options})
            CHANGES[change](model)
            torch.manual_seed(3)
            losses.append(next_token_loss(model, torch.randint(256, (4, 65))))
            losses[-1].backward()
        counts = ascend_parallel.ops.COUNTS.as_dict()
    logging.getLogger("ascend_parallel").removeHandler(handler)
    texts = [text for text in said if "without a region" in text]
    return texts, [name for name in counts if "region" in name], torch.equal(*losses)


def layer(model):
    return model.decoder.layers[0]


def set_own_forward(model):
    fc1 = layer(model).mlp.linear_fc1
    fc1.forward = lambda hidden: type(fc1).forward(fc1, hidden)


CHANGES = {
    "nothing": lambda model: None,
    "hook on fc2": lambda model: layer(model).mlp.linear_fc2.register_forward_hook(lambda *_: None),
    "hook on mlp": lambda model: layer(model).mlp.register_full_backward_hook(lambda *_: None),
    "hook on proj": lambda model: layer(model).self_attention.linear_proj.register_forward_hook(lambda *_: None),
    "hook on norm": lambda model: layer(model).pre_mlp_layernorm.register_forward_pre_hook(lambda *_: None),
    "own forward": set_own_forward,
    "own activation": lambda model: setattr(layer(model).mlp, "activation_func", lambda h: torch.nn.functional.gelu(h)),
    "own bda": lambda model: setattr(
        layer(model), "self_attn_bda", lambda training, fused: lambda output, residual, prob: residual + sum(output)
    ),
    "own norm": lambda model: setattr(layer(model), "pre_mlp_layernorm", torch.nn.Identity()),
    "fp32 residual": lambda model: setattr(layer(model).config, "fp32_residual_connection", True),
}


class Foreign(torch.nn.Module):
    """A layer that is not Megatron-core's."""

    def forward(self, hidden_states, **_):
        return hidden_states * 2, None


def replace_second(model):
    """Give the second layer's place to a foreign module, once the first layer has left it rows."""
    from megatron_cpu import next_token_loss

    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(4))
    next_token_loss(model, tokens)
    model.decoder.layers[1] = Foreign()


ACROSS = {
    "nothing": lambda model: None,
    "hook on the first layer": lambda model: layer(model).register_forward_hook(lambda *_: None),
    "hook on the second": lambda model: model.decoder.layers[1].register_forward_pre_hook(lambda *_: None),
    "hook on its norm": lambda model: model.decoder.layers[1].input_layernorm.register_forward_hook(lambda *_: None),
    "hook on its qkv": lambda model: model.decoder.layers[1].self_attention.linear_qkv.register_forward_hook(
        lambda *_: None
    ),
    "own norm in the second": lambda model: setattr(model.decoder.layers[1], "input_layernorm", torch.nn.Identity()),
    "replaced": replace_second,
}
CHANGES |= ACROSS


@pytest.mark.parametrize(
    ("change", "across"),
    [(change, change in ("nothing", "replaced")) for change in ACROSS],
)
def test_rows_cross_to_the_next_layer_only_if_it_pulls_them(ranks, change, across):
    """The last case leaves rows in a first forward; in the second nobody is there to pull them."""
    for _, counted, same in ranks(2).run(reasons, {"num_layers": 2}, change, {}):
        assert "layer_region" in counted
        assert ("region_across_layers" in counted) == across
        assert same


class Interrupts(contextlib.nullcontext):
    """Raises when it is entered for the second time: between the first layer and the second."""

    entered = 0

    def __enter__(self):
        self.entered += 1
        if self.entered == 2:
            raise InterruptedError


def interrupted(group):
    """Raise between two layers, the first of which has left rows; then train on."""
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel

    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(4))
    with megatron(group.size()):
        plain = next_token_loss(small_gpt(), tokens)
        ascend_parallel.configure(**REGION)
        with late_collectives():
            model = small_gpt()
            model.decoder.offload_context = Interrupts()
            with pytest.raises(InterruptedError):
                next_token_loss(model, tokens)
            left = LateWork.unfinished
            model.decoder.offload_context = contextlib.nullcontext()
            loss = next_token_loss(model, tokens)
            loss.backward()
            return left, LateWork.unfinished, torch.equal(plain, loss)


def test_rows_that_nobody_comes_for_are_finished_at_the_next_call(ranks):
    assert ranks(2).run(interrupted) == [(4, 0, True)] * 2


FALLBACKS = {  # options, change, settings, the region that is left, part of the reason
    "hidden dropout": ({"hidden_dropout": 0.1}, "nothing", {}, ["mlp_region"], "hidden_dropout=0.1"),
    "hook on fc2": ({}, "hook on fc2", {}, [], "hooks on linear_fc2"),
    "hook on mlp": ({}, "hook on mlp", {}, [], "hooks on"),
    "hook on proj": ({}, "hook on proj", {}, ["mlp_region"], "hooks on linear_proj"),
    "hook on norm": ({}, "hook on norm", {}, ["mlp_region"], "hooks on norm"),
    "own forward": ({}, "own forward", {}, [], "hooks on linear_fc1"),
    "own activation": ({}, "own activation", {}, [], "not known to work row by row"),
    "own bias_dropout_add": ({}, "own bda", {}, ["mlp_region"], "self_attn_bda"),
    "own norm": ({}, "own norm", {}, ["mlp_region"], "pre_mlp_layernorm is a torch"),
    "fp32 residual": ({}, "fp32 residual", {}, ["mlp_region"], "fp32_residual_connection"),
    "few rows": ({}, "nothing", {"region_rows": 200}, [], "one chunk"),
    "deterministic": ({}, "nothing", {"deterministic": True}, [], "one chunk"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", FALLBACKS.values(), ids=FALLBACKS)
def test_a_call_that_cannot_be_a_region_says_why(ranks, case):
    options, change, settings, left, reason = case
    (texts, counted, same), (silent, also_counted, also_same) = ranks(2).run(reasons, options, change, settings)
    assert any(reason in text for text in texts), texts
    assert silent == []  # rank 0 alone speaks
    assert counted == also_counted == left
    assert same
    assert also_same


def strict(group):
    from ascend_parallel.ops import UnmetRequestError

    try:
        reasons(group, {"hidden_dropout": 0.1}, "nothing", {"strict": True})
    except UnmetRequestError as error:
        return str(error)
    return ""


def test_a_strict_run_refuses(ranks):
    assert all("hidden_dropout=0.1" in text for text in ranks(2).run(strict))


def judged(group):
    """Return the reasons against regions in configurations that do not run on a CPU, by their change."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    import ascend_parallel

    def patched():
        return RowParallelLinear.forward.ascend_parallel

    from megatron_cpu import small_gpt

    from ascend_parallel.patches.megatron.region_checks import layer_reason, mlp_reason

    found = {}
    with megatron(group.size()):
        ascend_parallel.configure(**REGION)
        model, hidden = small_gpt(num_layers=1), torch.zeros(64, 4, 64)
        one = layer(model)
        found["none"] = layer_reason(one, {"context": None}), mlp_reason(patched(), one.mlp, hidden, None)
        found["context"] = layer_reason(one, {"inference_context": object()})
        found["per_token_scale"] = mlp_reason(patched(), one.mlp, hidden, torch.ones(1))
        for flag in ("recompute_pre_mlp_layernorm", "recompute_mlp", "recompute_input_layernorm"):
            setattr(one, flag, True)
            found[flag] = layer_reason(one, {})
            setattr(one, flag, False)
        for option in ("fp8", "cpu_offloading", "cuda_graph_impl", "enable_cuda_graph"):
            before = getattr(one.config, option, None)
            setattr(one.config, option, "local" if option == "cuda_graph_impl" else True)
            found[option] = layer_reason(one, {}), mlp_reason(patched(), one.mlp, hidden, None)
            setattr(one.config, option, before or "none" if option == "cuda_graph_impl" else before)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found["autocast"] = mlp_reason(patched(), one.mlp, hidden, None)
        one.mlp.linear_fc2 = torch.nn.Linear(4, 4)  # as LoRA and TransformerEngine replace it
        found["another layer"] = mlp_reason(patched(), one.mlp, hidden, None)
    return found


def test_the_reasons_that_no_cpu_can_run(ranks):
    found, _ = ranks(2).run(judged)
    assert found == {
        "none": (None, None),
        "context": "inference_context is given",
        "per_token_scale": "it is called with per_token_scale",
        "recompute_pre_mlp_layernorm": "recompute_pre_mlp_layernorm",
        "recompute_mlp": "recompute_mlp",
        "recompute_input_layernorm": "recompute_input_layernorm",
        "fp8": ("fp8", "fp8"),
        "cpu_offloading": ("CPU offloading of activations", "CPU offloading of activations"),
        "cuda_graph_impl": ("CUDA graphs", "CUDA graphs"),
        "enable_cuda_graph": ("CUDA graphs", "CUDA graphs"),
        "autocast": "autocast is active",
        "another layer": "linear_fc2 is a torch.nn.modules.linear.Linear",
    }


def methods(group, settings):
    from megatron_cpu import megatron_on_cpu

    import ascend_parallel

    with megatron_on_cpu():
        from megatron.core.transformer.mlp import MLP
        from megatron.core.transformer.transformer_layer import TransformerLayer

        ascend_parallel.configure(**settings)
        found = [MLP.forward.__module__, TransformerLayer.forward.__module__]
        patched = [hasattr(kind.forward, "ascend_parallel") for kind in (MLP, TransformerLayer)]
        patches = ascend_parallel.status().patches
        applied = sum(patch.applied for patch in patches if patch.target.startswith("megatron"))
        ascend_parallel.configure(num_chunks=1)
        off = [hasattr(kind.forward, "ascend_parallel") for kind in (MLP, TransformerLayer)]
    return found, patched, applied, off


@pytest.mark.parametrize(("settings", "on"), [(REGION, True), ({"num_chunks": 4}, False)])
def test_the_methods_are_replaced_only_on_request(ranks, settings, on):
    _, patched, applied, off = ranks(2).run(methods, settings)[0]
    assert patched == [on, on]
    assert applied == (4 if on else 2)
    assert off == [False, False]


def reordered(group, order):
    """Give the block its layers in another order, after a first forward has noted the places."""
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel

    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(4))
    with megatron(group.size()):
        losses = []
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            model = small_gpt(num_layers=3)
            next_token_loss(model, tokens)
            layers = model.decoder.layers
            model.decoder.layers = torch.nn.ModuleList([layers[place] for place in order])
            ascend_parallel.ops.COUNTS.clear()
            losses.append(next_token_loss(model, tokens))
        counts = ascend_parallel.ops.COUNTS.as_dict()
    return torch.equal(*losses), counts.get("region_across_layers", {"calls": 0})["calls"]


def test_a_block_that_was_changed_since_hands_no_rows_to_the_wrong_layer(ranks):
    assert ranks(2).run(reordered, [2, 0, 1]) == [(True, 0)] * 2


def test_a_layer_with_two_places_hands_no_rows_on(ranks):
    """Layers 0 and 2 hand their rows to layer 1; it has two successors, and hands on none."""
    assert ranks(2).run(reordered, [0, 1, 2, 1]) == [(True, 2)] * 2
