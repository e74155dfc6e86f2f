"""Running the command lines in processes of their own, and what every error must look like."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
FAKE = TESTS / "fake_core.py"


@dataclass
class Result:
    status: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would change results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ROCKET_") and k != "NO_COLOR"}
    return {**kept, **more}


def _run(command: list[str], stdin: bytes, env: dict[str, str] | None, cwd: Path | None) -> Result:
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        env=environment(**(env or {})),
        cwd=cwd,
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_decode(
    *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, cwd: Path | None = None
):
    """rocket-decode, as it is installed."""
    code = "from rocket.decode import main; main()"
    return _run([sys.executable, "-c", code, *arguments], stdin, env, cwd)


def run_rocket(
    *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, cwd: Path | None = None
):
    """rocket, as it is installed."""
    code = "from rocket.cli import main; main()"
    return _run([sys.executable, "-c", code, *arguments], stdin, env, cwd)


def run_fake(command: str, *arguments: str, script: dict | None = None, stdin: bytes = b"") -> Result:
    """decode or rocket over the stand-in for the engine."""
    env = {"FAKE_CORE": json.dumps(script or {})}
    return _run([sys.executable, str(FAKE), command, *arguments], stdin, env, None)


def check_error(result: Result, status: int, *words: str) -> None:
    """One line, a blank line, a hint; nothing on standard output; every word somewhere in the message."""
    shown = f"status {result.status}\nstdout: {result.out!r}\nstderr: {result.err}"
    assert result.status == status, shown
    assert result.out == "", shown
    assert "Traceback" not in result.err, shown
    found = re.fullmatch(r"error: ([^\n]+)\n\nhint: ([^\n]+)\n", result.err)
    assert found, shown
    for word in words:
        assert word in found[1], f"{word!r} is not in the message\n{shown}"


def tree(folder: Path) -> list[str]:
    """Everything below a folder, to see that nothing was left behind."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
