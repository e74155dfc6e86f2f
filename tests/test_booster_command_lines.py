"""Command lines of ranks that differ: what one of them cannot do it says, at once and once; what changes a
result must be the same; and signals end all of them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_tools import run_decode
from mpi_tools import (
    DECODE,
    check_ranks_error,
    end_ranks,
    rank_process,
    run_ranks,
    start_ranks,
    wait_for_none,
    with_pid,
)

pytestmark = pytest.mark.mpi

ROCKET = (sys.executable, "-c", "from rocket.cli import main; main()")
WAIT = 40.0  # --booster-wait: much longer than any of these runs may take
SOON = 15.0


def program(*arguments: str) -> tuple[str, ...]:
    return (*DECODE, "--boosters", "2", "--threads", "1", "--booster-wait", str(WAIT), "--quiet", *arguments)


PLAIN = program("--prompt", "x", "--tokens", "3")


def check_soon(programs: list[tuple[int, tuple[str, ...]]], status: int, *words: str) -> None:
    start = time.monotonic()
    check_ranks_error(programs, status, *words)
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--expert-slots", "many"), ("--expert-slots", "found 'many'")),
        (("--nonsuch",), ("nonsuch",)),
        (("--tokens", "-1"), ("--tokens: expected", "found -1")),
        (("--split", "nonsuch"), ("--split", "nonsuch")),
        (("--slot-map", "nonsuch"), ("--slot-map", "nonsuch")),
        (("--fuel", "nonsuch"), ("fuel nonsuch",)),
        (("--boosters", "3"), ("--boosters: expected as many ranks as boosters, 3, found 2",)),
    ],
)
def test_a_rank_that_cannot_start_says_so(rank: int, wrong: tuple[str, ...], words: tuple[str, ...]) -> None:
    programs = [(1, PLAIN)] * 2
    programs[rank] = (1, (*PLAIN, *wrong))
    status = 1 if rank or wrong[0] == "--fuel" else 2
    check_soon(programs, status, *words, *([f"boosters: rank {rank}: "] if rank else []))


def test_score_and_bench_say_so(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("x = 1\n")
    score = (*ROCKET, "score", "sparkler", "--text", str(text), "--boosters", "2", "--quiet")
    check_soon([(1, score), (1, (*score, "--chunk", "-1"))], 1, "boosters: rank 1: --chunk")
    check_soon([(1, score), (1, (*score, "--text", "y"))], 1, "--text: rank 0 has", "rank 1 has y")
    bench = (*ROCKET, "bench", "decode", "--fuel", "sparkler", "--boosters", "2", "--quiet")
    check_soon([(1, bench), (1, (*bench, "--pairs", "no"))], 1, "boosters: rank 1: ", "--pairs")
    check_soon([(1, bench), (1, (*bench, "--pairs", "2"))], 1, "--pairs: rank 0 has 5, rank 1 has 2")


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        (("--prompt", "x"), ("--prompt", "y"), "--prompt: rank 0 has x, rank 1 has y"),
        (("--prompt", "x"), ("--prompt-ids", "5"), "--prompt-ids: rank 0 has none, rank 1 has 5"),
        (("--prompt", 99 * "x"), ("--prompt", 99 * "x" + "y"), "x… (99 characters, sha256 "),
        (("--prompt", "x"), ("--seed", "1"), "--seed: rank 0 has 0, rank 1 has 1"),
        (("--prompt", "x", "--seed", "1"), ("--seed", "0"), "--seed: rank 0 has 1, rank 1 has 0"),
        (("--prompt", "x"), ("--tokens", "4"), "--tokens: rank 0 has 128, rank 1 has 4"),
        (("--prompt", "x"), ("--temperature", "1"), "--temperature: rank 0 has none, rank 1 has 1.0"),
        (("--prompt", "x"), ("--top-k", "3"), "--top-k: rank 0 has none, rank 1 has 3"),
        (("--prompt", "x"), ("--top-p", "0.5"), "--top-p: rank 0 has none, rank 1 has 0.5"),
        (("--prompt", "x"), ("--min-p", "0.5"), "--min-p: rank 0 has none, rank 1 has 0.5"),
        (("--prompt", "x"), ("--sampling", "fuel"), "--sampling: rank 0 has greedy, rank 1 has fuel"),
        (("--prompt", "x"), ("--chat",), "--chat: rank 0 has none, rank 1 has it"),
        (("--prompt", "x"), ("--ignore-eos",), "--ignore-eos: rank 0 has none, rank 1 has it"),
        (("--prompt", "x"), ("--max-context", "50"), "--max-context: rank 0 has none, rank 1 has 50"),
    ],
)
def test_what_changes_the_result_must_be_the_same(
    mine: tuple[str, ...], other: tuple[str, ...], words: str
) -> None:
    check_soon([(1, program(*mine)), (1, program(*other))], 1, "boosters: ", words)


def test_what_a_rank_is_not_told_it_takes_from_rank_0(tmp_path: Path) -> None:
    told = program("--prompt", "x", "--tokens", "6", "--temperature", "0.9", "--seed", "3")
    alike = run_ranks([(2, told)])
    assert alike.status == 0, alike.err
    short = run_ranks([(1, told), (1, program())])
    assert (short.status, short.out) == (0, alike.out), short.err
    # Outputs are rank 0's; another's are neither written nor a difference.
    trace = tmp_path / "trace"
    outputs = ("--json", "--trace-out", str(trace), "--logits-out", str(tmp_path / "logits"), "--stats", "1")
    other = run_ranks([(1, told), (1, program(*outputs))])
    assert (other.status, other.out) == (0, alike.out), other.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "rank", "status"),
    [(signal.SIGHUP, 0, 129), (signal.SIGTERM, 0, 143), (signal.SIGHUP, 1, None)],
)
def test_signals_end_all_ranks(number: signal.Signals, rank: int, status: int | None) -> None:
    """Of a rank other than 0 the launcher says it, in its own way."""
    run, mark = start_ranks([(2, program("--prompt", "x", "--ignore-eos", "--tokens", "4000"))])
    try:
        assert run.stdout is not None
        text = run.stdout.read(50)  # it decodes
        pid = rank_process(mark, rank)
        assert pid is not None
        start = time.monotonic()
        with_pid(pid, number)
        out, err = run.communicate(timeout=60)
        assert time.monotonic() - start < SOON
        assert wait_for_none(mark, SOON) == []
        assert run.returncode == status if status else run.returncode != 0
        if rank == 0:
            assert err == b""
            whole = run_decode("--prompt", "x", "--ignore-eos", "--tokens", "4000", "--quiet").out
            assert whole.startswith((text + out).decode()), "there is more than the text in standard output"
    finally:
        end_ranks(mark)


@pytest.mark.parametrize("program", [DECODE, (*ROCKET, "score"), (*ROCKET, "bench", "decode"), ROCKET])
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_is_printed_once(program: tuple[str, ...], option: str) -> None:
    if option == "--version" and program not in (DECODE, ROCKET):
        option = "--help"
    alone = subprocess.run([*program, option], capture_output=True, text=True, check=True, timeout=60)
    result = run_ranks([(2, (*program, option))])
    assert (result.status, result.out) == (0, alone.stdout)
    assert result.out
