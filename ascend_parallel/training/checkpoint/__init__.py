"""Checkpoints that load under another layout: another mesh, parallelism, number of ranks, or a single process.

dcp_planner      tensor shards as items of torch.distributed.checkpoint, and the checks over all ranks
dcp_files        files of torch.distributed.checkpoint's format, checked before they are read and without running code
differences      descriptions of what differs; CheckpointError
folder           complete, interrupted and removed checkpoints; manifest and checksums
lock             only one save of a step at a time, whichever jobs share the folder
storage          files hashed as they are written, renamed when complete; errors shared by all ranks
saving, loading  save and load, with the states of the random number generators; read in one process
module_shards    the tensor shards of any module and of torch's optimizers
safetensors      the safetensors format: full models written and read
megatron         Megatron-core's distributed checkpoints, read
convert          conversion between formats
"""

from ascend_parallel.training.checkpoint.differences import CheckpointError
from ascend_parallel.training.checkpoint.folder import latest, steps
from ascend_parallel.training.checkpoint.loading import CheckpointReader, LoadResult, load, whole_state
from ascend_parallel.training.checkpoint.module_shards import optimizer_tensor_shards, tensor_shards_of
from ascend_parallel.training.checkpoint.safetensors import load_safetensors, read_safetensors, write_safetensors
from ascend_parallel.training.checkpoint.saving import Saving, save

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "LoadResult",
    "Saving",
    "latest",
    "load",
    "load_safetensors",
    "optimizer_tensor_shards",
    "read_safetensors",
    "save",
    "steps",
    "tensor_shards_of",
    "whole_state",
    "write_safetensors",
]
