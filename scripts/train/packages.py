"""The packages that the corpus is read from: a pinned list, and fetching with the ordinary clients."""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from .errors import TrainError, read_text

LIST = Path(__file__).with_name("packages.tsv")
COLUMNS = ("client", "name", "version", "licence", "file", "sha256")
# One kind of wheel, whatever machine asks: what is read from it is the same on all.
WHEELS = [
    *("--python-version", "3.11", "--implementation", "cp"),
    *(f"--platform={name}" for name in ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "any")),
    *(f"--abi={name}" for name in ("cp311", "abi3", "none")),
]


class Package(NamedTuple):
    client: str  # apt, npm or pip
    name: str
    version: str
    licence: str
    file: str
    sha256: str


def read_list(path: Path = LIST) -> list[Package]:
    """The list in its canonical order, which is the order that documents are read in."""
    head, *rows = read_text(path).splitlines() or [""]
    if tuple(head.split("\t")) != COLUMNS:
        raise TrainError(f"{path}: the first line is not {', '.join(COLUMNS)}", "separate columns with tabs")
    packages = []
    for number, row in enumerate(rows, 2):
        cells = row.split("\t")
        if len(cells) != len(COLUMNS) or not all(cells) or cells[0] not in _COMMANDS or "/" in cells[4]:
            raise TrainError(
                f"{path}: line {number} is not a package",
                f"give {', '.join(COLUMNS)}, where client is one of {', '.join(_COMMANDS)}",
            )
        packages.append(Package(*cells))
    if len({(p.client, p.file) for p in packages}) < len(packages):
        raise TrainError(f"{path}: a file is listed twice", "remove one of the lines")
    return sorted(packages)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def place(package: Package, folder: Path) -> Path:
    return folder / package.client / package.file


def checked(package: Package, folder: Path) -> Path:
    """The downloaded file, as the list describes it."""
    path = place(package, folder)
    if not path.is_file():
        raise TrainError(f"{path} is missing", f"download it: train_fuel.py fetch --packages {folder}")
    found = sha256(path)
    if found != package.sha256:
        raise TrainError(
            f"{path}: sha256 is {found}, but the list says {package.sha256}",
            "remove the file and run `train_fuel.py fetch` again",
        )
    return path


def _apt(package: Package, folder: Path) -> list[str]:
    return ["apt-get", "download", "--quiet=2", f"{package.name}={package.version}"]


def _npm(package: Package, folder: Path) -> list[str]:
    return ["npm", "pack", "--silent", f"{package.name}@{package.version}"]


def _pip(package: Package, folder: Path) -> list[str]:
    wanted = folder / "requirement.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--require-hashes"]
    return [sys.executable, "-m", "pip", "download", *quiet, *WHEELS, "--requirement", str(wanted)]


_COMMANDS = {"apt": _apt, "npm": _npm, "pip": _pip}


def _download(package: Package, folder: Path) -> None:
    target = place(package, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = _COMMANDS[package.client](package, Path(scratch))
        what = f"{package.name} {package.version}"
        try:
            done = subprocess.run(
                command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise TrainError(
                f"{command[0]} is not installed, which downloads {what}",
                f"install {command[0]}, or put {package.file} into {target.parent}",
            ) from None
        got = Path(scratch) / package.file
        if done.returncode or not got.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "no such file came").splitlines()[-1]
            raise TrainError(
                f"{package.client} cannot download {what}: {said}",
                f"if the archive no longer has it, put {package.file} from elsewhere into {target.parent}",
            )
        got.replace(target)


def fetch(folder: Path, packages: list[Package]) -> dict[str, int]:
    """Downloads what is not there yet to CLIENT/FILE in the folder, and checks everything."""
    folder.mkdir(parents=True, exist_ok=True)
    downloaded = 0
    for package in packages:
        if not place(package, folder).is_file():
            _download(package, folder)
            downloaded += 1
        checked(package, folder)
    return {
        "packages": len(packages),
        "downloaded": downloaded,
        "bytes": sum(place(p, folder).stat().st_size for p in packages),
    }
