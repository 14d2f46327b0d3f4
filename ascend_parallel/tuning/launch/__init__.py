"""Processes, links and machines for measurements: what `bench`, `tune`, `doctor` and benchmarks/ share."""
