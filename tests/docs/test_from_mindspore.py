"""docs/from-mindspore.md: its model runs as it stands, with one card's losses; what it shows of files is printed."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from ascend_parallel.tuning.cost_model.mindformers import read_mindformers

PAGE = (Path(__file__).parents[2] / "docs" / "from-mindspore.md").read_text(encoding="utf-8")
AFTER = re.search(r"^```python\n# after\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


def module():
    """The script of the page, not as the main program."""
    made = types.ModuleType("after")
    sys.modules["after"] = made
    exec(compile(AFTER, "after.py", "exec"), made.__dict__)
    return made


def trained(_):
    return module().main()


def on_one_card():
    """The losses of the same model and batches, without this package."""
    script = module()
    weights, batches = script.data()
    network = script.FeedForward(weights).double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, target in ([torch.tensor(part).double() for part in batch] for batch in batches):
        loss = nn.functional.mse_loss(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_model_after_has_the_losses_of_one_card_and_of_the_page(ranks):
    truth = on_one_card()
    before, after = (
        [float(word) for word in re.search(rf"^{name} +(.*)$", PAGE, re.MULTILINE)[1].split()]
        for name in ("before", "after")
    )
    for losses in ranks(4).run(trained):
        assert losses == pytest.approx(truth, rel=1e-6)
    assert before == pytest.approx(truth, rel=2e-7)  # what MindSpore 2.10.0 printed
    assert after == pytest.approx(truth, rel=2e-7)


def test_the_lines_of_a_file_are_those_that_are_printed(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("parallel_config: {gradient_aggregation_group: 1}\nrecompute_config: {mp_comm_recompute: True}\n")
    lines = read_mindformers(file).report().splitlines()
    shown = re.findall(r"^  (?:differs|none) .*$", PAGE, re.MULTILINE)
    assert len(shown) == 2
    assert [line for line in shown if line not in lines] == []


def test_the_keys_that_the_page_names_are_known_to_the_reader():
    source = Path(sys.modules[read_mindformers.__module__].__file__).read_text(encoding="utf-8")
    table = PAGE.partition("## Their configuration files")[2].partition("## What stays")[0]
    keys = re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    assert len(keys) > 15
    assert [key for key in keys if key not in source] == []
