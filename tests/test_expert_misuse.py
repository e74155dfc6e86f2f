"""What a newcomer gets wrong about slots, slabs, traces and splits: a line with option and file, a hint,
and nothing half-written."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_tools import Result, check_error, environment, run_decode, run_rocket, tree
from rocket.routing_file import read_any_routing

BASE = ("--prompt-ids", "5,6", "--tokens", "3")


def limited(size: int, *arguments: str) -> Result:
    """rocket-decode on a disk that takes so many bytes of a file."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "from rocket.decode import main; main()"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False, timeout=60)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_trace_that_cannot_begin_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    result = limited(20, *BASE, "--trace-out", str(file))
    check_error(result, 1, f"--trace-out {file}: cannot write it: File too large")
    assert tree(tmp_path) == []
    check_error(run_decode(*BASE, "--trace-out", "/dev/full"), 1, "--trace-out /dev/full: cannot write it")
    assert Path("/dev/full").exists()


def test_a_trace_that_cannot_grow_ends_with_a_whole_row(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    long = ("--prompt-ids", "5,6", "--tokens", "3000", "--ignore-eos", "--json", "--quiet")
    result = limited(70_000, *long, "--trace-out", str(file))
    check_error(result, 1, f"--trace-out {file}: cannot write it: File too large")
    found = read_any_routing(file, "trace")
    assert found.tokens > 100
    assert found.torn_bytes == 0


@pytest.mark.parametrize("option", ["--trace-out", "--logits-out"])
def test_an_output_that_is_a_folder(option: str, tmp_path: Path) -> None:
    for name in (f"{tmp_path}/", f"{tmp_path}/new/"):
        check_error(run_decode(*BASE, option, name), 2, f"{option}: expected a file, found the folder {name}")
    assert tree(tmp_path) == []


@pytest.mark.parametrize("option", ["--slot-map", "--split"])
def test_an_empty_name(option: str) -> None:
    check_error(run_decode(*BASE, option, ""), 2, f"{option}: expected a file, found an empty name")
    check_error(
        run_rocket("plan", "sparkler", option, ""), 2, f"{option}: expected a file, found an empty name"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "broken JSON"),
        ("[]", "expected an object, layer number -> slots, found []"),
        ("[" * 100_000, "broken JSON: expected less nesting"),
        ('{"1": 1' + "0" * 5000 + "}", "broken JSON: expected no number of thousands of digits"),
        ('{"1": NaN}', "layer 1: expected a whole number of slots, found NaN"),
        ('{"1": "4"}', 'layer 1: expected a whole number of slots, found "4"'),
        ('{"1": true}', "layer 1: expected a whole number of slots, found true"),
        ('{"1": -4}', "layer 1: expected 0 to"),
        ('{"1": 4, "1": 5}', 'expected each field once, found "1" twice'),
        ('{"1": 4}', "layer 2: missing"),
        ('{"01": 4}', 'expected MoE layers from 1 to 7, found "01"'),
    ],
)
def test_slot_maps_that_say_nothing_of_use(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    check_error(run_decode(*BASE, "--slot-map", str(file)), 2, f"--slot-map {file}: ", words)
    check_error(run_rocket("plan", "sparkler", "--slot-map", str(file)), 2, f"--slot-map {file}: ", words)


def test_errors_of_the_engine_name_options(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    slab = ("--expert-slots", "20", "--expert-slab", nothing)
    check_error(run_decode(*BASE, *slab), 1, f"--expert-slab: {nothing}/experts.slab: cannot open")
    text = tmp_path / "text"
    text.write_text("x = 1\n")
    score = ("score", "sparkler", "--text", str(text))
    check_error(run_rocket(*score, *slab), 1, f"--expert-slab: {nothing}/experts.slab: cannot open")
    check_error(run_rocket(*score, "--expert-slots", "2"), 2, "--expert-slots: expected at least 4 slots")
    check_error(
        run_decode(*BASE, "--expert-slots", "20", "--expert-bank", "yes"), 2, "--expert-bank: expected"
    )
    result = run_decode(*BASE, "--backend", "cuda")
    if result.status:
        check_error(result, 1, "--backend cuda: ")


def test_a_slab_where_none_can_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    below = file / "below"
    check_error(run_rocket("fuel", "slab", "sparkler", str(below)), 1, f"{below}: cannot make the folder")
    long = "a" * 300
    check_error(
        run_rocket("fuel", "slab", "sparkler", long), 1, f"DIR: cannot use {long}: File name too long"
    )
    lines = tmp_path / "two\nlines\x1b[31m"
    done = run_rocket("fuel", "slab", "sparkler", str(lines))
    assert done.status == 0
    assert re.fullmatch(
        r"[^\n\x1b]*two lines\\x1b\[31m/experts\.slab: 168 experts [^\n]+, written\n", done.err
    )


def test_a_size_is_shown_as_it_is_taken() -> None:
    check_error(
        run_decode(*BASE, "--expert-cache-gib", "inf"), 2, "expected a number in (0, 1048576], found inf"
    )


def test_json_of_a_replay_says_what_was_cut(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"tok": i, "layers": [[i % 3, 3 + i % 2]]}) + "\n" for i in range(9)))
    done = run_rocket("trace", "replay", str(trace), "--slots", "50", "--json")
    found = json.loads(done.out)
    assert (found["slots"], found["slots_requested"]) == (5, 50)
