"""Plans: round trips, refusals and precedence."""

import json
import os
import pickle
import stat
from dataclasses import replace

import pytest
import torch

from ascend_parallel import Settings, SettingsError
from ascend_parallel.environment import read_settings
from ascend_parallel.ops import Exchange, Matmul, choose
from ascend_parallel.tuning.measured.chunk_plan import (
    Entry,
    Machine,
    Plan,
    PlanError,
    differences,
    load_plan,
    this_machine,
)

MACHINE = Machine(hardware="x86_64, 2 cores", torch="2.13.0", backend="gloo", threads=1, ranks=2)
ENTRY = Entry(
    run="forward",
    operator="matmul_all_reduce",
    m=512,
    k=64,
    n=32,
    dtype="float32",
    sizes=(32, 160, 320),
    serial=2e-3,
    chosen=1.5e-3,
)
PLAN = Plan(MACHINE, (ENTRY, replace(ENTRY, run="backward", sizes=(512,), chosen=2e-3)))


def problem(m=512, ranks=2, dtype=torch.float32):
    return Matmul("matmul_all_reduce", m, 64, 32, dtype, "cpu", ranks)


def test_a_plan_survives_its_file(tmp_path):
    path = tmp_path / "new folder" / "plan.json"
    PLAN.save(path)
    assert load_plan(str(path)) == PLAN
    assert hash(load_plan(str(path))) == hash(PLAN)
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


EXPERTS = replace(ENTRY, operator="expert_exchange", m=6, k=64, n=64, sizes=(1, 2, 2, 1))


def test_groups_of_experts_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "plan.json"
    one = replace(EXPERTS, m=2, sizes=(2,), chosen=2e-3)
    PLAN.with_entries((EXPERTS, one)).save(path)
    plan = load_plan(str(path))
    exchange = Exchange("expert_exchange", 6, None, 64, torch.float32, "cpu", 2)
    sizes, reason = plan.find(exchange)
    assert (sizes, reason.code) == ((1, 2, 2, 1), "plan_groups")
    assert reason.text == "plan: 4 groups, 25% faster than the framework's own layer"
    choice = choose(exchange, Settings(plan=plan))
    assert (choice.kernel, choice.sizes, choice.given) == ("chunked", (1, 2, 2, 1), True)
    assert plan.find(replace(exchange, parts=2))[0] == (2,) and plan.find(replace(exchange, parts=4)) is None
    assert plan.find(replace(exchange, features=32)) is None


OLD_FILE = """
{"schema": 1,
 "machine": {"hardware": "a chip", "torch": "2.6.0", "backend": "gloo", "threads": 1, "ranks": 2},
 "entries": [
  {"run": "forward", "operator": "matmul_all_reduce", "m": 512, "k": 64, "n": 32, "dtype": "float32",
   "sizes": [256, 256], "serial": 0.02, "chosen": 0.01},
  {"run": "forward", "operator": "expert_exchange", "m": 4, "k": 64, "n": 64, "dtype": "float32",
   "sizes": [2, 2], "serial": 0.02, "chosen": 0.015},
  {"run": "forward", "operator": "head_exchange", "m": 6, "k": 2048, "n": 192, "dtype": "float32",
   "sizes": [6], "serial": 0.02, "chosen": 0.02},
  {"run": "forward", "operator": "key_gather", "m": 6, "k": 2048, "n": 128, "dtype": "float32",
   "sizes": [1, 5], "serial": 0.02, "chosen": 0.01}]}
"""
FLOAT = (torch.float32, "cpu", 2)


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        (Matmul("matmul_all_reduce", 512, 64, 32, *FLOAT), (256, 256)),
        (Exchange("expert_exchange", 4, None, 64, *FLOAT), (2, 2)),
        (Exchange("head_exchange", 6, 2048, 192, *FLOAT), (6,)),
        (Exchange("key_gather", 6, 2048, 128, *FLOAT), (1, 5)),
    ],
    ids=lambda value: getattr(value, "operator", ""),
)
def test_a_file_that_an_earlier_version_wrote_cuts_matmuls_and_exchanges(call, sizes, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(OLD_FILE)
    plan = load_plan(str(path))
    assert choose(call, Settings(plan=plan)).sizes == sizes
    assert plan.as_dict() == json.loads(OLD_FILE)  # and a file of this version is one of that


@pytest.mark.parametrize("change", [{"sizes": (1, 2)}, {"run": "backward"}, {"n": 32}, {"sizes": (6, 0)}, {"m": 12}])
def test_groups_of_experts_that_do_not_fit_are_refused(change, tmp_path):
    path = tmp_path / "plan.json"
    PLAN.with_entries((replace(EXPERTS, **change),)).save(path)
    with pytest.raises(PlanError, match="entry 2 is"):
        load_plan(str(path))


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        PLAN.with_entries((replace(ENTRY, m=1024, sizes=(1024,)),)).save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1
    assert stat.S_ISREG(path.stat().st_mode)


def change(**changes):
    return lambda raw: raw.update(changes)


def change_entry(**changes):
    return lambda raw: raw["entries"][0].update(changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(schema=2), "its schema is 2, and this version reads 1"),
        (lambda raw: raw.pop("schema"), "it has no schema"),
        (lambda raw: raw["machine"].pop("ranks"), "ranks"),
        (lambda raw: raw["machine"].update(ranks="2"), "machine.ranks is '2'"),
        (lambda raw: raw["machine"].update(colour="red"), "colour"),
        (lambda raw: raw.pop("entries"), "entries"),
        (change_entry(sizes=[]), "entry 0"),
        (change_entry(sizes=[16, -1]), "entry 0"),
        (change_entry(sizes=["16"]), "entry 0"),
        (change_entry(operator="matmul"), "entry 0"),
        (change_entry(run="sideways"), "entry 0"),
        (change_entry(serial=0), "entry 0"),
        (change_entry(m=None), "entry 0"),
        (change_entry(sizes=[5, 507]), "entry 0"),
        (change_entry(sizes=[16] * 65 + [0]), "entry 0"),
        (change_entry(sizes=[256, 128]), "entry 0"),
        (change_entry(dtype=["float32"]), "entry 0"),
    ],
)
def test_broken_plans_are_refused_as_a_whole(tmp_path, damage, message):
    raw = PLAN.as_dict()
    damage(raw)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(PlanError, match=message) as error:
        read_settings({"COC_PLAN": str(path)})
    assert "COC_PLAN=" in str(error.value)
    assert "COC_TUNE" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "it has no schema"), (None, "cannot be read")]
)
def test_files_that_are_no_plans(tmp_path, text, message):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_settings({"COC_PLAN": str(path)})


def test_a_foreign_machine_is_told_in_words():
    here = this_machine(4, torch.device("cpu"), "gloo")
    found = " ".join(differences(PLAN, here))
    assert "ranks is 4 here and was 2" in found
    assert f"torch is '{torch.__version__}' here and was '2.13.0'" in found
    assert differences(Plan(here), here) == []


def test_a_plan_decides_and_switches_on(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    settings = read_settings({"COC_PLAN": str(path)})
    assert settings.enabled
    choice = choose(problem(), settings)
    assert (choice.kernel, choice.sizes) == ("chunked", (32, 160, 320))
    assert choice.codes == ("plan_chunks",) and choice.reason == "plan: 3 chunks, 25% faster than one"
    backward = choose(problem(), replace(settings, plan=settings.plan.of("backward")))
    assert (backward.kernel, backward.codes) == ("reference", ("plan_whole",))
    for other in (problem(m=1024), problem(dtype=torch.float64)):  # not measured: one chunk, and that is said
        unplanned = choose(other, settings)
        assert (unplanned.kernel, unplanned.codes) == ("reference", ("unplanned",))
        assert unplanned.unmet == unplanned.reason
    with pytest.raises(PlanError, match="measured on 2 ranks and does not fit a group of 3"):
        choose(problem(ranks=3), settings)


def test_what_wins_over_what():
    table = {(512, 64, 32): 8}
    assert len(choose(problem(), Settings(num_chunks=4)).sizes) == 4
    assert choose(problem(), Settings(num_chunks=4, plan=PLAN)).sizes == (32, 160, 320)
    assert len(choose(problem(), Settings(num_chunks=4, plan=PLAN, customized_coc=table)).sizes) == 8
    given = Settings(num_chunks=4, plan=PLAN, customized_coc={(512, 64, 32): [48, 464]})
    assert choose(problem(), given).sizes == (48, 464)
    assert len(choose(problem(m=1024), given).sizes) == 4
    assert choose(problem(), replace(given, mode=1)).sizes == (512,)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\[512, 64, 32\] has chunks of 500 rows together.* cuts 512"):
        choose(problem(), Settings(customized_coc={(512, 64, 32): [48, 452]}, mode=2))
    for sizes in ([], [15, 497], [0, 512], ["16"], [16] * 65):
        with pytest.raises(SettingsError, match="the rows of each, all but the last multiples of 16"):
            Settings(customized_coc={(512, 64, 32): sizes})


def test_a_plan_beside_a_search_for_one_is_refused():
    for other in ({"tune": "new.json"}, {"auto": True}):
        with pytest.raises(SettingsError, match="COC_PLAN cannot be set together"):
            Settings(plan=PLAN, **other)
    with pytest.raises(SettingsError, match=r"COC_TUNE='x.toml' .*path to a .json"):
        read_settings({"COC_TUNE": "x.toml"})


def test_values_travel_without_their_hashes():
    settings = Settings(plan=PLAN)
    assert hash(settings) == hash(pickle.loads(pickle.dumps(settings)))
    assert not {"_hash", "_by_key", "digest"} & set(vars(pickle.loads(pickle.dumps(settings)).plan))


def test_a_count_beats_an_auto_that_was_read_before(tmp_path):
    file = tmp_path / "coc.json"
    file.write_text('{"num_chunks": "auto"}')
    assert read_settings({"COC_CONFIG": str(file)}).auto
    assert not read_settings({"COC_CONFIG": str(file), "COC_PARALLEL_NUM": "4"}).auto
    assert not read_settings({"COC_PARALLEL_NUM": "auto"}, num_chunks=4).auto
    assert not read_settings({"COC_PARALLEL_NUM": "auto"}, auto=False).auto


def test_auto():
    assert read_settings({"COC_PARALLEL_NUM": "auto"}).auto
    assert read_settings({}, num_chunks="auto").effective_mode == 2
    assert json.dumps(Settings(plan=PLAN).as_dict()["plan"]) == f'"{PLAN.digest}"'
