"""rocket-decode with several boosters: what it prints, what it refuses, and that nothing is left of a run of
which a rank dies or stalls."""

import json
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cli_tools import check_error, run_decode, run_rocket
from golden_fuels import CASES
from mpi_tools import (
    DECODE,
    check_ranks_error,
    decode_ranks,
    end_ranks,
    processes,
    rank_process,
    run_ranks,
    start_ranks,
    wait_for_none,
    with_pid,
)

SPARKLER = Path(__file__).parents[1] / "fuels" / "sparkler"
PROMPT = ("--prompt", "The capital of France is", "--ignore-eos")
LONG = (*PROMPT, "--tokens", "4000")  # some seconds
GRACE = 8.0  # for the launcher to clear up, on a busy machine

mpi = pytest.mark.mpi


@mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_decode_prints_once_what_one_booster_prints(ranks: int, tmp_path: Path) -> None:
    split = tmp_path / "split.json"
    assert run_rocket("split", "sparkler", "--boosters", str(ranks), "--out", str(split)).status == 0
    files = [tmp_path / "one", tmp_path / "several"]
    options = (*PROMPT, "--tokens", "30", "--temperature", "0.8", "--seed", "3", "--prefill-chunk", "3")
    one = run_decode(*options, "--logits-out", str(files[0]))
    several = decode_ranks(ranks, *options, "--split", str(split), "--logits-out", str(files[1]))
    assert several.status == 0, several.err
    assert several.out == one.out
    logits = [load_file(file)["logits"] for file in files]
    assert np.array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))
    assert several.err.count(f"boosters: {ranks} ranks over ") == 1
    closing = several.err.splitlines()[-1]
    assert re.search(rf"^30 tok, .* \| {ranks} boosters, [\d,]+ rows crossed, waited [\d.]+ s$", closing)


@mpi
def test_json_agrees_with_the_plan(tmp_path: Path) -> None:
    done = decode_ranks(2, *PROMPT, "--tokens", "5", "--json", "--quiet")
    assert (done.status, done.err) == (0, "")
    boosters = json.loads(done.out)["boosters"]
    fields = ["rank", "device", "experts_owned", "expert_bytes", "dense_bytes"]
    fields += ["rows_sent", "rows_received", "wait_ms"]
    assert [list(booster) for booster in boosters] == [fields] * 2
    assert all(booster["wait_ms"] > 0 and booster["rows_sent"] > 0 for booster in boosters)
    plan = json.loads(run_rocket("plan", "sparkler", "--boosters", "2", "--json").out)
    assert [booster["experts_owned"] for booster in boosters] == [plan["experts_owned"]] * 2
    cached = decode_ranks(2, *PROMPT, "--tokens", "5", "--json", "--expert-slots", "400")
    experts = json.loads(cached.out)["experts"]
    assert experts["slots"] == plan["experts_owned"]  # of each booster
    assert experts["slots"] * experts["slot_bytes"] >= boosters[0]["expert_bytes"]
    assert "84 slots" in cached.err


def test_one_booster_reports_itself() -> None:
    done = run_decode(*PROMPT, "--tokens", "2", "--json", "--boosters", "1")
    (booster,) = json.loads(done.out)["boosters"]
    assert (booster["rank"], booster["experts_owned"], booster["rows_sent"]) == (0, 168, 0)


@mpi
def test_standard_input_and_interruption_are_rank_0s() -> None:
    run, mark = start_ranks([(2, (*DECODE, "--boosters", "2", "--threads", "1", *LONG, "--json"))])
    try:
        assert run.stderr is not None
        while b"boosters: 2 ranks over " not in (line := run.stderr.readline()):  # all is loaded then
            assert line, "it ended"
        time.sleep(0.5)
        for rank in (1, 0):  # as a terminal does
            found = rank_process(mark, rank)
            assert found is not None
            with_pid(found, signal.SIGINT)
        out, err = run.communicate(timeout=30)
        assert json.loads(out)["finish_reason"] == "interrupted", err
        assert wait_for_none(mark, GRACE) == []
    finally:
        end_ranks(mark)


# --- what is refused ----------------------------------------------------------------------------------------


def program(*arguments: str) -> tuple[str, ...]:
    return (*DECODE, "--prompt-ids", "5", "--tokens", "2", "--threads", "1", *arguments)


@mpi
@pytest.mark.parametrize(
    ("ranks", "arguments", "status", "words"),
    [
        (2, (), 2, ("--boosters: expected 2, the ranks that were started, found none",)),
        (2, ("--boosters", "1"), 2, ("--boosters: expected 2", "found 1")),
        (3, ("--boosters", "2"), 2, ("--boosters: expected as many ranks as boosters, 2, found 3",)),
        (2, ("--boosters", "2", "--tokens", "-1"), 2, ("--tokens", "found -1")),
        (2, ("--boosters", "2", "--booster-wait", "0"), 2, ("--booster-wait", "found 0")),
        (2, ("--boosters", "2", "--prompt", "x"), 2, ("expected one prompt",)),
        (2, ("--boosters", "2", "--fuel", "nonsuch"), 1, ("fuel nonsuch",)),
        (2, ("--boosters", "2", "--split", "nonsuch"), 2, ("--split", "nonsuch")),
        (
            2,
            ("--boosters", "2", "--expert-slots", "3"),
            2,
            ("--expert-slots: ", "at least 4 slots", "found 3"),
        ),
        (2, ("--boosters", "2", "--logits-out", "no/such/folder"), 1, ("--logits-out",)),
    ],
)
def test_one_line_for_all_ranks(
    ranks: int, arguments: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    check_ranks_error([(ranks, program(*arguments))], status, *words)


@mpi
def test_a_split_for_others(tmp_path: Path, fuel_dir: Path) -> None:
    split = tmp_path / "split.json"
    assert run_rocket("split", "sparkler", "--boosters", "3", "--out", str(split)).status == 0
    check_ranks_error(
        [(2, program("--boosters", "2", "--split", str(split)))], 2, "boosters: expected 2, found 3"
    )
    # Without --boosters it says how many there are.
    check_ranks_error(
        [(2, program("--split", str(split)))], 2, "expected as many ranks as boosters, 3, found 2"
    )
    assert run_ranks([(3, program("--split", str(split)))]).status == 0
    tiny = CASES[0].build(fuel_dir)
    check_ranks_error([(3, program("--fuel", str(tiny), "--split", str(split)))], 2, "fuel.hidden_size")


LEADS = """
import sys
from rocket import Engine
with Engine("sparkler", boosters=2, booster_wait=20) as engine:
    if engine.rank == int(sys.argv[1]):
        print(list(engine.generate([5, 6], 3)))
    else:
        engine.follow()
"""


@mpi
def test_a_rank_above_0_only_follows() -> None:
    result = run_ranks([(2, (sys.executable, "-c", LEADS, "1"))])
    assert result.status != 0
    assert "boosters: expected follow() on a rank above 0, found another call" in result.err
    right = run_ranks([(2, (sys.executable, "-c", LEADS, "0"))])
    assert right.status == 0, right.err
    assert right.out.count("[") == 1


@mpi
def test_a_rank_that_leaves_before_it_starts() -> None:
    quick = (*program("--boosters", "2"), "--booster-wait", "3")
    result = run_ranks([(1, (*quick, "--version")), (1, quick)])
    assert result.status != 0
    assert result.err.count("error: boosters: MPI has not started within 3 s") == 1


def test_without_a_launcher() -> None:
    result = run_decode(*PROMPT, "--boosters", "2")
    assert result.status in (1, 2)
    if "no MPI" in result.err:
        check_error(result, 1, "boosters: this build has no MPI: expected", "librocket_mpi.so")
        assert "pip install mpich" in result.err
    else:
        check_error(result, 2, "--boosters: expected as many ranks as boosters, 2, found 1")
        assert "mpirun -np 2" in result.err


def test_what_a_build_without_mpi_says(tmp_path: Path) -> None:
    nothing = str(tmp_path / "librocket_mpi.so")
    result = run_decode(*PROMPT, "--boosters", "2", env={"ROCKET_MPI_LIBRARY": nothing})
    check_error(result, 1, "boosters: this build has no MPI", nothing)
    Path(nothing).write_bytes(b"no library")
    result = run_decode(*PROMPT, "--boosters", "2", env={"ROCKET_MPI_LIBRARY": nothing})
    check_error(result, 1, "boosters: cannot load MPI", nothing)


@mpi
@pytest.mark.parametrize(
    ("rank", "other", "field"),
    [
        (1, ("env", "ROCKET_CPU_ISA=portable"), "kernel path: rank 0 has"),
        (2, ("env", "ROCKET_CPU_ISA=portable"), "kernel path: rank 0 has"),
        (1, ("--expert-slots", "20"), "expert cache: rank 0 has none"),
        (1, ("--prefill-chunk", "7"), "rows a step: rank 0 has 0"),
        (1, ("--booster-wait", "7"), "time limit: rank 0 has"),
        (2, ("--kv-dtype", "f32"), "KV dtype: rank 0 has auto"),
        (1, ("--split",), "split: rank 0 has 3 boosters"),
        (2, ("--split",), "split: rank 0 has 3 boosters"),
        (1, ("--fuel",), "fuel fingerprint: rank 0 has"),
        (1, ("finetune",), "fuel's norms and biases: rank 0 has"),
        (2, ("experts",), "pieces of the fuel's weights: rank 0 has"),
    ],
)
def test_the_handshake_names_both_sides(
    rank: int, other: tuple[str, ...], field: str, tmp_path: Path, fuel_dir: Path
) -> None:
    common = program("--boosters", "3")
    if other[0] == "env":
        different = (*other, *common)
    elif other == ("--split",):
        different = (*common, "--split", str(other_split(tmp_path)))
    elif other == ("--fuel",):
        common = program("--boosters", "3", "--fuel", str(CASES[0].build(fuel_dir)))
        different = program("--boosters", "3", "--fuel", str(CASES[3].build(fuel_dir)))
    elif other == ("finetune",):
        different = (*common, "--fuel", str(changed(tmp_path, "layers.3.input_layernorm.weight")))
    elif other == ("experts",):
        different = (*common, "--fuel", str(changed(tmp_path, "_proj.weight")))
    else:
        different = (*common, *other)
    programs = [(1, common)] * 3
    programs[rank] = (1, different)
    check_ranks_error(programs, 1, "boosters: ", field, f", rank {rank} has ")


def other_split(folder: Path) -> Path:
    file = folder / "split.json"
    assert run_rocket("split", "sparkler", "--boosters", "3", "--out", str(file)).status == 0
    split = json.loads(file.read_text())
    owner = split["owner"]["3"]
    owner[0], owner[-1] = owner[-1], owner[0]
    file.write_text(json.dumps(split))
    return file


def changed(folder: Path, ending: str) -> Path:
    """Sparkler with the same names, shapes and config; a bit of each byte of such tensors is another."""
    copy = folder / "sparkler"
    copy.mkdir()
    for file in SPARKLER.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    data = np.fromfile(weights, dtype=np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + length].tobytes())
    names = [name for name in header if name.endswith(ending) and (".experts." in name or "norm" in name)]
    assert names
    for name in names:
        begin, end = header[name]["data_offsets"]
        data[8 + length + begin : 8 + length + end] ^= 1
    data.tofile(weights)
    return copy


# --- what breaks --------------------------------------------------------------------------------------------


def broken_run(
    ranks: int, rank: int, number: signal.Signals, after: float, wait: str
) -> tuple[int, str, float]:
    """Status and output of a run of which a rank gets a signal, and how long it went on after that."""
    command = (*DECODE, "--boosters", str(ranks), "--threads", "1", "--booster-wait", wait, *LONG, "--quiet")
    run, mark = start_ranks([(ranks, command)])
    try:
        start = time.monotonic()
        while (pid := rank_process(mark, rank)) is None and time.monotonic() - start < 30:
            time.sleep(0.01)
        assert pid is not None
        time.sleep(after)
        assert pid in processes(mark), "the run was over before"
        with_pid(pid, number)
        start = time.monotonic()
        out, err = run.communicate(timeout=60)
        seconds = time.monotonic() - start
        assert wait_for_none(mark, GRACE) == [], "processes are left behind"
        return run.returncode, (out + err).decode(), seconds
    finally:
        end_ranks(mark)


@mpi
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_is_killed_ends_the_run(seed: int) -> None:
    dice = random.Random(seed)
    ranks = 2 + seed % 2
    rank, after = dice.randrange(ranks), dice.uniform(0, 2.5)
    status, err, seconds = broken_run(ranks, rank, signal.SIGKILL, after, "3")
    assert status != 0, err
    assert seconds < 3 + GRACE, err
    assert re.search(r"[Kk]illed|signal 9|SIGNAL: 9|rank \d", err), err


@mpi
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (2, 0), (3, 1), (3, 0)])
def test_a_rank_that_stalls_ends_the_run(ranks: int, rank: int) -> None:
    status, err, seconds = broken_run(ranks, rank, signal.SIGSTOP, 2.0, "1.5")
    assert status == 1, err
    assert seconds < 1.5 + GRACE, err
    assert re.search(
        rf"error: boosters: rank \d waited [\d.]+ s for .* from rank {rank}, which gives no sign", err
    )
    assert err.count("error: ") == 1


@mpi
@pytest.mark.parametrize("after", [0.0, 0.15, 0.3, 0.45, 0.6])
def test_a_rank_that_stalls_as_it_starts_ends_the_run(after: float) -> None:
    status, err, seconds = broken_run(2, 1, signal.SIGSTOP, after, "2")
    found = re.search(r"error: boosters: (rank 0 waited .* from rank 1|MPI has not started within 2 s)", err)
    assert found, err
    # Before MPI is there only the launcher can end a rank, and its status tells of that.
    assert status == 1 or (status != 0 and found[1].startswith("MPI")), err
    assert seconds < 2 * 2 + GRACE, err


@mpi
def test_an_expert_that_cannot_be_read_is_named_by_rank_0(tmp_path: Path) -> None:
    copy = changed(tmp_path, "layers.3.input_layernorm.weight")
    weights = copy / "model.safetensors"
    command = (
        *DECODE,
        "--boosters",
        "2",
        "--threads",
        "1",
        "--fuel",
        str(copy),
        "--expert-slots",
        "4",
        *LONG,
    )
    run, mark = start_ranks([(2, (*command, "--quiet"))])
    try:
        time.sleep(2.5)
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size // 2)
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1, err
        assert re.search(rb"error: [^\n]*expert \d+ of layer \d+: [^\n]*model.safetensors", err), err
        assert err.count(b"error: ") == 1, err
        assert wait_for_none(mark, GRACE) == []
    finally:
        end_ranks(mark)


@mpi
def test_a_reader_that_goes_away_ends_all() -> None:
    run, mark = start_ranks([(2, (*DECODE, "--boosters", "2", "--threads", "1", *LONG, "--quiet"))])
    try:
        assert run.stdout is not None
        run.stdout.read(1)
        run.stdout.close()
        run.stdout = None
        run.communicate(timeout=60)
        assert wait_for_none(mark, GRACE) == []
    finally:
        end_ranks(mark)


@mpi
def test_a_launcher_that_is_killed_leaves_nobody() -> None:
    run, mark = start_ranks([(2, (*DECODE, "--boosters", "2", "--threads", "1", *LONG, "--quiet"))])
    try:
        time.sleep(2)
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
        assert wait_for_none(mark, 20) == []
    finally:
        end_ranks(mark)
