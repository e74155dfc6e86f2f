"""The smallest and the largest cache of experts: every command says the same of one fuel, names the option
(and the file), and takes what it says that it takes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_tools import Result, check_error, run_decode, run_rocket
from rocket import _core
from rocket.errors import UsageError
from rocket.report import format_bytes
from rocket.slot_limits import SlotLimits

LAYERS, EXPERTS, TOPK = 7, 24, 4  # of sparkler
WHY = "(the experts of one token in a layer)"
Command = Callable[..., Result]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("trace") / "trace"
    done = run_decode(
        "--prompt", "The capital of", "--tokens", "12", "--ignore-eos", "--trace-out", str(file)
    )
    assert done.status == 0, done.err
    return str(file)


def decode(*options: str) -> Result:
    return run_decode("--prompt-ids", "5,6", "--tokens", "4", "--json", *options)


def score(*options: str) -> Result:
    return run_rocket(
        "score", "sparkler", "--text", str(Path(__file__)), "--max-context", "4096", "--json", *options
    )


def plan(*options: str) -> Result:
    return run_rocket("plan", "sparkler", "--booster", "h200", "--json", *options)


def replay(trace: str) -> Command:
    return lambda *options: run_rocket("trace", "replay", trace, "--fuel", "sparkler", "--json", *options)


def fit(trace: str) -> Command:
    return lambda *options: run_rocket("trace", "fit", trace, "--fuel", "sparkler", "--json", *options)


def delivered(result: Result) -> int:
    assert result.status == 0, result.err
    found = json.loads(result.out)
    return found["experts"]["slots"] if "experts" in found and "slots" not in found else found["slots"]


def test_all_layers_together(trace: str) -> None:
    for option, command in (("--expert-slots", decode), ("--expert-slots", plan), ("--slots", replay(trace))):
        for few in (1, TOPK - 1):
            check_error(
                command(option, str(few)), 2, f"{option}: expected at least {TOPK} slots {WHY}, found {few}"
            )
        assert delivered(command(option, str(TOPK))) == TOPK
        for many in (LAYERS * EXPERTS, LAYERS * EXPERTS + 1, 100_000):
            assert delivered(command(option, str(many))) == LAYERS * EXPERTS
    check_error(
        score("--expert-slots", "3"), 2, f"--expert-slots: expected at least {TOPK} slots {WHY}, found 3"
    )


def test_each_layer_by_itself(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    for command in (decode, plan, replay(trace)):
        for few in (0, TOPK - 1):
            slots = {str(layer): TOPK + 1 for layer in range(1, LAYERS + 1)} | {"3": few}
            file.write_text(json.dumps({"per_layer": slots}))
            words = f"--slot-map {file}: layer 3: expected at least {TOPK} slots {WHY}, found {few}"
            check_error(command("--slot-map", str(file)), 2, words)
        for slots, given in ((TOPK, TOPK), (EXPERTS, EXPERTS), (EXPERTS + 1, EXPERTS), (1 << 40, EXPERTS)):
            file.write_text(json.dumps({str(layer): slots for layer in range(1, LAYERS + 1)}))
            assert delivered(command("--slot-map", str(file))) == LAYERS * given


def test_slots_that_are_shared_out(trace: str) -> None:
    few = LAYERS * TOPK
    commands = (fit(trace), lambda *options: replay(trace)(*options, "--equal"))
    for command in commands:
        words = f"--slots: expected at least {few} slots, {TOPK} for each of {LAYERS} layers {WHY}"
        check_error(command("--slots", str(few - 1)), 2, words, f"found {few - 1}")
        assert delivered(command("--slots", str(few))) == few
        assert delivered(command("--slots", "5000")) == LAYERS * EXPERTS


def test_bytes() -> None:
    slot = _core.FuelSlab(str(Path(__file__).parents[1] / "fuels" / "sparkler"), "x").slot_bytes
    for command in (decode, plan):
        gib = f"{(TOPK * slot - 1) / 2**30:.12f}"
        result = command("--expert-cache-gib", gib)
        check_error(result, 2, "--expert-cache-gib: expected at least", f"{TOPK} slots {WHY}", "which hold 3")
        found = re.search(r"raise --expert-cache-gib to ([\d.]+)", result.err)
        assert found
        assert delivered(command("--expert-cache-gib", found[1])) == TOPK
        assert delivered(command("--expert-cache-gib", "56")) == LAYERS * EXPERTS


@pytest.mark.parametrize("more", ["169", "100000"])
def test_a_cut_is_said(trace: str, more: str) -> None:
    asked = f"{int(more):,}"
    for command in (
        ("plan", "sparkler", "--booster", "h200", "--expert-slots", more),
        ("trace", "replay", trace, "--slots", more),
        ("trace", "fit", trace, "--slots", more),
    ):
        assert f"168 slots; cut from the {asked}" in run_rocket(*command).out or re.search(
            rf"168(,| slots).*; cut from the {asked} that were asked for", run_rocket(*command).out
        )
    assert "; cut from the " in run_decode("--prompt-ids", "5", "--tokens", "1", "--expert-slots", more).err


def test_a_plan_with_a_few_slots_replays_a_trace(trace: str) -> None:
    """Less than every layer's share, which only one order of eviction has."""
    found = json.loads(plan("--expert-slots", "9", "--trace", trace).out)
    assert found["slots"] == 9
    assert 0 <= found["step"]["hit_rate"] < 0.5


def test_boosters_that_own_few() -> None:
    limits = SlotLimits((2, 5, 0), 4)
    assert (limits.of_layer, limits.fewest, limits.most) == ((2, 4, 0), 4, 7)
    assert limits.of_map("map", (2, 9, 0), (3, 4, 5)) == (2, 5, 0)
    assert limits.total("--x", 4) == 4
    assert limits.shared_out("--x", 99) == 7
    with pytest.raises(UsageError, match="layer 4: expected at least 4 slots"):
        limits.of_map("map", (2, 3, 0), (3, 4, 5))
    with pytest.raises(UsageError, match=re.escape(f"found {format_bytes(39)}, which hold 3")):
        limits.in_bytes("--x", 39, 10)
    assert SlotLimits((), 4).fewest == 0
