"""What is installed, switched on and possible on this machine, and what to do about it."""

from ascend_parallel.diagnostics.doctor.findings import BAD, Finding, Report, examine, examine_request

__all__ = ["BAD", "Finding", "Report", "examine", "examine_request"]
