"""Several boosters: processes that an MPI launcher has started, each with its share of the routed experts.

Rank 0 reads the prompt, draws and prints; the other ranks follow it. Whatever goes wrong anywhere is for rank
0 to say, as long as it can.
"""

import array
import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rocket.errors import UsageError, explain
from rocket.failures import input_error
from rocket.options import check_integer, check_real
from rocket.rank_options import RankOptions, agree

if TYPE_CHECKING:
    from rocket._core import Fabric

BOOSTERS_HELP = "Share the routed experts between N processes, which mpirun -np N starts."
DENSE_HELP = "Share the dense weights, too: heads, columns of MLPs and rows of lm_head."
SPLIT_HELP = "Which booster owns which expert (rocket split); by id without it."
WAIT_HELP = "End the run when a booster has not answered for N seconds."
WAIT_SECONDS = 60.0

# What a launcher tells each process: rank, ranks, ranks on this machine. MPICH, Open MPI. Slurm's
# srun tells the first two as MPICH does.
_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise


def launched() -> tuple[int, int]:
    """This process's rank and how many were started; 0 and 1 without a launcher."""
    for rank, ranks, _ in _LAUNCHERS:
        found = _number(rank, -1), _number(ranks, -1)
        if 0 <= found[0] < found[1]:
            return found
    return 0, 1


def threads_for(threads: int, boosters: int) -> int:
    """Ranks of one machine that may all use all of its CPUs share them out, unless a number was asked for."""
    local = max(_number(names[2], 1) for names in _LAUNCHERS)
    cpus = os.cpu_count() or 1
    if threads or boosters == 1 or local == 1 or len(os.sched_getaffinity(0)) < cpus:
        return threads
    return max(1, cpus // local)


_fabric: "Fabric | None" = None  # MPI starts once in a process
_starting = False  # a start that has failed may still be under way in a thread


def speaks(message: str, hint: str, takes_part: bool = True) -> bool:
    """Whether it is for this process to say what goes wrong.

    What goes wrong before a rank has met the others, such as with its command line, they must be told: they
    would wait for it. ``takes_part`` says whether the command is one of several boosters.
    """
    if _fabric is None and takes_part and not _starting and launched()[1] > 1:
        with contextlib.suppress(Exception):
            _start(WAIT_SECONDS).fail(message, hint)
    if _starting:  # they do not come; rank 0, if it is there, says so first and ends the others
        time.sleep(min(2.0 * launched()[0], 10.0))
        return True
    if _fabric is None:
        return launched()[0] == 0
    return _fabric.rank == 0 or not _fabric.rank0_knows


def count_of(boosters: int | None, split: str | None, option: str = "--split") -> int:
    """How many boosters were asked for. Throws UsageError if a launcher started several and none were."""
    if boosters is not None:
        check_integer("--boosters", boosters, 1)
    elif split is not None:
        from rocket.checked import parse_json, read_whole

        found = parse_json(read_whole(split, option), f"{option} {split}")
        boosters = found.get("boosters") if isinstance(found, dict) else None
        if type(boosters) is not int or boosters < 1:
            raise UsageError(
                f"{option} {split}: boosters: expected a whole number of at least 1, "
                f"found {json.dumps(boosters)}",
                "write it with: rocket split FUEL --boosters N --out FILE",
            )
    count = boosters or 1
    ranks = launched()[1]
    if count == 1 and ranks > 1:
        raise UsageError(
            f"--boosters: expected {ranks}, the ranks that were started, found {'1' if boosters else 'none'}",
            f"give --boosters {ranks}, or start it without mpirun",
        )
    return count


def check_shared(boosters: int | None, split: str | None, split_dense: bool) -> None:
    """Throws UsageError if dense weights are to be shared, and nobody said between how many."""
    if split_dense and boosters is None and split is None:
        raise UsageError(
            "--split-dense: expected a number of boosters beside it, found none",
            "give --boosters N, or leave it out: a single booster has all dense weights",
        )


def only_rank0_prints() -> None:
    """On other ranks standard output is nowhere, that of --help and --version too."""
    if launched()[0] > 0:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the end)


def _start(wait: float) -> "Fabric":
    global _fabric, _starting
    from rocket import _core

    if _starting:
        raise input_error("boosters: MPI was told to start before, and has not", "start a process anew")
    begin = time.monotonic()
    try:
        _fabric = _core.mpi_fabric(wait)
    except _core.DeviceError:
        _starting = launched()[1] > 1 and time.monotonic() - begin >= wait
        raise
    except BaseException:  # Ctrl-C
        _starting = launched()[1] > 1
        raise
    return _fabric


def connect(boosters: int, wait: float = WAIT_SECONDS) -> "Fabric":
    """The fabric of all ranks. Throws DeviceError without MPI, UsageError if there are not as many ranks."""
    check_real("--booster-wait", wait, 0, 86400, with_low=False)
    fabric = _start(wait)
    if fabric.ranks == boosters:
        return fabric
    message = f"--boosters: expected as many ranks as boosters, {boosters}, found {fabric.ranks}"
    hint = f"start it with: mpirun -np {boosters} rocket-decode --boosters {boosters} …"
    if fabric.ranks == 1:
        fabric.leave()
    else:
        fabric.fail(message, hint)
    raise UsageError(message, hint)


def _wait_for_reader(descriptor: int, seconds: float = 1.0) -> None:
    """Until a pipe is empty: a launcher that ends the ranks does not read what is still in it."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    end = time.monotonic() + seconds
    left = array.array("i", [1])
    while left[0] and time.monotonic() < end:
        fcntl.ioctl(descriptor, termios.FIONREAD, left)
        time.sleep(0.005)


def leave(status: int = 1) -> None:
    """Before the process ends, with this status. After a failure it ends those of all ranks: they may be
    anywhere in a step."""
    if _fabric is not None:
        _fabric.leave()
    if _starting or (_fabric is not None and _fabric.failed):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                _wait_for_reader(stream.fileno())
    if _starting:
        os._exit(status)
    if _fabric is not None and _fabric.failed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what went wrong is said; MPI would add that it ends
        _fabric.abort(status)


@contextlib.contextmanager
def joined(boosters: int, wait: float, context: typer.Context) -> Iterator[int]:
    """This process's rank among the boosters, whose command lines agree. What is raised inside ends the run
    of all of them."""
    if boosters == 1:
        yield 0
        return
    fabric = connect(boosters, wait)
    try:
        agree(fabric, RankOptions.of(context))
        yield fabric.rank
    except BaseException as error:
        message, hint, _ = explain(error)
        fabric.fail(message, hint)
        raise
    fabric.leave()


@dataclass(frozen=True)
class Group:
    """The options of several boosters as a command takes them."""

    count: int = 1
    split: str | None = None
    split_dense: bool = False
    wait: float = WAIT_SECONDS

    @classmethod
    def of(cls, boosters: int | None, split: str | None, split_dense: bool, wait: float) -> "Group":
        """Checks them. Throws UsageError."""
        check_real("--booster-wait", wait, 0, 86400, with_low=False)
        count = count_of(boosters, split)
        check_shared(boosters, split, split_dense)
        return cls(count, split, split_dense, wait)

    def arguments(self, threads: int) -> dict[str, Any]:
        """Of Engine, on every booster."""
        return {
            "threads": threads_for(threads, self.count),
            "boosters": self.count,
            "split": self.split,
            "split_dense": self.split_dense,
            "booster_wait": self.wait,
        }


def follow(fuel: str, arguments: dict[str, Any]) -> int:
    """On a booster other than the one that prints."""
    from rocket.engine import Engine
    from rocket.fuel import resolve
    from rocket.loading import named_options

    ignore_signals()
    with named_options(arguments):
        engine = Engine(resolve(fuel), **arguments)
    with engine:
        engine.follow()
    return 0


def ignore_signals() -> None:
    """Ctrl-C reaches every process of a terminal, and is rank 0's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def owners_of(
    folder: Path, boosters: int, split: str | Path | None, split_dense: bool = False
) -> list[list[int]]:
    """The booster of each expert of each MoE layer."""
    if split is not None:
        from rocket.fuel_account import load_account
        from rocket.split_file import read_split

        return read_split(str(split), load_account(str(folder))[1], boosters).owners.tolist()
    from rocket import _core
    from rocket.split import make_split

    config = _core.read_config(str(folder))
    layers = sum(config["is_moe"])
    if not layers and not split_dense:
        raise UsageError(
            f"--boosters: expected 1, since {folder} has no MoE layers, found {boosters}",
            "share the dense weights: --split-dense",
        )
    return make_split(config["n_routed_experts"], layers, boosters, "id").tolist()


def arguments(
    folder: Path, boosters: int, split: str | Path | None, wait: float, split_dense: bool
) -> dict[str, Any]:
    """Of CoreEngine, for several boosters: none for one. Throws InputError for what cannot be."""
    try:
        if boosters == 1:
            if split is not None:
                owners_of(folder, boosters, split)  # what it says is checked all the same
            return {}
        return {
            "fabric": connect(boosters, wait),
            "owners": owners_of(folder, boosters, split, split_dense),
            "split_dense": split_dense,
        }
    except UsageError as error:
        raise input_error(str(error), error.hint) from None
