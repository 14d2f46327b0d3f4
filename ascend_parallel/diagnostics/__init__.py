"""Diagnose runs: timelines of overlap, verification of layers inside a run, and the doctor."""
