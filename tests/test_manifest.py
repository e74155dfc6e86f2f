"""Manifests: the schema, the shipped ones, comparison with weights, --fix, and wrong input of every kind."""

import io
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from fuel_tools import FUELS, Rocket, check_golden, flash, rocket
from rocket.fuel_account import weights_of_folder, weights_of_manifest
from rocket.manifest import json_schema, parse_manifest, read_manifest
from rocket.validate import compare, fixed_text

__all__ = ["flash", "rocket"]
NAMES = ("glm-5.3-flash", "glm-5.3")
FLASH = FUELS / "glm-5.3-flash" / "fuel.yaml"


def load(file: Path) -> Any:
    return YAML(typ="safe").load(file.read_text())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(FLASH, tmp_path / "fuel.yaml"))


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of a hollow Flash are many; nothing changes them."""
    monkeypatch.setattr("rocket.fuel_command.weights_of_folder", weights_once)


weights_once = cache(weights_of_folder)


def edit(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    file.write_text(text.replace(old, new))
    return file


# --- the schema -------------------------------------------------------------------------------------------


def test_the_published_schema_is_current() -> None:
    published = (FUELS / "fuel.schema.json").read_text()
    assert published == json_schema(), "write it with: python -m rocket.manifest > fuels/fuel.schema.json"


@pytest.mark.parametrize("name", NAMES)
def test_shipped_manifests_fit_the_published_schema(name: str) -> None:
    schema = json.loads((FUELS / "fuel.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    value = load(FUELS / name / "fuel.yaml")
    jsonschema.validate(value, schema)
    assert value["id"] == name
    value["residency"]["resident_gib"] = 16.62  # a bare number will do
    jsonschema.validate(value, schema)
    value["residency"]["resident_gb"] = 16.62
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, schema)


def test_a_bare_number_counts_as_published(copy: Path) -> None:
    edit(copy, "single_token_routed_gib: {value: 4.43, source: measured}", "single_token_routed_gib: 4.43")
    residency = read_manifest(copy).manifest.residency
    assert residency.single_token_routed_gib.source == "published"
    assert residency.single_token_routed_gib.value == 4.43
    assert residency.single_token_active_gib.source == "measured"


def test_what_the_shipped_manifests_say() -> None:
    flash = load(FLASH)
    assert flash["residency"]["single_token_active_gib"]["value"] == 21.05
    single = flash["serving_regime"]["single_stream_reference"]
    assert (single["boosters"], single["tok_per_s"]["value"]) == (2, 21.1)
    big = load(FUELS / "glm-5.3" / "fuel.yaml")
    assert big["chemistry"] == "glm_moe_dsa"
    assert (big["architecture"]["layers"], big["architecture"]["moe_layers"]) == (78, 75)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_numbers_agree_with_their_own_config(name: str, rocket: Rocket) -> None:
    assert rocket("fuel", "validate", name) == 0
    assert "agree" in rocket.out


# --- against weights --------------------------------------------------------------------------------------


def test_shipped_numbers_agree_with_the_weights(flash: Path, rocket: Rocket) -> None:
    assert rocket("fuel", "validate", "glm-5.3-flash", "--weights", str(flash)) == 0, rocket.out
    assert re.search(r"4[0-9] recorded values agree", rocket.out)


def test_each_mismatch_is_a_row(flash: Path, copy: Path, rocket: Rocket) -> None:
    """The seed's case among them: 9.6 recorded where 21.05 is found."""
    edit(
        copy,
        "single_token_active_gib: {value: 21.05, source: measured",
        "single_token_active_gib: {value: 9.6",
    )
    edit(copy, "tok_per_s: {value: 21.1,", "tok_per_s: {value: 49.6,")
    edit(copy, "kda_layers: 34", "kda_layers: 33")
    edit(copy, "input_scales: true", "input_scales: false")
    edit(copy, "hyper_connections: bf16", "hyper_connections: f32")
    before = copy.read_bytes()
    assert rocket("fuel", "validate", str(copy), "--weights", str(flash)) == 1
    check_golden("validate-mismatch.txt", rocket.out)
    assert ["residency.single_token_active_gib", "9.6", "21.05", "2.19x"] in [
        line.split() for line in rocket.out.splitlines()
    ]
    assert "5 of" in rocket.err
    assert copy.read_bytes() == before


@pytest.mark.parametrize("right", ["21", "21.0", "21.05", "21.047", "21.0469"])
@pytest.mark.parametrize("wrong", ["22", "20.9", "21.04", "21.046", "21.0468", "2105"])
def test_a_number_agrees_as_it_is_rounded(flash: Path, right: str, wrong: str) -> None:
    text = FLASH.read_text()
    for number, fields in ((right, []), (wrong, ["residency.single_token_active_gib"])):
        manifest = parse_manifest(text.replace("{value: 21.05,", f"{{value: {number},").encode(), "m")
        found = [m.field for m in compare(manifest, weights_once(str(flash)))[0]]
        assert found == fields, number


def test_zero_is_no_rounded_number(flash: Path, copy: Path, rocket: Rocket) -> None:
    edit(copy, "vision_gib: {value: 1.05", "vision_gib: {value: 0")
    assert rocket("fuel", "validate", str(copy), "--weights", str(flash)) == 1
    assert ["residency.vision_gib", "0", "1.05", "-"] in [line.split() for line in rocket.out.splitlines()]


# --- putting right ----------------------------------------------------------------------------------------


def test_fix_keeps_comments_and_order(flash: Path, copy: Path, rocket: Rocket) -> None:
    edit(copy, "{value: 21.05, source: measured, note:", "{value: 9.6, source: published, note:")
    edit(copy, "moe_layers: 42", "moe_layers: 41 # one too few")
    edit(copy, "resident_gib: {value: 16.62, source: measured}", "resident_gib: 9.6  # a bare number")
    assert rocket("fuel", "validate", str(copy), "--weights", str(flash), "--fix") == 0
    expected = FLASH.read_text().replace("moe_layers: 42", "moe_layers: 42 # one too few")
    expected = expected.replace(
        "resident_gib: {value: 16.62, source: measured}",
        "resident_gib: {value: 16.62, source: measured}  # a bare number",
    )
    assert copy.read_text() == expected
    assert rocket("fuel", "validate", str(copy), "--weights", str(flash), "--fix") == 0
    assert copy.read_text() == expected
    assert list(copy.parent.iterdir()) == [copy]


def _numbers(value: Any, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the numbers of a manifest are."""
    if isinstance(value, dict) and "value" in value:
        return [(*place, "value")]
    if isinstance(value, dict):
        return [found for name, inner in value.items() for found in _numbers(inner, (*place, name))]
    return [place] if isinstance(value, int) and not isinstance(value, bool) else []


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_put_right(name: str) -> None:
    """All wrong at once, and all as they were after --fix."""
    file = FUELS / name / "fuel.yaml"
    skipped = ("config", "vision_config", "shard_files", "boosters")
    held = weights_of_manifest(read_manifest(file).manifest)
    yaml = YAML(typ="rt")
    yaml.width = 4096
    data = yaml.load(file.read_text())
    places = [place for place in _numbers(load(file)) if not set(skipped) & set(place)]
    assert len(places) > 30
    for place in places:
        node = data
        for part in place[:-1]:
            node = node[part]
        node[place[-1]] = node[place[-1]] + 1 if place[-1] != "value" else node["value"] * 3 + 1
    wrong = file.with_name("wrong.yaml").name  # only a name in messages
    out = io.StringIO()
    yaml.dump(data, out)
    mismatches, count = compare(parse_manifest(out.getvalue().encode(), wrong), held)
    assert len(mismatches) == len(places) <= count
    fixed = fixed_text(out.getvalue(), mismatches, "derived")
    assert fixed.replace("source: measured", "source: derived") == file.read_text().replace(
        "source: measured", "source: derived"
    )


# --- wrong input ------------------------------------------------------------------------------------------

WRONG = [
    ("name: GLM", "names: GLM", ("names", "unknown field", "did you mean name?")),
    ("single_token_active_gib:", "single_token_active_gb:", ("residency.single_token_active_gb", "_gib?")),
    ("resident_gib: {value: 16.62,", "resident_gib: {valu: 16.62,", ("residency.resident_gib.valu",)),
    ("resident_gib: {value: 16.62,", "resident_gib: {value: 16 GiB,", ("resident_gib", "a number", "16 GiB")),
    ("resident_gib: {value: 16.62,", "resident_gib: {value: -1,", ("resident_gib", "at least 0", "-1")),
    ("resident_gib: {value: 16.62,", "resident_gib: {value: .nan,", ("resident_gib", "finite", "NaN")),
    (
        "resident_gib: {value: 16.62, source: measured}",
        "resident_gib: {value: 16.62, source: guessed}",
        ("residency.resident_gib.source", "measured", "derived", "published", "guessed"),
    ),
    ("resident_gib: {value: 16.62, source: measured}", "resident_gib: much", ("resident_gib", "much")),
    ("layers: 45", "layers: forty-five", ("architecture.layers", "a whole number", "forty-five")),
    ("layers: 45", "layers: 0", ("architecture.layers", "at least 1", "found 0")),
    ("layers: 45", "layers: 45.5", ("architecture.layers", "whole number", "45.5")),
    ("chemistry: glm5_next", "chemistry: llama", ("chemistry", "glm5_next", "glm_moe_dsa", "llama")),
    ("routed_experts: nvfp4", "routed_experts: int4", ("weight_formats.routed_experts", "nvfp4", "int4")),
    ("input_scales: true", "input_scales: maybe", ("weight_formats.input_scales", "true or false", "maybe")),
    ("shard_files: 40", "shard_files: 0", ("weight_formats.shard_files", "at least 1", "found 0")),
    ("booster: gb10", "booster: gb11", ("single_stream_reference.booster", "gb10", "gb11")),
    ("index_kpool: 4", "index_kpol: 4", ("architecture.config.index_kpol", "unknown field")),
    ("index_kpool: 4", "index_kpool: 3", ("index_topk", "multiple of index_kpool (3)", "2048")),
    ("index_kpool: 4", "num_experts_per_tok: 300", ("num_experts_per_tok", "288", "300")),
    ("vision_config: {}", "vision_config: {dept: 3}", ("vision_config.dept", "unknown field", "depth")),
    ("id: glm-5.3-flash", "id: ../flash", ("id", "letters, digits", "../flash")),
    ("parameters:\n", "parameters: 320\nparameter:\n", ("parameter", "unknown field")),
    ("name: GLM", "name: [GLM", ("broken YAML", "line")),
    ("id: glm-5.3-flash\n", "", ("id", "missing")),
]


@pytest.mark.parametrize(("old", "new", "words"), WRONG, ids=[new[:28] for _, new, _ in WRONG])
def test_wrong_manifests(
    old: str, new: str, words: tuple[str, ...], copy: Path, flash: Path, rocket: Rocket
) -> None:
    text = copy.read_text()
    assert old in text
    copy.write_text(text.replace(old, new, 1))
    before = copy.read_bytes()
    commands = [("fuel", "validate", str(copy), "--weights", str(flash), "--fix"), ("bytes", str(copy))]
    commands.append(("fuel", "hollow", str(copy), str(copy.parent / "made")))
    for arguments in commands:
        rocket.fails(2, str(copy), *words, arguments=arguments)
    assert copy.read_bytes() == before
    assert list(copy.parent.iterdir()) == [copy]


def test_a_manifest_of_other_weights(flash: Path, copy: Path, rocket: Rocket) -> None:
    arguments = ("fuel", "validate", "glm-5.3", "--weights", str(flash))
    rocket.fails(2, "other weights", "chemistry", "glm_moe_dsa", "glm5_next", arguments=arguments)
    edit(copy, "index_kpool: 4", "index_kpool: 4\n    hidden_size: 2048")
    before = copy.read_bytes()
    arguments = ("fuel", "validate", str(copy), "--weights", str(flash), "--fix")
    rocket.fails(2, "hidden_size", "2048", "4096", str(flash), arguments=arguments)
    assert copy.read_bytes() == before


def test_names_that_are_not_known(tmp_path: Path, rocket: Rocket) -> None:
    rocket.fails(2, "'glm-5.4'", arguments=("fuel", "validate", "glm-5.4"))
    assert "glm-5.3-flash" in rocket.err
    rocket.fails(1, "'glm-5.3-flush'", arguments=("bytes", "glm-5.3-flush"))
    assert "did you mean glm-5.3-flash" in rocket.err
    rocket.fails(2, str(tmp_path), "fuel.yaml", arguments=("fuel", "validate", str(tmp_path)))
    rocket.fails(1, "config.json", arguments=("bytes", str(tmp_path)))
    rocket.fails(1, "config.json", arguments=("fuel", "validate", "glm-5.3", "--weights", str(tmp_path)))


def test_fix_that_cannot_be_written(flash: Path, copy: Path, rocket: Rocket) -> None:
    edit(copy, "moe_layers: 42", "moe_layers: 41")
    link = copy.parent / "gone" / "fuel.yaml"
    assert not link.exists()
    rocket.fails(2, "neither", arguments=("fuel", "validate", str(link), "--fix"))
    weights = weights_once(str(flash))
    assert [m.field for m in compare(read_manifest(copy).manifest, weights)[0]] == ["architecture.moe_layers"]
