"""Draws pipeline.svg: the schedules of docs/pipeline.md, as they are simulated. Run it after a change.

python docs/images/draw_pipeline.py
"""

from __future__ import annotations

from pathlib import Path

from ascend_parallel.training.pipeline.picture import svg
from ascend_parallel.tuning.step_time.timing import simulate

RANKS, MICRO_BATCHES = 4, 8
STAGES = {"gpipe": 4, "1f1b": 4, "interleaved_1f1b": 8, "zero_bubble": 4, "zbv": 8}


def main() -> None:
    """Write the picture beside this file."""
    drawn = svg(*(simulate(name, RANKS, stages, MICRO_BATCHES) for name, stages in STAGES.items()))
    Path(__file__).with_name("pipeline.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
