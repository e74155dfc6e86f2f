"""Plans over budget: what rocket plan proposes, taken literally, does fit."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_tools
import plan_tools
from fuel_tools import Rocket, check_golden
from plan_tools import BOOSTER, load_account, small_account
from rocket import booster as boosters
from rocket import plan_command, plan_remedies
from rocket.booster import GIB, Booster
from rocket.plan import OverBudgetError, Request, make_plan

rocket = fuel_tools.rocket  # a fixture
accounts_once, tiny = plan_tools.accounts_once, plan_tools.tiny

OVER = [
    ("glm-5.3", "--booster", "gb300", "--context", "1048576", "--streams", "2"),
    ("glm-5.3", "--booster", "rtx-5090"),
    ("glm-5.3-flash", "--booster", "gb10", "--streams", "400"),
    ("glm-5.3-flash", "--booster", "gb10", "--expert-cache-gib", "110"),
    ("glm-5.3-flash", "--booster", "h200", "--expert-slots", "12096", "--context", "100000"),
]


def apply(arguments: Sequence[str], remedy: str, folder: Path) -> list[str]:
    """A command with a remedy as it is printed, taken literally."""
    pairs = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    words, _, gone = remedy.partition(" instead of ")
    for option in gone.split(" and ") if gone else ():
        del pairs[option]
    words, _, fuel = words.partition("the fuel ")
    words, _, memory = words.partition("a booster with memory_gib ")
    memory, _, reserve = memory.partition(" and reserve_gib ")
    added = words.removesuffix("on ").removesuffix("with ").split()
    pairs |= dict(zip(added[::2], added[1::2], strict=True))
    if memory:
        profile = boosters.load(pairs.get("--booster", "gb10")).model_dump(exclude_none=True)
        profile["memory_gib"] = float(memory)
        if reserve:
            profile["reserve_gib"] = float(reserve)
        file = folder / "larger.yaml"
        file.write_text(json.dumps(profile))  # JSON is YAML
        pairs["--booster"] = str(file)
    return [fuel or arguments[0], *(word for pair in pairs.items() for word in pair)]


def check_remedies(rocket: Rocket, arguments: Sequence[str], folder: Path) -> list[str]:
    """At least two of different kinds, all of which fit. Returns them as printed."""
    rocket.fails(1, "required", "available", arguments=("plan", *arguments))
    start, _, listed = rocket.err.split("hint: ")[1].strip().partition(": ")
    assert start == "any one of these fits"
    printed = listed.split(" | ")
    assert rocket("plan", *arguments, "--json") == 1
    over = json.loads(rocket.out)
    assert over["fits"] is False
    assert over["required_bytes"] > over["available_bytes"]
    kinds = [set(remedy["options"]) - {"reserve_gib"} for remedy in over["remedies"]]
    assert any(not (one <= other or other <= one) for one, other in combinations(kinds, 2)), printed
    for remedy, text in zip(over["remedies"], printed, strict=True):
        for option, value in remedy["options"].items():
            assert f"{option} {value}" in text
        assert (remedy["instead_of"] or "") == text.partition(" instead of ")[2]
        assert rocket("plan", *apply(arguments, text, folder), "--json") == 0, text
        assert json.loads(rocket.out)["each_booster_bytes"]["left"] >= 0
    return printed


@pytest.mark.parametrize("arguments", OVER, ids=" ".join)
def test_remedies_do_work(rocket: Rocket, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    check_remedies(rocket, arguments, tmp_path)


FIELDS: dict[str, Any] = {**BOOSTER, "reserve_gib": 0}
UNIFIED = {
    field: value
    for field, value in FIELDS.items()
    if field not in ("host_memory_gib", "host_reserve_gib", "link_gb_s")
} | {"unified_memory": True}
OWN = {
    "unified": UNIFIED | {"memory_gib": 17.95, "reserve_gib": 4.49},
    "small": FIELDS | {"memory_gib": 0.01},
    "medium": FIELDS | {"memory_gib": 8},
    "keeps most": FIELDS | {"memory_gib": 400, "reserve_gib": 399.9},
    "keeps all": FIELDS | {"memory_gib": 9000, "reserve_gib": 8999.999},
}
PROFILE = ("memory_gib", "reserve_gib")  # what a remedy says of a profile
GRID = [
    (fuel, booster, count, context, streams, dtype)
    for fuel in ("glm-5.3-flash", "glm-5.3", "sparkler")
    for booster in (*boosters.names(), *OWN)
    for count in ("1", "7")
    for context in (None, "64", "1048576")
    for streams in ("1", "3", "4000")
    for dtype in (None, "fp8")
]


@pytest.mark.parametrize("part", range(8))
def test_every_way_to_be_over_budget_has_two_ways_out(rocket: Rocket, tmp_path: Path, part: int) -> None:
    """A part of all combinations, most left out: each takes some tenths of a second."""
    tried = 0
    for fuel, booster, count, context, streams, dtype in GRID[part::31]:
        file = tmp_path / "own.yaml"
        if booster in OWN:
            file.write_text(json.dumps(OWN[booster]))
        options = {
            "--booster": str(file) if booster in OWN else booster,
            "--boosters": count,
            "--context": "4096" if context and fuel == "sparkler" else context,
            "--streams": streams,
            "--kv-dtype": dtype,
        }
        arguments = [fuel, *(word for pair in options.items() if pair[1] for word in pair)]
        if rocket("plan", *arguments) == 1:
            check_remedies(rocket, arguments, tmp_path)
            tried += 1
    assert tried >= 5


@settings(deadline=None, max_examples=150)
@given(
    share=st.floats(0.001, 1.0),
    over=st.floats(0, 1),
    unified=st.booleans(),
    experts=st.integers(3, 12),
    streams=st.sampled_from([1, 5, 300]),
    dtype=st.sampled_from([None, "fp8"]),
    large=st.booleans(),
)
def test_remedies_of_any_memory_are_profiles(
    share: float, over: float, unified: bool, experts: int, streams: int, dtype: str | None, large: bool
) -> None:
    """Whatever memory and reserve a profile has. Of large fuels the reserve ends at what a system needs."""
    account = load_account("glm-5.3-flash")[1] if large else small_account(experts=experts)
    memory = max(0.002, share * 1.2 * account.resident_loaded_bytes / GIB)
    least = boosters.least_reserve_gib(memory) if unified else 0.0
    reserve = least + over * (0.99 * memory - least)
    fields = UNIFIED if unified else FIELDS
    booster = Booster.model_validate(fields | {"memory_gib": memory, "reserve_gib": reserve})
    request = Request(booster=booster, streams=streams, kv_dtype=dtype)
    try:
        make_plan(account, request)
    except OverBudgetError:
        found = plan_remedies.remedies(account, request)
    else:
        return
    assert plan_remedies.two_kinds(found) or any("memory_gib" in remedy.options for remedy in found)
    for remedy in found:
        assert make_plan(account, remedy.request).left >= 0, remedy
        said = {name: float(remedy.options[name]) for name in PROFILE if name in remedy.options}
        if said:
            again = Booster.model_validate(booster.model_dump() | said)
            assert make_plan(account, replace(remedy.request, booster=again)).left >= 0, remedy
            assert again.reserve_bytes == remedy.request.booster.reserve_bytes


@pytest.mark.parametrize("memory", [1, 8, 12, 16, 17.95, 18, 20])
def test_more_memory_on_one_memory_keeps_more_back(rocket: Rocket, tmp_path: Path, memory: float) -> None:
    """As rocket bench host writes the reserve: a quarter, up to what an operating system needs."""
    file = tmp_path / "host.yaml"
    fields = UNIFIED | {"memory_gib": memory, "reserve_gib": min(5, ceil(memory * 25) / 100)}
    file.write_text(json.dumps(fields))
    printed = check_remedies(rocket, ["glm-5.3-flash", "--booster", str(file)], tmp_path)
    larger = next(text for text in printed if text.startswith("a booster with memory_gib "))
    assert ("and reserve_gib 5.00" in larger) == (memory < 20)


def test_no_profile_is_large_enough(
    rocket: Rocket, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are sizes that no profile can name; nothing is proposed then that would be refused."""
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(UNIFIED | {"memory_gib": 0.002, "reserve_gib": 0.001}))
    monkeypatch.setattr(plan_remedies, "_shipped", list)
    monkeypatch.setattr(plan_remedies, "MOST_GIB", 0.001)
    monkeypatch.setattr(plan_command, "_other_fuels", lambda fuel: ())
    rocket.fails(1, "required", "available", arguments=("plan", tiny, "--booster", str(file)))
    assert "hint: no booster is large enough" in rocket.err


def test_nothing_that_ships_is_large_enough(
    rocket: Rocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then another fuel remains, without what was said of the first one's experts."""
    monkeypatch.setattr(plan_remedies, "_shipped", list)
    split, file = str(tmp_path / "split.json"), tmp_path / "own.yaml"
    file.write_text(json.dumps(OWN["medium"]))
    assert rocket("split", "glm-5.3", "--boosters", "2", "--out", split) == 0
    arguments = ["glm-5.3", "--booster", str(file), "--context", "64", "--kv-dtype", "fp8"]
    assert "the fuel sparkler" in check_remedies(rocket, arguments, tmp_path)
    arguments += ["--split", split, "--expert-slots", "900"]
    expected = "--boosters 2 with the fuel sparkler instead of --split and --expert-slots"
    assert expected in check_remedies(rocket, arguments, tmp_path)
    file.write_text(json.dumps(OWN["small"]))
    rocket.fails(1, "glm-5.3", arguments=("plan", *arguments[:-4]))
    assert re.fullmatch(
        "hint: nothing but more memory fits: a booster with memory_gib [0-9.]+", rocket.err.splitlines()[-1]
    )


def test_a_split_gives_way_to_more_boosters(rocket: Rocket, tmp_path: Path) -> None:
    split = str(tmp_path / "split.json")
    assert rocket("split", "glm-5.3-flash", "--boosters", "2", "--out", split) == 0
    fixed = ("glm-5.3-flash", "--booster", "rtx-5090", "--split", split)
    for more in (("--expert-slots", "1000"), ("--expert-cache-gib", "14")):
        arguments = (*fixed, "--context", "420000", *more)
        printed = check_remedies(rocket, arguments, tmp_path)
        assert any(re.match("--boosters [0-9]+ .*instead of --split", text) for text in printed), printed


def test_remedies_beside_a_slot_map(rocket: Rocket, tiny: str, tmp_path: Path) -> None:
    """What sets slots says what has to go, and more boosters take their share of the slots."""
    assert rocket("plan", "glm-5.3-flash", "--json") == 0
    layers = json.loads(rocket.out)["slots_of_layer"]
    file = tmp_path / "map.json"
    file.write_text(json.dumps(dict.fromkeys(layers, 288)))
    arguments = ("glm-5.3-flash", "--booster", "gb10", "--slot-map", str(file))
    rocket.fails(1, "glm-5.3-flash on gb10", arguments=("plan", *arguments))
    printed = rocket.err.split("fits: ")[1].strip().split(" | ")
    assert any(re.fullmatch("--expert-slots [0-9]+ instead of --slot-map", text) for text in printed)
    assert "--boosters 2" in printed  # each owns half of the experts, and the map is cut to them
    for text in printed:
        assert rocket("plan", *apply(arguments, text, tmp_path), "--json") == 0, text


def test_over_budget_names_the_boosters_file(rocket: Rocket, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(BOOSTER))
    arguments = ("plan", "glm-5.3", "--booster", str(file))
    rocket.fails(1, f"glm-5.3 on {file}: ", arguments=arguments)


def test_golden_over_budget(rocket: Rocket) -> None:
    assert rocket("plan", *OVER[2]) == 1
    check_golden("plan-over-budget.txt", rocket.err)


def test_more_memory_is_the_last_resort(rocket: Rocket, tmp_path: Path) -> None:
    """No shipped booster is large enough; the remedy names a memory that is."""
    fields = boosters.load("gb300").model_dump(exclude_none=True) | {"memory_gib": 300.0}
    file = tmp_path / "large.yaml"
    file.write_text(json.dumps(fields))
    arguments = ("glm-5.3", "--booster", str(file), "--expert-slots", "19200", "--streams", "9")
    assert rocket("plan", *arguments, "--json") == 1
    assert len(json.loads(rocket.out)["remedies"]) >= 2
    fields["memory_gib"] = 30.0
    file.write_text(json.dumps(fields))
    arguments = ("glm-5.3", "--booster", str(file), "--streams", "2000", "--context", "1048576")
    assert rocket("plan", *arguments, "--json") == 1
    found = json.loads(rocket.out)["remedies"]
    assert len(found) >= 2
    assert any("memory_gib" in remedy["options"] for remedy in found)
    for options in (remedy["options"] for remedy in found):
        pairs = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        if "memory_gib" in options:
            larger = tmp_path / "larger.yaml"
            larger.write_text(json.dumps({**fields, "memory_gib": float(options.pop("memory_gib"))}))
            pairs["--booster"] = str(larger)
        pairs |= options
        assert rocket("plan", "glm-5.3", *(word for pair in pairs.items() for word in pair)) == 0
