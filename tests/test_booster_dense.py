"""Several boosters that share the dense weights: one booster's tokens, its logits within rounding, and the
bytes that were planned."""

import dataclasses
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from booster_program import run
from cli_tools import check_error, run_decode, run_rocket
from golden_fuels import CASES, WILD, variant
from mpi_tools import DECODE, decode_ranks, run_ranks
from rocket.accounting import State
from rocket.fuel_account import load_account
from rocket.inventory import Bucket
from rocket.plan import workspace_bytes
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import FuelOptions

mpi = pytest.mark.mpi

SPARKLER = Path(__file__).parents[1] / "fuels" / "sparkler"
PROGRAM = Path(__file__).parent / "booster_program.py"
PROMPT = ("--prompt", "The capital of France is", "--ignore-eos")

# Parts of these end where blocks of 16, 32 and 128 do, or lie within one.
EVEN = dataclasses.replace(
    WILD,
    vocab_size=256,
    intermediate_size=256,
    moe_intermediate_size=64,
    v_head_dim=64,
    linear_head_dim=32,
    qk_nope_head_dim=64,
    num_hidden_layers=4,
)
ODD = dataclasses.replace(
    next(case.shape for case in CASES if case.name == "odd"), intermediate_size=48, moe_intermediate_size=48
)
FUELS: dict[str, FuelOptions] = {
    **{name: variant(name, 2, shape=EVEN) for name in ("fp8", "fp8-rows", "mxfp8", "mixed-layers")},
    **{name: variant(name, 2, shape=EVEN) for name in ("modelopt-dense", "mixed-groups", "patchwork")},
    "tied-3": FuelOptions(ODD, seed=4, tokenizer=False),
    "no-experts": FuelOptions(dataclasses.replace(EVEN, mlp_pattern="DDDD"), seed=4, tokenizer=False),
}
RUNS = [
    *((name, ranks) for name in ("sparkler", "modelopt") for ranks in (2, 4)),
    ("groups", 4),
    ("shared", 2),
    *((name, 3 if name == "tied-3" else 2) for name in FUELS),
]


def fuel_of(name: str, folder: Path) -> Path:
    if name == "sparkler":
        return SPARKLER
    if name not in FUELS:
        return next(case for case in CASES if case.name == name).build(folder)
    fuel = folder / f"dense-{name}"
    return fuel if fuel.is_dir() else make_fuel(fuel, FUELS[name])


def limit(fuel: Path, logits: np.ndarray) -> float:
    """How far logits may be from those of one booster. Only sums out of heads and columns are of another
    order: one in each attention, one in each MLP. A float32 sum of n numbers is off by about sqrt(n) times
    2^-24 of its size in either order, so that two differ by twice that; of L layers' 2 L sums all of it may
    add up."""
    arch = load_account(str(fuel))[1].arch
    shared = arch.moe_intermediate_size * arch.n_shared_experts
    widest = max(
        arch.intermediate_size, arch.kda_channels, arch.num_attention_heads * arch.v_head_dim, shared
    )
    sums = 2 * arch.num_hidden_layers
    return sums * 2 * math.sqrt(widest) * 2.0**-24 * float(np.abs(logits).max())


def close(found: np.ndarray, alone: np.ndarray, most: float) -> None:
    assert found.shape == alone.shape
    assert np.isfinite(found).all()
    worst = float(np.abs(found - alone).max())
    assert worst <= most, f"{worst:.3g} apart, at most {most:.3g}"


def several(ranks: int, runs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    inputs, output = folder / "in", folder / "out"
    inputs.write_bytes(pickle.dumps(runs))
    done = run_ranks([(ranks, (sys.executable, str(PROGRAM), str(inputs), str(output)))])
    assert done.status == 0, done.err
    results = pickle.loads(output.read_bytes())
    assert len(results) == len(runs)
    return results


@mpi
@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_logits_are_those_of_one_booster_within_rounding(
    name: str, ranks: int, fuel_dir: Path, tmp_path: Path
) -> None:
    fuel = fuel_of(name, fuel_dir)
    alone = run(fuel)
    assert alone is not None
    account = load_account(str(fuel))[1]
    share = account.share(ranks)
    most = limit(fuel, alone["logits"])
    slots = max(alone["info"]["topk"], 3)
    options: list[dict[str, Any]] = [{}, {"expert_slots": slots} if account.arch.moe_layers else {}]
    results = several(
        ranks, [{"fuel": fuel, "boosters": ranks, "split_dense": True, **o} for o in options], tmp_path
    )
    for given, found in zip(options, results, strict=True):
        close(found["logits"], alone["logits"], most)
        assert found["tokens"] == alone["tokens"]
        for ours, theirs in zip(found["scores"][1:], alone["scores"][1:], strict=True):
            assert np.array_equal(ours, theirs)
        close(found["scores"][0], alone["scores"][0], 2 * most)
        info = found["info"]
        assert info["split_dense"]
        saved = alone["info"]["state_bytes_per_stream"] - info["state_bytes_per_stream"]
        assert saved == State(account.arch).stream_bytes - State(share.arch).stream_bytes
        assert info["workspace_bytes"] <= workspace_bytes(share.arch, 160, 64, ranks, True)
        for booster in found["stats"]["boosters"]:
            check_bytes(booster["dense_bytes"], share.resident_loaded_bytes, fuel, given, alone)
    assert np.array_equal(results[0]["logits"].view(np.uint32), results[1]["logits"].view(np.uint32))


def check_bytes(found: int, planned: int, fuel: Path, given: dict[str, Any], alone: dict[str, Any]) -> None:
    """The engine pads each tensor to 64 bytes. It keeps experts that cannot be used in place with the dense
    weights, unless they are in a cache."""
    account = load_account(str(fuel))[1]
    parts = sum(count.tensors for bucket, count in account.buckets.items() if bucket is not Bucket.EXPERTS)
    padding = found - planned
    if not given and alone["info"]["dense_bytes"] - account.resident_loaded_bytes > 64 * 2 * parts:
        return
    assert 0 <= padding < 64 * 2 * parts


@mpi
def test_one_rank_has_all(tmp_path: Path) -> None:
    alone = run(SPARKLER)
    assert alone is not None
    (found,) = several(1, [{"fuel": SPARKLER, "boosters": 1, "split_dense": True}], tmp_path)
    assert np.array_equal(found["logits"].view(np.uint32), alone["logits"].view(np.uint32))
    assert found["info"]["dense_bytes"] == alone["info"]["dense_bytes"]


@mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_decode_gives_the_same_text(ranks: int, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "several"]
    options = (*PROMPT, "--tokens", "60", "--json", "--prefill-chunk", "3")
    one = run_decode(*options, "--logits-out", str(files[0]))
    many = decode_ranks(ranks, *options, "--split-dense", "--logits-out", str(files[1]))
    assert many.status == 0, many.err
    ours, theirs = json.loads(many.out), json.loads(one.out)
    assert ours["text"] == theirs["text"]
    logits = [load_file(file)["logits"] for file in files]
    close(logits[1], logits[0], limit(SPARKLER, logits[0]))
    assert "its share of the dense weights" in many.err
    plan = json.loads(run_rocket("plan", "sparkler", "--boosters", str(ranks), "--split-dense", "--json").out)
    resident = plan["each_booster_bytes"]["resident"]
    whole = theirs["boosters"][0]["dense_bytes"]
    kept = resident - (whole - resident) / (ranks - 1)  # what is on all
    assert 0 < kept < 0.32 * whole
    for booster in ours["boosters"]:
        assert 0 <= booster["dense_bytes"] - resident < 0.01 * resident


def test_plan_of_a_large_model() -> None:
    """Two machines read half of all but 1.7 GiB of Flash's dense weights."""
    found = json.loads(run_rocket("plan", "glm-5.3-flash", "--boosters", "2", "--split-dense", "--json").out)
    rows = {row["count"]: row for row in found["ceilings"]}
    best, real = rows["touched, all weights split"], rows["touched, with --split-dense"]
    assert found["split_dense"]
    assert best["bytes_a_token"] < real["bytes_a_token"] < 1.04 * best["bytes_a_token"]
    assert real["tok_s"] > 21.1
    assert found["step"]["base_bytes"] < 1.05 * real["bytes_a_token"]


# --- what is refused ----------------------------------------------------------------------------------------


@mpi
def test_boosters_that_do_not_divide_the_heads() -> None:
    result = decode_ranks(3, *PROMPT, "--tokens", "2", "--split-dense", "--quiet")
    check_error(
        result, 2, "--split-dense: expected a number of boosters that divides the 4 KDA heads, found 3"
    )
    assert "it works with this many boosters: 1, 2, 4\n" in result.err
    plan = run_rocket("plan", "sparkler", "--boosters", "3", "--split-dense")
    check_error(plan, 2, "--split-dense: expected a number of boosters that divides the 4 KDA heads, found 3")
    assert "it works with this many boosters: 1, 2, 4\n" in plan.err


@mpi
@pytest.mark.parametrize(("name", "block"), [("fp8", 128), ("mxfp8", 32)])
def test_cuts_inside_a_block(name: str, block: int, fuel_dir: Path) -> None:
    fuel = next(case for case in CASES if case.name == name).build(fuel_dir)
    result = decode_ranks(2, "--fuel", str(fuel), "--prompt-ids", "5", "--tokens", "2", "--split-dense")
    check_error(result, 1, "--split-dense: ", f"in 2 parts of whole blocks of {block}, found ")
    assert "it works with this many boosters: 1\n" in result.err
    plan = run_rocket("plan", str(fuel), "--boosters", "2", "--split-dense")
    check_error(plan, 2, "--split-dense: ", f"in 2 parts of whole blocks of {block}, found ")
    assert "it works with this many boosters: 1\n" in plan.err


@mpi
def test_the_handshake_compares_it() -> None:
    common = (*DECODE, "--prompt-ids", "5", "--tokens", "2", "--threads", "1", "--boosters", "2", "--quiet")
    result = run_ranks([(1, common), (1, (*common, "--split-dense"))])
    check_error(result, 1, "boosters: dense weights: rank 0 has whole, rank 1 has split (--split-dense)")
