"""Hollow fuels of small shapes, and the command line within this process."""

import os
import re
from pathlib import Path

import pytest

from rocket.cli import build
from rocket.errors import run_command
from rocket.hollow import write_hollow
from rocket.inventory import TensorInfo
from rocket.manifest import read_manifest
from rocket.shards import header_of, shard_names, split_by_name

FUELS = Path(__file__).resolve().parents[1] / "fuels"
GOLDEN = Path(__file__).parent / "golden"


def write_headers(folder: Path, found: list[TensorInfo], files: int = 1) -> Path:
    """Safetensors files with these headers and nothing behind them."""
    folder.mkdir(parents=True)
    for name, tensors in zip(shard_names(files), split_by_name(found, files), strict=True):
        header = header_of(tensors)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(t.nbytes for t in tensors))
    return folder


class Rocket:
    """The command `rocket`, run within this process."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self.capture = capture
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        self.capture.readouterr()
        status = run_command(lambda: build()(args=list(arguments), prog_name="rocket", standalone_mode=False))
        out, err = self.capture.readouterr()
        self.out, self.err = out.decode(), err.decode()
        return status

    def fails(self, status: int, *words: str, arguments: tuple[str, ...]) -> None:
        """One line and a hint on standard error, and every word in that line."""
        found = self(*arguments)
        shown = f"status {found}\nstdout: {self.out}\nstderr: {self.err}"
        assert found == status, shown
        assert self.out == "", shown
        match = re.fullmatch(r"error: ([^\n]+)\n\nhint: ([^\n]+)\n", self.err)
        assert match, shown
        for word in words:
            assert word in match[1], f"{word!r} is not in the message\n{shown}"


@pytest.fixture
def rocket(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Rocket:
    monkeypatch.setenv("ROCKET_FUELS", str(FUELS))
    return Rocket(capsysbinary)


_made: dict[str, Path] = {}


@pytest.fixture(scope="session")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hollow GLM-5.3-Flash, made once for all test files. Nobody writes into it."""
    if "flash" not in _made:
        manifest = read_manifest(FUELS / "glm-5.3-flash" / "fuel.yaml").manifest
        _made["flash"] = write_hollow(manifest, str(tmp_path_factory.mktemp("hollow") / "flash"))
    return _made["flash"]


def check_golden(name: str, text: str) -> None:
    """Compares with tests/golden/NAME; ROCKET_UPDATE_GOLDEN=1 writes it."""
    file = GOLDEN / name
    if os.environ.get("ROCKET_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
