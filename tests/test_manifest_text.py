"""Manifests from anywhere: hostile YAML, --fix that changes nothing but values, contradictions."""

import json
import os
import shutil
import time
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from fuel_tools import FUELS, Rocket, rocket
from rocket.fuel_account import weights_of_folder, weights_of_manifest
from rocket.manifest import json_schema, parse_manifest, read_manifest
from rocket.manifest_text import Change, changed
from rocket.validate import compare, fixed_text

__all__ = ["rocket"]
FLASH = FUELS / "glm-5.3-flash" / "fuel.yaml"
SPARKLER = FUELS / "sparkler"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(FLASH, tmp_path / "fuel.yaml"))


def replaced(file: Path, old: str, new: str) -> bytes:
    data = file.read_bytes()
    assert data.count(old.encode()) == 1, old
    data = data.replace(old.encode(), new.encode())
    file.write_bytes(data)
    return data


# --- hostile texts ----------------------------------------------------------------------------------------


def hostile() -> dict[str, tuple[bytes, str]]:
    text = FLASH.read_text()
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    return {
        "utf-16": (text.encode("utf-16"), "UTF-8"),
        "utf-32": (text.encode("utf-32-le"), "UTF-8"),
        "latin-1": (text.replace("GLM-5.3-Flash", "Fl\xe4sh").encode("latin-1"), "byte 0xe4"),
        "circular": (
            text.replace("config:\n", "config: &c\n    self: *c\n", 1).encode(),
            "expected no alias",
        ),
        "circular list": (b"id: &a [*a]\n", "expected no alias"),
        "unknown alias": (b"id: *a\n", "expected no alias"),
        "deep": (b"id: " + b"[" * 100_000, "16 levels"),
        "deep mappings": (b"{a: " * 50_000, "16 levels"),
        "deep indents": ("".join(" " * i + "a:\n" for i in range(500)).encode(), "16 levels"),
        "bomb": ((text + bomb).encode(), "expected no alias"),
        "many": (b"id: [" + b"1, " * 300_000 + b"1]", "20,000 values"),
        "decimal": (text.replace("layers: 45", "layers: " + "9" * 100_000, 1).encode(), "40 digits"),
        "hexadecimal": (text.replace("layers: 45", "layers: 0x" + "f" * 100_000, 1).encode(), "40 digits"),
        "large": (text.replace("layers: 45", "layers: " + "9" * 40, 1).encode(), "architecture.layers"),
        "large float": (text.replace("value: 16.62", "value: " + "9" * 40, 1).encode(), "resident_gib"),
        "many layers": (
            text.replace("index_kpool: 4", "num_hidden_layers: 1000000", 1).encode(),
            "architecture.config.num_hidden_layers",
        ),
        "deep tower": (
            text.replace("vision_config: {}", "vision_config: {depth: " + "9" * 39 + "}").encode(),
            "architecture.vision_config.depth",
        ),
        "tag": (b"id: !!python/name:os.system x\n", "tag"),
        "long": (text.encode() + b"#" * (1 << 20), "1,048,576 bytes"),
        "number as a name": (b"id: x\n7: y\n", "expected a text as a field's name, found 7"),
        "true as a name": (
            text.replace("vision_config: {}", "vision_config: {true: 1}").encode(),
            "architecture.vision_config: expected a text as a field's name, found true",
        ),
        "date as a name": (
            b"a: [{2026-01-01: x}]\n",
            "a[0]: expected a text as a field's name, found \"2026",
        ),
        "list as a name": (b"id:\n  ? [a]\n  : y\n", "line 2: id: expected a text as a field's name"),
        "empty": (b"", "expected an object"),
    }


@pytest.mark.parametrize("kind", hostile())
def test_hostile_texts_are_refused_quickly(kind: str, copy: Path, rocket: Rocket) -> None:
    data, words = hostile()[kind]
    copy.write_bytes(data)
    start = time.monotonic()
    rocket.fails(2, str(copy), words, arguments=("fuel", "validate", str(copy), "--fix"))
    assert time.monotonic() - start < 3
    assert copy.read_bytes() == data
    assert list(copy.parent.iterdir()) == [copy]


def test_only_regular_files(tmp_path: Path, rocket: Rocket) -> None:
    os.mkfifo(tmp_path / "fuel.yaml")
    for path in (tmp_path / "fuel.yaml", Path("/dev/zero")):
        rocket.fails(2, str(path), "regular file", arguments=("fuel", "validate", str(path)))


def test_anchors_without_fix(copy: Path, rocket: Rocket) -> None:
    replaced(copy, "context_tokens: 1048576", "context_tokens: &context 1048576")
    assert rocket("fuel", "validate", str(copy)) == 0


# --- --fix ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  layers: 45\n  kda_layers: 34", "  layers: &n 45\n  kda_layers: *n"),
        ("resident_gib: {value: 16.62, source: measured}", "resident_gib: &x {value: 1, source: measured}"),
    ],
)
def test_fix_refuses_anchors(old: str, new: str, copy: Path, rocket: Rocket) -> None:
    data = replaced(copy, old, new)
    assert rocket("fuel", "validate", str(copy), "--fix") == 2
    assert "anchors" in rocket.err or "expected no alias" in rocket.err
    assert copy.read_bytes() == data
    assert list(copy.parent.iterdir()) == [copy]


def test_nothing_is_written_unless_it_agrees(
    copy: Path, rocket: Rocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that does not come out as it should, made so on purpose."""
    replaced(copy, "moe_layers: 42", "moe_layers: 41")
    data = replaced(copy, "kda_layers: 34", "kda_layers: 33")
    monkeypatch.setattr(
        "rocket.validate.fixed_text", lambda text, *_: text.replace("layers: 41", "layers: 42")
    )
    assert rocket("fuel", "validate", str(copy), "--fix") == 2
    assert "architecture.kda_layers would still disagree" in rocket.err
    monkeypatch.setattr(
        "rocket.validate.fixed_text", lambda text, *_: text.replace("layers: 41", "layers: x")
    )
    assert rocket("fuel", "validate", str(copy), "--fix") == 2
    assert copy.read_bytes() == data
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_fix_keeps_every_other_byte(end: str, bom: bytes, copy: Path, rocket: Rocket) -> None:
    odd = "\n\n\n#   odd   \n   \nparameters:\n"
    text = FLASH.read_text().replace("\nparameters:\n", odd).rstrip("\n").replace("\n", end)
    right = bom + text.encode()
    copy.write_bytes(right)
    assert rocket("fuel", "validate", str(copy), "--fix") == 0
    assert copy.read_bytes() == right
    wrong = right
    for old, new in (
        (b"  layers: 45", b"  layers: 46"),
        (b"kda_layers: 34", b"kda_layers: 7"),
        (b"total_billion: {value: 321.32", b"total_billion: {value: 1"),
        (b"draft_gib: {value: 4.14", b"draft_gib: {value: 40000.125"),
        (b"tok_per_s: {value: 21.1", b"tok_per_s: {value: 3"),
    ):
        assert wrong.count(old) == 1
        wrong = wrong.replace(old, new)
    copy.write_bytes(wrong)
    assert rocket("fuel", "validate", str(copy), "--fix") == 0, rocket.err
    assert copy.read_bytes() == right


def test_correct_texts_come_back_as_they_are() -> None:
    for file in FUELS.glob("*/fuel.yaml"):
        for end in ("\n", "\r\n"):
            text = file.read_text().replace("\n", end)
            manifest = parse_manifest(text.encode(), "m")
            weights = (file.parent / "config.json").is_file()
            held = weights_of_folder(file.parent) if weights else weights_of_manifest(manifest)
            mismatches, count = compare(manifest, held)
            assert mismatches == []
            assert count > 20
            assert fixed_text(text, mismatches, "derived") == text
            recorded = YAML(typ="safe").load(text)
            same = {
                f"{section}.{field}": Change(value)
                for section in ("architecture", "weight_formats")
                for field, value in recorded[section].items()
                if isinstance(value, int | str)
            }
            assert len(same) > 25
            assert changed(text, same, "m") == text  # every value written where it stood


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_fix_adds_a_missing_source(end: str, copy: Path, rocket: Rocket) -> None:
    block = "total_billion:\n    value: 1 # all\n    note: n"
    text = FLASH.read_text().replace("total_billion: {value: 321.32, source: derived}", block)
    text = text.replace("draft_gib: {value: 4.14, source: derived}", "draft_gib: {value: 4}")
    copy.write_bytes(text.replace("\n", end).encode())
    assert rocket("fuel", "validate", str(copy), "--fix") == 0, rocket.err
    expected = text.replace("value: 1 # all\n", "value: 321.32 # all\n    source: derived\n")
    assert copy.read_bytes() == expected.replace("\n", end).encode()  # 4 is 4.14, rounded
    copy.write_bytes(copy.read_bytes().replace(b"draft_gib: {value: 4}", b"draft_gib: {value: 5}"))
    assert rocket("fuel", "validate", str(copy), "--fix") == 0
    assert b"draft_gib: {value: 4.14, source: derived}" in copy.read_bytes()


# --- lists, contradictions, numbers, defaults -------------------------------------------------------------


def test_a_broken_fuel_does_not_hide_the_others(
    tmp_path: Path, rocket: Rocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in (("bad", b"id: ["), ("worse", FLASH.read_text().encode("utf-16"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fuel.yaml").write_bytes(data)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("[" * 100_000)
    monkeypatch.setenv("ROCKET_FUELS", str(tmp_path))
    assert rocket("fuel", "list") == 0
    rows = {line.split()[0]: line for line in rocket.out.splitlines()}
    assert "181.28 GiB" in rows["glm-5.3-flash"]
    assert "broken: " not in rows["glm-5.3-flash"] + rows["sparkler"]
    assert "broken YAML, line 1" in rows["bad"]
    assert "UTF-8" in rows["worse"]
    assert "broken: " in rows["config"]
    assert "bad, config, worse" in rocket.err


CONTRADICTIONS = [
    ("  layers: 45", "  layers: 46", ("architecture.layers", "46", "45")),
    ("experts_per_layer: 288", "experts_per_layer: 256", ("architecture.experts_per_layer", "256", "288")),
    ("experts_per_token: 8", "experts_per_token: 6", ("architecture.experts_per_token", "6", "8")),
    ("hidden_size: 4096", "hidden_size: 2048", ("architecture.hidden_size", "2048", "4096")),
    ("vision_layers: 24", "vision_layers: 0", ("architecture.vision_layers", "0", "24")),
    ("draft_layers: 1", "draft_layers: 0", ("architecture.draft_layers", "0", "1")),
]


@pytest.mark.parametrize(("old", "new", "words"), CONTRADICTIONS, ids=[c[1].strip() for c in CONTRADICTIONS])
def test_contradictions(old: str, new: str, words: tuple[str, ...], copy: Path, rocket: Rocket) -> None:
    replaced(copy, old, new)
    for arguments in (
        ("fuel", "hollow", str(copy), str(copy.parent / "made")),
        ("bytes", str(copy)),
        ("plan", str(copy), "--booster", "gb10"),
    ):
        rocket.fails(2, str(copy), *words, arguments=arguments)
    assert list(copy.parent.iterdir()) == [copy]
    assert rocket("fuel", "validate", str(copy)) == 1  # where it is a row
    assert words[0] in rocket.out


def test_show_says_what_speaks_against_a_manifest(copy: Path, rocket: Rocket) -> None:
    assert rocket("fuel", "show", str(copy)) == 0
    assert rocket.err == ""
    replaced(copy, "moe_layers: 42", "moe_layers: 41")
    assert rocket("fuel", "show", str(copy)) == 0
    assert "moe_layers" in rocket.out
    (line,) = rocket.err.splitlines()
    for words in (str(copy), "1 of ", "its own config", "moe_layers: recorded 41, found 42", "validate"):
        assert words in line


def test_show_of_a_manifest_beside_weights(tmp_path: Path, rocket: Rocket) -> None:
    fuel = Path(shutil.copytree(SPARKLER, tmp_path / "sparkler"))
    assert rocket("fuel", "show", str(fuel)) == 0
    assert rocket.err == ""
    shutil.copy(FLASH, fuel / "fuel.yaml")
    assert rocket("fuel", "show", str(fuel)) == 0
    (line,) = rocket.err.splitlines()
    assert "is of other weights" in line


def test_absurd_numbers(copy: Path, rocket: Rocket) -> None:
    schema = json.loads(json_schema())
    for number in ("1e308", "1.0e+308", "100001"):
        copy.write_text(
            FLASH.read_text().replace("resident_gib: {value: 16.62", f"resident_gib: {{value: {number}")
        )
        rocket.fails(2, "residency.resident_gib", "100000", arguments=("fuel", "show", str(copy)))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(YAML(typ="safe").load(copy.read_text()), schema)
    for number in ("1.0e-300", "100000"):
        copy.write_text(
            FLASH.read_text().replace("resident_gib: {value: 16.62", f"resident_gib: {{value: {number}")
        )
        assert rocket("fuel", "show", str(copy)) == 0
        assert rocket("fuel", "validate", str(copy)) == 1
        assert max(map(len, rocket.out.splitlines())) < 80


def test_texts_reach_no_terminal_as_control_characters(copy: Path, rocket: Rocket) -> None:
    replaced(copy, "name: GLM-5.3-Flash", 'name: "\\e[2J\\a\\nGLM"')
    assert rocket("fuel", "show", str(copy)) == 0
    assert "glm-5.3-flash: \\x1b[2J\\x07 GLM, glm5_next" in rocket.out


def test_weights_beside_the_manifest_count(tmp_path: Path, rocket: Rocket) -> None:
    folder = shutil.copytree(SPARKLER, tmp_path / "s")
    for given in (str(folder), str(folder / "fuel.yaml")):
        assert rocket("fuel", "validate", given) == 0
        assert rocket.out.endswith(f"agree with {folder}\n")
    replaced(folder / "fuel.yaml", "input_scales: false", "input_scales: true")  # only headers tell
    assert rocket("fuel", "validate", str(folder)) == 1
    assert "weight_formats.input_scales" in rocket.out


def test_small_numbers_are_put_right(tmp_path: Path, rocket: Rocket) -> None:
    """Two decimals would make them 0."""
    folder = shutil.copytree(SPARKLER, tmp_path / "s")
    right = (folder / "fuel.yaml").read_bytes()
    replaced(folder / "fuel.yaml", "draft_gib: {value: 0.002169", "draft_gib: {value: 7")
    assert rocket("fuel", "validate", str(folder), "--fix") == 0, rocket.err
    assert (folder / "fuel.yaml").read_bytes() == right


@pytest.mark.parametrize(
    "arguments",
    [
        ("fuel", "hollow", "glm-5.3-flash", ""),
        ("fuel", "hollow", "", "x"),
        ("fuel", "validate", ""),
        ("fuel", "validate", "glm-5.3-flash", "--weights", ""),
    ],
)
def test_empty_paths(
    arguments: tuple[str, ...], tmp_path: Path, rocket: Rocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FLASH, tmp_path)  # which "" as the working directory would find
    rocket.fails(2, "expected", arguments=arguments)
    assert [file.name for file in tmp_path.iterdir()] == ["fuel.yaml"]


# --- the schema -------------------------------------------------------------------------------------------


def test_the_command_prints_the_schema(copy: Path, rocket: Rocket) -> None:
    assert rocket("fuel", "schema") == 0
    assert rocket.out == (FUELS / "fuel.schema.json").read_text()
    replaced(copy, "chemistry: glm5_next", "chemistry: llama")
    assert rocket("fuel", "validate", str(copy)) == 2
    assert "rocket fuel schema" in rocket.err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("id: glm-5.3-flash", "id: ../flash"),
        ("id: glm-5.3-flash", "id: flä"),
        ("index_kpool: 4", "index_kpol: 4"),
        ("vision_config: {}", "vision_config: {dept: 3}"),
        ("booster: gb10", "booster: gb11"),
        ("chemistry: glm5_next", "chemistry: glm_moe_dsa"),
    ],
)
def test_the_schema_is_as_strict_as_the_tool(old: str, new: str, copy: Path, rocket: Rocket) -> None:
    jsonschema.validate(YAML(typ="safe").load(copy.read_text()), json.loads(json_schema()))
    replaced(copy, old, new)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(YAML(typ="safe").load(copy.read_text()), json.loads(json_schema()))
    assert rocket("fuel", "validate", str(copy)) == 2
    assert read_manifest(FLASH).manifest.id == "glm-5.3-flash"
