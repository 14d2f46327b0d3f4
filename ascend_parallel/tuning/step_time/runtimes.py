"""What runs a training step: a framework's habits around the layers, as data."""

from __future__ import annotations

from dataclasses import dataclass

BUCKET_BYTES = 25_000_000
"""Size of a bucket of gradients; about the default of torch's DistributedDataParallel (25 MiB)."""
# Bytes of an element of fp32.
WIDE = 4
# Bytes of clipping by the norm for each gradient: read for the norm, then read and written for the scale
# (Megatron-core 0.12.1, optimizer/clip_grads.py).
CLIPPED = 3 * WIDE


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What a framework does around a model's layers.

    fused
        A norm, a rotary embedding and a gated activation are one kernel each; False: torch's operators, one by one.
    bucket_bytes, bucket_bytes_per_replica
        Size of a bucket of gradients: the larger of the first, and the second for each replica.
    buckets_held
        Buckets in use at a time, beside the gradients.
    wide_gradients
        16-bit gradients always add up in fp32; False: only where several backwards do, or ranks at ZeRO 2.
    scatters_sums
        ZeRO 1 reduce-scatters gradients; False: it all-reduces them, and each rank reads its share.
    clips
        Gradients are clipped by their norm, and the sums of the next step begin with zeros that are written.
    sums_under_backward
        Whether a step without a pipeline sums gradients under its last backward by default.
    receives_ahead
        A rank of a pipeline has a receive buffer for every micro-batch.
    hides_partitions
        Gathers of ZeRO 3 run under the layer before, reduce-scatters of ZeRO 2 and 3 under backward. False: they are
        counted in full, which is more than a run takes that hides a part.
    balances_stages
        Stages take as long as each other, with the logits; False: they have equal numbers of layers.
    shares_along_dp
        ZeRO shares among the replicas of whole groups alone, not among the ranks of a sequence or of the experts.
    """

    name: str
    fused: bool
    bucket_bytes: int = BUCKET_BYTES
    bucket_bytes_per_replica: int = 0
    buckets_held: int
    wide_gradients: bool
    scatters_sums: bool
    clips: bool
    sums_under_backward: bool
    receives_ahead: bool
    hides_partitions: bool
    balances_stages: bool
    shares_along_dp: bool

    def bucket(self, replicas: int) -> int:
        """Return the bytes of a bucket."""
        return max(self.bucket_bytes, self.bucket_bytes_per_replica * replicas)


# This package's runtime of planned models (docs/optimizer-parallel.md); torch.distributed.pipelining's stages allocate
# a receive buffer for every micro-batch (`_prepare_forward_infra`).
PLANNED = Runtime(
    name="planned",
    fused=False,
    buckets_held=3,
    wide_gradients=False,
    scatters_sums=False,
    clips=False,
    sums_under_backward=True,
    receives_ahead=True,
    hides_partitions=False,
    balances_stages=True,
    shares_along_dp=True,
)
# Megatron-core 0.12.1 with the fused operators of Transformer Engine or MindSpeed. distributed_data_parallel.py:
# buckets of 40 M parameters in fp32, or 1 M for each replica; --bf16 sets --accumulate-allreduce-grads-in-fp32; the
# distributed optimizer (ZeRO 1) reduce-scatters; --clip-grad is 1 by default; --overlap-grad-reduce is off.
MEGATRON = Runtime(
    name="megatron",
    fused=True,
    bucket_bytes=40_000_000 * WIDE,
    bucket_bytes_per_replica=1_000_000 * WIDE,
    buckets_held=1,
    wide_gradients=True,
    scatters_sums=True,
    clips=True,
    sums_under_backward=False,
    receives_ahead=False,
    hides_partitions=True,
    balances_stages=False,
    shares_along_dp=False,
)
RUNTIMES = {runtime.name: runtime for runtime in (PLANNED, MEGATRON)}
