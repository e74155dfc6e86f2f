"""Slabs of experts: written once, the same bits as from the fuel's files for every size of cache and either
way of reading, refused when they are another fuel's or damaged; and files that change under a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import EXACT
from cli_tools import check_error, environment, run_decode, run_rocket, tree
from golden_fuels import CASES
from rocket import DeviceError, Engine, FuelError, InputError, _core, slab_command
from rocket.errors import CliError

SPARKLER = Path(__file__).parents[1] / "fuels" / "sparkler"
GREEDY = _core.SamplingParams()
SLAB = "experts.slab"


def engine(fuel: Path, **options: Any) -> _core.CoreEngine:
    return _core.CoreEngine(
        str(fuel), backend="cpu", threads=2, max_context=160, max_rows=64, max_streams=6, **EXACT, **options
    )


def scenario(core: _core.CoreEngine) -> tuple[list[np.ndarray], list[int]]:
    """Prompts in chunks, then a batch."""
    rng = np.random.default_rng(11)
    vocab = core.info()["vocab"]
    streams = [core.open() for _ in range(3)]
    logits = []
    for stream, length, chunk in zip(streams, (70, 21, 5), (64, 7, 1), strict=True):
        found = core.feed(stream, rng.integers(0, vocab, length).tolist(), logits="all", chunk=chunk)
        assert found is not None
        logits.append(found)
    tokens, last = [], rng.integers(0, vocab, 3).tolist()
    for _ in range(8):
        last = core.decode_batch(streams, last, [GREEDY] * 3)
        logits.append(core.last_logits())
        tokens += last
    for stream in streams:
        core.close(stream)
    return logits, tokens


def same(found: tuple[list[np.ndarray], list[int]], wanted: tuple[list[np.ndarray], list[int]]) -> None:
    assert found[1] == wanted[1]
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sparkler."""
    folder = tmp_path_factory.mktemp("slab")
    _core.FuelSlab(str(SPARKLER), str(folder)).write()
    return folder


@pytest.fixture
def own_slab(slab: Path, tmp_path: Path) -> Path:
    """That a test may damage."""
    return Path(shutil.copytree(slab, tmp_path / "slab"))


@pytest.mark.parametrize("case", [*CASES, None], ids=lambda case: case.name if case else "sparkler")
def test_bits_are_those_of_experts_in_place(
    case: Any, fuel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuel = case.build(fuel_dir) if case else SPARKLER
    core = engine(fuel)
    info, wanted = core.info(), scenario(core)
    core.unload()
    written = _core.FuelSlab(str(fuel), str(tmp_path))
    assert not written.written()
    calls: list[tuple[int, int]] = []
    written.write(lambda done, total: calls.append((done, total)))
    assert calls[-1] == (written.file_bytes, written.file_bytes)
    assert (tmp_path / SLAB).stat().st_size == written.file_bytes
    assert written.written()
    written.verify()
    all_experts, topk = info["moe_layers"] * info["experts"], info["topk"]
    for slots in sorted({topk, max(topk, all_experts // 4), all_experts // 2, all_experts}):
        for uring in ("1", "0"):
            monkeypatch.setenv("ROCKET_IO_URING", uring)
            core = engine(fuel, expert_slots=slots, expert_slab=str(tmp_path))
            found = core.info()
            assert re.fullmatch(r"slab, (io_uring|preads), (O_DIRECT|buffered)", found["expert_store"])
            if uring == "0":
                assert "preads" in found["expert_store"]
            assert any(str(tmp_path / SLAB) in choice for choice in found["choices"])
            same(scenario(core), wanted)
            stats = core.stats()
            assert stats["expert_misses"] > 0
            core.unload()


# --- the command that writes it ---------------------------------------------------------------------------


def test_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    first = run_rocket("fuel", "slab", "sparkler", str(folder))
    assert (first.status, first.out) == (0, ""), first.err
    assert re.search(r"experts\.slab: 168 experts of 7 MoE layers, 9\.\d\d MiB, written", first.err)
    before = (folder / SLAB).stat()
    again = run_rocket("fuel", "slab", "sparkler", str(folder))
    assert again.status == 0
    assert "are there already" in again.err
    whole = run_rocket("fuel", "slab", "sparkler", str(folder), "--verify")
    assert whole.status == 0
    assert "agree with the fuel, byte for byte" in whole.err
    after = (folder / SLAB).stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert tree(folder) == [SLAB]
    assert run_rocket("fuel", "slab", "sparkler", str(folder), "--quiet").err == ""


def test_what_cannot_be_written(tmp_path: Path, own_slab: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    check_error(run_rocket("fuel", "slab", "sparkler", str(file)), 2, "DIR: expected a folder", str(file))
    check_error(run_rocket("fuel", "slab", "sparkler", ""), 2, "expected a folder, found nothing")
    check_error(run_rocket("fuel", "slab", "no-such-fuel", str(tmp_path)), 1, "no-such-fuel")
    fuel = tmp_path / "fuel"
    shutil.copytree(SPARKLER, fuel)
    check_error(run_rocket("fuel", "slab", str(fuel), str(fuel)), 2, "lies in the fuel")
    check_error(
        run_rocket("fuel", "slab", "sparkler", str(tmp_path / "new"), "--verify"), 1, "no slab is there"
    )
    (own_slab / SLAB).write_bytes((own_slab / SLAB).read_bytes()[:-4096])
    check_error(run_rocket("fuel", "slab", "sparkler", str(own_slab)), 1, "experts.slab: truncated: expected")
    hollow = tmp_path / "hollow"
    assert run_rocket("fuel", "hollow", "sparkler", str(hollow)).status == 0
    check_error(run_rocket("fuel", "slab", str(hollow), str(tmp_path / "new")), 1, "hollow")
    assert not (tmp_path / "new").exists()


def test_a_disk_that_is_too_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "not" / "there" / SLAB
    has = slab_command.room(path)
    assert has > 0
    slab_command.check_room(path, 1)
    with pytest.raises(CliError, match=rf"needs .* \({1 << 60} bytes\), and the disk has .* bytes\)"):
        slab_command.check_room(path, 1 << 60)
    monkeypatch.setattr(slab_command, "room", lambda _: 1 << 20)
    with pytest.raises(CliError, match=r"needs 9\.\d\d MiB .*the disk has 1\.00 MiB") as error:
        slab_command.slab("sparkler", str(tmp_path / "new"))
    assert "make room for 8." in error.value.hint
    assert not (tmp_path / "new").exists()


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """As a quota: the system refuses it in the middle, and nothing is left."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from rocket.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "fuel", "slab", "sparkler", str(tmp_path / "slab")]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(
        rb"error: [^\n]*experts\.slab\.part: cannot [^\n]*: File too large\n\nhint: [^\n]+\n", done.stderr
    ), done.stderr
    assert tree(tmp_path) == ["slab"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.FuelSlab(str(SPARKLER), str(tmp_path)).write(stop)
    assert tree(tmp_path) == []


# --- the command lines that read it -----------------------------------------------------------------------


def decode_json(*arguments: str, **env: str) -> tuple[dict[str, Any], str]:
    result = run_decode(
        *("--prompt-ids", "5,6,7", "--tokens", "30", "--ignore-eos", "--json", *arguments), env=env
    )
    assert result.status == 0, result.err
    return json.loads(result.out), result.err


def test_decode_score_and_bench_take_it(slab: Path, tmp_path: Path) -> None:
    options = ("--expert-slots", "20", "--expert-slab", str(slab))
    plain, _ = decode_json()
    for uring, name in (("1", r"(io_uring|preads)"), ("0", "preads")):
        found, err = decode_json(*options, ROCKET_IO_URING=uring)
        assert found["token_ids"] == plain["token_ids"]
        assert re.fullmatch(rf"slab, {name}, (O_DIRECT|buffered)", found["experts"]["store"])
        assert re.search(rf"^expert store: {re.escape(str(slab))}/experts\.slab, {name}", err, re.M)
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n")
    runs = [run_rocket("score", "sparkler", "--text", str(text), "--json", *more) for more in ((), options)]
    rows = [[line for line in run.out.splitlines() if "seconds" not in line] for run in runs]
    assert runs[1].status == 0, runs[1].err
    assert rows[0] == rows[1]
    bench = run_rocket(
        *("bench", "decode", "--fuel", "sparkler", "--prompt", "8", "--tokens", "8", "--pairs", "1"),
        *("--read-seconds", "0.01", "--json", *options),
    )
    assert bench.status == 0, bench.err
    assert json.loads(bench.out)["experts"]["misses"] > 0


@pytest.mark.parametrize("option", ["--trace-out", "--logits-out"])
def test_no_output_replaces_it(own_slab: Path, option: str) -> None:
    file = own_slab / SLAB
    before = file.read_bytes()
    arguments = ("--prompt", "x", "--expert-slots", "10", "--expert-slab", str(own_slab), option, str(file))
    check_error(run_decode(*arguments), 2, option, "--expert-slab", "would be lost")
    assert file.read_bytes() == before


def test_a_bank_is_a_gpus(slab: Path) -> None:
    base = ("--backend", "cpu", "--prompt-ids", "5", "--tokens", "4")
    small = (*base, "--expert-slots", "20", "--expert-slab", str(slab))
    plain = run_decode(*base, "--json")
    without = run_decode(*small, "--expert-bank", "no", "--json")
    assert without.status == 0, without.err
    assert json.loads(without.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    for word in ("yes", "exclusive"):
        check_error(run_decode(*small, "--expert-bank", word), 2, "--expert-bank: expected a GPU")
    check_error(run_decode(*small, "--expert-bank", "some"), 2, "--expert-bank", "found 'some'")
    check_error(run_decode(*base, "--expert-bank", "no"), 2, "--expert-bank: expected one of --expert-cache")
    with pytest.raises(InputError, match="expected auto, yes, exclusive or no, found 'some'"):
        engine(SPARKLER, expert_slots=20, expert_bank="some")


def test_what_cannot_be_read(slab: Path, own_slab: Path, tmp_path: Path) -> None:
    base = ("--prompt-ids", "5", "--expert-slots", "20", "--expert-slab")
    check_error(
        run_decode("--prompt-ids", "5", "--expert-slab", str(slab)), 2, "--expert-slab", "--expert-slots"
    )
    check_error(run_decode(*base, ""), 2, "--expert-slab: expected a folder")
    check_error(run_decode(*base, str(tmp_path)), 1, "experts.slab: cannot open")
    case = CASES[0]
    other = case.build(tmp_path / "fuels")
    check_error(run_decode("--fuel", str(other), *base, str(slab)), 1, "experts.slab: a slab of another fuel")
    slow = run_decode(*base, str(slab), env={"ROCKET_EXPERT_READ_SECONDS": "soon"})
    check_error(slow, 2, "ROCKET_EXPERT_READ_SECONDS", "found 'soon'")
    with (own_slab / SLAB).open("r+b") as file:
        file.truncate(5 << 20)
    check_error(run_decode(*base, str(own_slab)), 1, "experts.slab: truncated: expected", "found 5242880")
    with pytest.raises(InputError, match="expected a cache of experts"):
        engine(SPARKLER, expert_slab=str(slab))
    with Engine(SPARKLER, backend="cpu", expert_slots=20, expert_slab=slab) as small:
        assert small.info["expert_store"].startswith("slab")


def changed(folder: Path, pattern: str, where: Callable[[int], range]) -> Path:
    """A copy of sparkler with a bit turned in the bytes ``where`` (of so many) of tensors with such names."""
    fuel = Path(shutil.copytree(SPARKLER, folder / "fuel"))
    file = fuel / "model.safetensors"
    found = [t for t in _core.read_headers(str(fuel))[0]["tensors"] if re.search(pattern, t[0])]
    assert found
    data = bytearray(file.read_bytes())
    for _, _, _, offset, size in found:
        for at in where(size):
            data[offset + at] ^= 1
    file.write_bytes(data)
    return fuel


@pytest.mark.parametrize("layer", [1, 7])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("expert", [0, 11, 23])
def test_other_weights_of_one_expert(layer: int, part: str, expert: int, slab: Path, tmp_path: Path) -> None:
    """The same shapes, and all else: the slab is not this fuel's, at the start of a run already."""
    name = rf"layers\.{layer}\..*\.experts\.{expert}\.{part}\.weight(_packed)?$"
    fuel = changed(tmp_path, name, range)
    with pytest.raises(FuelError, match="the same shapes, but other weights"):
        engine(fuel, expert_slots=20, expert_slab=str(slab))
    check_error(run_rocket("fuel", "slab", str(fuel), str(slab), "--verify"), 1, "but other weights")


def test_verify_finds_a_byte(slab: Path, tmp_path: Path) -> None:
    """One that the start of a run does not look at."""
    fuel = changed(tmp_path, r"layers\.3\..*\.experts\.5\.down_proj\.weight$", lambda _: range(1, 2))
    engine(fuel, expert_slots=20, expert_slab=str(slab)).unload()
    result = run_rocket("fuel", "slab", str(fuel), str(slab), "--verify")
    check_error(
        result, 1, "expert 5 of layer 3: ", "experts.slab: its bytes are not those of the fuel", "at byte"
    )
    check_error(
        run_rocket("fuel", "slab", str(fuel), str(slab), "--verify", "--quiet"), 1, "not those of the fuel"
    )


# --- files that change under a run ------------------------------------------------------------------------


def fails(core: _core.CoreEngine, stream: int, kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=pattern) as error:
        for token in range(20, 60):
            core.decode(stream, token, GREEDY)
    assert getattr(error.value, "hint", "")
    with pytest.raises(InputError, match="a step failed half-way"):
        core.decode(stream, 1, GREEDY)


@pytest.mark.parametrize("uring", ["0", "1"])
@pytest.mark.parametrize("change", ["shrinks", "written to"])
def test_a_slab_that_changes(
    own_slab: Path, change: str, uring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKET_IO_URING", uring)
    core = engine(SPARKLER, expert_slots=4, expert_slab=str(own_slab))
    stream = core.open()
    core.feed(stream, [5, 6, 7])
    time.sleep(0.02)  # files have the time of the kernel's last tick
    file = own_slab / SLAB
    if change == "shrinks":
        os.truncate(file, file.stat().st_size // 8)
    else:
        with file.open("r+b") as open_file:
            open_file.seek(-5000, os.SEEK_END)
            open_file.write(b"\x55")
    words = "in use" if change == "shrinks" else "(changed while in use|do not agree with their checksum)"
    fails(core, stream, FuelError, rf"^expert \d+ of layer \d+: .*experts\.slab: .*{words}")
    core.unload()


@pytest.mark.parametrize("uring", ["0", "1"])
def test_a_disk_that_takes_too_long(slab: Path, uring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that no disk keeps. Nothing is asked of the slab again, nor is its memory given back."""
    monkeypatch.setenv("ROCKET_IO_URING", uring)
    monkeypatch.setenv("ROCKET_EXPERT_READ_SECONDS", "1e-9")
    core = engine(SPARKLER, expert_slots=4, expert_slab=str(slab))
    stream = core.open()
    pattern = r"^expert \d+ of layer \d+: .*experts\.slab: the disk gave nothing for 1e-09 s"
    fails(core, stream, DeviceError, pattern)
    with pytest.raises(DeviceError, match=pattern):
        core.feed(core.open(), [5, 6, 7])
    core.unload()


def test_mapped_experts_whose_file_shrinks(tmp_path: Path) -> None:
    """Experts in place, from pages that went away: an error, where the system would end the process."""
    fuel = Path(shutil.copytree(SPARKLER, tmp_path / "fuel"))
    core = engine(fuel)
    stream = core.open()
    core.feed(stream, [5, 6, 7])
    os.truncate(fuel / "model.safetensors", 100_000)
    fails(
        core, stream, FuelError, r"model\.safetensors: changed while in use: expected \d+ bytes, found 100000"
    )
    core.unload()


def test_mapped_experts_whose_file_is_written_to(tmp_path: Path) -> None:
    fuel = Path(shutil.copytree(SPARKLER, tmp_path / "fuel"))
    core = engine(fuel)
    stream = core.open()
    core.feed(stream, [5, 6, 7])
    time.sleep(0.02)
    with (fuel / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    fails(core, stream, FuelError, r"model\.safetensors: changed while in use: its bytes were written")
    core.unload()


@pytest.mark.parametrize("kind", ["in place", "slab"])
def test_the_command_line_says_it(kind: str, own_slab: Path, tmp_path: Path) -> None:
    fuel = Path(shutil.copytree(SPARKLER, tmp_path / "fuel"))
    options = ["--expert-slots", "4", "--expert-slab", str(own_slab)] if kind == "slab" else []
    code = "from rocket.decode import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "--fuel",
        str(fuel),
        "--prompt-ids",
        "5,6,7",
        "--ignore-eos",
        "--quiet",
    ]
    command += ["--tokens", "4090", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as run:
        assert run.stdout is not None
        assert run.stdout.read(20)
        os.truncate(own_slab / SLAB if kind == "slab" else fuel / "model.safetensors", 1 << 20)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 1, (run.returncode, err)
    where = rb"expert \d+ of layer \d+: " if kind == "slab" else b""
    assert re.fullmatch(rb"error: " + where + rb"[^\n]+ in use: [^\n]+\n\nhint: [^\n]+\n", err), err


def test_a_bus_error_of_another_s_ends_the_process() -> None:
    """Only pages of mapped fuels are answered for."""
    code = f"""
import mmap, tempfile
from rocket import _core
core = _core.CoreEngine({str(SPARKLER)!r}, backend="cpu", threads=1, max_context=16)
file = tempfile.TemporaryFile()
file.truncate(8192)
page = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
page[5000]
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=False, timeout=60)
    assert done.returncode == -signal.SIGBUS
