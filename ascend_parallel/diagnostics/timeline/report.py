"""Make the report: a self-contained HTML page with the pictures and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ascend_parallel.diagnostics.timeline.align import Shift
from ascend_parallel.diagnostics.timeline.drawing import COLOURS, MEANING, bars, names
from ascend_parallel.diagnostics.timeline.markup import Markup, fill, joined
from ascend_parallel.diagnostics.timeline.picture import Picture
from ascend_parallel.diagnostics.timeline.table import Row

STYLE = Markup("""
  body { font: 14px system-ui, 'DejaVu Sans', sans-serif; color: #1f2328; background: #fff; margin: 2em auto;
         max-width: 1300px; padding: 0 1em }
  h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 2em }
  .picture { position: relative; display: flex; border: 1px solid #d0d7de; padding: 6px }
  .labels { flex: none; width: 150px } .scroll { overflow-x: auto; flex: 1 }
  svg text { font-size: 12px; fill: #1f2328 } svg .title { font-weight: bold }
  svg.names { overflow: visible; position: relative; pointer-events: none }
  .bar text { fill: #fff; font-size: 11px } .bar rect { stroke: #fff; stroke-width: 1 }
  .pass text, .clocks text { fill: #59636e } .pass rect { stroke: none }
  .lane { fill: #f6f8fa } .tick { stroke: #d0d7de } svg .quiet { fill: #59636e }
  .key { white-space: nowrap; margin-left: 14px }
  .key i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; border: 1px solid #d0d7de }
  table { border-collapse: collapse } th, td { padding: 3px 10px; border-bottom: 1px solid #d0d7de; text-align: right }
  th:first-child, td:first-child, td:nth-child(2), td:nth-child(3) { text-align: left }
  .warning { color: #9a3412 } button { font: inherit } .quiet { color: #59636e }
""")
SCRIPT = Markup("""
  let zoom = 1;
  const scroll = document.querySelector('.scroll'), time = document.querySelector('svg.time');
  const look = (factor, at) => {
    const x = (scroll.scrollLeft + at) / zoom;
    zoom = Math.min(Math.max(zoom * factor, 1), 400);
    time.style.width = zoom * 100 + '%';
    scroll.scrollLeft = x * zoom - at;
  };
  document.querySelector('#in').onclick = () => look(2, scroll.clientWidth / 2);
  document.querySelector('#out').onclick = () => look(0.5, scroll.clientWidth / 2);
  scroll.addEventListener('wheel', event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    look(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - scroll.getBoundingClientRect().left);
  }, {passive: false});
""")
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Timeline $about</title>
<style>$style$colours</style></head><body>
<h1>Timeline of $about</h1>
$warnings
<p><button id="in">closer</button> <button id="out">farther</button>
<span class="quiet">or Ctrl and the wheel; point at a bar for its times</span>$key</p>
<div class="picture"><div class="labels">$names</div><div class="scroll">$bars</div></div>
<h2>Layers, medians in ms</h2>
$table
<h2>Clocks</h2>
<ul>$clocks</ul>
<script>$script</script>
</body></html>
"""

# (heading, value, format, meaning)
Column = tuple[str, Callable[[Row], float | None], str, str]
COLUMNS: list[Column] = [
    ("T", lambda row: row.total, ".2f", "median of the whole pass, on the rank where it is longest"),
    ("T_mm", lambda row: row.matmul, ".2f", "all matmuls of the pass, with the weight gradient"),
    ("T_comm", lambda row: row.comm, ".2f", "time in which at least one collective of the pass ran"),
    ("exposed", lambda row: row.exposed, ".2f", "communication or waiting for it while the rank computed nothing"),
    ("hidden", lambda row: row.hidden, ".0%", "share of T_comm beside a computation"),
    ("serial", lambda row: row.serial, ".2f", "T of the same pass in the serial run"),
    (
        "E_bound",
        lambda row: row.e_bound,
        ".2f",
        "1: all that can be hidden was hidden; 0: nothing was, or overlap lost",
    ),
]


def report(
    pictures: Sequence[Picture], rows: Sequence[Row], shifts: Sequence[Shift], notes: Sequence[str], about: str
) -> str:
    """Return the page; `about` describes the run, `notes` are warnings for the reader."""
    key = joined(
        fill(
            '<span class="key"><i style="background:$colour"></i>$meaning</span> ',
            colour=COLOURS[kind],
            meaning=meaning,
        )
        for kind, meaning in MEANING.items()
    )
    return fill(
        PAGE,
        about=about,
        style=STYLE,
        colours=joined(fill("  .$kind rect { fill: $colour }\n", kind=k, colour=c) for k, c in COLOURS.items()),
        warnings=joined(fill('<p class="warning">$note</p>', note=note) for note in notes),
        key=key,
        names=names(pictures),
        bars=bars(pictures),
        table=_table(rows),
        clocks=joined(fill("<li>$clock</li>", clock=clock(shift)) for shift in shifts),
        script=SCRIPT,
    )


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns to show; the serial column only with a serial run."""
    compared = any(row.serial is not None for row in rows)
    return [column for column in COLUMNS if compared or column[0] != "serial"]


def clock(shift: Shift) -> str:
    """Return, in words, how a rank's times were shifted to the common clock."""
    error = "an unknown error" if shift.error is None else f"at most {shift.error / 1e3:.0f} µs of error"
    return f"rank {shift.rank}: {shift.offset / 1e3:+.0f} µs, {error}; {shift.how}"


def _table(rows: Sequence[Row]) -> Markup:
    shown = columns(rows)
    heads = [fill("<th>$name</th>", name=name) for name in ("layer", "pass", "operators [m, k, n]", "chunks", "passes")]
    heads += [fill("<th>rank</th>")]
    heads += [fill('<th title="$meaning">$name</th>', name=name, meaning=meaning) for name, _, _, meaning in shown]
    lines = [
        fill(
            "<tr>$cells</tr>\n",
            cells=joined(
                fill("<td>$value</td>", value=value)
                for value in (
                    *(row.layer, row.direction, row.shape, row.kernel, row.passes, row.rank),
                    *(cell(value(row), form) for _, value, form, _ in shown),
                )
            ),
        )
        for row in rows
    ]
    meanings = [fill("<li>$name: $meaning</li>", name=name, meaning=meaning) for name, _, _, meaning in shown]
    return fill(
        "<table><tr>$heads</tr>\n$lines</table>\n<ul class=quiet>$meanings</ul>",
        heads=joined(heads),
        lines=joined(lines),
        meanings=joined(meanings),
    )


def cell(value: float | None, form: str) -> str:
    """Return a number as text, or "-" for None."""
    return "-" if value is None else format(value, form)
