"""Pipes, devices and directories where a command wants a file: one line at once, and nothing waits."""

import os
import shutil
from pathlib import Path

import pytest

from cli_tools import check_error, run_decode, run_rocket
from fuel_tools import FUELS

SPARKLER = FUELS / "sparkler"
REGULAR = "expected a regular file"


def fuel_with(tmp_path: Path, name: str, kind: str) -> Path:
    """Sparkler with a pipe or a directory of a file's name."""
    fuel = tmp_path / "fuel"
    shutil.copytree(SPARKLER, fuel)
    (fuel / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(fuel / name)
    else:
        (fuel / name).mkdir()
    return fuel


@pytest.mark.parametrize("kind", ["pipe", "directory"])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "fuel.yaml"]
)
def test_files_of_a_fuel(name: str, kind: str, tmp_path: Path) -> None:
    fuel = fuel_with(tmp_path, name, kind)
    status = 2 if name == "fuel.yaml" else 1
    commands = [
        ("fuel", "show", str(fuel)),
        ("plan", str(fuel)),
        ("bytes", str(fuel)),
        ("split", str(fuel), "--boosters", "2", "--out", str(tmp_path / "split.json")),
    ]
    if name == "fuel.yaml":
        commands += [("fuel", "validate", str(fuel)), ("fuel", "hollow", str(fuel), str(tmp_path / "hollow"))]
    else:
        commands += [("fuel", "validate", "sparkler", "--weights", str(fuel))]
    for command in commands:
        check_error(
            run_rocket(*command), status, str(fuel / name), "directory" if kind != "pipe" else REGULAR
        )
    assert list(tmp_path.iterdir()) == [fuel]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("config.json", ()),
        ("tokenizer.json", ()),
        ("model.safetensors", ()),
        ("generation_config.json", ("--sampling", "fuel")),
        ("tokenizer_config.json", ("--chat",)),
        ("chat_template.jinja", ("--chat",)),
    ],
)
def test_pipes_beside_the_weights(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    fuel = fuel_with(tmp_path, name, "pipe")
    result = run_decode("--fuel", str(fuel), "--prompt", "a", "--tokens", "1", *arguments)
    check_error(result, 1, str(fuel / name), REGULAR)


def test_a_pipe_in_the_list(tmp_path: Path) -> None:
    fuel_with(tmp_path, "fuel.yaml", "pipe")
    result = run_rocket("fuel", "list", env={"ROCKET_FUELS": str(tmp_path)})
    assert result.status == 0
    assert "broken: " in next(line for line in result.out.splitlines() if line.startswith("fuel "))


@pytest.mark.parametrize("command", ["plan", "bytes", "fuel show"])
def test_devices_and_pipes_in_place_of_a_fuel(command: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    check_error(run_rocket(*command.split(), str(tmp_path / "pipe.yaml")), 2, "pipe.yaml", REGULAR)
    check_error(run_rocket(*command.split(), "/dev/null"), 1, "/dev/null", "a folder")
