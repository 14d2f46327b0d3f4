"""Train the GPT in bf16 by operator (amp.level O1) and as a whole (O2), beside fp32.

torchrun --nproc-per-node 2 examples/strategy/mixed_precision.py
"""

import gpt
import torch
import torch.distributed as dist

from ascend_parallel.training import AmpOptions, PipelineOptions, ShardingOptions, Strategy, train_step

STEPS = 20
LEVELS = {
    "fp32": AmpOptions(),
    "O1": AmpOptions(dtype="bfloat16", level="O1", keep_fp32=("gelu",)),
    "O2": AmpOptions(dtype="bfloat16", level="O2", keep_fp32=("layer_norm", "cross_entropy_loss")),
}


def train(amp: AmpOptions) -> list[float]:
    """Return the losses of some steps, each of 4 micro-batches, with the optimizer's state partitioned."""
    torch.manual_seed(0)
    model = gpt.GPT()
    strategy = Strategy(
        mode="data",
        mesh={"dp": dist.get_world_size()},
        amp=amp,
        pipeline=PipelineOptions(micro_batches=4),
        sharding=ShardingOptions(zero_stage=1),
    )
    step = train_step(model, gpt.batch_of(0), torch.optim.AdamW(model.parameters(), lr=1e-2), strategy)
    losses = [step(*gpt.batch_of(number)).item() for number in range(STEPS)]
    step.close()
    return losses


def main() -> dict[str, list[float]]:
    """Train at each level."""
    return {name: train(amp) for name, amp in LEVELS.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, losses in main().items():
        if dist.get_rank() == 0:
            print(f"{name}: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
    dist.destroy_process_group()
