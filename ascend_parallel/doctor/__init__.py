"""What is installed, switched on and possible on this machine, and what to do about it."""

from ascend_parallel.doctor.findings import Finding, Report, examine

__all__ = ["Finding", "Report", "examine"]
