"""Chunk sizes measured on real process groups: pass times, saved plans, the tuner of a running job."""
