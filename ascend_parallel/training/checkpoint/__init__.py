"""Checkpoints that load under another layout: other mesh, parallelism, number of ranks, or one process.

planner          shards as torch.distributed.checkpoint's items, and the check over all ranks
differences      what differs, in words; CheckpointError
folder           whole, interrupted and removed checkpoints; manifest and checksums
lock             one save of a step at a time, whichever jobs share the folder
storage          files hashed as they are written, named when whole; ranks say together what went wrong
unpickling       metadata unpickled without running what it names
reading          metadata, values and tensors read by one process
saving, loading  save and load
random_state     states of the generators
modules          the shards of any module and of torch's optimizers
saved            a checkpoint of ours opened by one process, without process groups
safetensors      the format: full models written and read
convert          one format to another
"""

from ascend_parallel.training.checkpoint.differences import CheckpointError
from ascend_parallel.training.checkpoint.folder import latest, steps
from ascend_parallel.training.checkpoint.loading import Loaded, load
from ascend_parallel.training.checkpoint.module_shards import optimizer_tensor_shards, tensor_shards_of
from ascend_parallel.training.checkpoint.reader import CheckpointReader, whole_state
from ascend_parallel.training.checkpoint.safetensors import load_safetensors, read_safetensors, write_safetensors
from ascend_parallel.training.checkpoint.saving import Saving, save

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "Loaded",
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
