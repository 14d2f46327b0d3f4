"""When every matmul and collective ran, on each rank: recorded, merged, and drawn. See docs/timeline.md."""

from ascend_parallel.diagnostics.timeline.clocks import ClockError
from ascend_parallel.diagnostics.timeline.files import TimelineError
from ascend_parallel.diagnostics.timeline.session import Session, record

__all__ = ["ClockError", "Session", "TimelineError", "record"]
