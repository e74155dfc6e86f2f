"""The command line's parts, without an engine: options, prompts, reports, files, scores."""

import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file

from cli_tools import tree
from rocket import FuelError, InputError, PlanError
from rocket import fuel as fuels
from rocket.errors import CliError, UsageError, explain, one_line
from rocket.options import check_choice, check_integer, check_real, parse_ids
from rocket.output import AtomicFile, LogitsWriter
from rocket.prompt import check_ids, check_text, context_for, read_prompt
from rocket.report import (
    Experts,
    Timing,
    closing_line,
    diagnostics_table,
    format_bytes,
    mean_entropy,
    profile_table,
)
from rocket.score_file import Comparison, ScoreWriter
from rocket.score_reader import ScoreReader
from rocket.score_run import Totals, windows

# --- options ---


@pytest.mark.parametrize("value", [0.5, 0.0, 1.0])
def test_real_numbers_in_range(value: float) -> None:
    assert check_real("--x", value, 0, 1) == value


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), float("-inf")])
def test_real_numbers_out_of_range(value: float) -> None:
    with pytest.raises(UsageError, match=r"--x: expected a number in \[0, 1\], found"):
        check_real("--x", value, 0, 1)


def test_open_ends() -> None:
    with pytest.raises(UsageError, match=r"in \(0, 1\], found 0"):
        check_real("--x", 0, 0, 1, with_low=False)
    with pytest.raises(UsageError, match=r"in \[0, 1\), found 1"):
        check_real("--x", 1, 0, 1, with_high=False)
    with pytest.raises(UsageError, match="found inf"):
        check_real("--x", float("inf"), 0, float("inf"))


def test_integers_and_choices() -> None:
    assert check_integer("--n", 3, 0) == 3
    with pytest.raises(UsageError, match="--n: expected an integer from 1 to 5, found 6"):
        check_integer("--n", 6, 1, 5)
    with pytest.raises(UsageError, match="--b: expected one of cpu, cuda, found 'x'"):
        check_choice("--b", "x", ("cpu", "cuda"))


@pytest.mark.parametrize("text", ["1,5,9", " 1 5  9 ", "1, 5 ,9", "+1\n5\t9"])
def test_ids(text: str) -> None:
    assert parse_ids("--ids", text) == [1, 5, 9]


@pytest.mark.parametrize(
    "text", ["1,,2", "1,x", "1,-2", "1.5", "1,2,", "²", "9" * 25, str(2**31), "1_0", "0x1"]
)
def test_ids_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--ids: expected token ids such as 1,5,9, found"):
        parse_ids("--ids", text)


# --- prompts ---


def test_prompt_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p"
    file.write_bytes(b"\xef\xbb\xbfa\xc3\xa9\r\n")
    assert read_prompt(None, str(file), None).text == "aé"
    assert read_prompt("a\n", None, None).text == "a\n"
    assert read_prompt(None, None, "3,4").ids == [3, 4]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped\n\n")))
    assert read_prompt(None, None, None).text == "piped\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a\0b", "a binary file (a zero byte at 1)"),
        (b"ab\xff", "byte 0xff at 2"),
        (b"a\xc3", "byte 0xc3 at 1"),
    ],
)
def test_prompt_files_that_are_no_text(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "p"
    file.write_bytes(data)
    with pytest.raises(CliError) as caught:
        read_prompt(None, str(file), None)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_ids_in_the_vocabulary() -> None:
    check_ids([0, 9], 10)
    with pytest.raises(InputError, match="token id 10 at place 2: the fuel's vocabulary is 0 to 9"):
        check_ids([0, 10], 10)


def test_context() -> None:
    config = {"max_position_embeddings": 100}
    assert context_for(5, 10, None, config) == 15
    assert context_for(5, 10, 15, config) == 15
    assert context_for(5, 0, 50, config) == 50
    with pytest.raises(PlanError, match=r"5 .* \+ 10 to generate = 15, but --max-context is 14") as caught:
        context_for(5, 10, 14, config)
    assert caught.value.hint == "use --max-context 15, or --tokens 9"
    with pytest.raises(PlanError, match="= 101, but the model holds 100") as caught:
        context_for(5, 96, None, config)
    assert caught.value.hint == "use --tokens 95 or less"
    with pytest.raises(PlanError) as caught:
        context_for(101, 30, None, config)
    assert caught.value.hint == "shorten the prompt to 70 tokens or less"
    context_for(70, 30, None, config)  # the hint is right
    with pytest.raises(PlanError) as caught:
        context_for(101, 200, None, config)
    assert caught.value.hint == "shorten the prompt to 1 tokens or less, with --tokens 99 or less"
    with pytest.raises(PlanError) as caught:
        context_for(9, 5, 8, config)
    assert caught.value.hint == "use --max-context 14"
    with pytest.raises(InputError, match="expected 1 to 100, the model's own, found 101"):
        context_for(5, 10, 101, config)


def test_prompts_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocket.inputs.MAX_BYTES", 1 << 20)
    with pytest.raises(CliError, match="--prompt-file /dev/zero: too long: expected at most 1 MiB"):
        read_prompt(None, "/dev/zero", None)
    check_text("é" * 32, "prompt", 1)
    with pytest.raises(PlanError, match="prompt: too long: 66 bytes, but the model holds 1 tokens"):
        check_text("é" * 33, "prompt", 1)


# --- errors ---


def test_messages_are_one_line_without_control_characters() -> None:
    assert one_line("a\n b\t\tc\x1b[2J\x07é") == "a b c\\x1b[2J\\x07é"


def test_every_error_has_a_hint() -> None:
    errors = [
        FuelError("x"),
        UsageError("x", "h"),
        MemoryError(),
        OSError(errno.ENOSPC, "No space left on device", "f"),
        typer.BadParameter("x"),
        ValueError("x"),
    ]
    for error in errors:
        message, hint, status = explain(error)
        assert message
        assert hint
        assert status == (2 if isinstance(error, UsageError | typer.BadParameter) else 1)


# --- fuels ---


def test_fuels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "config.json").touch()
    (tmp_path / "b" / "alpha").mkdir(parents=True)
    monkeypatch.setenv("ROCKET_FUELS", f"{tmp_path / 'a'}:{tmp_path / 'b'}:{tmp_path / 'none'}")
    monkeypatch.chdir(tmp_path)
    assert fuels.resolve("alpha") == tmp_path / "a" / "alpha"
    assert fuels.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(FuelError, match="fuel alhpa: no such directory, and no fuel of that name") as caught:
        fuels.resolve("alhpa")
    assert caught.value.hint == "did you mean alpha?"
    with pytest.raises(FuelError) as caught:
        fuels.resolve(str(tmp_path / "a" / "betta"))
    assert caught.value.hint == f"did you mean {tmp_path / 'a' / 'beta'}?"
    with pytest.raises(FuelError) as caught:
        fuels.resolve("zzzzzz")
    assert "fuels with weights: alpha, beta" in caught.value.hint
    with pytest.raises(FuelError, match="expected a directory, found a file"):
        fuels.resolve(str(tmp_path / "a" / "alpha" / "config.json"))
    (tmp_path / "a" / "huge").mkdir()
    (tmp_path / "a" / "huge" / "fuel.yaml").touch()
    with pytest.raises(FuelError, match=r"fuel huge: .* has its manifest, but not its weights"):
        fuels.resolve("huge")
    with pytest.raises(FuelError, match="expected a name or a directory"):
        fuels.resolve("")


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def test_end_tokens(tmp_path: Path) -> None:
    assert fuels.eos_ids(tmp_path) == []
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": [7, 8]}})
    assert fuels.eos_ids(tmp_path) == [7, 8]
    write(tmp_path, "config.json", {"eos_token_id": 9, "text_config": {"eos_token_id": [7, 8]}})
    assert fuels.eos_ids(tmp_path) == [9]
    write(tmp_path, "generation_config.json", {"eos_token_id": [1]})
    assert fuels.eos_ids(tmp_path) == [1]
    write(tmp_path, "generation_config.json", {"eos_token_id": "1"})
    with pytest.raises(FuelError, match="eos_token_id: expected an integer or a list of integers, found '1'"):
        fuels.eos_ids(tmp_path)
    for odd in (-1, [3, -2]):
        write(tmp_path, "generation_config.json", {"eos_token_id": odd})
        with pytest.raises(FuelError, match="eos_token_id: expected token ids of 0 or more, found -"):
            fuels.eos_ids(tmp_path)
    write(tmp_path, "config.json", {"vocab_size": 5, "text_config": {"vocab_size": 20}})
    write(tmp_path, "generation_config.json", {"eos_token_id": 19})
    assert fuels.eos_ids(tmp_path) == [19]
    write(tmp_path, "generation_config.json", {"eos_token_id": 20})
    with pytest.raises(FuelError, match="eos_token_id: expected token ids from 0 to 19, found 20"):
        fuels.eos_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(FuelError, match="expected a JSON object, found list"):
        fuels.eos_ids(tmp_path)


def test_the_fuels_sampling(tmp_path: Path) -> None:
    with pytest.raises(FuelError, match="not found"):
        fuels.sampling_of(tmp_path)
    write(tmp_path, "generation_config.json", {"do_sample": True, "temperature": 0.7, "top_k": 20})
    assert fuels.sampling_of(tmp_path) == fuels.FuelSampling(0.7, 20, 1.0, 0.0)
    write(tmp_path, "generation_config.json", {"temperature": 0.7})
    assert fuels.sampling_of(tmp_path).temperature == 0
    write(tmp_path, "generation_config.json", {"do_sample": True, "top_p": "high"})
    with pytest.raises(FuelError, match=r'top_p: expected a number in \(0, 1\], found "high"'):
        fuels.sampling_of(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", 2.5),
        ("top_k", -1),
        ("top_k", 10**30),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", float("nan")),
        ("min_p", 1),
        ("temperature", -1),
        ("temperature", 1e30),
        ("temperature", float("inf")),
        ("do_sample", "yes"),
        ("do_sample", 1),
    ],
)
def test_sampling_that_a_fuel_cannot_ask_for(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, "generation_config.json", {"do_sample": True, key: value})
    with pytest.raises(FuelError) as caught:
        fuels.sampling_of(tmp_path)
    file = tmp_path / "generation_config.json"
    assert str(caught.value).startswith(f"{file}: {key}: expected ")
    assert str(caught.value).endswith(f", found {json.dumps(value)}")
    assert caught.value.hint
    assert "--do-sample" not in caught.value.hint  # there is no such option


# --- reports ---


def test_the_closing_line() -> None:
    timing = Timing(prefill_s=1.2, prefill_tokens=512, decode_s=127 / 18.0, steps_s=[1 / 18.0] * 127)
    line = closing_line(128, timing, Experts(912, 88, 88, 127 * 450971566), 0.74)
    assert line == (
        "128 tok, 7.1 s, 18.0 tok/s (55.6 ms/tok) | prefill 512 tok, 1.2 s | "
        "experts 91.2 % hit, 0.42 GiB/tok in decode | 74 % of read limit"
    )


def test_the_closing_line_leaves_out_what_it_does_not_know() -> None:
    timing = Timing(prefill_s=0.0125, prefill_tokens=5)
    assert closing_line(0, timing, Experts(), None) == "0 tok, 0.000 s | prefill 5 tok, 0.013 s"


def test_bytes() -> None:
    shown = [format_bytes(n) for n in (0, 100, 2048, 5 << 20, 5 << 30, 450971566)]
    assert shown == ["0 B", "100 B", "2.00 KiB", "5.00 MiB", "5.00 GiB", "0.42 GiB"]


def test_parts_of_a_stage_stay_out_of_the_sum_and_the_shares() -> None:
    table = profile_table("decode", [("KDA", 6.0, False), ("MoE", 18.0, False), ("streaming", 12.0, True)], 2)
    assert [line.split() for line in table.splitlines()] == [
        ["decode", "ms", "share"],
        ["KDA", "3.000", "25.0", "%"],
        ["MoE", "9.000", "75.0", "%"],
        ["of", "which", "streaming", "6.000"],
        ["sum", "12.000"],
    ]
    assert "\n  of which streaming " in table


def test_diagnostics() -> None:
    layers = [(0.5, -1.0), (0.75, 1.0), (1.0, 1.5)]
    table = diagnostics_table(layers, 8)
    assert mean_entropy(layers) == 1.25
    assert table.splitlines()[1].split() == ["0", "0.5", "-"]
    assert table.splitlines()[3].split() == ["2", "1", "1.5000"]
    assert table.endswith("router entropy, mean over 2 MoE layers: 1.2500 nats; ln 8 = 2.0794")
    assert mean_entropy([(1.0, -1.0)]) is None


# --- files ---


def test_a_file_appears_whole(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "f", "--out") as out:
        out.file.write(b"abc")
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f").read_bytes() == b"abc"
    assert tree(tmp_path) == ["f"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o666 & ~umask


def test_a_file_appears_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), AtomicFile(tmp_path / "f", "--out") as out:
        out.file.write(b"abc")
        raise KeyboardInterrupt
    assert (tmp_path / "f").read_bytes() == b"old"
    assert tree(tmp_path) == ["f"]


KILLED = """
import os, signal, sys
from rocket.output import AtomicFile
out = AtomicFile(sys.argv[1], "--out")
out.write(b"half")
out.file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        pytest.skip("NOT TESTED: the file system of temporary files has none without a name")
    (tmp_path / "f").write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "f")], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"


def test_files_where_none_is_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtomicFile, "_nameless", lambda self: None)
    with AtomicFile(tmp_path / "f", "--out") as out:
        assert len(list(tmp_path.iterdir())) == 1
        out.write(b"new")
    with pytest.raises(KeyError), AtomicFile(tmp_path / "f", "--out") as out:
        out.write(b"half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"


def test_what_a_link_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with AtomicFile(tmp_path / "link", "--out") as out:
        out.file.write(b"new")
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_devices_are_written_not_replaced() -> None:
    before = Path("/dev/null").stat()
    with AtomicFile("/dev/null", "--out") as out:
        out.file.write(b"abc")
    assert Path("/dev/null").stat().st_rdev == before.st_rdev
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize(("name", "words"), [("none/f", "No such file"), (".", "it is a directory")])
def test_places_that_cannot_be_written(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(CliError, match="--out: cannot write") as caught:
        AtomicFile(tmp_path / name, "--out")
    assert words in str(caught.value)
    assert tree(tmp_path) == []


def test_logits_are_safetensors(tmp_path: Path) -> None:
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    with LogitsWriter(tmp_path / "l", "--logits-out") as out:
        out.append(rows[:2])
        out.append(rows[2:])
    assert np.array_equal(load_file(tmp_path / "l")["logits"], rows)


def test_logits_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    with LogitsWriter(tmp_path / "l", "--logits-out") as out:
        out.append(np.zeros((1, 3), np.float32))
        out.discard()
    assert tree(tmp_path) == []


# --- scores ---


@pytest.mark.parametrize("tokens", [2, 3, 9, 10, 11, 12, 37])
@pytest.mark.parametrize(("opening", "room"), [(0, 2), (0, 3), (0, 10), (2, 4), (2, 10), (0, 100), (3, 100)])
def test_windows_score_each_token_once(tokens: int, opening: int, room: int) -> None:
    plan = list(windows(tokens, opening, room))
    scored = [i for w in plan for i in range(w.begin, w.end)]
    assert scored == list(range(0 if opening else 1, tokens))
    for w in plan:
        fed = opening + (w.end - 1 - w.context)
        assert 0 < fed <= room
        assert 0 <= w.context <= w.begin < w.end
        assert opening or w.context < w.begin  # something is fed before the first scored token
    for w in plan[1:-1]:
        assert opening + (w.end - 1 - w.context) == room
    for w in plan[1:]:
        assert w.begin - w.context >= min(w.begin, max(1, (room - opening) // 2))


def test_totals() -> None:
    totals = Totals()
    totals.add(np.log([0.5, 0.25]), np.array([0, 3]))
    totals.add(np.log([0.5]), np.array([0]))
    summary = totals.summary(8)
    assert summary["scored"] == 3
    assert summary["mean_log_prob"] == pytest.approx(-4 * np.log(2) / 3)
    assert summary["perplexity"] == pytest.approx(2 ** (4 / 3))
    assert summary["bits_per_byte"] == pytest.approx(0.5)
    assert summary["top1"] == pytest.approx(2 / 3)
    totals.add(np.array([-np.inf]), np.array([9]))
    assert totals.summary(8)["mean_log_prob"] is None
    assert totals.summary(8)["not_finite"] == 1


HEAD = {
    "fuel": "é",
    "backend": "cpu",
    "device": "a test",
    "tokens": 4,
    "opening": [],
    "sha256": "0" * 64,
    "max_context": 8,
    "windows": 1,
}
SUMMARY = {
    **{name: HEAD[name] for name in ("tokens", "max_context", "windows")},
    **{"scored": 3, "not_finite": 1, "mean_log_prob": None, "perplexity": None, "bits_per_byte": None},
    **{"top1": 0.5, "seconds": 1.0},
}
IDS = (5, 6, 7, 8)
ROWS = [(5, None, None, None), (6, -1.5, 3, 2), (7, None, 9, 2), (8, -0.25, 0, 8)]


def score_file(folder: Path, rows: list = ROWS) -> Path:
    file = folder / "s.json"
    with file.open("wb") as f:
        writer = ScoreWriter(f, HEAD)
        writer.write(rows[:2])
        writer.write(rows[2:])
        writer.finish(SUMMARY)
    return file


def test_scores_are_json_and_come_back(tmp_path: Path) -> None:
    file = score_file(tmp_path)
    whole = json.loads(file.read_text())
    assert whole["rows"] == [list(row) for row in ROWS]
    assert whole["summary"] == SUMMARY
    reader = ScoreReader(str(file))
    assert (reader.head.fuel, reader.head.tokens) == ("é", 4)
    assert list(reader.rows(IDS)) == ROWS
    reader.close()


def test_scores_in_another_layout_come_back(tmp_path: Path) -> None:
    file = score_file(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()), indent=2))
    reader = ScoreReader(str(file))
    assert list(reader.rows(IDS)) == ROWS
    reader.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t[: len(t) // 2], "broken JSON"),
        (lambda t: t.split("[8")[0], "it ends in the middle of its rows"),
        (lambda t: t.replace("[8, -0.25, 0, 8]", "[8]"), "expected rows of 4 values, found [8]"),
        (lambda t: "{}", "expected the JSON of rocket score"),
        (lambda t: "[]", "expected the JSON of rocket score"),
        (lambda t: "", "broken JSON"),
    ],
)
def test_broken_scores_are_named(tmp_path: Path, damage, words: str) -> None:
    file = score_file(tmp_path)
    file.write_text(damage(file.read_text()))
    with pytest.raises(CliError) as caught:
        reader = ScoreReader(str(file))
        try:
            list(reader.rows(IDS))
        finally:
            reader.close()
    assert words in str(caught.value)


def compare(deltas: list[float | None]) -> Comparison:
    comparison = Comparison()
    comparison.add((1, None, None, None), (1, None, None, None))
    for i, delta in enumerate(deltas):
        value = None if delta is None else -2.0 + delta
        comparison.add((i, value, 0, 1), (i, -2.0, 0, 1 if i % 2 else 2))
    return comparison


def test_the_gate() -> None:
    assert compare([0.0199, -0.0199, 0.0199]).passes
    assert not compare([0.0201, -0.0201]).passes
    one = compare([0.0] * 999 + [1.01])
    assert (one.mean < 0.02, one.over, one.passes) == (True, 1, False)
    assert (one.largest_at, one.largest) == (1000, pytest.approx(1.01))
    assert compare([0.0] * 999 + [1.0]).passes
    assert not compare([0.0, None]).passes
    assert not Comparison().passes
    half = compare([0.0, 0.0])
    assert half.as_json("f")["top1_agreement"] == 0.5
    assert "passes" in half.lines("f")[-1]
    assert "FAILS" in one.lines("f")[-1]
    assert compare([None]).as_json("f")["not_finite"] == 1
