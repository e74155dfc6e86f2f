"""Starting programs of several ranks, and finding what is left of them."""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from cli_tools import Result, environment
from rocket import _core

DECODE = (sys.executable, "-c", "from rocket.decode import main; main()")
MARK = "ROCKET_TEST_RANKS"  # in the environment of every process of a run


def launcher() -> list[str] | None:
    """mpirun with what it needs here: $ROCKET_MPIRUN, that of this Python's environment, that of $PATH."""
    beside = shutil.which("mpirun", path=str(Path(sys.prefix) / "bin"))
    found = os.environ.get("ROCKET_MPIRUN") or beside or shutil.which("mpirun")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, check=False).stdout.lower()
    if b"open mpi" not in version and b"open-mpi" not in version:
        return [found]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [found, *root, "--oversubscribe"]


@functools.cache
def missing_mpi() -> str | None:
    """Why several ranks cannot be tested."""
    how = "pip install mpich, then build Rocket again"
    if not (Path(_core.__file__).parent / "librocket_mpi.so").exists():
        return f"NOT RUN OVER MPI: this build has no MPI ({how})"
    if launcher() is None:
        return f"NOT RUN OVER MPI: no mpirun was found ({how}, or set ROCKET_MPIRUN)"
    code = "from rocket import _core; f = _core.mpi_fabric(20.0); f.leave(); print(f.ranks)"
    try:
        done = run_ranks([(2, (sys.executable, "-c", code))], timeout=60)
    except subprocess.TimeoutExpired:
        return "NOT RUN OVER MPI: two ranks do not start within 60 s"
    if done.status or "".join(done.out.split()) != "22":  # a launcher may run lines into each other
        return f"NOT RUN OVER MPI: two ranks do not find each other: {' '.join(done.err.split())[:300]}"
    return None


def start_ranks(
    programs: list[tuple[int, tuple[str, ...]]], env: dict[str, str] | None = None
) -> tuple["subprocess.Popen[bytes]", str]:
    """Ranks of one or several programs; the mark by which their processes are known."""
    found = launcher()
    assert found is not None
    mark = uuid.uuid4().hex
    parts: list[str] = []
    for ranks, command in programs:
        parts += [":"] * bool(parts) + ["-np", str(ranks), *command]
    run = subprocess.Popen(
        [*found, *parts],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**{MARK: mark, **(env or {})}),
    )
    return run, mark


def end_ranks(mark: str) -> None:
    for pid in processes(mark):
        with_pid(pid, signal.SIGKILL)


def run_ranks(
    programs: list[tuple[int, tuple[str, ...]]], env: dict[str, str] | None = None, timeout: float = 120
) -> Result:
    run, mark = start_ranks(programs, env)
    try:
        out, err = run.communicate(timeout=timeout)
    finally:
        end_ranks(mark)
    return Result(run.returncode, out.decode(), err.decode())


def check_ranks_error(programs: list[tuple[int, tuple[str, ...]]], status: int, *words: str) -> None:
    """One line from all ranks together, and its hint."""
    result = run_ranks(programs)
    own = "\n".join(line for line in result.err.splitlines() if not line.startswith("[mpiexec"))
    found = re.search(r"^error: ([^\n]+)\n\nhint: [^\n]+$", own, re.M)
    shown = f"status {result.status}\nstdout: {result.out!r}\nstderr: {result.err}"
    assert result.err.count("error: ") == 1, shown
    assert found, shown
    assert result.out == "", shown
    assert result.status == status, shown
    for word in words:
        assert word in found[1], f"{word!r}\n{shown}"


def decode_ranks(ranks: int, *arguments: str, env: dict[str, str] | None = None) -> Result:
    """mpirun -np RANKS rocket-decode --boosters RANKS …"""
    return run_ranks([(ranks, (*DECODE, "--boosters", str(ranks), "--threads", "1", *arguments))], env)


def with_pid(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def processes(mark: str) -> list[int]:
    """Those of a run that have not ended; one that nobody has waited for counts as ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes():
                continue
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if state not in "ZX":
            found.append(int(folder.name))
    return found


def rank_process(mark: str, rank: int) -> int | None:
    """The process of a rank: Python, and not what started it."""
    for pid in processes(mark):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        named = {f"{name}={rank}".encode() for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")}
        if named & set(variables) and command.split(b"\0")[0] == sys.executable.encode():
            return pid
    return None


def wait_for_none(mark: str, seconds: float) -> list[int]:
    """What is left after so long."""
    end = time.monotonic() + seconds
    while (left := processes(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return left
