"""Runs the recorded stages in order, each once: a run that was stopped goes on where it was."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .errors import TrainError, read_text
from .packages import sha256

RECIPE = Path(__file__).with_name("recipe.txt")
WORK = "{work}"


class Stage(NamedTuple):
    name: str
    words: list[str]  # the command line, with WORK for the folder
    marker: str  # a file in the folder's `done`
    record: str  # what the marker holds: this stage and those before it


def read_recipe(path: Path) -> list[Stage]:
    stages: list[Stage] = []
    record = ""
    for line in read_text(path).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise TrainError(f"{path}: {error}: {line}", "close what is quoted") from None
        if not words:
            continue
        record += shlex.join(words) + "\n"
        stages.append(Stage(words[0], words, f"{len(stages) + 1:02}-{words[0]}", record))
    if not stages:
        raise TrainError(f"{path}: no stage in it", "give one command of train_fuel.py a line")
    return stages


def command(stage: Stage, work: Path) -> list[str]:
    return [word.replace(WORK, str(work)) for word in stage.words]


def recorded_sums(path: Path) -> dict[str, str]:
    """File below the folder -> sha256, as `sha256sum` wrote them beside a recipe, if it did."""
    sums = path.with_suffix(".sha256")
    if not sums.is_file():
        return {}
    return {line[66:]: line[:64] for line in read_text(sums).splitlines() if line}


def _compare(stage: Stage, work: Path, sums: dict[str, str]) -> None:
    """Says which of the stage's files are not those that were recorded."""
    outputs = [word.removeprefix(WORK + "/") for option, word in _pairs(stage) if option == "--out"]
    for name, expected in sums.items():
        ours = (work / name).is_file() and any(name.startswith(f"{output}/") for output in outputs)
        if ours and sha256(work / name) != expected:
            print(f"note: {name} is not the file that was recorded with the recipe", file=sys.stderr)


def _pairs(stage: Stage) -> list[tuple[str, str]]:
    return list(zip(stage.words, stage.words[1:], strict=False))


def run(
    path: Path,
    work: Path,
    until: str | None,
    more: dict[str, list[str]],
    check: Callable[[list[str]], object],
    stage_main: Callable[[list[str]], bool],
) -> bool:
    """Runs what is not done; `more` are further arguments by stage. False if a stage was left unfinished."""
    stages, sums = read_recipe(path), recorded_sums(path)
    if until is not None and until not in [s.name for s in stages]:
        raise TrainError(
            f"--until {until}: no such stage", f"one of {', '.join(s.name for s in stages)}", status=2
        )
    for stage in stages:
        if stage.name == "recipe":
            raise TrainError(f"{path}: a recipe is no stage of a recipe", "name its stages instead")
        check(command(stage, work) + more.get(stage.name, []))
    done = work / "done"
    done.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        marker = done / stage.marker
        if not marker.is_file() or read_text(marker) != stage.record:
            words = command(stage, work)
            print(f"{stage.name}: {shlex.join(words[1:])}", file=sys.stderr, flush=True)
            if not stage_main(words + more.get(stage.name, [])):
                return False
            _compare(stage, work, sums)
            marker.write_text(stage.record, encoding="utf-8")
        if stage.name == until:
            break
    return True
