"""Tensor-parallel linear layers that overlap their matmul with their collective."""
