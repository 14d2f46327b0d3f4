"""Variables and options: a value as it is written, or an error that names it."""

import json
import os
import pickle
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import promise

from ascend_parallel import Settings, SettingsError
from ascend_parallel.environment import near_misses, read_settings
from ascend_parallel.settings import MAX_CHUNKS
from ascend_parallel.sharding import read_strategies
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.tuning.cost_model.hardware import read_hardware
from ascend_parallel.tuning.cost_model.models import read_model


@pytest.mark.parametrize(
    ("environ", "mode", "chunks", "fused"),
    [
        ({}, 0, 1, False),
        ({"COC_PARALLEL_NUM": "1", "USE_COC_FUSED_KERNEL": "0"}, 0, 1, False),
        ({"COC_PARALLEL_NUM": "2"}, 2, 2, False),
        ({"COC_PARALLEL_NUM": "8"}, 2, 8, False),
        ({"COC_PARALLEL_NUM": " 3 "}, 2, 3, False),
        ({"COC_PARALLEL_NUM": "64"}, 2, 64, False),
        ({"USE_COC_FUSED_KERNEL": "1"}, 2, 1, True),
        ({"COC_PARALLEL_NUM": "4", "USE_COC_FUSED_KERNEL": "1"}, 2, 4, True),
        ({"COC_PARALLEL_NUM": "4", "COC_MODE": "0"}, 0, 4, False),
        ({"COC_PARALLEL_NUM": "4", "COC_MODE": "1"}, 1, 4, False),
        ({"COC_MODE": "2"}, 2, 1, False),
        ({"COC_PARALLEL_NUM": "4", "COC_MODE": "-1"}, 2, 4, False),
    ],
)
def test_variables(environ, mode, chunks, fused):
    settings = read_settings(environ)
    assert (settings.effective_mode, settings.num_chunks, settings.fused) == (mode, chunks, fused)
    assert settings.enabled == (mode != 0)


@pytest.mark.parametrize("value", ["", "four", "4.0", "0", "-1", "1e9", "65", "999999999999", "4;2", "0x4", "None"])
def test_bad_chunk_counts(value):
    with pytest.raises(SettingsError) as error:
        read_settings({"COC_PARALLEL_NUM": value})
    assert "COC_PARALLEL_NUM=" in str(error.value)
    assert value in str(error.value)
    assert "from 1 (off) to 64" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("USE_COC_FUSED_KERNEL", "yes", "0 or 1"),
        ("USE_COC_FUSED_KERNEL", "", "0 or 1"),
        ("USE_COC_FUSED_KERNEL", "2", "0 or 1"),
        ("COC_DETERMINISTIC", "true", "0, 1, tp or invariant"),
        ("COC_DIGESTS", " ", "the folder to write to"),
        ("COC_STRICT", "", "0 or 1"),
        ("COC_TIME_LIMIT", "0", "whole seconds from 1 to 86400"),
        ("COC_TIME_LIMIT", "5m", "whole seconds from 1 to 86400"),
        ("COC_MODE", "3", "-1 .*0 .*1 .*2"),
        ("COC_MODE", "fast", "-1 .*0 .*1 .*2"),
    ],
)
def test_bad_switches(name, value, allowed):
    with pytest.raises(SettingsError, match=f"{name}='{value}' is not allowed: give {allowed}"):
        read_settings({name: value})


@pytest.mark.parametrize("name", ["USE_COC_FUSED_KERNE", "COC_PARALEL_NUM", "COC_PARALLEL_NUMS", "coc_parallel_num"])
def test_near_misses_are_warned_of(name):
    with pytest.warns(UserWarning, match=f"{name}, which nothing reads; did you mean"):
        read_settings({name: "4"})


def test_how_what_is_on_behaves():
    settings = read_settings({"COC_STRICT": "1", "COC_TIME_LIMIT": "20"})
    assert (settings.strict, settings.time_limit) == (True, 20)
    assert not settings.enabled


def test_the_buffer_of_hccl_is_read_and_compared_where_fused_operators_depend_on_it(tmp_path):
    file = tmp_path / "coc.toml"
    file.write_text('comm_mode = "aiv"')
    environ = {"USE_COC_FUSED_KERNEL": "1", "COC_CONFIG": str(file), "HCCL_BUFFSIZE": "120"}
    with pytest.raises(SettingsError, match=r"HCCL_BUFFSIZE=120 is not allowed: .*need a buffer of 200 MB"):
        read_settings(environ)
    assert read_settings({**environ, "HCCL_BUFFSIZE": "256"}).hccl_buffsize == 256
    assert read_settings(environ, hccl_buffsize=400).hccl_buffsize == 400  # of a group's own options
    assert read_settings({**environ, "USE_COC_FUSED_KERNEL": "0"}).hccl_buffsize == 120
    chunked, fused = (Settings(fused=fused, hccl_buffsize=120).shared() for fused in (False, True))
    assert "HCCL_BUFFSIZE" not in chunked and fused["HCCL_BUFFSIZE"] == 120


def test_determinism_is_asked_of_one_chunk_too():
    """One chunk must have the same bits as many, so the original layer cannot run."""
    assert read_settings({"COC_DETERMINISTIC": "1"}).enabled
    assert not read_settings({"COC_DETERMINISTIC": "1", "COC_MODE": "0"}).enabled
    assert read_settings({"COC_DETERMINISTIC": " TP "}) == Settings(deterministic="tp")
    assert Settings(deterministic="tp").enabled


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"mode": 0}, "COC_MODE=0 is not allowed with COC_DETERMINISTIC=tp"),
        ({"region": True}, "COC_REGION=1 is not allowed"),
        ({"region": "auto"}, "COC_REGION=auto is not allowed"),
        ({"split_weight_gradient": True}, "not allowed with COC_DETERMINISTIC=tp"),
        ({"deterministic": "dp"}, 'true, false, "tp" or "invariant"'),
    ],
)
def test_what_excludes_the_same_bits_at_every_degree(others, words):
    with pytest.raises(SettingsError, match=words):
        Settings(**{"deterministic": "tp", **others})


def test_other_names_are_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_settings({"PATH": "x", "RANK": "0", "COC_VERIFY": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert near_misses(os.environ) == {}


TOML = """
matmul_soc_friendly = false
recompute_all_gather = false
enable_coc_in_column_backward = true
k_min = 512
k_max = 2048
order = "compute_first"
[customized_coc]
"[16384, 5120, 1920]" = 8
"[16384, 1920, 5120]" = 1
"""


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file(tmp_path, kind):
    import tomllib

    file = tmp_path / f"coc.{kind}"
    file.write_text(TOML if kind == "toml" else json.dumps(tomllib.loads(TOML)))
    settings = read_settings({"COC_CONFIG": str(file), "COC_PARALLEL_NUM": "4"})
    assert settings == Settings(
        num_chunks=4,
        matmul_soc_friendly=False,
        recompute_all_gather=False,
        enable_coc_in_column_backward=True,
        k_min=512,
        k_max=2048,
        order="compute_first",
        customized_coc={(16384, 5120, 1920): 8, (16384, 1920, 5120): 1},
    )
    assert settings.as_dict()["customized_coc"] == {"[16384, 1920, 5120]": 1, "[16384, 5120, 1920]": 8}


def test_variables_win_over_the_file_and_arguments_over_both(tmp_path):
    file = tmp_path / "coc.json"
    file.write_text('{"num_chunks": 2, "order": "compute_first"}')
    assert read_settings({"COC_CONFIG": str(file)}).num_chunks == 2
    environ = {"COC_CONFIG": str(file), "COC_PARALLEL_NUM": "4"}
    assert read_settings(environ).num_chunks == 4
    assert read_settings(environ, num_chunks=8).num_chunks == 8
    assert read_settings(environ, num_chunks=8).order == "compute_first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_chunk": 4}', "unknown key 'num_chunk'; did you mean num_chunks.*Known keys: num_chunks"),
        ('{"num_chunks": "4"}', "num_chunks='4'"),
        ('{"num_chunks": true}', "num_chunks=True"),
        ('{"recompute_all_gather": 1}', "recompute_all_gather=1 .*true or false"),
        ('{"k_min": 5000}', r"k_min=5000 .*at most k_max \(4096\)"),
        ('{"k_max": 0}', "k_max=0 .*1 or more"),
        ('{"comm_mode": "fast"}', "comm_mode='fast' .*ai_cpu or aiv or ccu"),
        ('{"fused_ranks": 128}', "fused_ranks=128 .*8 or 16 or 32 or 64"),
        ('{"fused_ranks": true}', "fused_ranks=True .*8 or 16"),
        (
            '{"fused": true, "comm_mode": "aiv", "hccl_buffsize": 199}',
            "comm_mode='aiv' with HCCL_BUFFSIZE=199 .*set HCCL_BUFFSIZE to 200 or more",
        ),
        ('{"stream_limit": [0, 24]}', r"stream_limit=\(0, 24\) .*\[cube cores, vector cores\]"),
        ('{"stream_limit": [-1, -1]}', r"stream_limit=\(-1, -1\) .*or one of them -1"),
        ('{"stream_limit": 24}', "stream_limit=24 "),
        ('{"stream_limit": [24, true]}', "stream_limit="),
        ('{"hccl_buffsize": 0}', "hccl_buffsize=0 .*whole megabytes"),
        ('{"time_limit": 2.5}', "time_limit=2.5 .*whole seconds"),
        ('{"order": "both"}', "order='both' .*auto, compute_first, communicate_first"),
        ('{"customized_coc": 8}', "customized_coc=8 .*table of shapes"),
        ('{"customized_coc": {"[1, 2]": 8}}', r"customized_coc key '\[1, 2\]' .*whole numbers"),
        ('{"customized_coc": {"__import__(\'os\')": 8}}', "customized_coc key"),
        ('{"customized_coc": {"[1, 2, 3]": 65}}', r"customized_coc\['\[1, 2, 3\]'\]=65"),
        ("[1, 2]", "must hold a table of keys, not a list"),
        ("{", "is not valid JSON"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "coc.json"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_settings({"COC_CONFIG": str(file)})


def test_files_that_cannot_be_read(tmp_path):
    for name, message in (("missing.toml", "cannot be read: No such file"), ("", "is not allowed: give the path")):
        with pytest.raises(SettingsError, match=message):
            read_settings({"COC_CONFIG": str(tmp_path / name)})
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        read_settings({"COC_CONFIG": str(tmp_path / "folder.json")})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="is not valid TOML"):
        read_settings({"COC_CONFIG": str(tmp_path / "binary.toml")})


def test_settings_are_a_value():
    settings = Settings(num_chunks=4, customized_coc={"[1, 2, 3]": 8})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert hash(pickle.loads(pickle.dumps(settings))) == hash(settings)
    assert "'[1, 2, 3]': 8" in repr(settings)
    with pytest.raises(AttributeError):
        settings.num_chunks = 2
    with pytest.raises(SettingsError, match="unknown key"):
        read_settings({}, chunks=4)


@given(st.text(max_size=12))
def test_any_text_is_a_count_or_a_clear_error(text):
    try:
        settings = read_settings({"COC_PARALLEL_NUM": text})
    except SettingsError as error:
        assert "COC_PARALLEL_NUM" in str(error)
    else:
        assert 1 <= settings.num_chunks <= MAX_CHUNKS


DIGITS_BUT_NO_COUNT = [
    "4\x1f",
    "\x1c4",
    "\u0664",
    "\uff14",
    "\u00b2",
    "1_000",
    "1_0",
    "4\x00",
    "4\u00a0",
    "1" + "0" * 5000,
]


@promise("input-checked")
@pytest.mark.parametrize("text", DIGITS_BUT_NO_COUNT)
def test_every_variable_takes_ascii_digits_alone(text):
    for name in ("COC_PARALLEL_NUM", "USE_COC_FUSED_KERNEL", "COC_MODE", "COC_DETERMINISTIC", "COC_STRICT"):
        with pytest.raises(SettingsError, match=f"^{name}='.*' is not allowed: give "):
            read_settings({name: text})
    for name in ("COC_TIME_LIMIT", "COC_VERIFY", "COC_LOG_LEVEL", "COC_TUNE"):
        with pytest.raises(SettingsError, match=f"^{name}='.*' is not allowed: give ") as error:
            read_settings({name: text})
        assert len(str(error.value)) < 500


@promise("input-checked")
@given(
    st.sampled_from(["USE_COC_FUSED_KERNEL", "COC_MODE", "COC_TIME_LIMIT", "COC_VERIFY", "COC_LOG_LEVEL"]),
    st.text(max_size=12),
)
def test_any_text_of_any_variable_is_a_value_or_a_clear_error(name, text):
    try:
        read_settings({name: text})
    except SettingsError as error:
        assert str(error).startswith(f"{name}={text!r} is not allowed: give ")


def test_numbers_that_python_cannot_write_are_refused_from_python_too():
    with pytest.raises(SettingsError, match="num_chunks=<int of thousands of digits> is not allowed"):
        Settings(num_chunks=10**5000)


@pytest.mark.parametrize("variable", ["COC_CONFIG", "COC_PLAN"])
@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("json", '{"order": ' + "[" * 100_000),
        ("json", '{"order": ' + "[" * 400 + "]" * 400 + "}"),
        ("json", '{"num_chunks": 1' + "0" * 5000 + "}"),
        ("json", '{"customized_coc": {"' + "[" * 100_000 + '": 1}}'),
        ("toml", "order = " + "[" * 5000 + "]" * 5000),
        ("toml", "num_chunks = 1" + "0" * 5000),
        ("toml", ".".join("a" * 3000) + " = 1"),
    ],
)
def test_a_file_that_exhausts_its_parser_is_named(tmp_path, variable, ending, text):
    file = tmp_path / f"deep.{ending}"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        read_settings({variable: str(file)})
    assert len(str(error.value)) < 2000
    named = "deep" in str(error.value) or "order=" in str(error.value) or "customized_coc key" in str(error.value)
    assert named


READERS = {
    "COC_CONFIG": lambda path: read_settings({"COC_CONFIG": str(path)}),
    "COC_PLAN": lambda path: read_settings({"COC_PLAN": str(path)}),
    "strategy": Strategy.from_toml,
    "strategies": read_strategies,
    "--model-file": read_model,
    "--hardware-file": read_hardware,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_not_waited_for_and_a_huge_file_not_parsed(tmp_path, reader):
    pipe, huge = tmp_path / "pipe.toml", tmp_path / "huge.toml"
    os.mkfifo(pipe)
    huge.write_text("x = [1]\n" + "#" * 4_000_000)
    for path, message in ((pipe, "a pipe or a device, not a file"), (huge, "it has 4 MB, more than")):
        with pytest.raises(ValueError, match=rf"{path.name}.* cannot be read: .*{message}"):
            READERS[reader](path)


def test_regions():
    assert Settings().region is None
    for text, value in (("0", False), ("1", True), ("auto", "auto"), (" AUTO ", "auto")):
        assert read_settings({"COC_REGION": text}).region == value
    for text in ("", "2", "yes"):
        with pytest.raises(SettingsError, match=r"COC_REGION=.* is not allowed: .*0, 1 or auto"):
            read_settings({"COC_REGION": text})
    for value in (1, "1"):
        with pytest.raises(SettingsError, match=r'region=.*true, false or "auto"'):
            Settings(region=value)
    with pytest.raises(SettingsError, match="region_rows=0"):
        Settings(region_rows=0)
    assert not Settings(region=True).enabled
