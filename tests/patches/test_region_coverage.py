"""ascend_parallel.coverage with COC_REGION: which modules of a real GPT can run as regions, and why not the others."""

import torch
from trained import REGION, megatron
from verified import lines


def hook_on_fc2(model):
    model.decoder.layers[0].mlp.linear_fc2.register_forward_hook(lambda *_: None)


def hook_on_proj(model):
    model.decoder.layers[1].self_attention.linear_proj.register_forward_hook(lambda *_: None)


class Wrapped(torch.nn.Module):
    """Stands for an MLP of another library."""

    def __init__(self, mlp):
        super().__init__()
        self.inner = mlp


def foreign_mlp(model):
    model.decoder.layers[1].mlp = Wrapped(model.decoder.layers[1].mlp)


def nothing(model):
    pass


# Settings, options of the model, what happens to it -> what coverage says of regions.
SAID = [
    ({}, {}, nothing, "2 of 2 MLPs, 2 of 2 transformer layers"),
    ({"region": "auto"}, {}, nothing, "2 of 2 MLPs, 2 of 2 transformer layers"),
    (
        {},
        {"hidden_dropout": 0.1},
        nothing,
        "2 of 2 MLPs, 0 of 2 transformer layers (2 TransformerLayer: hidden_dropout=0.1 draws for whole tensors)",
    ),
    (
        {},
        {},
        hook_on_fc2,
        "1 of 2 MLPs (1 MLP: hooks on linear_fc2), 1 of 2 transformer layers (1 TransformerLayer: its MLP: hooks on "
        "linear_fc2)",
    ),
    (
        {},
        {},
        hook_on_proj,
        "2 of 2 MLPs, 1 of 2 transformer layers (1 TransformerLayer: hooks on linear_proj)",
    ),
    (
        {},
        {},
        foreign_mlp,
        f"2 of 2 MLPs, 1 of 2 transformer layers (1 TransformerLayer: its MLP: it is a {Wrapped.__module__}.Wrapped)",
    ),
    (
        {"deterministic": True},
        {},
        nothing,
        "0 of 2 MLPs (2 MLP: one chunk: the deterministic mode has chunks of its own), 0 of 2 transformer layers "
        "(2 TransformerLayer: one chunk: the deterministic mode has chunks of its own)",
    ),
]


def said(group, cases):
    from megatron_cpu import small_gpt

    import ascend_parallel

    found = []
    with megatron(group.size()):
        for settings, options, change in cases:
            ascend_parallel.configure(**{**REGION, **settings})
            model = small_gpt(**options)
            change(model)
            found.append(str(ascend_parallel.coverage(model)))
    return found


def test_what_can_run_as_a_region_is_counted(ranks):
    for found in ranks(2).run(said, [case[:3] for case in SAID]):
        assert found == [f"9 of 9 linear layers covered; can run as regions: {case[3]}" for case in SAID]


def alone(group):
    """Return the coverage without regions, and of a layer that is in no transformer layer."""
    from megatron_cpu import small_gpt

    import ascend_parallel

    with megatron(group.size()):
        ascend_parallel.configure(**{**REGION, "region": False})
        without = ascend_parallel.coverage(small_gpt())
        ascend_parallel.configure(**REGION)
        model = small_gpt()
        proj = ascend_parallel.coverage(model.decoder.layers[0].self_attention.linear_proj)
        return str(without), without.as_dict(), str(proj), ascend_parallel.coverage(model).as_dict()


def test_without_regions_nothing_is_said_of_them(ranks):
    text, plain, proj, values = ranks(2).run(alone)[0]
    assert text == "9 of 9 linear layers covered"
    assert plain == {"covered": 9, "total": 9, "reasons": {}}
    assert proj == "1 of 1 linear layers covered; can run as regions: no module of this model"
    two = {"covered": 2, "total": 2, "reasons": {}}
    assert values == {**plain, "regions": {"MLPs": two, "transformer layers": two}}


def announced(group):
    """Return what the first call announces, and what coverage says while layers run as regions."""
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel

    inside = []
    with megatron(group.size()), lines() as logged:
        ascend_parallel.configure(**REGION)
        model = small_gpt()
        cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
        for core in cores:
            core.register_forward_hook(lambda *_: inside.append(str(ascend_parallel.coverage(model))))
        next_token_loss(model, torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(3)))
        after = str(ascend_parallel.coverage(model))
    return [line for line in logged if "overlap is on" in line], inside, after


def test_a_run_announces_its_regions_though_the_first_call_is_inside_one(ranks):
    text = "9 of 9 linear layers covered; can run as regions: 2 of 2 MLPs, 2 of 2 transformer layers"
    (first, inside, after), (second, _, _) = ranks(2).run(announced)
    (line,) = first
    assert f"; {text}, on 2 ranks; " in line
    assert second == []
    assert inside == [text, text]
    assert after == text


def decided(group):
    """COC_REGION=auto decides at once that the layers stay: with COC_VERIFY nothing is timed."""
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel

    with megatron(group.size()):
        ascend_parallel.configure(**{**REGION, "region": "auto", "verify_every": 1})
        model = small_gpt()
        next_token_loss(model, torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(3)))
        return ascend_parallel.coverage(model).regions


def test_a_decision_for_the_layers_is_the_reason(ranks):
    for regions in ranks(2).run(decided):
        assert regions["MLPs"].reasons == {"MLP: COC_REGION=auto keeps the layers": 2}
        assert regions["transformer layers"].covered == 0
