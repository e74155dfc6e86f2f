"""scripts/gpu_check.sh with stubs of the programs it runs: arguments, what is missing, how it is stopped."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What the script and the stubs take from the system; everything else in their PATH is a stub.
TOOLS = "awk basename bash cat cut date dirname env find grep head ls mkdir mv nproc realpath rm sed"
TOOLS += " setsid sleep sort tail tee timeout touch wc xargs"

# Hangs where $STUB_HANG says so, with a child in a session of its own; $STUB_DEAF: neither heeds a signal.
# All that hang have $STUB_HOME in their environment.
HANG = """#!/usr/bin/env bash
hang() {
  [ "${STUB_HANG-}" = "$1" ] || return 0
  [ -z "${STUB_DEAF-}" ] || trap '' HUP INT TERM
  setsid sleep 1000 &
  touch "$STUB_HOME/hangs"
  sleep 1000
  sleep 1000
}
"""

STUBS = {
    "nvcc": "",
    "make": "",
    "c++": "",
    "nvidia-smi": """
hang nvidia-smi
printf 'name, memory.total [MiB], driver_version\\n%s' "${STUB_GPUS-Stub 1, 8 MiB, 99.1
}"
""",
    "df": r"""printf 'Filesystem 1024-blocks Used Available\n/dev/stub 0 0 %s\n' "${STUB_FREE-99000000}" """,
    "cmake": """
if [ "$1" = --build ]; then
  hang build
  for name in test_gpu_a bench_gpu_{step,linear,experts,step_ops,attention,stream}; do
    printf '#!/usr/bin/env bash\\n. "%s/bin/hang"\\nhang %s\\n' "$STUB_HOME" "$name" > "$2/$name"
    echo '[ -z "${ROCKET_BENCH_OUT-}" ] || echo "{}" >> "$ROCKET_BENCH_OUT"' >> "$2/$name"
    "$STUB_HOME/chmod" +x "$2/$name"
  done
fi
hang configure
""",
    "ctest": """
hang ctest
echo '<testsuite><testcase name="a" status="run"/></testsuite>' > build-gpu/results/ctest.xml
""",
    "compute-sanitizer": "hang sanitizer",
    "mypython": """
case "$*" in
  -) PYTHONPATH=$STUB_HOME/fakes exec "$STUB_PYTHON" - ;;
  '- '*) exec "$STUB_PYTHON" "$@" ;;
  *xdist*) exit 1 ;;
  *results/waiting.xml*) hang waiting ;;
  *results/pytest.xml*) hang pytest ;;
  *make_fuel.py*)
    partial=$(dirname "$2")/.$(basename "$2").partial-$$
    mkdir -p "$partial"
    touch "$partial/config.json"
    hang slice
    mv "$partial" "$2"
    ;;
  *'bench decode'*) hang decode; echo '{}' ;;
  *) exit 99 ;;
esac
""",
}
MODULES = (
    "hypothesis jinja2 jsonschema ml_dtypes numpy pybind11 pydantic pytest rich safetensors tokenizers typer"
)


def heed_signals() -> None:
    """What was started in the background of a shell ignores some, and a shell cannot trap those again."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


PHASES = [
    "build",
    "component tests",
    "GPU tests, those that wait for the host",
    "GPU tests",
    "compute-sanitizer, after the GPU tests beside it",
    "benchmarks of the ops",
    "decode",
]


class Check:
    """A tree with the script in it, and a PATH of stubs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.tree = home / "tree"
        self.bin = home / "bin"
        self.results = self.tree / "build-gpu" / "results"
        self.slice = home / "slices" / "slice"
        for folder in (self.tree / "scripts", self.bin, home / "fakes" / "ruamel"):
            folder.mkdir(parents=True)
        self.script = shutil.copy(ROOT / "scripts" / "gpu_check.sh", self.tree / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.tree)
        for tool in TOOLS.split():
            found = shutil.which(tool)
            assert found, f"{tool} is needed here"
            (self.bin / tool).symlink_to(found)
        (home / "chmod").symlink_to(str(shutil.which("chmod")))
        (self.bin / "hang").write_text(HANG)
        for name, text in STUBS.items():
            (self.bin / name).write_text(HANG + text + "\n")
            (self.bin / name).chmod(0o755)
        for name in [*MODULES.split(), "ruamel/__init__", "ruamel/yaml"]:
            (home / "fakes" / f"{name}.py").touch()
        (home / "fakes" / "Python.h").touch()
        (home / "fakes" / "sitecustomize.py").write_text(
            f"import sysconfig\nsysconfig.get_path = lambda name: {str(home / 'fakes')!r}\n"
        )

    def start(self, *args: str, cwd: Path | None = None, **stubs: str) -> "subprocess.Popen[str]":
        env = {"PATH": str(self.bin), "STUB_HOME": str(self.home), "STUB_PYTHON": sys.executable, **stubs}
        return subprocess.Popen(
            [self.script, *args],
            cwd=cwd or self.home,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_signals,
        )

    def run(self, *args: str, **more: str) -> tuple[int, str, str]:
        process = self.start(*args, **more)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def start_hanging(self, *args: str, **stubs: str) -> "subprocess.Popen[str]":
        process = self.start(*args, **stubs)
        until = time.monotonic() + 30
        while not (self.home / "hangs").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until, "it did not come to hang"
            time.sleep(0.01)
        return process

    def summary(self) -> dict:
        return json.loads((self.results / "summary.json").read_text())

    def left(self) -> list[str]:
        """What still runs of all that was started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"STUB_HOME={self.home}\0".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text())
        return found


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_whole_run_makes_the_slice_and_measures(check: Check) -> None:
    code, out, err = check.run("--slice", "slices/slice", "mypython")
    assert (code, err) == (0, ""), out
    summary = check.summary()
    assert summary["status"] == 0
    assert [phase["name"] for phase in summary["phases"]] == PHASES
    assert summary["gpus"] == ["Stub 1"]
    assert summary["driver"] == "99.1"
    assert (check.slice / "config.json").exists()
    made = {file.name for file in check.results.iterdir()}
    assert {"ctest.xml", "ops.jsonl", "decode-slice-8.json", "step-slice-half.jsonl"} <= made
    assert check.left() == []


def test_quick_run_writes_no_slice(check: Check) -> None:
    code, out, _ = check.run("--quick", "--slice", "slices/slice", "mypython", STUB_FREE="1")
    assert code == 0, out
    assert "quick runs measure nothing" in out
    assert not check.slice.parent.exists()
    assert [p["name"] for p in check.summary()["phases"]] == [
        *PHASES[:3],
        "GPU tests, without compute-sanitizer",
    ]


# Where it hangs, the phase under way then, the signal, and whom it is sent to.
STOPS = [
    ("nvidia-smi", None, signal.SIGINT, "script"),
    ("configure", "build", signal.SIGTERM, "script"),
    ("build", "build", signal.SIGINT, "group"),
    ("ctest", "component tests", signal.SIGHUP, "script"),
    ("waiting", PHASES[2], signal.SIGTERM, "group"),
    ("pytest", "GPU tests", signal.SIGINT, "script"),
    ("sanitizer", PHASES[4], signal.SIGTERM, "script"),
    ("bench_gpu_experts", PHASES[5], signal.SIGHUP, "group"),
    ("decode", "decode", signal.SIGINT, "script"),
    ("slice", "decode", signal.SIGTERM, "group"),
    ("bench_gpu_step", "decode", signal.SIGHUP, "script"),
]


@pytest.mark.parametrize(("where", "phase", "number", "whom"), STOPS)
def test_two_signals_stop_all_of_it(
    check: Check, where: str, phase: str | None, number: signal.Signals, whom: str
) -> None:
    process = check.start_hanging("--slice", str(check.slice), "mypython", STUB_HANG=where)
    if where in ("slice", "sanitizer"):  # beside it other phases go on
        until = time.monotonic() + 20
        while f"==> {phase}" not in (line := process.stdout.readline()):
            assert line, "it ended"
            assert time.monotonic() < until
    send = os.kill if whom == "script" else os.killpg
    began = time.monotonic()
    for _ in range(2):
        send(process.pid, number)
        time.sleep(0.02)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number, err
    assert time.monotonic() - began < 4
    assert check.left() == []
    assert not list(check.slice.parent.glob(".*"))
    summary = check.summary()
    assert summary["status"] == 128 + number
    done = [p["name"] for p in summary["phases"]]
    assert done == (PHASES[: PHASES.index(phase) + 1] if phase else [])


def test_what_ignores_signals_is_killed(check: Check) -> None:
    process = check.start_hanging("mypython", STUB_HANG="build", STUB_DEAF="1")
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert check.left() == []
    assert [p["name"] for p in check.summary()["phases"]] == ["build"]


def test_all_that_is_missing_is_listed_at_the_start(check: Check) -> None:
    for name in ("nvidia-smi", "nvcc", "compute-sanitizer", "cmake", "ctest", "c++", "make"):
        (check.bin / name).unlink()
    (check.home / "fakes" / "Python.h").unlink()
    (check.home / "fakes" / "pybind11.py").write_text("import missing_part")
    (check.home / "fakes" / "jsonschema.py").write_text("raise RuntimeError('torn')")
    (check.home / "fakes" / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')")
    code, out, err = check.run("--slice", "slices/slice", "mypython", STUB_FREE="26000000")
    assert code == 1
    lines = [line.removeprefix("gpu_check.sh: ") for line in err.splitlines()]
    programs = ["nvidia-smi", "nvcc", "compute-sanitizer", "cmake", "ctest", "make", "c++"]
    of_python = ["Python.h", "pybind11", "numpy", "jsonschema"]
    assert [line.split()[0] for line in lines] == [*programs, *of_python, "--slice"]
    assert "expected" in lines[0]
    assert "26 GB free, expected 27" in lines[-1]
    assert "==> build" not in out
    assert check.summary()["status"] == 1


def test_gpu_is_asked_once_and_must_be_there(check: Check) -> None:
    code, _, err = check.run("mypython", STUB_GPUS="")
    assert code == 1
    assert "nvidia-smi lists none" in err


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--slice"], "--slice needs a directory"),
        (["--slice", "--quick"], "--slice needs a directory, found --quick"),
        (["--slice", ""], "--slice needs a directory"),
        (["one", "two"], "a second PYTHON: two"),
        ([""], "PYTHON is empty"),
        (["--fast"], "unknown option --fast"),
    ],
)
def test_wrong_arguments_have_status_2_and_touch_nothing(check: Check, args: list[str], what: str) -> None:
    code, out, err = check.run(*args)
    assert (code, out) == (2, "")
    assert what in err
    assert not check.results.exists()


def test_help_is_the_usage(check: Check) -> None:
    code, out, err = check.run("--help")
    assert (code, err) == (0, "")
    assert "[--quick] [--slice DIR] [PYTHON]" in out


def test_python_is_where_the_user_stands_or_that_of_the_repository(check: Check) -> None:
    elsewhere = check.home / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "named").symlink_to(check.bin / "mypython")
    own = check.tree / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    (check.bin / "python3").symlink_to(check.bin / "mypython")
    (check.bin / "nvcc").unlink()
    assert f"Python: {elsewhere}/named\n" in check.run("./named", cwd=elsewhere)[1].replace("/./", "/")
    assert f"Python: {check.bin}/python3\n" in check.run(cwd=elsewhere)[1]
    own.symlink_to(check.bin / "mypython")
    assert f"Python: {own}\n" in check.run(cwd=elsewhere)[1]
    assert "nowhere is missing" in check.run("nowhere", cwd=elsewhere)[2]


def test_slice_must_be_a_fuel_or_new(check: Check) -> None:
    (check.home / "file").touch()
    for where in (check.home, check.home / "file", check.home / "file" / "below"):
        code, out, err = check.run("--slice", str(where), "mypython")
        assert code == 1
        assert f"--slice {where}: " in err
        assert "==> build" not in out
