"""Measure chunk sizes on real process groups: pass times, plan files, and the decider of a running job."""
