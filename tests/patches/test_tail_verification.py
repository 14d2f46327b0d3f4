"""COC_VERIFY finds faults of a layer's region beside its MLP: in proj, addition and norm, and the next layer's qkv."""

import contextlib
from unittest import mock

import pytest
import torch
from late import late_collectives
from trained import REGION, megatron, train
from verified import planted


@contextlib.contextmanager
def unawaited(tails):
    """Have the `tails`-th tail of a run read rows without asking for them."""
    from ascend_parallel.overlap.region import tail
    from ascend_parallel.overlap.region.rows import LazyRows

    made = []

    class Hasty(tail.Tail):
        def __init__(self, add, norm, parameters, source, sizes):
            made.append(self)
            there = LazyRows(sizes, lambda index: None)
            super().__init__(add, norm, parameters, there if len(made) == tails else source, sizes)

    from ascend_parallel.patches.megatron import handover

    with late_collectives(), mock.patch.object(handover, "Tail", Hasty):
        yield


@contextlib.contextmanager
def wrong_gradient(index, faulty):
    """Double a gradient of each tail on the faulty rank; `index`: among y, bias, residual, nothing, norm's weight."""
    from ascend_parallel.overlap.region.tail import _Tail

    original = _Tail.backward

    def backward(ctx, *gradients):
        found = list(original(ctx, *gradients))
        found[index] = found[index] * 2 if faulty else found[index]
        return tuple(found)

    with mock.patch.object(_Tail, "backward", staticmethod(backward)):
        yield


@contextlib.contextmanager
def wrong_proj(faulty):
    """Double what the faulty rank gives to proj."""
    from ascend_parallel.patches.megatron import layer_region

    def doubled(original):
        return lambda x, *args, **options: original(x * 2 if faulty else x, *args, **options)

    names = ("row_linear", "send_rows_on_demand")  # without and with sequence parallelism
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(layer_region, name, doubled(getattr(layer_region, name))))
        yield


def wrong_column(faulty):
    """Change rows of what the next layer's linear_qkv makes of the rows that it pulls."""
    from ascend_parallel.overlap.region import column

    def change(found):
        if faulty:
            found[0][3:5] *= 1.5
        return found

    return planted(column.PulledColumn, "forward", change)


TAIL = "(LayerNorm, addition and norm{sp}): the"
FAULTS = {  # what is planted, and how the message begins
    "rows of proj are read too early": (
        lambda _: unawaited(1),
        f"decoder.layers.0.pre_mlp_layernorm {TAIL}",
        " output",
    ),
    "rows of fc2 are read too early": (lambda _: unawaited(2), f"decoder.layers.1.input_layernorm {TAIL}", " output"),
    "input": (
        lambda faulty: wrong_gradient(0, faulty),
        f"decoder.layers.1.pre_mlp_layernorm {TAIL}",
        " input gradient",
    ),
    "bias": (lambda faulty: wrong_gradient(1, faulty), f"decoder.layers.1.pre_mlp_layernorm {TAIL}", " bias gradient"),
    "residual": (
        lambda faulty: wrong_gradient(2, faulty),
        f"decoder.layers.1.pre_mlp_layernorm {TAIL}",
        " residual input gradient",
    ),
    "norm weight": (
        lambda faulty: wrong_gradient(4, faulty),
        f"decoder.layers.1.pre_mlp_layernorm {TAIL}",
        " norm weight gradient",
    ),
    "qkv": (
        wrong_column,
        "decoder.layers.1.self_attention.linear_qkv (ColumnParallelLinear, column{sp}): the",
        " output",
    ),
    "proj": (
        wrong_proj,
        "decoder.layers.0.self_attention.linear_proj (RowParallelLinear, row{sp}): the",
        " output",
    ),
}


def caught(group, fault, options):
    """Plant a fault on the last rank; return the message of the error."""
    import ascend_parallel
    from ascend_parallel.diagnostics.verify import LEDGER

    LEDGER.clear()
    with megatron(group.size()), FAULTS[fault][0](group.rank() == group.size() - 1):
        try:
            train(options, overlap=True)
        except ascend_parallel.VerificationError as error:
            return str(error)
        finally:
            LEDGER.clear()
    return ""


@pytest.mark.sample(10)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "sequence parallel"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named_on_every_rank(ranks, fault, sequence_parallel):
    """The first check that fails names the part."""
    options = {"sequence_parallel": sequence_parallel, "steps": 1, "settings": {**REGION, "verify_every": 1}}
    messages = ranks(2).run(caught, fault, options)
    assert len(set(messages)) == 1, messages
    _, part, quantity = FAULTS[fault]
    begin, end = messages[0].split(" of call 1 is wrong on rank ")
    assert begin.startswith(part.format(sp=", sequence parallel" if sequence_parallel else "")), begin
    assert begin.endswith(quantity), begin
    assert "ran as a region in chunks of rows" in end


def late(group):
    """Train with rows that are NaN until they are waited for: the checks too read finished rows alone."""
    with megatron(group.size()):
        plain = train({}, overlap=False)
        with late_collectives():
            checked = train({"settings": {**REGION, "verify_every": 2}}, overlap=True)
    same = [name for name in plain[1] if not torch.equal(plain[1][name], checked[1][name])]
    return plain[0] == checked[0], same, checked[2]["region_across_layers"]["calls"]


def test_the_checks_wait_for_rows_that_are_not_there_yet(ranks):
    assert ranks(2).run(late) == [(True, [], 3)] * 2


def accumulated(group, faulty):
    """Return the main_grads without and with checks, or the error for a wrong weight gradient of proj."""
    from megatron.core.tensor_parallel import layers as module
    from megatron_cpu import next_token_loss, small_gpt

    import ascend_parallel
    from ascend_parallel.diagnostics.verify import LEDGER

    class Extension:
        @staticmethod
        def wgrad_gemm_accum_fp32(x, dy, main_grad):
            main_grad.add_(dy.t().matmul(x) * (3 if faulty and x.shape[1] == 32 else 1))

    module.fused_weight_gradient_mlp_cuda, module._grad_accum_fusion_available = Extension, True
    LEDGER.clear()
    runs = []
    with megatron(group.size()):
        for every in (0, 1):
            ascend_parallel.configure(**REGION, verify_every=every)
            model = small_gpt(gradient_accumulation_fusion=True, ffn_hidden_size=96)
            for parameter in model.parameters():
                parameter.main_grad = torch.ones_like(parameter)
                parameter.grad_added_to_main_grad = False
            torch.manual_seed(3)
            try:
                next_token_loss(model, torch.randint(256, (4, 65))).backward()
            except ascend_parallel.VerificationError as error:
                return str(error)
            runs.append([parameter.main_grad for parameter in model.parameters()])
            runs[-1] += [parameter.grad for parameter in model.parameters() if parameter.dim() == 1]
    return all(map(torch.equal, *runs)), ascend_parallel.verification().passed


def test_checks_of_two_layers_leave_main_grad_alone(ranks):
    assert ranks(2).run(accumulated, False) == [(True, True)] * 2


def test_a_wrong_main_grad_of_proj_is_found(ranks):
    for message in ranks(2).run(accumulated, True):
        assert message.startswith("decoder.layers.1.self_attention.linear_proj (RowParallelLinear, row): the weight")
