"""Builds the corpus: documents in five groups, split into training and test by a hash.

Groups: ``code`` (Python), ``docs`` (documentation), ``prose`` (books, dictionaries, country profiles),
``facts`` and ``functions`` (generated, see facts.py and functions). The same packages and seed give the same
files, byte by byte.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from .errors import TrainError
from .facts import fact_documents
from .functions import function_documents
from .sources import Document

GROUPS = ("code", "docs", "prose", "facts", "functions")
TEST_SHARE = 0.01
SEPARATOR = "\x00"


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
    licences: dict[str, str] = {}
    groups: dict[str, dict[str, int]] = {}  # by source
    seen: set[bytes] = set()
    for document in documents:
        body = _without_repeats(document.body, seen).replace(SEPARATOR, "")
        if len(body) < 150 or len(body) < 0.3 * len(document.body):
            continue
        licences.setdefault(document.source, document.licence)
        sizes_of = groups.setdefault(document.source, {})
        sizes_of[document.group] = sizes_of.get(document.group, 0) + len(body)
        texts["test" if _is_test(document) else "train", document.group].append(body)
    texts["train", "facts"] = list(fact_documents(seed, facts))
    texts["test", "facts"] = list(fact_documents(seed + 1, facts // 100))
    texts["train", "functions"] = list(function_documents(seed + 2, functions))
    texts["test", "functions"] = list(function_documents(seed + 3, functions // 100))
    sizes: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for split in sizes:
        for group in GROUPS:
            bodies = texts[split, group]
            (out / f"{split}-{group}.txt").write_bytes(SEPARATOR.join(bodies).encode())
            sizes[split][group] = sum(map(len, bodies))
    sources = {name: {"licence": licences[name], "groups": groups[name]} for name in licences}
    (out / "sources.json").write_text(json.dumps(sources, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return sizes


def read_documents(folder: Path, split: str, group: str) -> list[str]:
    path = folder / f"{split}-{group}.txt"
    if not path.is_file():
        raise TrainError(f"{path} is missing", "make the corpus first: train_fuel.py corpus")
    return [d for d in path.read_bytes().decode().split(SEPARATOR) if d]
