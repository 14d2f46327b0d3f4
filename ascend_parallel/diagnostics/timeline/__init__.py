"""Record when every matmul and collective ran on each rank; merge and draw the records. See docs/timeline.md."""

from ascend_parallel.diagnostics.timeline.align import ClockError
from ascend_parallel.diagnostics.timeline.files import TimelineError
from ascend_parallel.diagnostics.timeline.session import Session, record

__all__ = ["ClockError", "Session", "TimelineError", "record"]
