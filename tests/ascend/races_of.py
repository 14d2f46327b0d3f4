"""What ranks run where races are looked for: paths of this package, whole and with a wait left out."""

import programs
import torch
import torch.distributed as dist
from programs import device


def layer(kind, sequence, settings):
    """Run a layer forward and backward; return output and gradients."""
    return programs.layer(kind, (64, 2, 48), 40, torch.float32, sequence, mode=2, **settings)[1]


def fused(kind, sequence):
    """Run a layer by torch_npu's fused operators; return output and gradients."""
    settings = {"fused": True, "enable_coc_in_column_backward": True}
    return programs.layer(kind, (32, 2, 512), 512, torch.bfloat16, sequence, **settings)[1]


def gpt(settings, **options):
    """Train Megatron's GPT for a step; return the loss and the gradients."""
    return programs.gpt(settings, steps=1, **options)[0]


def experts(settings):
    """Train Megatron's GPT with experts for a step; return the loss and the gradients."""
    return gpt(settings, sequence=True, experts=True)


def attention(exchange, chunks):
    """Attend to a sequence that ranks share; return the output and the gradients."""
    from ascend_parallel import Settings
    from ascend_parallel.overlap.context import run_attention

    def attend(heads, q, k, v):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return torch.softmax(q @ k.transpose(-1, -2) / 4, -1).matmul(v).permute(2, 0, 1, 3)

    drawn = torch.Generator().manual_seed(dist.get_rank())
    operands = [torch.randn(32, 1, 8, 16, generator=drawn).to(device()).requires_grad_() for _ in "qkv"]
    how = {"group": dist.group.WORLD, "settings": Settings(num_chunks=chunks), "exchange": exchange}
    output = run_attention(*operands, attend, **how)
    output.square().sum().backward()
    return [x.detach().cpu() for x in (output, *(x.grad for x in operands))]


def races_of(path, arguments):
    """Run a path twice; return the races that the second run found."""
    from emulated_ascend import races
    from emulated_ascend.kernels.table import library

    globals()[path](*arguments)
    library().emulated_wait_for_all()
    library().emulated_forget_races()
    globals()[path](*arguments)
    return races()


def with_each_wait_left_out(path, arguments, most):
    """Run a path with one wait of a stream left out on rank 0, for up to `most` waits, evenly chosen.

    Return for each whether a race was found on this rank, and whether its results have other bits.
    """
    from emulated_ascend import races
    from emulated_ascend.kernels.table import library

    run = globals()[path]
    run(*arguments)
    library().emulated_plant(-1)
    truth = run(*arguments)
    waits = torch.tensor(library().emulated_plant(-1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(f"waits of {path}{arguments}", str(int(waits)))
    waits = int(store.get(f"waits of {path}{arguments}"))
    outcomes = []
    for number in range(0, waits, max(1, waits // most)):
        library().emulated_wait_for_all()
        library().emulated_forget_races()
        library().emulated_plant(number if dist.get_rank() == 0 else -1)
        found = run(*arguments)
        library().emulated_plant(-1)
        outcomes.append((bool(races()), not all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))))
    return outcomes
