"""The scripts where packages are missing: one line that names them, and what installs them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rocket.launch import DEPENDENCIES

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
USES = re.compile("from rocket|import needs_engine")
USERS = sorted(
    file for file in (*SCRIPTS.glob("*.py"), *SCRIPTS.glob("runtime/*.py")) if USES.search(file.read_text())
)
NAMES = [str(file.relative_to(SCRIPTS)) for file in USERS if not file.name.startswith("needs_")]


NEEDED = {
    "make_fuel.py": ["numpy", "typer"],
    "make_oracle.py": ["numpy", "typer", "safetensors", "torch", "transformers"],
}


def bare(script: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess:
    """Run by a Python without any package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-S", str(script), *arguments],
        env=kept | ({"PYTHONPATH": path} if path else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check_line(done: subprocess.CompletedProcess, message: str, hint: str) -> None:
    shown = f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert (done.returncode, done.stdout) == (1, ""), shown
    found = re.fullmatch(r"error: ([^\n]+)\n\nhint: ([^\n]+)\n", done.stderr)
    assert found, shown
    assert message in found[1], shown
    assert hint in found[2], shown


def test_the_scripts_are_found() -> None:
    assert {"make_fuel.py", "make_oracle.py", "bench_decode.py", "runtime/active-set-bytes.py"} <= set(NAMES)
    assert len(NAMES) >= 7


@pytest.mark.parametrize("name", NAMES)
def test_packages_that_are_missing(name: str) -> None:
    missing = " ".join(NEEDED.get(name, DEPENDENCIES.values()))
    done = bare(SCRIPTS / name, "fuel")
    check_line(done, f"Python packages are missing: {missing}", f"{sys.executable} -m pip install {missing}")


def test_some_packages_that_are_missing(tmp_path: Path) -> None:
    """Only those are named, and nothing else is in the way of the others."""
    (tmp_path / "numpy.py").touch()
    check_line(bare(SCRIPTS / "make_fuel.py", "fuel", path=str(tmp_path)), "missing: typer", "install typer")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("bench_")])
def test_a_tree_that_was_not_built(tmp_path: Path, name: str) -> None:
    """Packages are there, the C++ module is not."""
    scripts, package = tmp_path / "scripts", tmp_path / "python" / "rocket"
    shutil.copytree(SCRIPTS, scripts)
    package.mkdir(parents=True)
    for file in (ROOT / "python" / "rocket").glob("*.py"):
        shutil.copy(file, package)
    for module in DEPENDENCIES:
        folder = tmp_path / "packages" / module.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    done = bare(scripts / name, "fuel", path=str(tmp_path / "packages"))
    check_line(done, "the C++ module of Rocket is missing", "pip install .")


def test_what_makes_a_fuel_needs_no_other_packages() -> None:
    """Those that are said to be enough are."""
    code = "import sys; import rocket.random_fuel; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    others = {module.split(".")[0] for module in DEPENDENCIES} - {"numpy", "typer"}
    loaded_by_typer = {"rich"}
    assert not (others - loaded_by_typer) & set(done.stdout.split())


def test_the_readme_makes_a_fuel_with_its_environment(tmp_path: Path) -> None:
    """Its commands begin with the environment that it makes; this Python stands for that one."""
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^(\S*python\S*) (scripts/make_fuel\.py \S+ .*?)(?:  .*)?$", text, re.MULTILINE)
    assert len(lines) == 2
    assert {python for python, _ in lines} == {".venv/bin/python"}
    for _, command in lines:
        script, folder, *options = command.split()
        done = subprocess.run(
            [sys.executable, str(ROOT / script), str(tmp_path / folder), *options],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / folder / "config.json").read_text())
