"""rocket plan, rocket split and rocket bench host on the command line."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fuel_tools
from cli_tools import tree
from fuel_tools import Rocket, check_golden
from plan_tools import skewed_ids, write_trace
from rocket import _core, bench_host, fuel_account, plan_command, split_command
from rocket import booster as boosters
from rocket.disk_rate import DiskRates
from rocket.random_fuel import make_fuel

rocket = fuel_tools.rocket  # a fixture
load_account = cache(fuel_account.load_account)  # a large fuel's takes seconds
MOE_LAYERS, EXPERTS, TOPK = 5, 16, 4  # of the smallest random fuel


@pytest.fixture(autouse=True)
def _accounts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan_command, split_command):
        monkeypatch.setattr(module, "load_account", load_account)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_fuel(tmp_path_factory.mktemp("fuel") / "tiny"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    ids = skewed_ids(41, MOE_LAYERS, EXPERTS, TOPK)
    return str(write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", ids))


# --- golden output ----------------------------------------------------------------------------------------

GOLDEN = {
    "plan-flash-gb10.txt": ("glm-5.3-flash", "--context", "32768", "--kv-dtype", "bf16"),
    "plan-flash-2-gb10.txt": ("glm-5.3-flash", "--booster", "gb10", "--boosters", "2", "--hit-rate", "0.97"),
    "plan-flash-cache-56.txt": ("glm-5.3-flash", "--booster", "gb10", "--expert-cache-gib", "56"),
    "plan-744b-gb300.txt": (
        *("glm-5.3", "--booster", "gb300", "--context", "262144", "--kv-dtype", "bf16"),
        *("--expert-slots", "7360", "--hit-rate", "0.9"),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plans(rocket: Rocket, name: str) -> None:
    assert rocket("plan", *GOLDEN[name]) == 0
    assert rocket.err == ""
    check_golden(name, rocket.out)


def test_the_manifest_chooses_the_booster(rocket: Rocket, tiny: str) -> None:
    for fuel, booster in (("glm-5.3-flash", "gb10"), ("glm-5.3", "gb300"), (tiny, "gb10")):
        assert rocket("plan", fuel, "--json") == 0
        plan = json.loads(rocket.out)
        assert (plan["booster"], plan["boosters"]) == (booster, 1)
        assert plan["choices"][0].startswith(f"booster: {booster}")


def test_ceilings_of_flash(rocket: Rocket) -> None:
    assert rocket("plan", "glm-5.3-flash", "--booster", "gb10", "--boosters", "2", "--json") == 0
    rows = {(row["count"], row["boosters"]): row["tok_s"] for row in json.loads(rocket.out)["ceilings"]}
    assert f"{rows['full table', 1]:.1f}" == "10.5"
    assert f"{rows['full table, all weights split', 2]:.1f}" == "21.1"


def test_requested_and_delivered_cache(rocket: Rocket) -> None:
    """56 GiB make 4,247 slots of 13.50 MiB, 55.99 GiB."""
    assert rocket("plan", "glm-5.3-flash", "--booster", "gb10", "--expert-cache-gib", "56", "--json") == 0
    plan = json.loads(rocket.out)
    assert (plan["slots"], plan["slot_bytes"]) == (4247, 27 << 19)
    assert plan["expert_cache_requested_bytes"] == 56 << 30
    assert plan["expert_cache_delivered_bytes"] == 4247 * (27 << 19)


def test_golden_split(rocket: Rocket, tiny: str, trace: str, tmp_path: Path) -> None:
    out = tmp_path / "split.json"
    arguments = ("--boosters", "3", "--by", "load", "--trace", trace, "--out", str(out))
    assert rocket("split", tiny, *arguments) == 0
    check_golden("split-tiny.txt", rocket.out)
    check_golden("split-tiny.json", out.read_text())
    first = out.read_bytes()
    assert rocket("split", tiny, *arguments, "--json") == 0
    assert out.read_bytes() == first
    summary = json.loads(rocket.out)
    assert summary == {k: v for k, v in json.loads(first).items() if k != "owner"}
    assert (summary["trace"]["fitted_tokens"], summary["trace"]["judged_tokens"]) == (20, 21)


def test_plan_takes_a_split_and_a_trace(rocket: Rocket, tiny: str, trace: str, tmp_path: Path) -> None:
    out = str(tmp_path / "split.json")
    assert (
        rocket("split", tiny, "--boosters", "3", "--by", "coactivation", "--trace", trace, "--out", out) == 0
    )
    assert rocket("plan", tiny, "--split", out, "--trace", trace, "--expert-slots", "20", "--json") == 0
    plan = json.loads(rocket.out)
    assert (plan["boosters"], plan["split"], plan["experts_owned"]) == (3, out, 27)
    assert 0 < plan["step"]["hit_rate"] < 1
    assert "trace.jsonl" in plan["step"]["hit_rate_source"]


def test_a_plans_slots_are_a_slot_map(rocket: Rocket, tiny: str, tmp_path: Path) -> None:
    assert rocket("plan", tiny, "--expert-slots", "43", "--json") == 0
    slots = json.loads(rocket.out)["slots_of_layer"]
    assert sorted(slots.values()) == [8, 8, 9, 9, 9]
    file = tmp_path / "map.json"
    file.write_text(json.dumps(slots))
    assert rocket("plan", tiny, "--slot-map", str(file), "--json") == 0
    assert json.loads(rocket.out)["slots_of_layer"] == slots


# --- over budget ------------------------------------------------------------------------------------------

OVER = [
    ("glm-5.3", "--booster", "gb300", "--context", "1048576", "--streams", "2"),
    ("glm-5.3", "--booster", "rtx-5090"),
    ("glm-5.3-flash", "--booster", "gb10", "--streams", "400"),
    ("glm-5.3-flash", "--booster", "gb10", "--expert-cache-gib", "110"),
    ("glm-5.3-flash", "--booster", "h200", "--expert-slots", "12096", "--context", "100000"),
]


def apply(arguments: tuple[str, ...], remedy: str, folder: Path) -> list[str]:
    """A command with a remedy as it is printed, taken literally."""
    pairs = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    remedy, _, gone = remedy.partition(" instead of ")
    if gone:
        del pairs[gone]
    words, _, memory = remedy.partition("a booster with memory_gib ")
    added = words.removesuffix("on ").split()
    pairs |= dict(zip(added[::2], added[1::2], strict=True))
    if memory:
        profile = boosters.load(pairs.get("--booster", "gb10")).model_dump(exclude_none=True)
        file = folder / "larger.yaml"
        file.write_text(json.dumps({**profile, "memory_gib": float(memory)}))  # JSON is YAML
        pairs["--booster"] = str(file)
    return [arguments[0], *(word for pair in pairs.items() for word in pair)]


@pytest.mark.parametrize("arguments", OVER, ids=" ".join)
def test_remedies_do_work(rocket: Rocket, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    rocket.fails(1, "required", "available", "GiB", arguments=("plan", *arguments))
    hint = rocket.err.split("hint: ")[1]
    assert rocket("plan", *arguments, "--json") == 1
    over = json.loads(rocket.out)
    assert over["fits"] is False
    assert over["required_bytes"] > over["available_bytes"]
    printed = hint.strip().split(": ")[1].split(" | ")
    assert len(over["remedies"]) == len(printed) >= 2
    for remedy, text in zip(over["remedies"], printed, strict=True):
        for option, value in remedy["options"].items():
            assert f"{option} {value}" in text
        assert (remedy["instead_of"] or "") == text.partition(" instead of ")[2]
        assert rocket("plan", *apply(arguments, text, tmp_path), "--json") == 0, text
        assert json.loads(rocket.out)["each_booster_bytes"]["left"] >= 0


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
    assert "--boosters 2 --expert-slots 6048 instead of --slot-map" in printed
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


# --- bad input --------------------------------------------------------------------------------------------

BOOSTER: dict[str, Any] = {
    "id": "mine",
    "name": "my machine",
    "unified_memory": False,
    "memory_gib": {"value": 24, "source": "measured"},
    "reserve_gib": 1,
    "read_gb_s": 900,
    "copy_gb_s": 800,
    "host_memory_gib": 60,
    "host_reserve_gib": 5,
    "link_gb_s": 25,
    "disk_read_gb_s": 3,
}


def without(*fields: str) -> dict[str, Any]:
    return {field: value for field, value in BOOSTER.items() if field not in fields}


WRONG_BOOSTERS = {
    "no rate": (without("read_gb_s"), ("read_gb_s", "missing", "GB/s", "0.001 to 1e+09")),
    "no disk rate": (without("disk_read_gb_s"), ("disk_read_gb_s", "missing")),
    "no link rate": (without("link_gb_s"), ("link_gb_s", "missing", "unified_memory")),
    "no memory": (without("memory_gib"), ("memory_gib", "missing", "GiB")),
    "unknown field": ({**BOOSTER, "colour": "red"}, ("colour", '"red"', "memory_gib")),
    "wrong unit": ({**BOOSTER, "read_gib_s": 900}, ("read_gib_s", "900", "did you mean read_gb_s")),
    "a unit in the value": ({**BOOSTER, "read_gb_s": "900 GB/s"}, ("read_gb_s", "a number", '"900 GB/s"')),
    "wrong type": ({**BOOSTER, "unified_memory": "no"}, ("unified_memory", "true or false", '"no"')),
    "zero": ({**BOOSTER, "read_gb_s": 0}, ("read_gb_s", "from 0.001 to 1e+09", "found 0")),
    "below zero": ({**BOOSTER, "link_gb_s": -25}, ("link_gb_s", "at least 0", "-25")),
    "not a number": ({**BOOSTER, "copy_gb_s": float("nan")}, ("copy_gb_s", "finite", "NaN")),
    "reserve of everything": ({**BOOSTER, "reserve_gib": 24}, ("reserve_gib", "less than", "24")),
    "host reserve of everything": (
        {**BOOSTER, "host_reserve_gib": 60},
        ("host_reserve_gib", "less than", "60"),
    ),
    "unknown source": (
        {**BOOSTER, "memory_gib": {"value": 24, "source": "guessed"}},
        ("memory_gib.source", "measured", "derived", "published", '"guessed"'),
    ),
    "unknown part of a number": (
        {**BOOSTER, "memory_gib": {"value": 24, "unit": "GB"}},
        ("memory_gib.unit", '"GB"', "value, source, note"),
    ),
    "no value": ({**BOOSTER, "memory_gib": {"source": "measured"}}, ("memory_gib.value", "missing")),
    "link on unified memory": (
        {**without("host_memory_gib", "host_reserve_gib"), "unified_memory": True, "reserve_gib": 5},
        ("link_gb_s", "unified_memory", "25"),
    ),
    "too little for the system": (
        {**without("host_memory_gib", "host_reserve_gib", "link_gb_s"), "unified_memory": True},
        ("reserve_gib", "at least 5", "found 1"),
    ),
    "id with a space": ({**BOOSTER, "id": "my box"}, ("id", '"my box"')),
}


@pytest.mark.parametrize("case", WRONG_BOOSTERS)
def test_wrong_booster_files(rocket: Rocket, tiny: str, tmp_path: Path, case: str) -> None:
    fields, words = WRONG_BOOSTERS[case]
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(fields).replace("NaN", ".nan"))
    rocket.fails(2, str(file), *words, arguments=("plan", tiny, "--booster", str(file)))


WRONG_BYTES = {
    "UTF-16": (json.dumps(BOOSTER).encode("utf-16"), ("expected UTF-8", "byte 0xff at 0")),
    "UTF-16 without a mark": (json.dumps(BOOSTER).encode("utf-16-le"), ("expected UTF-8", "zero byte")),
    "binary": (b"\x7fELF\x02\x01\x01\0\0", ("expected UTF-8", "zero byte")),
    "circular": (b"id: &a\n  x: *a\n", ("line 2", "no alias", "*a")),
    "an alias": (b"id: &a mine\nname: *a\n", ("line 2", "no alias", "*a")),
    "deep": (b"id: " + b"[" * 100_000, ("line 1", "32 levels")),
    "deep blocks": (b"".join(b" " * i + b"a:\n" for i in range(900)), ("line 33", "32 levels")),
    "a list as a key": (b"? [1, 2]\n: 3\n", ("mine.yaml",)),
    "large": (b"#" * ((1 << 20) + 1), ("at most 1,048,576 bytes",)),
    "twice": (b"id: a\nid: b\n", ("broken YAML", "line 2")),
}


@pytest.mark.parametrize("case", WRONG_BYTES)
def test_booster_files_that_are_none(rocket: Rocket, tiny: str, tmp_path: Path, case: str) -> None:
    data, words = WRONG_BYTES[case]
    file = tmp_path / "mine.yaml"
    file.write_bytes(data)
    rocket.fails(2, str(file), *words, arguments=("plan", tiny, "--booster", str(file)))


SIZES = [field for field in BOOSTER if field.endswith(("_gib", "_gb_s"))]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", ["1e-300", "5e-324", "1e308", "1e10", "1" + "0" * 400])
def test_sizes_and_rates_have_bounds(
    rocket: Rocket, tiny: str, tmp_path: Path, field: str, value: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{f}: {value if f == field else json.dumps(v)}\n" for f, v in BOOSTER.items()))
    if "reserve" in field and value.endswith(("e-300", "e-324")):  # as good as no reserve
        assert rocket("plan", tiny, "--booster", str(file)) == 0
    else:
        rocket.fails(2, str(file), field, arguments=("plan", tiny, "--booster", str(file)))


@pytest.mark.parametrize("value", [1e-3, 1e9])
def test_bounds_themselves_can_be_planned(rocket: Rocket, tiny: str, tmp_path: Path, value: float) -> None:
    rates = {field: value for field in SIZES if field.endswith("_gb_s")}
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({**BOOSTER, **rates}))
    assert rocket("plan", tiny, "--booster", str(file), "--hit-rate", "0") == 0
    file.write_text(json.dumps({**BOOSTER, **rates, "memory_gib": value, "reserve_gib": 0}))
    assert rocket("plan", tiny, "--booster", str(file), "--json") == (0 if value > 1 else 1)


FILE_OPTIONS = [
    ("plan", "--booster"),
    ("plan", "--slot-map"),
    ("plan", "--split"),
    ("plan", "--trace"),
    ("split", "--boosters", "2", "--out", "OUT", "--trace"),
]


@pytest.mark.parametrize("command", FILE_OPTIONS, ids=" ".join)
def test_only_regular_files_are_read(
    rocket: Rocket, tiny: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    os.mkfifo(tmp_path / "pipe")  # opening one would wait for a writer
    for file in ("/dev/zero", str(tmp_path / "pipe")):
        arguments = (words[0], tiny, *words[1:], file)
        rocket.fails(2, command[-1], file, "regular file", arguments=arguments)
    rocket.fails(2, command[-1], "nowhere", arguments=(words[0], tiny, *words[1:], str(tmp_path / "nowhere")))
    assert tree(tmp_path) == ["pipe"]


@pytest.mark.parametrize("option", ["--slot-map", "--split"])
def test_large_files_are_refused(rocket: Rocket, tiny: str, tmp_path: Path, option: str) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as out:
        out.truncate(1 << 40)  # a hole
    rocket.fails(2, str(file), "at most 1,048,576 bytes", arguments=("plan", tiny, option, str(file)))
    rocket.fails(2, "line 1", "at most 16,777,216", arguments=("plan", tiny, "--trace", str(file)))


def test_split_does_not_overwrite_what_it_is_made_from(
    rocket: Rocket, tiny: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "trace.jsonl"
    own.write_bytes(Path(trace).read_bytes())
    (tmp_path / "link").symlink_to(own)
    command = ("split", tiny, "--boosters", "2", "--trace", str(own), "--out")

    def work(*_: object) -> None:
        raise AssertionError("the work has begun")

    with monkeypatch.context() as patched:
        patched.setattr(split_command, "build", work)
        for out in (own, tmp_path / "link"):
            rocket.fails(2, "--out", str(out), "--trace", arguments=(*command, str(out)))
        for file in sorted(Path(tiny).iterdir()):
            rocket.fails(2, "--out", file.name, "the fuel", arguments=(*command, str(file)))
        manifest = str(fuel_tools.FUELS / "glm-5.3-flash" / "fuel.yaml")
        flash = ("split", "glm-5.3-flash", "--boosters", "2", "--out", manifest)
        rocket.fails(2, "--out", "the fuel's manifest", arguments=flash)
    assert own.read_bytes() == Path(trace).read_bytes()
    for _ in range(2):  # an earlier split may be written over
        assert rocket(*command, str(tmp_path / "split.json")) == 0


def test_a_trace_adds_no_misses_where_every_expert_has_a_slot(rocket: Rocket, tiny: str, trace: str) -> None:
    assert rocket("plan", tiny, "--trace", trace, "--json") == 0
    step = json.loads(rocket.out)["step"]
    assert (step["hit_rate"], step["misses"], step["ms"]) == (1, 0, step["base_ms"])
    assert 0 < step["cold_start_misses"] <= MOE_LAYERS * EXPERTS
    assert f"fills {step['cold_start_misses']} of them once" in step["hit_rate_source"]
    assert rocket("plan", tiny, "--trace", trace, "--expert-slots", "40", "--boosters", "2") == 0
    assert "hit rate of all boosters together, experts and misses of each layer's busiest" in rocket.out


def test_a_right_booster_file(rocket: Rocket, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(BOOSTER))
    assert rocket("plan", tiny, "--booster", str(file)) == 0
    assert f", from {file}\n" in rocket.out


FILES = {
    "list.yaml": "- 1\n",
    "broken.yaml": "id: x\n  y: [\n",
    "list.json": "[1]",
    "broken.json": "{",
    "layer.json": '{"0": 8, "3": 8}',
    "few.json": '{"3": 8}',
    "text.json": '{"3": "many", "4": 8, "5": 8, "6": 8, "7": 8}',
    "large.json": '{"3": 17, "4": 8, "5": 8, "6": 8, "7": 8}',
    "twice.json": '{"3": 8, "3": 9, "4": 8, "5": 8, "6": 8, "7": 8}',
    "twice.jsonl": '{"tok": 1, "tok": 2, "layers": []}',
    "other.jsonl": '{"tok": 1, "layers": [[0, 1], [2, 3]]}\n',
}
PLAN, SPLIT = ("plan", "FUEL"), ("split", "FUEL", "--out", "OUT")
WRONG = [
    ((*PLAN, "--booster", "gb11"), ("--booster", "gb10, gb300, h200, rtx-5090", "'gb11'")),
    ((*PLAN, "--booster", "."), ("--booster", "gb10, gb300, h200, rtx-5090", "'.'")),
    ((*PLAN, "--booster", ""), ("--booster", "gb10, gb300, h200, rtx-5090", "''")),
    ((*PLAN, "--booster", "list.yaml"), ("list.yaml", "object of fields", "[1]")),
    ((*PLAN, "--booster", "broken.yaml"), ("broken.yaml", "broken YAML", "line 2")),
    ((*PLAN, "--boosters", "17"), ("--boosters", "1 to 16", "17")),
    ((*PLAN, "--boosters", "0"), ("--boosters", "1 to 16", "found 0")),
    ((*PLAN, "--boosters", "two"), ("--boosters", "an integer", "'two'")),
    ((*PLAN, "--context", "8193"), ("--context", "1 to 8192", "8193")),
    ((*PLAN, "--context", "0"), ("--context", "1 to 8192", "found 0")),
    ((*PLAN, "--streams", "0"), ("--streams", "1", "found 0")),
    ((*PLAN, "--kv-dtype", "f64"), ("--kv-dtype", "f32, bf16, fp8", "'f64'")),
    ((*PLAN, "--hit-rate", "1.1"), ("--hit-rate", "[0, 1]", "1.1")),
    ((*PLAN, "--hit-rate", "nan"), ("--hit-rate", "[0, 1]", "nan")),
    ((*PLAN, "--expert-slots", "81"), ("--expert-slots", "20", "80", "81")),
    ((*PLAN, "--expert-slots", "19"), ("--expert-slots", "20", "80", "19")),
    ((*PLAN, "--expert-cache-gib", "-1"), ("--expert-cache-gib", "(0,", "-1")),
    ((*PLAN, "--expert-cache-gib", "0.00001"), ("--expert-cache-gib", "at least", "20 slots")),
    ((*PLAN, "--expert-slots", "40", "--expert-cache-gib", "1"), ("--expert-cache-gib", "--expert-slots")),
    ((*PLAN, "--hit-rate", "1", "--trace", "x"), ("--hit-rate", "--trace")),
    ((*PLAN, "--slot-map", "list.json"), ("--slot-map", "object", "[1]")),
    ((*PLAN, "--slot-map", "broken.json"), ("--slot-map", "broken JSON")),
    ((*PLAN, "--slot-map", "layer.json"), ("--slot-map", "layers from 3 to 7", '"0"')),
    ((*PLAN, "--slot-map", "few.json"), ("--slot-map", "4: missing")),
    ((*PLAN, "--slot-map", "text.json"), ("--slot-map", "3: ", "whole number", '"many"')),
    ((*PLAN, "--slot-map", "large.json"), ("--slot-map", "large.json: 3: ", "4 to 16", "17")),
    ((*PLAN, "--slot-map", "twice.json"), ("twice.json", "each field once", '"3" twice')),
    ((*PLAN, "--trace", "twice.jsonl"), ("line 1", "each field once", '"tok" twice')),
    ((*PLAN, "--split", "twice.json"), ("twice.json", "each field once", '"3" twice')),
    ((*PLAN, "--trace", "other.jsonl"), ("--trace", "line 1", "layers", "5 lists", "found 2")),
    ((*PLAN, "--split", "other.json", "--boosters", "2"), ("--split", "fuel.experts", "16", "12")),
    ((*PLAN, "--split", "three.json", "--boosters", "2"), ("--split", "boosters", "expected 2", "found 3")),
    ((*SPLIT, "--boosters", "17"), ("--boosters", "1 to 16", "17")),
    ((*SPLIT, "--boosters", "0"), ("--boosters", "1 to 16", "found 0")),
    ((*SPLIT, "--boosters", "2", "--by", "size"), ("--by", "id, load, coactivation", "'size'")),
    ((*SPLIT, "--boosters", "2", "--by", "load"), ("--by load", "--trace")),
    ((*SPLIT, "--boosters", "2", "--trace", "other.jsonl"), ("--trace", "5 lists", "found 2")),
    ((*SPLIT,), ("--boosters",)),
    (("split", "FUEL", "--boosters", "2"), ("--out",)),
    (("bench", "host", "--out", "OUT", "--disk-mib", "3"), ("--disk-mib", "4", "found 3")),
    (("bench", "host", "--out", "OUT", "--seconds", "0"), ("--seconds", "0.01", "found 0")),
    (("bench", "host", "--out", "OUT", "--threads", "-1"), ("--threads", "0", "found -1")),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: " ".join(value))
def test_wrong_input_writes_nothing(
    rocket: Rocket, tiny: str, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    three = tmp_path / "three.json"
    assert rocket("split", tiny, "--boosters", "3", "--out", str(three)) == 0
    other = json.loads(three.read_text())
    other["fuel"]["experts"] = 12
    (tmp_path / "other.json").write_text(json.dumps(other))
    before = tree(tmp_path)
    names = {"FUEL": tiny, "OUT": str(tmp_path / "out"), **{n: str(tmp_path / n) for n in before}}
    rocket.fails(2, *words, arguments=tuple(names.get(word, word) for word in arguments))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", [("plan",), ("split", "--boosters", "2", "--out", "OUT")])
def test_unknown_fuel(rocket: Rocket, tmp_path: Path, command: tuple[str, ...]) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in command]
    rocket.fails(1, "glm-5.4", arguments=(words[0], "glm-5.4", *words[1:]))
    assert tree(tmp_path) == []


@pytest.mark.parametrize("where", ["missing/split.json", "."])
def test_split_to_where_nothing_can_be_written(rocket: Rocket, tiny: str, tmp_path: Path, where: str) -> None:
    rocket.fails(1, "--out", arguments=("split", tiny, "--boosters", "2", "--out", str(tmp_path / where)))
    assert tree(tmp_path) == []


# --- bench host -------------------------------------------------------------------------------------------

DISK = DiskRates(read_gb_s=2.5, write_gb_s=1.25, direct=True)
DEVICE = {
    "name": "NVIDIA H200",
    "unified": False,
    "total_bytes": 140 << 30,
    "free_bytes": 139 << 30,
    "read_gb_s": 4623.4,
    "copy_gb_s": 4235.1,
    "pinned_to_gb_s": 55.41,
    "pageable_to_gb_s": 8.2,
    "pinned_from_gb_s": 55.3,
}


def measured(tmp_path: Path, **changes: Any) -> bench_host.Measured:
    fields = {
        "cpu": 'A "CPU"',
        "threads": 8,
        "memory_bytes": 100 << 30,
        "memory_source": "MemAvailable",
        "read_gb_s": 238.04,
        "copy_gb_s": 201.5,
        "device": None,
        "why_no_device": "no CUDA device was found",
        "disk": DISK,
        "disk_folder": tmp_path,
        "disk_mib": 64,
        **changes,
    }
    return bench_host.Measured(**fields)


def test_profile_of_a_cpu(tmp_path: Path) -> None:
    text = bench_host.profile_text(measured(tmp_path), "host", "2026-11-30")
    assert "Host to device: not measured: no CUDA device was found." in text
    profile = boosters.parse(text.encode(), "host.yaml")
    assert profile.unified_memory
    assert profile.link_gb_s is None
    assert (profile.memory_gib.value, profile.reserve_gib.value) == (100, 5)
    assert (profile.read_gb_s.value, profile.copy_gb_s.value) == (238, 201.5)
    assert (profile.disk_read_gb_s.value, profile.disk_read_gb_s.source) == (2.5, "measured")


def test_profile_of_a_device(tmp_path: Path) -> None:
    text = bench_host.profile_text(measured(tmp_path, device=DEVICE, why_no_device=""), "host", "2026-11-30")
    profile = boosters.parse(text.encode(), "host.yaml")
    assert not profile.unified_memory
    assert (profile.name, profile.memory_gib.value, profile.reserve_gib.value) == ("NVIDIA H200", 139, 2)
    assert (profile.read_gb_s.value, profile.copy_gb_s.value) == (4623, 4235)
    assert profile.host_memory_gib is not None
    assert profile.host_memory_gib.value == 100
    assert profile.link_gb_s is not None
    assert profile.link_gb_s.value == 55.41
    assert "not measured" not in text
    assert "55.4 GB/s pinned, 8.2 GB/s pageable" in "\n".join(
        bench_host.report_lines(measured(tmp_path, device=DEVICE), "host.yaml")
    )


def test_profile_of_unified_memory_is_sized_by_the_system(tmp_path: Path) -> None:
    """What the driver calls free leaves out clean page cache there."""
    device = {**DEVICE, "unified": True, "free_bytes": 7 << 30}
    text = bench_host.profile_text(measured(tmp_path, device=device, why_no_device=""), "host", "2026-11-30")
    profile = boosters.parse(text.encode(), "host.yaml")
    assert profile.unified_memory
    assert profile.memory_gib.value == 100
    assert profile.read_gb_s.value == 4623


@pytest.mark.parametrize("memory_mib", [64, 4096, 21_000])
def test_small_machines_get_a_profile_that_plans(tmp_path: Path, memory_mib: int) -> None:
    small = measured(tmp_path, memory_bytes=memory_mib << 20)
    profile = boosters.parse(bench_host.profile_text(small, "host", "2026-11-30").encode(), "host.yaml")
    assert 0 < profile.reserve_bytes < profile.memory_bytes <= memory_mib << 20


def test_bench_host(rocket: Rocket, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", "3G")
    (tmp_path / "disk").mkdir()
    out = tmp_path / "host.yaml"
    short = ("--disk", str(tmp_path / "disk"), "--disk-mib", "8", "--seconds", "0.01", "--out", str(out))
    assert rocket("bench", "host", *short, "--json") == 0
    result = json.loads(rocket.out)
    assert tree(tmp_path) == ["disk", "host.yaml"]
    assert 0.1 < result["read_gb_s"] < 10_000
    assert 0.1 < result["copy_gb_s"] < 10_000
    assert result["disk"]["read_gb_s"] > 0
    assert result["disk"]["write_gb_s"] > 0
    if result["device"] is None:
        assert "not measured" in rocket.err
        assert result["profile"]["memory_gib"]["value"] == 3
    assert boosters.load(str(out)).model_dump() == result["profile"]
    assert rocket("plan", tiny, "--booster", str(out)) == 0


def test_bench_host_that_fails_leaves_nothing(
    rocket: Rocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> DiskRates:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench_host, "disk_rates", fail)
    arguments = (
        "bench",
        "host",
        "--seconds",
        "0.01",
        "--disk",
        str(tmp_path),
        "--out",
        str(tmp_path / "host"),
    )
    rocket.fails(1, "--disk", "Input/output error", arguments=arguments)
    assert tree(tmp_path) == []
    rocket.fails(
        1, "--disk", "nowhere", arguments=(*arguments[:5], str(tmp_path / "nowhere"), *arguments[6:])
    )
    assert tree(tmp_path) == []


def test_rates_refuse_nonsense() -> None:
    for rate in (_core.read_rate_gb_s, _core.copy_rate_gb_s, _core.device_rates):
        with pytest.raises(_core.InputError, match="must not be negative"):
            rate(seconds=-1)


@pytest.mark.gpu
def test_rates_of_a_device() -> None:
    device, why = _core.device_rates(0.05)
    if device is None:
        pytest.skip(f"needs a build with CUDA and a device: {why}")
    assert device["free_bytes"] <= device["total_bytes"]
    assert device["copy_gb_s"] <= 1.1 * device["read_gb_s"]
    assert 0 < device["pageable_to_gb_s"] <= 1.1 * device["pinned_to_gb_s"]


# --- the comparison in fuels/glm-5.3/README.md ------------------------------------------------------------


def test_readme_has_the_plans_numbers(rocket: Rocket) -> None:
    text = (fuel_tools.FUELS / "glm-5.3" / "README.md").read_text()
    plans = {}
    for context, slots in re.findall(r"^\| ([0-9,]+) \| ([0-9,]+) \| [0-9,]+ \|$", text, re.MULTILINE):
        tokens = context.replace(",", "")
        arguments = ("--booster", "gb300", "--kv-dtype", "bf16", "--context", tokens, "--json")
        assert rocket("plan", "glm-5.3", *arguments) == 0
        plans[int(tokens)] = json.loads(rocket.out)
        assert f"{plans[int(tokens)]['slots']:,}" == slots
    assert sorted(plans) == [1 << 18, 1 << 19, 1 << 20]
    plan, longer = plans[1 << 18], plans[1 << 19]
    slots, state = plan["slots_of_layer"].values(), plan["each_booster_bytes"]["state"]
    for number in (
        f"| {plan['slots'] - longer['slots']:,} | 1,568 |",
        f"| {min(slots)} to {max(slots)} | 48 to 96 |",
        f"| {plan['step']['base_ms']:.2f} ms | 22.4 ms |",
        f"| {plan['step']['miss_a_layer_ms']:.2f} ms | 4.27 ms |",
        f"{plan['step']['base_bytes'] / 2**30:.2f} GiB at the data sheet",
        f"{state / 2**30:.2f} GiB, as much as {state / plan['slot_bytes']:,.0f} slots",
        f"The second 256K cost {plan['slots'] - longer['slots']:,},",
    ):
        assert number in text
