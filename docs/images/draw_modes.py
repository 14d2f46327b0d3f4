"""Draws modes.svg: what each of 4 ranks holds in the modes of docs/strategy.md, as planned. Run it after a change.

python docs/images/draw_modes.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ascend_parallel.sharding.graph import INPUT, PARAMETER, Value
from ascend_parallel.sharding.layout import bounds
from ascend_parallel.training.training_plan import TrainingPlan, plan_training

sys.path.append(str(Path(__file__).parents[2] / "examples" / "strategy"))
import modes

WIDE, NARROW, ROWS, RANKS = 4096, 1024, 2048, 4
SCALE = 1 / 64  # pixels per number
LEFT, TOP, WIDTH, LINE = 290, 52, 1050, 104
BETWEEN, OF_RANK = 12, 188
NAMES = {"x": "batch", "up": "up", "down": "down"}
SAID = {
    "data": "the model on every rank, different data",
    "semi_auto": "cut as two strategies say",
    "auto": "cut as the cost model finds (910B)",
    "hybrid": "cut by the model's own code",
}
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .title { font-weight: bold; font-size: 15px }
  .quiet { fill: #59636e }
  .middle { text-anchor: middle }
  .whole { fill: none; stroke: #8c959f; stroke-width: 1 }
  .x { fill: #2e7d4f }
  .up, .down { fill: #2f6fab }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
  }
"""
Box = tuple[tuple[int, int], tuple[int, int]]


def main() -> None:
    """Write the picture beside this file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + LINE * len(SAID) + 12}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{TOP + LINE * len(SAID) + 11}" rx="6"/>',
        *(
            f'<text class="title middle" x="{LEFT + OF_RANK * rank + 82}" y="28">rank {rank}</text>'
            for rank in range(RANKS)
        ),
    ]
    for number, mode in enumerate(SAID):
        lines += drawn(mode, TOP + number * LINE)
    Path(__file__).with_name("modes.svg").write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def drawn(mode: str, top: int) -> Iterator[str]:
    """Give the elements of one mode's row."""
    mesh = ", ".join(f"{name} {size}" for name, size in modes.STRATEGIES[mode].mesh.items())
    yield f'<text class="title" x="20" y="{top + 24}">{mode}</text>'
    yield f'<text x="20" y="{top + 44}">{SAID[mode]}</text>'
    yield f'<text class="quiet" x="20" y="{top + 64}">mesh {mesh}</text>'
    held = boxes(mode)
    for rank in range(RANKS):
        x = LEFT + rank * OF_RANK
        for name, shape in shapes().items():
            height, width = (size * SCALE for size in shape)
            (low, high), (first, last) = ((a * SCALE, b * SCALE) for a, b in held[rank][name])
            yield (
                f'<rect class="{name}" x="{x + first}" y="{top + low}" width="{last - first}" height="{high - low}"/>'
                f'<rect class="whole" x="{x}" y="{top}" width="{width}" height="{height}"/>'
                f'<text class="quiet middle" x="{x + width / 2}" y="{top + 82}">{NAMES[name]}</text>'
            )
            x += int(width) + BETWEEN + (16 if width < 30 else 0)


def shapes() -> dict[str, tuple[int, int]]:
    """Return the tensors that are drawn."""
    return {"x": (ROWS, NARROW), "up": (WIDE, NARROW), "down": (NARROW, WIDE)}


def boxes(mode: str) -> list[dict[str, Box]]:
    """Return what each rank holds of each tensor."""
    strategy = modes.STRATEGIES[mode]
    if mode == "hybrid":
        return [by_hand(*divmod(rank, strategy.mesh["tp"])) for rank in range(RANKS)]
    with torch.device("meta"):
        model, batch = modes.MLP(NARROW, WIDE), torch.empty(ROWS, NARROW)
    if mode == "auto":
        strategy = type(strategy)(mode="auto", mesh=strategy.mesh, hardware="910b")
    plan = plan_training(strategy, model, (batch,), modes.mean_square)
    return [planned(plan, rank) for rank in range(RANKS)]


def planned(plan: TrainingPlan, rank: int) -> dict[str, Box]:
    """Return what a plan lays out on a rank."""
    mesh, found = plan.meshes[0], {}
    place = mesh.coordinate(rank)
    assert place is not None
    for node in plan.plan.graph.nodes.values():
        if node.kind in (INPUT, PARAMETER):
            name = "x" if node.kind == INPUT else node.source.partition(".")[0]
            (shape,) = (meta.shape for meta in node.outputs)
            rows, columns = bounds(shape, plan.plan.layouts[Value(node.name)], mesh.shape, place)
            found[name] = (rows, columns)
    return found


def by_hand(replica: int, rank: int) -> dict[str, Box]:
    """Return what the model of mode "hybrid" takes on a rank."""

    class Group:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return rank

    with torch.device("meta"):
        group: Any = Group()
        shards = modes.ParallelMLP(modes.MLP(NARROW, WIDE), group).tensor_shards()
    found: dict[str, Box] = {"x": ((replica * ROWS // 2, (replica + 1) * ROWS // 2), (0, NARROW))}
    for name, shard in shards.items():
        rows, columns = ((at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))
        found[name] = (rows, columns)
    return found


if __name__ == "__main__":
    main()
