"""The search for degrees: data, tensor and pipeline parallel sizes, micro-batches, schedule, recompute, ZeRO stage."""
