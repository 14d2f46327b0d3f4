"""The page of a plan: self-contained and well-formed, with every collective, and no overlapping boxes."""

import random
import re
from html.parser import HTMLParser
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from small_models import Bert, Llama
from torch import nn

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.graph_drawing import GAP, draw
from ascend_parallel.sharding.visualize.page import OTHERS, to_html
from ascend_parallel.sharding.visualize.picture import COLLECTIVE, FOLDED, picture

SVG = "{http://www.w3.org/2000/svg}"
PLANS = {}


def llama(layers):
    """A Llama whose residual stream is sharded along the sequence, as in test_propagation."""
    if layers not in PLANS:
        with torch.device("meta"):
            model = Llama(layers=layers, width=1024, heads=16, groups=8, wide=2816, vocabulary=32000, length=512)
            tokens, targets = (torch.zeros(4, 512, dtype=torch.long) for _ in range(2))
        mesh = ProcessMesh([0, 1, 2, 3], ["mp"])
        cut = {"layers.*:add": (None, [(1, "mp", 1)])}
        PLANS[layers] = propagate(trace(model, (tokens, targets)), mesh, cut, objective="time")
    return PLANS[layers]


def bert():
    if "bert" not in PLANS:
        with torch.device("meta"):
            tokens = torch.zeros(4, 512, dtype=torch.long)
            args = (tokens, torch.ones(4, 512, dtype=torch.bool), tokens[:, 0].clone())
            graph = trace(Bert(width=1024, heads=16, vocabulary=32000, length=512), args)
        PLANS["bert"] = propagate(graph, ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), objective="time")
    return PLANS["bert"]


def two_readers():
    """A partial sum with two readers: it is reduced once, and the second reader takes slices."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.whole, self.sliced = (nn.Linear(1024, 1024, bias=False) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            return self.whole(x) + self.sliced(x)

    if "two" not in PLANS:
        with torch.device("meta"):
            graph = trace(Model(), (torch.zeros(512, 1024),))
        cut = {
            "first": ([(1, "mp"), (1, "mp")], None),
            "whole": ([(1, 1), ("mp", 1)], None),
            "sliced": ([(1, "mp"), (1, "mp")], None),
        }
        PLANS["two"] = propagate(graph, ProcessMesh([0, 1], ["mp"]), cut, objective="redistribution")
    return PLANS["two"]


def svg(page):
    return ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])


def groups(root, kind=""):
    return [group for group in root.iter(f"{SVG}g") if kind in group.get("class").split() or not kind]


def rectangle(group):
    return [float(group.find(f"{SVG}rect").get(name)) for name in ("x", "y", "width", "height")]


class Nesting(HTMLParser):
    """Fails if a closing tag does not match the open tag."""

    def __init__(self):
        super().__init__()
        self.open, self.names = [], set()

    def handle_starttag(self, tag, attrs):
        self.names |= {name for name, _ in attrs}
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("plan", [lambda: llama(2), bert], ids=["llama", "bert"])
def test_the_page_is_well_formed_and_needs_nothing_from_outside(plan):
    page = to_html(plan())
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    assert not nesting.names & {"src", "href"}
    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"]
    assert "@import" not in page
    assert page == to_html(plan())


@pytest.mark.parametrize("plan", [lambda: llama(12), bert], ids=["llama", "bert"])
def test_no_box_stands_on_another_or_outside(plan):
    root = svg(to_html(plan()))
    left, top, width, height = map(float, root.get("viewBox").split())
    boxes = [rectangle(group) for group in groups(root)]
    for x, y, wide, high in boxes:
        assert left <= x <= x + wide <= left + width
        assert top <= y <= y + high <= top + height
    for here, there in combinations(boxes, 2):
        assert any(
            here[axis] + here[axis + 2] <= there[axis] or there[axis] + there[axis + 2] <= here[axis] for axis in (0, 1)
        )


@pytest.mark.parametrize("plan", [lambda: llama(2), bert, two_readers], ids=["llama", "bert", "two readers"])
def test_every_collective_of_the_plan_is_in_the_table_and_on_an_edge(plan):
    plan = plan()
    page = to_html(plan)
    numbers = [float(number) for number in re.findall(r'<tr><td class="number">([0-9.]+)</td>', page)]
    assert numbers == sorted(numbers, reverse=True)
    assert sum(numbers) == pytest.approx(1e3 * plan.seconds, abs=1e-3 * len(numbers))
    of_weights = {node.name for node in plan.graph.nodes.values() if node.kind == "parameter"}
    conversions = [each for each in plan.conversions if each.communicates and each.value.node not in of_weights]
    root = svg(page)
    assert len(groups(root, COLLECTIVE)) == len({(each.value, each.source, each.target) for each in conversions})
    text = " ".join(root.itertext())
    for conversion in conversions:
        for step in [*conversion.ahead.steps, *(conversion.back.steps if conversion.back else ())]:
            assert not step.nbytes or step.text(plan.mesh.dim_names[step.mesh_dim]) in text
    thick = [path for path in root.iter(f"{SVG}path") if "thick" in path.get("class", "")]
    assert len(thick) >= 2 * len(groups(root, COLLECTIVE))
    assert all("forward: " in path.find(f"{SVG}title").text for path in thick)


def test_of_equal_layers_two_are_drawn_and_the_others_are_counted():
    pictures = {layers: picture(llama(layers)) for layers in (2, 3, 12)}
    assert not [box for box in pictures[2].boxes.values() if box.kind == FOLDED]
    assert len(pictures[3].boxes) == len(pictures[12].boxes) == len(pictures[2].boxes) + 1
    (fold,) = (box for box in pictures[12].boxes.values() if box.kind == FOLDED)
    assert fold.lines[:2] == ["layers.2 to layers.11: 10 more like layers.1", "same layouts"]
    per_layer = llama(12).collectives()["reduce_scatter"] - llama(2).collectives()["reduce_scatter"]
    assert f"{per_layer} reduce_scatter" in fold.lines[2]
    shown = " ".join(line for box in pictures[12].boxes.values() for line in box.lines)
    assert "layers.1.mlp.down linear" in shown
    assert "layers.2.mlp.down" not in shown


def test_folded_layers_with_other_layouts_are_counted():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(4)))
        graph = trace(model, (torch.zeros(512, 1024),))
    cut = {f"{layer}.0": ([None, ("mp", 1) if layer < 3 else (1, "mp")], None) for layer in range(4)}
    plan = propagate(graph, ProcessMesh([0, 1], ["mp"]), cut, objective="redistribution")
    (fold,) = (box for box in picture(plan).boxes.values() if box.kind == FOLDED)
    assert fold.lines[:2] == ["2 to 3: 2 more like 1", "1 with other layouts"]


def test_colours_are_those_of_the_legend():
    plan = bert()
    page = to_html(plan)
    legend = dict(re.findall(r'<span class="key"><i style="background:(#\w+)"></i>([^<]*)</span>', page))
    by_layout = {layout: colour for colour, layout in legend.items()}
    boxes = picture(plan).boxes
    drawn = groups(svg(page))
    assert len(drawn) == len(boxes)
    for box, group in zip(boxes.values(), drawn, strict=True):
        if box.layout:
            assert group.find(f"{SVG}rect").get("fill") == by_layout.get(box.layout, OTHERS)
    assert by_layout["dp R, mp R"] == "#dddddd"


def test_names_are_escaped():
    with torch.device("meta"):
        model = nn.ModuleDict({"a<b&c": nn.Linear(64, 64)})
        model.forward = lambda x: model["a<b&c"](x)
        graph = trace(model, (torch.zeros(8, 64),))
    page = to_html(propagate(graph, ProcessMesh([0, 1], ["mp"]), objective="redistribution"))
    assert "a<b" not in page
    assert any("a<b&c linear" in text for text in svg(page).itertext())


@pytest.mark.parametrize("seed", range(8))
def test_boxes_of_any_graph_stand_apart_and_arrows_lead_down(seed):
    draws = random.Random(seed)
    names = [f"n{index}" for index in range(40)]
    sizes = {name: (draws.uniform(20, 200), draws.uniform(20, 80)) for name in names}
    arrows = [(names[a], names[b]) for a, b in combinations(range(40), 2) if draws.random() < 0.06]
    drawing = draw(sizes, arrows)
    for (name, here), (other, there) in combinations(drawing.places.items(), 2):
        beside = here.x + here.width + GAP * 0.99 <= there.x or there.x + there.width + GAP * 0.99 <= here.x
        assert beside or here.y + here.height < there.y or there.y + there.height < here.y, (name, other)
    for (source, target), points in drawing.arrows.items():
        heights = [y for _, y in points]
        assert heights == sorted(heights), (source, target)
        assert heights[0] == drawing.places[source].y + drawing.places[source].height
        assert heights[-1] == drawing.places[target].y
