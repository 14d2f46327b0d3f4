"""``ascend-parallel plan-training``: its TOML trains on real ranks; its output, files and errors."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.training import Strategy, train_step
from ascend_parallel.training.degrees.report import HEADER
from ascend_parallel.training.degrees.space import SCHEDULES, ZERO_STAGES, Degrees, choices
from ascend_parallel.training.degrees.work import RECOMPUTE

EXAMPLES = Path(__file__).parents[2] / "examples" / "strategy"
PLANNED = f"{EXAMPLES / 'train.py'}:planned"


def tell(*options):
    # output that is redirected has 80 columns, on which its rows are stacked
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan-training", *map(str, options)])


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan(memory, *more, ranks=4):
    return tell("--model", PLANNED, "--ranks", ranks, "--memory", memory, "--hardware", "cpu-gloo", *more)


@pytest.fixture(scope="module")
def least():
    """Return the least bytes of a rank that the example needs, as the command says them."""
    text = plan("1kB").stderr.split("The least is ")[1]
    number, unit = text.split()[:2]
    return float(number) * {"KB": 1e3, "MB": 1e6}[unit] * 1.01


def trained(group, path):
    """Train the example's GPT for two steps by the strategy of a file; return the losses."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, batch_of

    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = train_step(model, batch_of(0), optimizer, Strategy.from_toml(path))
    losses = [step(*batch_of(number)).item() for number in range(2)]
    step.close()
    return losses


@functools.cache
def on_one_card():
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, batch_of

    torch.manual_seed(0)
    model = GPT().double()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(2):
        loss = model(*batch_of(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [1.0, 100.0])
def test_the_strategy_that_it_writes_trains_as_one_card_does(ranks, tmp_path, least, share):
    found = plan(least * share, "--out", "best.toml")
    assert found.exit_code == 0, found.output
    strategy = Strategy.from_toml("best.toml")
    assert strategy.ranks == 4
    assert (strategy.pipeline.degree > 1 or strategy.mesh["tp"] > 1 or strategy.sharding.zero_stage > 0) or share > 10
    expected = on_one_card()
    for losses in ranks(4).run(trained, str(tmp_path / "best.toml")):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_each_of_the_best_is_a_strategy_that_trains(ranks, tmp_path):
    found = json.loads(plan("1GB", "--json").stdout)
    seen, expected = set(), on_one_card()
    for number, each in enumerate(found["best"]):
        strategy = Strategy.from_dict(each["strategy"])
        degrees = each["degrees"]
        assert dict(strategy.mesh) == {"dp": degrees["dp"], "tp": degrees["tp"]}
        assert strategy.pipeline.degree == degrees["pp"]
        assert strategy.pipeline.micro_batches == degrees["micro_batches"]
        assert strategy.sharding.zero_stage == degrees["zero_stage"]
        kind = (strategy.pipeline.schedule, strategy.pipeline.degree, strategy.sharding.zero_stage)
        if kind not in seen:
            seen.add(kind)
            path = tmp_path / f"{number}.toml"
            path.write_text(toml(each["strategy"]))
            assert Strategy.from_toml(path) == strategy
            assert ranks(4).run(trained, str(path))[0] == pytest.approx(expected, rel=1e-12)
    assert len(seen) > 1


KINDS = [
    *({"pp": 2, "dp": 2, "schedule": schedule, "virtual_stages": several} for schedule, several in SCHEDULES),
    *({"pp": 2, "tp": 2, "recompute": kind} for kind in RECOMPUTE),
    *({"dp": 2, "tp": 2, "zero_stage": stage} for stage in ZERO_STAGES),
    *({"dp": 4, "zero_stage": stage, "recompute": "layers"} for stage in ZERO_STAGES[-2:]),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_choice_trains(ranks, tmp_path, kind):
    degrees = Degrees(**({"dp": 1, "tp": 1, "pp": 1, "rows": 2, "micro_batches": 16 // kind.get("dp", 1) // 2} | kind))
    layers = ("layers.*",)
    assert degrees in choices(
        (degrees.dp, degrees.ep, degrees.cp, degrees.tp, degrees.pp), 2, degrees.micro_batches, layers, 8
    )
    path = tmp_path / "kind.toml"
    path.write_text(toml(degrees.tables(layers, "cpu-gloo", None)))
    for losses in ranks(4).run(trained, str(path)):
        assert losses == pytest.approx(on_one_card(), rel=1e-12)


def toml(tables):
    """Write tables as TOML, with what `json` and TOML have in common."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            plain += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(plain)


def test_it_says_the_ten_best_and_why_the_others_lose():
    found = plan("1GB")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    heads = next(line for line in lines if line.lstrip().startswith("dp"))
    assert heads.split()[-2:] == ["bubbles", "why"]
    rows = lines[lines.index(heads) + 1 :][:10]
    assert [row.split()[0] for row in rows] == [str(place) for place in range(1, 11)]
    assert rows[0].endswith("the fastest")
    assert all("+" in row or "as fast" in row for row in rows[1:])
    split = any(f" {schedule} " in rows[0] for schedule in ("zbv", "zero_bubble"))
    assert ("its bytes and seconds are those of 1F1B" in found.stdout) == split
    assert "wrote planned-4.toml" in found.stdout
    assert Path("planned-4.toml").read_text().startswith(HEADER)


@pytest.mark.slow
def test_json_has_the_parts_of_time_and_memory():
    found = json.loads(plan("1GB", "--json").stdout)
    for each in found["best"]:
        assert sum(each["parts"].values()) == pytest.approx(each["seconds"])
        memory = dict(each["memory"])
        assert memory.pop("total") == pytest.approx(sum(memory.values()))
        assert memory["buffers"] >= 0
    assert [each["seconds"] for each in found["best"]] == sorted(each["seconds"] for each in found["best"])
    assert found["file"] == "planned-4.toml"
    assert found["planned"]["memory"] <= found["memory"] == 1e9


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama2-7b", pytest.param("gpt3-175b", marks=pytest.mark.stress)])
def test_a_preset_is_planned_in_its_own_sizes(preset):
    found = tell("--model", preset, "--ranks", 64, "--memory", "60GB", "--batch", 64, "--seq", 256, "--json")
    assert found.exit_code == 0, found.output
    best = json.loads(found.stdout)["best"]
    assert all(each["memory"]["total"] <= 60e9 for each in best)
    strategy = Strategy.from_toml(f"{preset}-64.toml")  # the first whose whole plan is confirmed
    assert strategy in [Strategy.from_dict(each["strategy"]) for each in best]
    assert (strategy.ranks, strategy.amp.dtype, strategy.hardware) == (64, "bfloat16", "910b")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama2-7", "--ranks", 4, "--memory", "60GB"], "--model 'llama2-7' is not known; did you mean"),
        (["--model", PLANNED, "--ranks", 4, "--memory", "60XB"], "--memory '60XB': give bytes up to 1e18"),
        (["--model", PLANNED, "--ranks", 4, "--memory", "1kB"], "memory=1 KB: no degrees fit on 4 ranks. The least is"),
        (["--model", PLANNED, "--ranks", 4, "--memory", "1GB", "--hardware", "911b"], "hardware '911b' is not known"),
        (["--model", PLANNED, "--ranks", 4, "--memory", "1GB", "--batch", 4], "--batch 4: "),
        (["--model", PLANNED, "--ranks", 4, "--memory", "1GB", "--dtype", "int8"], "--dtype 'int8' is not known"),
        (["--model", "no.py:f", "--ranks", 4, "--memory", "1GB"], "no.py: no such file"),
        (["--model", PLANNED, "--ranks", 4, "--memory", "1GB", "--out", "no/s.toml"], "--out no/s.toml: there is no"),
        (["--model", PLANNED, "--ranks", 4, "--memory", "1GB", "--out", "mine.toml"], "was not written by plan-train"),
    ],
)
def test_errors_are_a_line(options, message):
    Path("mine.toml").write_text("mode = 'auto'\n")
    found = tell(*options)
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert Path("mine.toml").read_text() == "mode = 'auto'\n"
    assert not list(Path.cwd().glob("*-4.toml"))


MIXTRAL = {"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
MIXTRAL |= {"num_attention_heads": 4, "vocab_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2}


def test_a_config_json_with_experts_is_planned_with_the_degree_that_is_given():
    Path("small.json").write_text(json.dumps(MIXTRAL))
    words = ["--model", "small.json", "--ranks", 4, "--memory", "1GB", "--batch", 8, "--seq", 32]
    found = tell(*words, "--ep", 2, "--hardware", "cpu-gloo")
    assert found.exit_code == 0, found.output
    assert "  ep  tp  " in found.stdout and "wrote small-4.toml" in found.stdout
    strategy = Strategy.from_toml("small-4.toml")
    assert (strategy.mesh["ep"], strategy.expert_dim, strategy.ranks) == (2, "ep", 4)
    refused = tell(*words, "--ep", 3)
    assert refused.exit_code == 2
    assert "ep=3: 4 ranks, and layers with 4 experts (mixture_of_experts); give one of 1, 2, 4" in refused.stderr


def test_ranks_below_1_are_refused():
    assert tell("--model", PLANNED, "--ranks", 0, "--memory", "1GB").exit_code == 2


def test_a_mindformers_file_gives_what_is_not_given():
    sizes = "num_layers: 3, hidden_size: 256, intermediate_size: 512, num_heads: 4, vocab_size: 512, seq_length: 64"
    Path("run.yaml").write_text(
        "runner_config: {batch_size: 4}\ncontext: {max_device_memory: 8GB}\n"
        "parallel_config: {data_parallel: 2, model_parallel: 2}\n"
        f"model: {{model_config: {{type: LlamaConfig, {sizes}}}}}\n"
    )
    found = tell("--mindformers", "run.yaml", "--hardware", "cpu-gloo", "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["file"] == "run-4.toml" and Strategy.from_toml("run-4.toml").ranks == 4
    assert any(use["key"] == "context.max_device_memory" for use in told["mindformers"])
    missing = tell("--ranks", "4", "--memory", "8GB")
    assert missing.exit_code == 2 and "--model is missing" in missing.stderr
