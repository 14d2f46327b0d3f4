"""Tell what a process group is for, and which overlap of which framework a profile shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_parallel.diagnostics.audit.profile import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    PEER_COPY,
    Collective,
    ProcessGroup,
)

TENSOR, SEQUENCE, EXPERT, CONTEXT, DATA, PIPELINE, UNKNOWN = (
    "tensor",
    "sequence",
    "expert",
    "context",
    "data",
    "pipeline",
    "not told",
)

# What frameworks call their groups: Megatron-core's descriptions, meshes of torch, MindSpeed's and vLLM's names. The
# first that fits: gradients are summed in groups that also name others (DATA_PARALLEL_GROUP_WITH_CP, dp_shard_cp).
_NAMES = (
    (DATA, re.compile(r"data_?parallel|(?:^|[_ ])dp|fsdp|hsdp", re.IGNORECASE)),
    (CONTEXT, re.compile(r"context|(?:^|[_ ])cp(?:$|[_ \d])|ulysses", re.IGNORECASE)),
    (EXPERT, re.compile(r"expert|(?:^|[_ ])ep(?:$|[_ \d])|moe", re.IGNORECASE)),
    (PIPELINE, re.compile(r"pipeline|(?:^|[_ ])pp(?:$|[_ \d])|embedding", re.IGNORECASE)),
    (TENSOR, re.compile(r"tensor|(?:^|[_ ])tp(?:$|[_ \d])|model_parallel", re.IGNORECASE)),
    (DATA, re.compile(r"data|replicate|shard", re.IGNORECASE)),
)
# A collective of a layer moves at least so many bytes; smaller ones are norms, flags and counts.
LAYER_BYTES = 32_768
# So large a share of a group's collectives in forward is no accident.
FEW = 0.1


@dataclass(frozen=True)
class Role:
    """What a group is for, and by what that was told."""

    name: str
    by: str


def role_of(group: ProcessGroup, collectives: Sequence[Collective]) -> Role:
    """Return the role of a group: by its name, else by its operations in forward and backward."""
    stated = f"{group.description} {group.name}"
    for name, pattern in _NAMES:
        if pattern.search(stated):
            return Role(name, "its name")
    large = [one for one in collectives if one.nbytes is None or one.nbytes >= LAYER_BYTES] or list(collectives)
    counts = Counter(one.operation for one in large)
    forward = Counter(one.operation for one in large if one.direction == FORWARD)
    operations = "its operations"
    if counts[EXCHANGE]:
        return Role(
            UNKNOWN,
            "NCCL's SendRecv is of a pipeline's stages or of an all-to-all; traces before torch 2.4 do not tell",
        )
    if counts[PEER_COPY] == len(large):
        return Role(
            UNKNOWN, "copies between devices name no group; symmetric memory and models on several devices copy so"
        )
    if counts["send_recv"] and counts["send_recv"] >= 0.5 * len(large):
        return Role(PIPELINE, operations)
    if counts["all_to_all"] and counts["all_to_all"] >= 0.5 * len(large):
        return Role(EXPERT, f"{operations}; context parallelism by heads looks alike")
    if not any(one.direction == BACKWARD for one in large):
        return (
            _of_inference(counts, operations)
            if any(one.direction for one in large)
            else Role(UNKNOWN, "the profile has no autograd")
        )
    told = f"{operations} in forward and backward"
    in_forward = {name: forward[name] / counts[name] for name in counts}
    if in_forward.get("reduce_scatter", 0) > FEW:
        return Role(SEQUENCE, told)
    if counts["reduce_scatter"] and counts["all_gather"]:
        return Role(DATA, told)
    if counts["all_reduce"]:
        return Role(TENSOR if in_forward["all_reduce"] > FEW else DATA, told)
    return Role(UNKNOWN, "neither its name nor its operations say it")


def _of_inference(counts: Mapping[str, int], by: str) -> Role:
    if counts["reduce_scatter"]:
        return Role(SEQUENCE, by)
    return Role(TENSOR, by) if counts["all_reduce"] else Role(UNKNOWN, "neither its name nor its operations say it")


@dataclass(frozen=True)
class OverlapFeature:
    """An overlap of some framework, and the names by which a profile shows that it ran.

    fused
        Whether those are kernels in which a matmul and its collective run together.
    """

    name: str
    clues: tuple[str, ...]
    fused: bool = False


OURS = "this package's layers"
FEATURES = (
    OverlapFeature(OURS, ("RowLinear", "ColumnLinear", "ascend_parallel::")),
    OverlapFeature(
        "Ascend's fused operators (MC2)",
        (
            *("MatmulAllReduce", "AllGatherMatmul", "MatmulReduceScatter", "AlltoAllMatmul", "MatmulAlltoAll"),
            *("AlltoAllvGroupedMatMul", "GroupedMatMulAlltoAllv"),
        ),
        fused=True,
    ),
    OverlapFeature(
        "TransformerEngine's user buffers (--tp-comm-overlap)", ("userbuffers_", "UserBuffers", "ubuf_"), fused=True
    ),
    OverlapFeature(
        "torch's async tensor parallelism (symm_mem)",
        ("fused_all_gather_matmul", "fused_matmul_reduce_scatter", "symm_mem::"),
        fused=True,
    ),
    OverlapFeature(
        "vLLM's fused all-reduce and norm",
        ("fused_allreduce", "allreduce_fusion", "fused_add_rms_norm_allreduce"),
        fused=True,
    ),
    OverlapFeature("FSDP2's prefetch", ("FSDP::all_gather", "FSDP::pre_forward")),
    OverlapFeature("DDP's buckets", ("DistributedDataParallel.forward", "c10d::Reducer", "_DDPSink")),
)
CLUES = tuple(clue for feature in FEATURES for clue in feature.clues)


def features_in(seen: Mapping[str, int]) -> list[tuple[OverlapFeature, dict[str, int]]]:
    """Return the overlap features of which a profile has names, with how often each name stands there."""
    found = ((feature, {clue: seen[clue] for clue in feature.clues if seen.get(clue)}) for feature in FEATURES)
    return [(feature, counts) for feature, counts in found if counts]
