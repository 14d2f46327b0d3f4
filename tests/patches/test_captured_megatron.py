"""Megatron-core's GPT in CUDA graphs, on CPUs, where no graph is captured."""

import torch
from gpt_training import REGION, megatron
from logged import logged
from megatron_cpu import next_token_loss, small_gpt
from pool import on_ranks

import ascend_parallel
from ascend_parallel.ops.unfinished import UnfinishedTensor

TOKENS = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(1))


def step(model):
    """Run a training step."""
    next_token_loss(model, TOKENS).backward()


@on_ranks(2)
def test_a_layer_that_is_a_graph_of_its_own_finishes_its_rows(group):
    for scope, leaves in ((["full_iteration"], True), ([], False)):
        with megatron(group.size()), logged() as texts:
            ascend_parallel.configure(**REGION)
            model = small_gpt()
            model.config.cuda_graph_impl, model.config.cuda_graph_scope = "local", scope
            kept = []
            for layer in model.decoder.layers:
                layer.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output[0]))
            step(model)
        assert len(kept) == 2 and all(isinstance(each, UnfinishedTensor) == leaves for each in kept)
        said = [text for text in texts if "regions are off" in text and "(cuda_graph_impl=local)" in text]
        assert len(said) == (not leaves and group.rank() == 0)
