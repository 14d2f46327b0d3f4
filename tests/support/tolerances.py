"""How close to the float64 truth a result of each dtype has to be."""

import torch

# Largest error allowed, relative to the largest magnitude of the truth.
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def close(result, truth, dtype):
    """Assert dtype, shape and values; return the relative error."""
    assert result is not None, "no result"
    assert result.dtype == dtype, f"{result.dtype} instead of {dtype}"
    assert result.shape == truth.shape, f"shape {tuple(result.shape)} instead of {tuple(truth.shape)}"
    if truth.numel() == 0:
        return 0.0
    scale = truth.abs().max().item() or 1.0
    error = (result.double() - truth).abs().max().item() / scale
    assert error <= LIMIT[dtype], f"relative error {error:.2e} exceeds {LIMIT[dtype]:.0e} for {dtype}"
    return error
