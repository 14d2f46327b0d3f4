"""What a rank of ``verify --against-server`` runs as the trainer.

Its argument is a file with a request (diagnostics/against_server.py). transformers computes the logprobs of the tokens
that the server has written, and rank 0 writes them, with digests.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ascend_parallel.diagnostics.row_digests import RowDigests
from ascend_parallel.overlap.logprobs import logprobs
from ascend_parallel.patches.transformers import MODULE, on_one_rank
from ascend_parallel.patches.transformers.attention import NAME
from ascend_parallel.settings import current_settings


def main() -> None:
    """Compute what the request asks for, which the command line names."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    served = json.loads(Path(request["served"]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    found = recomputed(request, [each["tokens"] for each in served])
    if dist.get_rank() == 0:
        Path(request["trained"]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def recomputed(request: dict[str, Any], sequences: list[list[int]]) -> list[dict[str, Any]]:
    """Return for each sequence its logprobs and the digests of its rows."""
    transformers = importlib.import_module("transformers")
    same = {"attn_implementation": NAME} if current_settings().arithmetic.fixed_tiles else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["checkpoint"], dtype=getattr(torch, request["dtype"]), **same
    ).eval()
    model = tensor_parallel(model)
    watched, found = RowDigests(model), []
    with torch.no_grad():
        for ids in sequences:
            made = logprobs(model, torch.tensor([ids]))[0].tolist()
            found.append({"tokens": ids, "logprobs": made, "digests": watched.taken()})
    return found


def tensor_parallel(model: Any) -> Any:
    """Apply the `tp_plan` of a loaded model on all ranks, and return the model."""
    if dist.get_world_size() == 1:
        return on_one_rank(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = dict(model.tp_plan)
    expand = getattr(model, "_expand_parallel_plan", lambda own: own)
    return importlib.import_module(MODULE).apply_tensor_parallelism(model, mesh, expand(plan))


if __name__ == "__main__":
    main()
