"""Files and values that rocket plan, rocket split and rocket bench host refuse."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import fuel_tools
import plan_tools
from cli_tools import tree
from fuel_tools import Rocket
from plan_tools import BOOSTER, EXPERTS, MOE_LAYERS
from rocket import split_command

rocket = fuel_tools.rocket  # a fixture
accounts_once, tiny, trace = plan_tools.accounts_once, plan_tools.tiny, plan_tools.trace


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
    "deep": (b"id: " + b"[" * 100_000, ("line 1", "16 levels")),
    "deep blocks": (b"".join(b" " * i + b"a:\n" for i in range(900)), ("line 17", "16 levels")),
    "a list as a key": (b"? [1, 2]\n: 3\n", ("line 1", "a text as a field's name")),
    "a number as a key": (b"id: mine\n7: 3\n", ("a text as a field's name", "found 7")),
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
    "small.json": '{"3": 3, "4": 8, "5": 8, "6": 8, "7": 8}',
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
    ((*PLAN, "--expert-slots", "3"), ("--expert-slots", "at least 4 slots", "found 3")),
    ((*PLAN, "--expert-slots", "-1"), ("--expert-slots", "at least 4 slots", "found -1")),
    ((*PLAN, "--expert-cache-gib", "-1"), ("--expert-cache-gib", "(0,", "-1")),
    ((*PLAN, "--expert-cache-gib", "0.00001"), ("--expert-cache-gib", "at least", "4 slots")),
    ((*PLAN, "--expert-slots", "40", "--expert-cache-gib", "1"), ("--expert-cache-gib", "--expert-slots")),
    ((*PLAN, "--hit-rate", "1", "--trace", "x"), ("--hit-rate", "--trace")),
    ((*PLAN, "--slot-map", "list.json"), ("--slot-map", "object", "[1]")),
    ((*PLAN, "--slot-map", "broken.json"), ("--slot-map", "broken JSON")),
    ((*PLAN, "--slot-map", "layer.json"), ("--slot-map", "layers from 3 to 7", '"0"')),
    ((*PLAN, "--slot-map", "few.json"), ("--slot-map", "4: missing")),
    ((*PLAN, "--slot-map", "text.json"), ("--slot-map", "3: ", "whole number", '"many"')),
    (
        (*PLAN, "--slot-map", "small.json"),
        ("--slot-map", "small.json: layer 3: ", "at least 4 slots", "found 3"),
    ),
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


def test_full_disks_are_named(rocket: Rocket, tiny: str) -> None:
    arguments = ("split", tiny, "--boosters", "2", "--out", "/dev/full")
    rocket.fails(1, "--out: cannot write /dev/full", "No space left", arguments=arguments)


@pytest.mark.parametrize("where", ["missing/split.json", "."])
def test_split_to_where_nothing_can_be_written(rocket: Rocket, tiny: str, tmp_path: Path, where: str) -> None:
    rocket.fails(1, "--out", arguments=("split", tiny, "--boosters", "2", "--out", str(tmp_path / where)))
    assert tree(tmp_path) == []
