"""Measure chunk sizes on real process groups: pass times, plan files, and the tuner of a running job."""
