"""A rank's part of a planned model: conversions, execution, overlapped matmuls."""
