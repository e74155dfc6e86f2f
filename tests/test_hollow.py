"""Hollow fuels: true headers, no data, whole or absent, refused by the engine."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from safetensors import safe_open

from cli_tools import check_error, run_decode, tree
from fuel_strategies import architectures
from fuel_tools import FUELS, Rocket, flash, rocket
from rocket import _core, hollow
from rocket.accounting import GIB, account_of_inventory
from rocket.architecture import Architecture, read_architecture, to_config
from rocket.manifest import read_manifest

__all__ = ["flash", "rocket"]


def test_size_and_time(tmp_path: Path, rocket: Rocket) -> None:
    start = time.monotonic()
    assert rocket("fuel", "hollow", "glm-5.3-flash", str(tmp_path / "f")) == 0
    assert time.monotonic() - start < 60
    files = list((tmp_path / "f").iterdir())
    apparent = sum(f.stat().st_size for f in files)
    used = sum(f.stat().st_blocks * 512 for f in files)
    assert 176 * GIB < apparent < 182 * GIB
    assert used < 200e6
    assert "40 files of 181.30 GiB" in rocket.err
    assert tree(tmp_path) == ["f", *sorted(f"f/{f.name}" for f in files)]


def test_the_744b_as_well(tmp_path: Path, rocket: Rocket) -> None:
    assert rocket("fuel", "hollow", "glm-5.3", str(tmp_path / "f"), "--quiet") == 0
    assert rocket.err == ""
    files = list((tmp_path / "f").glob("*.safetensors"))
    assert len(files) == 97
    sizes = [f.stat().st_size for f in files]
    assert sum(sizes) == pytest.approx(465e9, rel=0.001)
    assert max(sizes) < 5.1e9
    assert rocket("fuel", "validate", "glm-5.3", "--weights", str(tmp_path / "f")) == 0, rocket.out
    assert rocket("fuel", "show", str(tmp_path / "f")) == 0
    assert "no engine runs this chemistry" in rocket.out


def test_headers_are_true(flash: Path) -> None:
    """Another reader's view of a shard."""
    listed = {
        t.name: t for t in hollow.hollow_tensors(read_manifest(FUELS / "glm-5.3-flash/fuel.yaml").manifest)
    }
    with safe_open(flash / "model-00007-of-00040.safetensors", "np") as file:
        names = list(file.keys())
        assert len(names) > 1000
        for name in names[:: len(names) // 50]:
            found = file.get_slice(name)
            assert (found.get_dtype(), tuple(found.get_shape())) == listed[name][1:]


def test_the_engine_refuses_it(flash: Path) -> None:
    with pytest.raises(_core.FuelError, match="this fuel is hollow: its files have names and shapes but no"):
        _core.CoreEngine(str(flash), backend="cpu", threads=1, max_context=64)


def test_decoding_is_refused(flash: Path) -> None:
    for prompt in (("--prompt", "Hello"), ("--prompt-ids", "1,2,3")):
        result = run_decode("--fuel", str(flash), *prompt, "--tokens", "4", "--quiet", "--backend", "cpu")
        check_error(result, 1, str(flash), "hollow", "no data")


@settings(max_examples=25, deadline=None)
@given(arch=architectures())
def test_configs_are_read_back(tmp_path_factory: pytest.TempPathFactory, arch: Architecture) -> None:
    import json

    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(to_config(arch)))
    try:
        found = read_architecture(folder)
    except _core.FuelError:  # shapes that no engine can run
        return
    assert found == arch


def test_a_folder_that_is_there(tmp_path: Path, rocket: Rocket) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    for name in ("full", "file", "link", "full/notes.txt/below"):
        status = 1 if "below" in name else 2
        rocket.fails(status, name, arguments=("fuel", "hollow", "glm-5.3-flash", str(tmp_path / name)))
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert rocket("fuel", "hollow", "glm-5.3-flash", str(tmp_path / "empty"), "--quiet") == 0


def test_an_error_on_the_way_leaves_nothing(
    tmp_path: Path, rocket: Rocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = hollow.header_of, []

    def full_disk(found: list) -> bytes:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(found)

    monkeypatch.setattr(hollow, "header_of", full_disk)
    rocket.fails(1, "No space left", arguments=("fuel", "hollow", "glm-5.3-flash", str(tmp_path / "f")))
    assert tree(tmp_path) == []


def test_a_kill_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM comes while the third shard is written."""
    code = (
        "import os, signal\n"
        "from rocket import hollow\n"
        "real, calls = hollow.header_of, []\n"
        "def slow(found):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(found)\n"
        "hollow.header_of = slow\n"
        "from rocket.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "fuel", "hollow", "glm-5.3-flash", str(tmp_path / "f")]
    env = {**os.environ, "ROCKET_FUELS": str(FUELS)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == 128 + 15, done.stderr
    assert tree(tmp_path) == []


def test_a_disk_without_holes(tmp_path: Path, rocket: Rocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hollow, "disk_bytes", lambda file: hollow.PROBE_BYTES)
    for place in (tmp_path / "f", tmp_path / "new" / "folders" / "f"):
        rocket.fails(1, "keeps no holes", arguments=("fuel", "hollow", "glm-5.3-flash", str(place)))
        assert tree(tmp_path) == []


def test_where_nothing_can_be_made(tmp_path: Path, rocket: Rocket) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "f", Path("/proc/f")):
        rocket.fails(1, str(place), "cannot write", arguments=("fuel", "hollow", "glm-5.3-flash", str(place)))
    assert tree(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n_routed_experts", 23, ("layer 1", "23 routed experts", "found 24")),
        ("n_routed_experts", 4096, ("layer 1", "4096 routed experts", "found 24")),
        ("vocab_size", 4000, ("embed_tokens", "4000 x 256", "found 4096 x 256")),
        ("hidden_size", 512, ("embed_tokens", "4096 x 512", "found 4096 x 256")),
    ],
)
def test_a_config_of_other_weights(
    field: str, value: int, words: tuple[str, ...], tmp_path: Path, rocket: Rocket
) -> None:
    copy = Path(shutil.copytree(FUELS / "sparkler", tmp_path / "f"))
    config = json.loads((copy / "config.json").read_text())
    config["text_config"][field] = value
    (copy / "config.json").write_text(json.dumps(config))
    for command in (("bytes",), ("plan",), ("fuel", "show"), ("fuel", "validate", "sparkler", "--weights")):
        rocket.fails(1, str(copy), *words, arguments=(*command, str(copy)))


def test_an_unknown_type_of_model(tmp_path: Path, rocket: Rocket) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for kind in ("glm5_next", "glm_moe_dsa", "'llama'"):
        rocket.fails(1, "model_type", kind, arguments=("bytes", str(tmp_path)))


def test_a_hollow_fuel_that_lost_a_shard(flash: Path, tmp_path: Path, rocket: Rocket) -> None:
    copy = tmp_path / "f"
    copy.mkdir()
    for file in flash.iterdir():
        if file.name != "model-00007-of-00040.safetensors":
            os.link(file, copy / file.name)
    rocket.fails(1, "model-00007-of-00040.safetensors", arguments=("bytes", str(copy)))
    shutil.rmtree(copy)


def test_all_weight_formats(tmp_path: Path, rocket: Rocket) -> None:
    """What a manifest says of formats is what its hollow fuel has."""
    text = (FUELS / "glm-5.3-flash" / "fuel.yaml").read_text()
    text = text.replace("index_kpool: 4", "index_kpool: 4\n    num_hidden_layers: 5\n    n_routed_experts: 8")
    for old, new in (
        ("routed_experts: nvfp4", "routed_experts: fp8"),
        ("shared_experts: bf16", "shared_experts: mxfp8"),
        ("attention: bf16", "attention: fp8"),
        ("dense_mlp: bf16", "dense_mlp: nvfp4-packed"),
        ("draft_layer: bf16", "draft_layer: f16"),
        ("lm_head: bf16", "lm_head: fp8-row"),
        ("routers: bf16", "routers: f32"),
        ("draft_experts: nvfp4", "draft_experts: bf16"),
        ("draft_own_head: false", "draft_own_head: true"),
        ("input_scales: true", "input_scales: false"),
        ("shard_files: 40", "shard_files: 3"),
    ):
        assert old in text
        text = text.replace(old, new)
    manifest = tmp_path / "fuel.yaml"
    manifest.write_text(text)
    assert rocket("fuel", "validate", str(manifest), "--fix") == 0
    assert rocket("fuel", "hollow", str(manifest), str(tmp_path / "f"), "--quiet") == 0
    assert rocket("fuel", "validate", str(manifest), "--weights", str(tmp_path / "f")) == 0, rocket.out
    file = read_manifest(manifest).manifest
    account = account_of_inventory(file.model, file.weight_formats.scheme, own_head=True)
    on_disk = sum(f.stat().st_size for f in (tmp_path / "f").glob("*.safetensors"))
    assert 0 < on_disk - account.tensor_bytes < 1 << 20
