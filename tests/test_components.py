"""The C++ component tests, configured, built and run here, so that one command runs every test."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout.decode(errors='replace')[-20000:]}"


@pytest.fixture(scope="module")
def build() -> str:
    """The build tree; a later run builds only what has changed."""
    folder = ROOT / "build" / "components"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if not (folder / "CMakeCache.txt").exists():
        run("cmake", "-S", str(ROOT), "-B", str(folder), *generator, "-DROCKET_PYTHON=OFF")
    run("cmake", "--build", str(folder), "-j", str(len(os.sched_getaffinity(0))))
    return str(folder)


def test_components(build: str) -> None:
    run("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error")
