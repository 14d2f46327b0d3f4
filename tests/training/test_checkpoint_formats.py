"""Checkpoints in other formats: safetensors, torch.save, Megatron-core's; and the command."""

import json
import struct
import textwrap

import numpy as np
import pytest
import torch
from checkpoints import are_as_in, model_tensors, optimizer_tensors, tensor_shards
from launch import launch
from megatron_cpu import (
    end_model_parallel,
    megatron_on_cpu,
    small_gpt,
    start_model_parallel,
)
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.training.checkpoint import (
    CheckpointError,
    load,
    load_safetensors,
    read_safetensors,
    save,
    tensor_shards_of,
    whole_state,
)
from ascend_parallel.training.checkpoint.megatron import load_megatron, megatron_state

ONE = "one process"


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of step 12."""
    model, optimizer = tensor_shards(model_tensors(), ONE, 0), tensor_shards(optimizer_tensors(), ONE, 0)
    save(tmp_path / "saved", step=12, model=model, optimizer=optimizer, values={"position": 7, "rate": 0.5})
    return tmp_path / "saved"


def command(*arguments, code=0):
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def test_show_tells_step_values_and_tensors(saved):
    shown_values = json.loads(command("show", saved, "--json").stdout)
    assert (shown_values["step"], shown_values["ranks"], shown_values["steps"]) == (12, 1, [12])
    assert shown_values["values"] == {"position": "7", "rate": "0.5"}
    assert shown_values["tensors"].keys() == {f"model.{name}" for name in model_tensors()} | {
        f"optimizer.{name}" for name in optimizer_tensors()
    }
    box = {"offsets": [0, 0], "sizes": [6, 10]}
    shown = {"shape": [6, 10], "dtype": "float32", "bytes": 240, "boxes": [box]}
    assert shown_values["tensors"]["model.one.weight"] == shown
    words = command("show", saved).stdout
    for word in ("step 12", "position = 7", "model: 7 tensors", "one.weight", "6 x 10", "bfloat16"):
        assert word in words


@pytest.mark.slow
def test_show_tells_in_how_many_shards_a_tensor_was_written(ranks, tmp_path):
    ranks(4).run(save_2x2, tmp_path)
    assert "2 x 2 shards" in command("show", tmp_path).stdout


def save_2x2(group, path):
    save(path, step=1, model=tensor_shards(model_tensors(), "2 x 2", group.rank()))


def test_safetensors_are_as_the_format_says_and_go_back_into_shards(ranks, saved, tmp_path):
    file = tmp_path / "model.safetensors"
    command("convert", saved, file, "--to", "safetensors")
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt", "step": "12"}
    at = 0
    for (name, entry), (expected, tensor) in zip(header.items(), model_tensors().items(), strict=True):
        assert (name, entry["shape"], entry["data_offsets"][0]) == (expected, list(tensor.shape), at)
        at = entry["data_offsets"][1]
    assert len(raw) == 8 + length + at
    start, stop = header["two.weight"]["data_offsets"]
    assert header["two.weight"]["dtype"] == "F64"
    found = np.frombuffer(raw[8 + length :][start:stop], "<f8").reshape(5, 3)
    assert (found == model_tensors()["two.weight"].numpy()).all()
    assert header["one.bias"]["dtype"] == "BF16"
    for name, tensor in read_safetensors(file).items():
        assert torch.equal(tensor, model_tensors()[name])
    assert all(ranks(4).run(from_safetensors, file))


def from_safetensors(group, file):
    model = tensor_shards(model_tensors(), "two stages on 2 x 2", group.rank(), blank=True)
    load_safetensors(file, model)
    first = next(iter(model))
    right = are_as_in(model, tensor_shards(model_tensors(), "two stages on 2 x 2", group.rank()))
    del model[first]
    with pytest.raises(CheckpointError, match="in the file, not here"):
        load_safetensors(file, model)
    return right


@pytest.mark.parametrize("damage", ["cut", "longer", "no header", "missing"])
def test_a_damaged_safetensors_file_is_refused(saved, tmp_path, damage):
    file = tmp_path / "model.safetensors"
    command("convert", saved, file, "--to", "safetensors")
    raw = file.read_bytes()
    file.write_bytes({"cut": raw[:-1], "longer": raw + b"x", "no header": b"PK" * 40, "missing": b""}[damage])
    if damage == "missing":
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (missing|damaged)"):
        load_safetensors(file, tensor_shards(model_tensors(), ONE, 0))


def test_convert_casts_the_model_and_keeps_the_rest(saved, tmp_path):
    command("convert", saved, tmp_path / "all.pt", "--to", "torch", "--dtype", "bfloat16")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (found["step"], found["values"]) == (12, {"position": 7, "rate": 0.5})
    for name, tensor in model_tensors().items():
        assert torch.equal(found["model"][name], tensor.bfloat16() if tensor.is_floating_point() else tensor)
    for name, tensor in optimizer_tensors().items():
        assert torch.equal(found["optimizer"][name], tensor)


def test_convert_to_dcp_and_diff(saved, tmp_path):
    command("convert", saved, tmp_path / "again", "--to", "dcp")
    assert "17 tensors and all values are the same" in command("diff", saved, tmp_path / "again").stdout
    other = model_tensors()
    other["one.weight"][2, 3] += 0.25
    other["two.count"] = other["two.count"].int()
    save(tmp_path / "other", step=12, model=tensor_shards(other, ONE, 0), values={"position": 8, "rate": 0.5})
    shown_values = json.loads(command("diff", saved, tmp_path / "other", "--json", code=1).stdout)
    shown_values = {line["name"]: line["differs"] for line in shown_values["differences"]}
    assert shown_values["model.one.weight"] == "1 of 60 elements, by 0.25 at most"
    assert shown_values["model.two.count"] == "int64 in the first, int32 in the second"
    assert shown_values["optimizer.two.scale.step"] == "in the first, not in the second"
    assert shown_values["values['position']"] == "7 and 8"
    assert len(shown_values) == 3 + len(optimizer_tensors())


def test_safetensors_become_a_checkpoint(saved, tmp_path):
    command("convert", saved, tmp_path / "model.safetensors", "--to", "safetensors")
    command("convert", tmp_path / "model.safetensors", tmp_path / "back", "--to", "dcp")
    model = tensor_shards(model_tensors(), ONE, 0, blank=True)
    assert load(tmp_path / "back", model=model).step == 0
    assert are_as_in(model, tensor_shards(model_tensors(), ONE, 0))


def test_the_command_refuses_in_a_line(saved, tmp_path):
    (tmp_path / "there.pt").touch()
    for arguments, words in [
        (("show", tmp_path / "nowhere"), "no such folder; give the folder"),
        (("show", saved, "--step", 3), "no whole checkpoint of step 3; steps: 12"),
        (("convert", saved, tmp_path / "x", "--to", "onnx"), "--to 'onnx' is not known. Known: dcp"),
        (("convert", saved, tmp_path / "x", "--to", "torch", "--dtype", "int4"), "--dtype 'int4' is not known"),
        (("convert", saved, tmp_path / "there.pt", "--to", "torch"), "there.pt is there already"),
        (("diff", saved, tmp_path / "there.pt"), "no safetensors file"),
    ]:
        assert words in command(*arguments, code=2).output


# Megatron-core


MEGATRON = textwrap.dedent("""
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    from pathlib import Path
    from megatron_cpu import (
        megatron_on_cpu,
        small_gpt,
        start_model_parallel,
        stop_model_parallel,
    )
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    torch.cuda.synchronize = lambda *_: None
    filesystem_async._process_memory = lambda: 0  # psutil's number, for its log
    with megatron_on_cpu():
        start_model_parallel(tensor_parallel=2)
        for path, options in {kinds!r}.items():
            Path(path).mkdir(exist_ok=True)
            dist_checkpointing.save(small_gpt(**options).sharded_state_dict(prefix=""), path)
        stop_model_parallel()
""")
PLAIN = {"num_layers": 3, "hidden": 16, "heads": 4, "vocab": 32, "seq": 8}
GATED = {**PLAIN, "num_layers": 2, "gated_linear_unit": True, "add_bias_linear": False, "tied": False}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Distributed checkpoints that Megatron-core saved on two tensor-parallel ranks, by kind of GPT."""
    folder = tmp_path_factory.mktemp("megatron")
    found = {"plain": folder / "plain", "gated": folder / "gated"}
    kinds = {str(found["plain"]): PLAIN, str(found["gated"]): GATED}
    for rank in launch(MEGATRON.format(kinds=kinds), [{}, {}]):
        assert rank.returncode == 0, rank.stderr
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("plain", PLAIN), ("gated", GATED)])
def test_a_model_of_megatron_loads_whole_and_in_other_slices(ranks, megatron, kind, options):
    expected = ranks(1).run(load_gpt, megatron[kind], options)[0]
    for state in ranks(2).run(load_rows, megatron[kind], expected):
        assert state
    fused = megatron_state(megatron[kind])
    assert len(fused) == len(expected)
    for name, tensor in expected.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        assert torch.equal(fused[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")], tensor)


def load_gpt(group, path, options):
    """Load into a GPTModel of one rank; its tensors must be those of the same seed."""
    with megatron_on_cpu():
        start_model_parallel(tensor_parallel=1)
        truth, model = small_gpt(**options), small_gpt(**options, seed=99)
        fewer = small_gpt(**{**options, "num_layers": 1})
        end_model_parallel()
    loaded, expected = tensor_shards_of(model), tensor_shards_of(truth)
    assert not are_as_in(loaded, expected)
    load_megatron(path, loaded)
    assert are_as_in(loaded, expected)
    with pytest.raises(CheckpointError, match=r"\.weight\[1\]: in the checkpoint, not here"):
        load_megatron(path, tensor_shards_of(fewer))
    return {name: shard.local for name, shard in expected.items()}


def load_rows(group, path, expected):
    from ascend_parallel.sharding.tensor_shard import TensorShard

    def rows(name, tensor):
        at = tensor.shape[0] // 3  # uneven, and not Megatron's
        start, stop = ((0, at), (at, tensor.shape[0]))[group.rank()]
        return TensorShard(
            torch.full_like(tensor[start:stop], -1), tuple(tensor.shape), (start,) + (0,) * (tensor.dim() - 1)
        )

    model = {name: rows(name, tensor) for name, tensor in expected.items()}
    load_megatron(path, model)
    starts = {name: shard.offsets[0] for name, shard in model.items()}
    return all(
        torch.equal(shard.local, expected[name][starts[name] : starts[name] + len(shard.local)])
        for name, shard in model.items()
    )


@pytest.mark.slow
def test_what_does_not_fit_megatrons_checkpoint_is_refused(megatron, tmp_path):
    state = megatron_state(megatron["plain"])
    whole = tensor_shards_of(torch.nn.ParameterDict())
    with pytest.raises(CheckpointError, match=r"in the checkpoint, not here\n  and \d+ more"):
        load_megatron(megatron["plain"], whole)
    from ascend_parallel.sharding.tensor_shard import TensorShard

    model = {name: TensorShard(tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in state.items()}
    model["decoder.layers.3.mlp.linear_fc2.bias"] = model.pop("decoder.layers.1.mlp.linear_fc2.bias")
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.linear_fc2\.bias: here, not in the checkpoint"):
        load_megatron(megatron["plain"], model)
    with pytest.raises(CheckpointError, match="no distributed checkpoint of Megatron-core"):
        load_megatron(tmp_path, {})
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="the format 'zarr'; only torch_dist is read"):
        load_megatron(tmp_path, {})


@pytest.mark.slow
def test_a_megatron_directory_becomes_a_checkpoint(megatron, tmp_path):
    command("convert", megatron["plain"], tmp_path / "ours", "--to", "dcp")
    found, expected = whole_state(tmp_path / "ours"), megatron_state(megatron["plain"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
