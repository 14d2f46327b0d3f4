"""Table, trace, page and picture from files with invented times."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from marks import promise
from timelines import MS, made

from ascend_parallel.diagnostics.intervals import length, union, within, without
from ascend_parallel.diagnostics.timeline import files as timeline_files
from ascend_parallel.diagnostics.timeline.align import Difference, align
from ascend_parallel.diagnostics.timeline.files import read_run, write
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.diagnostics.timeline.picture import picture
from ascend_parallel.diagnostics.timeline.table import table
from ascend_parallel.diagnostics.timeline.trace import trace, tracks
from ascend_parallel.text import templates
from ascend_parallel.text.templates import render


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        write(tmp_path, *made(rank, steps=3))
    return tmp_path


def test_a_row_of_the_table(folder):
    (row,) = table(read_run(folder)[0])
    # Chunks of 10 ms of matmul; collectives from 10 to 25 and 25 to 40 ms; computing until 20.
    assert (row.total, row.matmul, row.comm, row.exposed) == (40, 20, 30, 20)
    assert row.hidden == pytest.approx(10 / 30)
    assert row.e_bound == pytest.approx((20 + 30 - 40) / (50 - 30))
    assert (row.passes, row.shape, row.kernel) == (3, "matmul_all_reduce [64, 8, 4]", "chunked 2")


def serial_run(folder, **changes):
    """Files of a run in one chunk: 10 ms of matmul, 15 of communication, 25 in all."""
    for rank in range(2):
        write(folder, *made(rank, chunks=1, **changes))
    return folder


def test_e_bound_against_a_serial_run_is_the_benchmarks_within_its_bounds(folder, tmp_path):
    (row,) = table(read_run(folder)[0], read_run(serial_run(tmp_path / "lost"))[0])  # (25 - 40) / (25 - 15) < 0
    assert (row.serial, row.total, row.e_bound, row.lost) == (25, 40, 0, True)
    (row,) = table(read_run(folder)[0], read_run(serial_run(tmp_path / "won", slower=2))[0])
    assert (row.serial, row.e_bound, row.lost) == (50, pytest.approx((50 - 40) / (50 - 30)), False)
    (row,) = table(read_run(folder)[0], read_run(serial_run(tmp_path / "all", slower=3))[0])  # (75 - 40) / (75 - 45)
    assert (row.serial, row.e_bound, row.lost) == (75, 1, False)


@promise("timeline-losses")
def test_where_overlap_lost_it_is_said_with_what_to_do(folder, tmp_path):
    (note,) = merge(folder, against=serial_run(tmp_path / "serial")).notes
    assert note.startswith("overlap loses here: 1 of 1 passes that communicate took longer than in the serial run")
    assert "mlp.<fc2> forward most (40.00 ms against 25.00 ms)" in note
    assert "COC_PARALLEL_NUM=auto" in note
    assert "COC_TUNE" in note
    assert merge(folder, against=serial_run(tmp_path / "slow", slower=2)).notes == []
    assert merge(folder).notes == []


def test_a_run_of_other_shapes_or_in_chunks_is_nothing_to_compare_with(folder, tmp_path):
    merged = merge(folder, against=serial_run(tmp_path / "other", m=128))
    (row,) = merged.rows()
    assert (row.serial, row.e_bound) == (None, None)
    assert merged.notes == [f"{tmp_path / 'other'} has no pass of the same layers and shapes: nothing is compared"]
    (note,) = merge(folder, against=folder).notes
    assert note == f"{folder} is not a serial run, but has chunked 2: record a serial run with COC_MODE=1"


def test_a_worker_runs_one_collective_at_a_time(folder):
    comm = [span for span in read_run(folder)[0][0].passes[0].spans if span.kind == "comm"]
    assert [(span.queued, span.begin, span.end) for span in comm] == [
        (10 * MS, 10 * MS, 25 * MS),
        (20 * MS, 25 * MS, 40 * MS),
    ]


def test_a_fused_operator_is_one_span(tmp_path):
    header, (layer_pass,) = made(0, ranks=1)
    layer_pass["spans"] = [["fused", "shm", 0, 0, 30 * MS, 0]]
    write(tmp_path, header, [layer_pass])
    (row,) = table(read_run(tmp_path)[0])
    assert (row.total, row.matmul, row.comm, row.hidden, row.e_bound) == (40, None, None, None, None)


def check_event(event):
    """The fields that the format requires of complete and of metadata events."""
    assert {"name", "ph", "pid", "tid"} <= event.keys()
    assert isinstance(event["name"], str)
    assert all(type(event[name]) is int for name in ("pid", "tid"))
    if event["ph"] == "X":
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["cat"], str)
    else:
        assert event["ph"] == "M"
        assert event["name"] in ("process_name", "thread_name", "process_sort_index")
        assert event["args"].keys() <= {"name", "sort_index"}


def test_the_trace_is_in_chromes_format(folder):
    made_trace = json.loads(json.dumps(trace(read_run(folder)[0])))
    assert made_trace["displayTimeUnit"] in ("ms", "ns")
    for event in made_trace["traceEvents"]:
        check_event(event)
    named = {(e["pid"], e["tid"]) for e in made_trace["traceEvents"] if e["name"] == "thread_name"}
    events = [event for event in made_trace["traceEvents"] if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in events} == named
    assert len(events) == 2 * 3 * (1 + 2 + 2 + 1 + 1)  # ranks, steps; layer, matmuls, collectives, wait, exposed
    for track in named:  # within a track events nest or follow each other, else a viewer drops them
        ends = []
        for event in sorted((e for e in events if (e["pid"], e["tid"]) == track), key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6
            ends.append(event["ts"] + event["dur"])


class Page(HTMLParser):
    """Collects tags, and references that need a network."""

    def __init__(self):
        super().__init__()
        self.open, self.outside, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.outside += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_report_needs_nothing_from_outside(folder):
    merge(folder).write(folder, png=False)
    text = (folder / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert "//" not in re.sub(r"http://www.w3.org/2000/svg", "", text)
    assert "mlp.<fc2>" in page.text  # escaped in the source
    assert "mlp.<fc2>" not in text


def test_the_bars_are_where_the_times_are(folder):
    merge(folder).write(folder, png=False)
    (drawn,) = re.findall(r'<svg class="time".*</svg>', (folder / "report.html").read_text(), re.S)
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    found = {}
    for bar in root.iter(f"{space}svg"):
        if bar.get("class", "").startswith("bar"):
            kind = bar.get("class").split()[1]
            place = tuple(round(float(bar.get(side).rstrip("%")) * 0.4, 3) for side in ("x", "width"))
            found.setdefault(kind, []).append(place)
    # One step of 40 ms is all of the width, for each of two ranks.
    assert sorted(found["matmul"]) == [(0, 10)] * 2 + [(10, 10)] * 2
    assert sorted(found["hidden"]) == [(10, 10)] * 2
    assert sorted(found["exposed"]) == [(20, 5)] * 2 + [(25, 15)] * 2
    assert sorted(found["wait"]) == [(20, 20)] * 2


def test_one_step_of_many_is_shown(folder):
    shown = picture(read_run(folder)[0], "recorded")
    assert shown.title == "recorded, step 1 of 3"
    assert shown.milliseconds == 40
    assert shown.share == pytest.approx(20 / 30)


def test_the_clocks_of_two_hosts_are_brought_together(tmp_path):
    apart = {"to": 0, "offset": 5000 * MS, "error": 40_000}
    write(tmp_path, *made(0))
    write(tmp_path, *made(1, begin=-5000, boot="b", clocks=[apart]))
    files, shifts = align(read_run(tmp_path)[0])
    assert files[1].passes[0].begin == files[0].passes[0].begin
    assert files[1].passes[0].spans == files[0].passes[0].spans
    assert (shifts[1].offset, shifts[1].error) == (5000 * MS, 40_000)


@pytest.mark.parametrize(("offset", "moved"), [(30_000, 0), (-50_000, 0), (70_000, 70_000)])
def test_one_host_has_one_clock_unless_measured_otherwise(tmp_path, offset, moved):
    write(tmp_path, *made(0))
    write(tmp_path, *made(1, clocks=[{"to": 0, "offset": offset, "error": 50_000}]))
    shift = align(read_run(tmp_path)[0])[1][1]
    assert shift.offset == moved
    assert ("another" in shift.how) == bool(moved)


def test_clocks_are_followed_from_group_to_group(tmp_path):
    """Rank 3 asked rank 2, rank 1 asked rank 0; rank 2 is of rank 1's host; rank 4 was never asked."""
    links = [None, (0, 1000), None, (2, 200), None]
    for rank, (link, boot) in enumerate(zip(links, "abbcd", strict=True)):
        clocks = [] if link is None else [{"to": link[0], "offset": link[1], "error": 10}]
        write(tmp_path, *made(rank, boot=boot, clocks=clocks, ranks=5))
    shifts = align(read_run(tmp_path)[0])[1]
    assert [(shift.offset, shift.error) for shift in shifts[:4]] == [(0, 0), (1000, 10), (1000, 10), (1200, 20)]
    assert shifts[4].error is None
    assert "never compared" in shifts[4].how


POINTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(POINTS, POINTS)
def test_sets_of_time(first, second):
    """Against sets of whole milliseconds."""

    def cells(intervals):
        return {cell for begin, end in intervals for cell in range(begin, end)}

    a, b = union(first), union(second)
    assert cells(a) == cells(first)
    assert length(a) == len(cells(first))
    assert cells(within(a, b)) == cells(first) & cells(second)
    assert cells(without(a, b)) == cells(first) - cells(second)


def test_tracks_are_used_again(folder):
    span = timeline_files.Span
    spans = [span("comm", "", 0, begin, begin, end) for begin, end in [(0, 10), (5, 12), (10, 20), (12, 13), (14, 15)]]
    assert tracks(spans) == [0, 1, 0, 1, 1]


def test_a_difference_is_a_value():
    assert Difference(0, 1, 2) == Difference(0, 1, 2)


TAG = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">"


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += [name for name, _ in attrs]


@promise("timeline-escapes")
def test_nothing_that_a_rank_wrote_becomes_a_tag(tmp_path):
    """Every text of a rank's file, wherever the page shows it."""
    clocks = [{"to": 0, "offset": 5, "error": 1}]
    for rank in range(2):
        header, passes = made(rank, steps=2, boot=f"{TAG}{rank}", clocks=clocks if rank else None)
        header["host"] = TAG
        for layer_pass in passes:
            layer_pass |= {"layer": f"{TAG}.{TAG}", "kind": TAG, "direction": TAG}
            layer_pass["calls"] = [{**call, "operator": TAG, "kernel": TAG} for call in layer_pass["calls"]]
            layer_pass["spans"] = [[kind, TAG, *rest] for kind, _, *rest in layer_pass["spans"]]
        write(tmp_path, header, passes)
    merged = merge(tmp_path, against=tmp_path)
    merged.write(tmp_path, False)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(page)
    assert tags.found.count("script") == 1  # the page's own
    assert "img" not in tags.found
    assert not {"src", "onerror"} & set(tags.attributes)
    assert page.count("&lt;script&gt;") > 10


def test_a_template_escapes_its_values_and_refuses_a_name_without_one(tmp_path):
    template = tmp_path / "page.html.jinja"
    template.write_text("<b>{{ about }}</b>\n")
    assert render(template, about="<i>") == "<b>&lt;i&gt;</b>\n"
    with pytest.raises(UndefinedError, match="'about' is undefined"):
        render(template)


def test_every_page_extends_the_one_frame_and_is_filled_in_one_place():
    """Pages of timeline, plans and lanes: no other file has a head of a page, or fills templates."""
    package = Path(templates.__file__).parents[1]
    frame = Path(templates.__file__).with_name("page.html.jinja")
    pages = set(package.rglob("*.html.jinja")) - {frame}
    names = {"report.html.jinja", "page.html.jinja", "lanes.html.jinja", "rank_lanes.html.jinja", "audit.html.jinja"}
    assert {page.name for page in pages} == names
    for page in pages:
        extends = "rank_lanes" if page.name in ("report.html.jinja", "audit.html.jinja") else "page"
        assert page.read_text(encoding="utf-8").startswith(f'{{% extends "{extends}.html.jinja" %}}'), page
    sources = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    assert [file for file, code in sources.items() if "jinja2" in code and file != Path(templates.__file__)] == []
    assert [file for file, code in sources.items() if "<html" in code or "<!DOCTYPE" in code] == []
