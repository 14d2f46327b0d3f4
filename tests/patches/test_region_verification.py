"""COC_VERIFY with COC_REGION: the parts of a layer's region are checked beside Megatron-core's own code."""

import pytest
import torch
from trained import LLAMA, REGION, both, megatron, train
from verified import planted


def options_for(count, **options):
    """One step on 3 ranks, whose sums have another order, and two on 2."""
    sizes = {"hidden": 96, "heads": 3, "vocab": 258, "seq": 96} if count == 3 else {}
    return {**sizes, **options, "steps": 4 - count, "settings": {**REGION, "verify_every": 1}}


def verified(group, options):
    import ascend_parallel
    from ascend_parallel.diagnostics.verify import LEDGER

    LEDGER.clear()
    found, report = both(group, options), ascend_parallel.verification()
    LEDGER.clear()
    return found, report, str(report).splitlines()[0]


STYLES = {
    "gpt": (2, {}),
    "gpt, recompute": (2, {"recompute": True}),
    "gpt, sequence parallel": (2, {"sequence_parallel": True}),
    "llama, sequence parallel": (2, {**LLAMA, "sequence_parallel": True}),
    "gpt, three ranks": (3, {}),
    "gpt, three ranks, sequence parallel": (3, {"sequence_parallel": True}),
}
LINEAR = {"output", "input gradient", "weight gradient"}


def parts(options):
    """Return what is compared of each part of a model with two layers."""
    biased, across = options.get("add_bias_linear", True), not options.get("recompute")
    tail = {"sum output", "norm output", "input gradient", "residual input gradient", "norm weight gradient"}
    tail |= {"bias gradient"} if biased else set()
    tail |= set() if options.get("normalization") == "RMSNorm" else {"norm bias gradient"}
    mlp = {"output", "input gradient", "linear_fc1 weight gradient", "linear_fc2 weight gradient"}
    mlp |= {"linear_fc1 bias gradient"} if biased else set()
    found = {"output_layer": LINEAR}
    for number in range(2):
        layer = f"decoder.layers.{number}"
        found |= {f"{layer}.self_attention.linear_{name}": LINEAR for name in ("qkv", "proj")}
        found |= {f"{layer}.pre_mlp_layernorm": tail, f"{layer}.mlp": mlp}
    return found | ({"decoder.layers.1.input_layernorm": tail} if across else {})


@pytest.mark.sample(4)
@pytest.mark.parametrize(("count", "options"), STYLES.values(), ids=STYLES)
def test_a_clean_run_checks_every_part_of_a_layers_region(ranks, count, options):
    steps = 4 - count
    for found, report, line in ranks(count).run(verified, options_for(count, **options)):
        assert found["counts"]["layer_region"]["calls"] == 2 * steps * (2 if options.get("recompute") else 1)
        assert "mlp_region" not in found["counts"]
        assert found["worst"] < 1e-5
        if count == 2:
            assert found["losses"][0] == found["losses"][1]
            assert found["different"] == []
        assert report.passed
        assert "2 of them regions, 0 over the limit" in line
        assert {layer.layer: set(layer.errors) for layer in report.layers} == parts(options)
        assert {layer.layer for layer in report.layers if layer.region} == {f"decoder.layers.{n}.mlp" for n in range(2)}
        for layer in report.layers:
            assert layer.backwards == steps
            assert max(layer.errors.values()) <= (0 if count == 2 else 1e-6), layer


def test_an_mlp_that_is_a_region_alone_is_checked(ranks):
    """Hidden dropout excludes the layer's region."""
    for found, report, line in ranks(2).run(verified, options_for(2, dropout=0.1)):
        assert found["different"] == []
        assert found["counts"]["mlp_region"]["calls"] == 4
        assert "layer_region" not in found["counts"]
        assert report.passed
        assert "2 of them regions, 0 over the limit" in line
        assert not any("linear_fc" in layer.layer or "norm" in layer.layer for layer in report.layers)


def unchanged(group, options):
    """Return what a verified run changes beside one that is not, on ranks whose sums have another order than plain."""
    runs = []
    with megatron(group.size()):
        for every in (0, 2):
            runs.append(train({**options, "settings": {**options["settings"], "verify_every": every}}, overlap=True))
    changed = [name for name in runs[0][1] if not torch.equal(runs[0][1][name], runs[1][1][name])]
    return runs[0][0] == runs[1][0], changed, runs[0][2] == runs[1][2]


def test_a_check_changes_no_bits_and_no_counts(ranks):
    options = {**options_for(3, sequence_parallel=True), "steps": 3}
    assert ranks(3).run(unchanged, options) == [(True, [], True)] * 3


def evaluated(group, options):
    """Evaluate without gradients: Megatron-core then adds in place, to rows that are still to be compared."""
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel
    from ascend_parallel.diagnostics.verify import LEDGER

    LEDGER.clear()
    losses = []
    with megatron(group.size()), torch.no_grad():
        for settings in ({"num_chunks": 1}, {**REGION, "verify_every": 1}):
            ascend_parallel.configure(**settings)
            model = small_gpt(**options).eval()
            torch.manual_seed(3)
            losses.append(next_token_loss(model, torch.randint(256, (4, 65))))
        report = ascend_parallel.verification()
    LEDGER.clear()
    worst = max(max(layer.errors.values()) for layer in report.layers)
    return torch.equal(*losses), worst, len(report.layers)


def test_an_evaluation_is_checked(ranks):
    assert ranks(2).run(evaluated, LLAMA) == [(True, 0, len(parts(LLAMA)))] * 2


def caught(group, fault, options):
    """Plant a fault on the last rank; return the message of the error."""
    import ascend_parallel
    from ascend_parallel.diagnostics.verify import LEDGER
    from ascend_parallel.overlap.region import mlp

    faulty = group.rank() == group.size() - 1

    def wrong_rows(found):
        if faulty:
            found[0][3:5] *= 1.5  # of every chunk's activation
        return found

    def wrong_hidden(found):
        for index, dh_c in found:
            yield index, dh_c * 2 if faulty and index == 2 else dh_c

    def wrong_weight(found):
        return (found[0] * 2 if faulty else found[0]), found[1]

    def wrong_bias(found):
        return found[0], found[1] + faulty

    name, change = {
        "output": ("_activate", wrong_rows),
        "input gradient": ("_hidden_gradients", wrong_hidden),
        "linear_fc1 weight gradient": ("_fc1_gradients", wrong_weight),
        "linear_fc1 bias gradient": ("_fc1_gradients", wrong_bias),
    }[fault]
    LEDGER.clear()
    with megatron(group.size()), planted(mlp, name, change):
        try:
            train(options, overlap=True)
        except ascend_parallel.VerificationError as error:
            return str(error)
        finally:
            LEDGER.clear()
    return None


@pytest.mark.parametrize(
    ("fault", "count", "sequence_parallel"),
    [
        ("output", 2, False),
        ("output", 3, True),
        ("input gradient", 3, False),
        ("linear_fc1 weight gradient", 2, True),
        ("linear_fc1 bias gradient", 2, False),
    ],
)
def test_a_fault_in_a_region_is_found_and_names_the_region(ranks, fault, count, sequence_parallel):
    messages = ranks(count).run(caught, fault, options_for(count, sequence_parallel=sequence_parallel))
    assert len(set(messages)) == 1, messages
    path = "region, sequence parallel" if sequence_parallel else "region"
    layer = 0 if fault == "output" else 1
    assert messages[0].startswith(f"decoder.layers.{layer}.mlp (MLP, {path}): the {fault} of call 1 is wrong")
    assert "ran as a region in chunks of rows" in messages[0]


def accumulated(group, faulty):
    """gradient_accumulation_fusion: the gradients are the change of main_grad, which a check must not change again."""
    from megatron.core.tensor_parallel import layers as module
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel
    from ascend_parallel.diagnostics.verify import LEDGER

    class Extension:
        @staticmethod
        def wgrad_gemm_accum_fp32(x, dy, main_grad):
            main_grad.add_(dy.t().matmul(x) * (3 if faulty and x.shape[1] == 48 else 1))

    module.fused_weight_gradient_mlp_cuda, module._grad_accum_fusion_available = Extension, True
    LEDGER.clear()
    runs = []
    with megatron(group.size()):
        for every in (0, 1):
            ascend_parallel.configure(**REGION, verify_every=every)
            model = small_gpt(num_layers=1, gradient_accumulation_fusion=True, ffn_hidden_size=96)
            for parameter in model.parameters():
                parameter.main_grad = torch.ones_like(parameter)
                parameter.grad_added_to_main_grad = False
            torch.manual_seed(3)
            try:
                next_token_loss(model, torch.randint(256, (4, 65))).backward()
            except ascend_parallel.VerificationError as error:
                return str(error)
            runs.append([parameter.main_grad for parameter in model.parameters()])
            runs[-1] += [torch.get_rng_state()]
        report = ascend_parallel.verification()
    return all(map(torch.equal, *runs)), report.passed, report.regions


def test_a_check_leaves_main_grad_and_random_states_alone(ranks):
    assert ranks(2).run(accumulated, False) == [(True, True, 1)] * 2


def test_a_wrong_main_grad_is_found(ranks):
    for message in ranks(2).run(accumulated, True):
        assert message.startswith(
            "decoder.layers.0.mlp (MLP, region): the linear_fc2 weight gradient of call 1 is wrong"
        )
