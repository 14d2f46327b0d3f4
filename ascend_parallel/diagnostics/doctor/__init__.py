"""Report what is installed, enabled and available on this machine, with advice for every problem."""

from ascend_parallel.diagnostics.doctor.findings import (
    BAD,
    ContextRequest,
    Finding,
    Report,
    commit,
    examine,
    examine_request,
)

__all__ = ["BAD", "ContextRequest", "Finding", "Report", "commit", "examine", "examine_request"]
