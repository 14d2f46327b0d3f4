"""When every matmul and collective ran, on each rank: recorded, merged, and drawn. See docs/timeline.md."""

from ascend_parallel.timeline.clocks import ClockError
from ascend_parallel.timeline.files import TimelineError
from ascend_parallel.timeline.session import Session, record

__all__ = ["ClockError", "Session", "TimelineError", "record"]
