"""Invalid checkpoints and files, and full disks: `CheckpointError` on all ranks."""

import json
import struct
import subprocess
import textwrap

import pytest
import torch
from checkpoints import are_as_in, model_tensors, tensor_shards
from launch import forked_python
from marks import promise
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint import CheckpointError, load, read_safetensors, save, steps
from ascend_parallel.training.checkpoint import folder as folders

ONE = "one process"


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of step 4."""
    return save(tmp_path, step=4, model=tensor_shards(model_tensors(), ONE, 0)).path


def rewritten(checkpoint, change):
    """Change a manifest and update its digest."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    content = change(content) or content
    path.write_text(
        json.dumps({**content, "digest": folders.digest_of(content)} if isinstance(content, dict) else content)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: [1], "it is no table with a digest"),
        (lambda content: {"format": folders.FORMAT}, "step=None"),
        (lambda content: content.pop("files") and None, "files=None"),
        (lambda content: content.update(step="x"), "step='x'"),
        (lambda content: content.update(step=True), "step=True"),
        (lambda content: content.update(ranks=0), "ranks=0"),
        (lambda content: content.update(files={}), "files={}"),
        (lambda content: content["files"].update({".metadata": "x"}), "files="),
        (lambda content: content["files"].update({"../elsewhere": [1, "x"]}), "files="),
    ],
)
def test_a_manifest_of_wrong_content_is_refused_by_key(checkpoint, change, words):
    rewritten(checkpoint, change)
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, model=tensor_shards(model_tensors(), ONE, 0))
    assert words in str(error.value)
    assert "manifest.json is damaged" in str(error.value)
    done = CliRunner().invoke(app, ["checkpoint", "show", str(checkpoint)])
    assert (done.exit_code, "manifest.json is damaged" in " ".join(done.output.split())) == (2, True)


def test_names_of_steps_are_ascii_digits_of_directories(tmp_path):
    (tmp_path / "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0661\u0662").mkdir()
    (tmp_path / "step-000000012").mkdir()
    (tmp_path / "step-00000013").write_text("")
    assert steps(tmp_path) == []


# Errors on a single rank


@promise("checkpoint-ranks")
def test_whatever_one_rank_meets_all_ranks_raise(ranks, checkpoint):
    content = ranks(2).run(load_with_a_fault, checkpoint)
    assert content[0] == content[1]
    assert "rank 1: ZeroDivisionError: planted" in content[0][0]
    assert "rank 1: AttributeError" in content[0][1]
    assert "rank 1: AttributeError" in content[0][2]


def load_with_a_fault(group, path):
    """Unexpected errors, while a rank reads or collects."""
    found = []
    for fault in (lambda: load(path, model=tensor_shards(model_tensors(), ONE, 0)),):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:
            if group.rank() == 1:
                patch.setattr("ascend_parallel.training.checkpoint.loading.verify", lambda *_: 1 / _planted())
            fault()
        found.append(str(error.value))
    model = tensor_shards(model_tensors(), ONE, 0)
    for call in (lambda model: load(path, model=model), lambda model: save(path, step=9, model=model)):
        with pytest.raises(CheckpointError) as error:
            call(model if group.rank() == 0 else ["no", "shards"] if not found[1:] else {"w": 3, 4: None})
        found.append(str(error.value))
    return found


def _planted():
    raise ZeroDivisionError("planted")


# safetensors


def tensors_file(path, entries, data, text=None):
    text = (text or json.dumps(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start, stop, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("entries", "text", "words"),
    [
        ({"a": entry(0, 4), "b": entry(2, 8)}, None, "bytes of the tensor before it in b"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, None, "bytes of the tensor before it in b"),
        ({"a": entry(0, 2), "b": entry(4, 8)}, None, "bytes that no tensor has before b"),
        ({"a": entry(2, 8)}, None, "bytes that no tensor has before a"),
        ({"a": entry(0, 4)}, None, "is damaged"),
        ({"a": entry(0, 8, shape=[9])}, None, "do not hold shape"),
        ({"a": entry(0, 8, shape=[-2, -4])}, None, "no whole numbers of 0 or more"),
        ({"a": entry(0, 8, shape=[8.0])}, None, "no whole numbers of 0 or more"),
        ({"a": entry(0, 8, dtype="U9")}, None, "dtype 'U9'"),
        ({"a": entry(0, 8, dtype=[])}, None, "dtype []"),
        ({"a": 3}, None, "give dtype, shape and data_offsets"),
        ({}, '{"a": %s, "a": %s}' % ((json.dumps(entry(0, 8)),) * 2), "names that stand twice: a"),
        ({}, '{"a": {"dtype": "U8", "shape": [8], "shape": [8], "data_offsets": [0, 8]}}', "stand twice: shape"),
        ({}, "[" * 50_000, "no safetensors file"),
        ({}, "[]", "no safetensors file"),
    ],
)
def test_a_safetensors_header_that_contradicts_itself_is_refused(tmp_path, entries, text, words):
    path = tensors_file(tmp_path / "m.safetensors", entries, bytes(range(8)), text)
    with pytest.raises(CheckpointError) as error:
        read_safetensors(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_safetensors_file_whose_tensors_stand_in_another_order_is_read(tmp_path):
    entries = {"b": entry(4, 8), "empty": entry(4, 4), "a": entry(0, 4)}
    found = read_safetensors(tensors_file(tmp_path / "m.safetensors", entries, bytes(range(8))))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [0, 1, 2, 3],
        "b": [4, 5, 6, 7],
        "empty": [],
    }


# Full disks, and existing files


CONVERT = textwrap.dedent("""
    import resource, signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    from ascend_parallel.cli.app import app
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    app(["checkpoint", "convert", *sys.argv[1:]])
""")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_a_conversion_that_cannot_be_written_leaves_nothing(tmp_path, to):
    whole = {"w": TensorShard(torch.arange(100_000.0), (100_000,), (0,))}
    path = save(tmp_path / "from", step=4, model=whole).path
    out = tmp_path / "to" / "out"
    out.parent.mkdir()
    command = [forked_python(), "-c", CONVERT, str(path), str(out), "--to", to]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.lstrip().startswith("checkpoint: ")
    assert "Traceback" not in done.stderr
    if to == "dcp":
        assert steps(out) == []
        save(out, step=4, model=whole)  # save removes the leftovers
        assert [left.name for left in out.iterdir()] == ["step-00000004"]
    else:
        assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_a_conversion_does_not_overwrite(checkpoint, tmp_path, to):
    out = tmp_path / "out"
    if to == "dcp":
        save(out, step=4, model={"w": TensorShard(torch.ones(1), (1,), (0,))})
    else:
        out.mkdir()
        (out / "mine").write_text("kept")
    before = sorted(path.relative_to(out) for path in out.rglob("*"))
    done = CliRunner().invoke(app, ["checkpoint", "convert", str(checkpoint), str(out), "--to", to])
    assert done.exit_code == 2
    assert "is there already" in " ".join(done.output.split())
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == before


def test_nothing_is_filled_where_what_is_no_tensor_cannot_be_read(checkpoint, monkeypatch):
    """Values and random states are read before the first shard is filled."""
    monkeypatch.setattr(torch, "load", lambda *args, **options: _planted())
    model = tensor_shards(model_tensors(), ONE, 0, blank=True)
    with pytest.raises(CheckpointError, match=r"values, random\.0 cannot be read: ZeroDivisionError: planted"):
        load(checkpoint, model=model)
    assert are_as_in(model, tensor_shards(model_tensors(), ONE, 0, blank=True))
