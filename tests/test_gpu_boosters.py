"""Several boosters on GPUs, or on one GPU that they share: bit for bit what one booster gives there, for
splits, precisions and cache sizes; and an end within the limit when one of them stalls."""

import json
import pickle
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends import EXACT
from booster_program import run
from cli_tools import run_decode
from golden_fuels import CASES
from mpi_tools import (
    DECODE,
    decode_ranks,
    end_ranks,
    rank_process,
    run_ranks,
    start_ranks,
    wait_for_none,
    with_pid,
)
from rocket import _core
from test_booster_dense import close, fuel_of, limit
from test_booster_runs import GRACE, LONG, PROMPT
from test_boosters import PROGRAM, SPARKLER, check_boosters, same, write_split

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

PRECISIONS: dict[str, dict[str, Any]] = {"exact": dict(EXACT), "rounded": {}}


@pytest.fixture(scope="module", params=["modelopt", "patchwork", "sparkler"])
def fuel(request: pytest.FixtureRequest, fuel_dir: Path) -> Path:
    if request.param == "sparkler":
        return SPARKLER
    return next(case for case in CASES if case.name == request.param).build(fuel_dir)


def on_gpu(fuel: Path, precision: str, **options: Any) -> dict[str, Any]:
    return {"fuel": fuel, "backend": "cuda", **PRECISIONS[precision], **options}


def several(ranks: int, runs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    inputs, output = folder / f"in-{ranks}", folder / f"out-{ranks}"
    inputs.write_bytes(pickle.dumps(runs))
    done = run_ranks([(ranks, (sys.executable, str(PROGRAM), str(inputs), str(output)))], timeout=300)
    assert done.status == 0, done.err
    results = pickle.loads(output.read_bytes())
    assert len(results) == len(runs)
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_are_those_of_one_booster(fuel: Path, ranks: int, tmp_path: Path) -> None:
    alone = {precision: run(**on_gpu(fuel, precision)) for precision in PRECISIONS}
    split = write_split(fuel, ranks, "load", tmp_path)
    runs = []
    for precision, one in alone.items():
        assert one is not None
        assert one["info"]["backend"] == "cuda"
        smallest = min(one["info"]["topk"], -(-one["info"]["experts"] // ranks))
        more: list[dict[str, Any]] = [{}, {"split": split}]
        more += [{"split": split, "expert_slots": slots} for slots in (smallest, smallest + 1)]
        more.append({"expert_slots": one["info"]["moe_layers"] * one["info"]["experts"]})
        runs += [(precision, on_gpu(fuel, precision, boosters=ranks, **options)) for options in more]
    results = several(ranks, [options for _, options in runs], tmp_path)
    for (precision, options), found in zip(runs, results, strict=True):
        one = alone[precision]
        assert one is not None
        same(found, one)
        info = found["info"]
        assert (info["backend"], info["prefill_precision"]) == ("cuda", one["info"]["prefill_precision"])
        check_boosters(found["stats"]["boosters"], ranks, one, options.get("split"), "patchwork" in fuel.name)
        assert all("NVIDIA" in booster["device"] for booster in found["stats"]["boosters"])
        owned = found["stats"]["boosters"][0]["experts_owned"]
        if options.get("expert_slots", owned) < owned:
            assert info["expert_store"] == "host bank"
            assert found["stats"]["expert_misses"] > 0
        else:  # resident: all ranks together use the experts that one would
            assert info["expert_store"] == ""
            assert found["stats"]["expert_hits"] == one["stats"]["expert_hits"]


@pytest.mark.parametrize("name", ["sparkler", "modelopt"])
def test_shared_dense_weights_are_within_rounding(name: str, fuel_dir: Path, tmp_path: Path) -> None:
    fuel = fuel_of(name, fuel_dir)
    alone = run(**on_gpu(fuel, "exact"))
    assert alone is not None
    most = limit(fuel, alone["logits"])
    slots = max(alone["info"]["topk"], 3)
    options: list[dict[str, Any]] = [{}, {"expert_slots": slots}]
    runs = [on_gpu(fuel, "exact", boosters=2, split_dense=True, **more) for more in options]
    results = several(2, runs, tmp_path)
    for found in results:
        close(found["logits"], alone["logits"], most)
        assert found["tokens"] == alone["tokens"]
        assert found["info"]["split_dense"]
    assert np.array_equal(results[0]["logits"].view(np.uint32), results[1]["logits"].view(np.uint32))


def test_decode_prints_what_one_booster_prints(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "several"]
    options = (*PROMPT, "--tokens", "40", "--temperature", "0.8", "--seed", "3", "--backend", "cuda")
    one = run_decode(*options, "--logits-out", str(files[0]))
    found = decode_ranks(2, *options, "--logits-out", str(files[1]))
    assert found.status == 0, found.err
    assert found.out == one.out
    logits = [load_file(file)["logits"] for file in files]
    assert np.array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))
    assert re.search(r"^boosters: 2 ranks over .*, rows (through pinned memory|over NCCL)", found.err, re.M)
    whole = json.loads(decode_ranks(2, *options, "--json", "--quiet").out)
    assert all(booster["rows_sent"] > 0 and booster["wait_ms"] > 0 for booster in whole["boosters"])


def broken_run(rank: int, number: signal.Signals) -> tuple[int, str, float]:
    """Status and output of a run of which a rank gets a signal while it decodes, and how long it went on."""
    options = ("--boosters", "2", "--threads", "1", "--booster-wait", "8", "--backend", "cuda", "--quiet")
    run, mark = start_ranks([(2, (*DECODE, *options, *LONG))])
    try:
        assert run.stdout is not None
        assert run.stdout.read(1), "the run has printed nothing"
        pid = rank_process(mark, rank)
        assert pid is not None, "the run was over before"
        with_pid(pid, number)
        start = time.monotonic()
        out, err = run.communicate(timeout=60)
        seconds = time.monotonic() - start
        assert wait_for_none(mark, GRACE) == [], "processes are left behind"
        return run.returncode, (out + err).decode(), seconds
    finally:
        end_ranks(mark)


def test_both_ways_to_exchange_give_the_same_bits(tmp_path: Path) -> None:
    """Between two GPUs through NCCL, and through the host's memory."""
    if len(_core.cuda_devices()[0]) < 2:
        pytest.skip("NOT RUN OVER NCCL: it takes two GPUs, and here is one")
    options = (*PROMPT, "--tokens", "40", "--backend", "cuda")
    found: dict[str, Any] = {}
    for way, off in (("over NCCL", "0"), ("through pinned memory", "1")):
        file = tmp_path / way.replace(" ", "-")
        for dense in ((), ("--split-dense",)):
            arguments = (*options, *dense, "--logits-out", str(file))
            done = decode_ranks(2, *arguments, env={"ROCKET_NO_NCCL": off})
            assert done.status == 0, done.err
            assert f", rows {way}" in done.err
            found[way, dense] = (done.out, load_file(file)["logits"])
    for dense in ((), ("--split-dense",)):
        one, other = (found[way, dense] for way in ("over NCCL", "through pinned memory"))
        assert one[0] == other[0]
        assert np.array_equal(one[1].view(np.uint32), other[1].view(np.uint32))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stalls_ends_the_run(rank: int) -> None:
    status, err, seconds = broken_run(rank, signal.SIGSTOP)
    assert status == 1, err
    assert seconds < 8 + GRACE, err
    assert re.search(
        rf"error: boosters: rank \d waited [\d.]+ s for .* from rank {rank}, which gives no sign", err
    )
    assert err.count("error: ") == 1


def test_a_rank_that_is_killed_ends_the_run() -> None:
    status, err, seconds = broken_run(1, signal.SIGKILL)
    assert status != 0, err
    assert seconds < 8 + GRACE, err
