"""Several boosters give the bits of one: tokens, logits, scores, for all kinds of splits and cache sizes."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from booster_program import run
from cli_tools import run_decode
from golden_fuels import CASES
from mpi_tools import run_ranks
from rocket.fuel_account import load_account
from rocket.plan import workspace_bytes
from rocket.split import WAYS
from rocket.split_command import build

pytestmark = pytest.mark.mpi

SPARKLER = Path(__file__).parents[1] / "fuels" / "sparkler"
PROGRAM = Path(__file__).parent / "booster_program.py"
NAMES = ("modelopt", "groups", "shared", "patchwork", "sparkler")


@pytest.fixture(scope="module", params=NAMES)
def fuel(request: pytest.FixtureRequest, fuel_dir: Path) -> Path:
    if request.param == "sparkler":
        return SPARKLER
    return next(case for case in CASES if case.name == request.param).build(fuel_dir)


@pytest.fixture(scope="module")
def alone(fuel: Path) -> dict[str, Any]:
    result = run(fuel)
    assert result is not None
    return result


def write_split(fuel: Path, boosters: int, by: str, folder: Path) -> Path:
    """As rocket split writes it, fitted to a routing that was recorded of the fuel."""
    name, account = load_account(str(fuel))
    trace = folder / "trace"
    if by != "id" and not trace.exists():
        done = run_decode(
            *("--fuel", str(fuel), "--prompt-ids", "3,5,8,13", "--tokens", "40", "--ignore-eos"),
            *("--trace-out", str(trace)),
        )
        assert done.status == 0, done.err
    file = folder / f"{by}-{boosters}.json"
    file.write_text(build(name, account, boosters, by, None if by == "id" else str(trace)).text())
    return file


def same(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["tokens"] == alone["tokens"]
    assert np.array_equal(found["logits"].view(np.uint32), alone["logits"].view(np.uint32))
    for ours, theirs in zip(found["scores"], alone["scores"], strict=True):
        assert np.array_equal(ours, theirs)
    for name in ("steps", "rows"):
        assert found["stats"][name] == alone["stats"][name]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_are_those_of_one_booster(fuel: Path, alone: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    topk, experts = alone["info"]["topk"], alone["info"]["experts"]
    smallest = min(topk, -(-experts // ranks))
    splits = {by: write_split(fuel, ranks, by, tmp_path) for by in WAYS}
    options: list[dict[str, Any]] = [{"split": split} for split in (None, *splits.values())]
    for slots in (smallest, smallest + 1, experts):
        options.append({"split": splits["load"], "expert_slots": slots, "hints": slots != smallest})
    runs = [{"fuel": fuel, "boosters": ranks, **more} for more in options]
    inputs, output = tmp_path / "in", tmp_path / "out"
    inputs.write_bytes(pickle.dumps(runs))
    done = run_ranks([(ranks, (sys.executable, str(PROGRAM), str(inputs), str(output)))])
    assert done.status == 0, done.err
    results = pickle.loads(output.read_bytes())
    assert len(results) == len(runs)
    for options, found in zip(runs, results, strict=True):
        same(found, alone)
        stats = found["stats"]
        planned = workspace_bytes(load_account(str(fuel))[1].arch, 160, 64, ranks)
        assert found["info"]["workspace_bytes"] <= planned
        hints = stats["expert_hints"]
        assert options.get("hints") or hints["taken"] == 0
        parts = ("useful", "late", "wasted", "on_their_way", "there")
        assert hints["taken"] == sum(hints[part] for part in parts)
        if "expert_slots" not in options:  # all ranks together use what one would
            for name in ("expert_hits", "expert_misses", "expert_layers"):
                assert stats[name] == alone["stats"][name]
        # An account takes the experts of a layer for equal, which those of a patchwork are not.
        check_boosters(stats["boosters"], ranks, alone, options.get("split"), "patchwork" in fuel.name)


def check_boosters(
    boosters: list[dict[str, Any]], ranks: int, alone: dict[str, Any], split: Path | None, mixed: bool
) -> None:
    if ranks == 1:
        assert boosters == []
        return
    assert [booster["rank"] for booster in boosters] == list(range(ranks))
    if split is not None:
        file = json.loads(split.read_text())
        assert [booster["experts_owned"] for booster in boosters] == file["experts_of_booster"]
        if not mixed:
            assert [booster["expert_bytes"] for booster in boosters] == file["bytes_of_booster"]
    assert sum(booster["expert_bytes"] for booster in boosters) == alone["info"]["expert_bytes"]
    # A row is computed on one rank and goes to all others.
    sent = sum(booster["rows_sent"] for booster in boosters)
    assert sent == sum(booster["rows_received"] for booster in boosters)
    info = alone["info"]
    assert sent == alone["stats"]["rows"] * info["moe_layers"] * info["topk"] * (ranks - 1)
