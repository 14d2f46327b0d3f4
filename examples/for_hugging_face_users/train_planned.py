"""The model and the loop of train.py, trained data x tensor parallel by strategy.toml.

    torchrun --nproc-per-node 4 examples/for_hugging_face_users/train_planned.py

Beside train.py: the whole model is loaded on every rank, and the step is `train_step`'s.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from train import FOLDER, STEPS, batch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ascend_parallel.training import Strategy, train_step


def loss_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's own mean loss."""
    return model(input_ids=tokens, labels=tokens).loss


def main() -> None:
    """Train, and print every digit of the losses."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(FOLDER).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    strategy = Strategy.from_toml(Path(__file__).with_name("strategy.toml"))
    training_step = train_step(model, (batch(0),), optimizer, strategy, loss=loss_of)
    if dist.get_rank() == 0:
        print(training_step.explain(), flush=True)
    for step in range(STEPS):
        loss = training_step(batch(step))
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.17g}", flush=True)
    training_step.close()
    dist.destroy_process_group()


def planned() -> tuple:
    """Return model, batch and loss for the command `ascend-parallel strategy`, which needs shapes, no weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER)).train(), (batch(0),), loss_of


if __name__ == "__main__":
    main()
