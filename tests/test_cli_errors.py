"""Wrong input: one line, a hint, an exit status, nothing on standard output, nothing left behind."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli_tools import check_error, run_decode, run_rocket, tree
from rocket import _core
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import PRESETS

PROMPT = ("--prompt", "The capital of France is")


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fuel(tmp_path_factory.mktemp("fuel") / "tiny")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fuel(tmp_path_factory.mktemp("fuel") / "sharded", replace(PRESETS["tiny"], files=3))


def check_decode(folder: Path, status: int, words: tuple[str, ...], *arguments: str, **more) -> None:
    """Runs with a file to write as well, and sees that neither it nor anything else appears."""
    (folder / "out").mkdir(exist_ok=True)
    before = tree(folder)
    out = ("--logits-out", str(folder / "out" / "logits.safetensors"))
    result = run_decode("--backend", "cpu", *out, *arguments, cwd=folder, **more)
    check_error(result, status, *words)
    assert tree(folder) == before


# --- fuels ---

SHARD = "model-00002-of-00003.safetensors"


def edit_json(file: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_header(file: Path, change: Callable[[dict], object]) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def config(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", change)


def header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Changes the header of the second shard."""
    return lambda folder: edit_header(folder / SHARD, change)


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def cut(name: str, bytes_less: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / name
        os.truncate(file, file.stat().st_size - bytes_less)

    return apply


def first_name(tensors: dict) -> str:
    return next(name for name in tensors if name != "__metadata__")


def reshape(tensors: dict) -> None:
    for name, entry in tensors.items():
        if name.endswith("mlp.shared_experts.up_proj.weight"):
            entry["shape"] = [entry["shape"][0] * 2, entry["shape"][1] // 2]
            return
    raise AssertionError("the shard has no such tensor")


def retype(tensors: dict) -> None:
    for name, entry in tensors.items():
        if name.endswith("mlp.shared_experts.up_proj.weight"):
            entry["dtype"] = "I16"
            return
    raise AssertionError("the shard has no such tensor")


def rename_tensor(folder: Path) -> None:
    """In the shard and in the index, so that all that is wrong is that the tensor is not there."""
    names: list[str] = []

    def change(tensors: dict) -> None:
        names.append(next(n for n in tensors if n.endswith("mlp.shared_experts.up_proj.weight")))
        renamed = {n.replace("up_proj", "uq_proj") if n == names[0] else n: e for n, e in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_header(folder / SHARD, change)
    edit_json(
        folder / "model.safetensors.index.json",
        lambda index: index["weight_map"].update(
            {names[0].replace("up_proj", "uq_proj"): index["weight_map"].pop(names[0])}
        ),
    )


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5000000000\n"

DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "empty config": (write("config.json", b""), ("config.json",)),
    "broken config": (write("config.json", b'{\n"a": 1,\n'), ("config.json", "line")),
    "config is a list": (write("config.json", b"[]"), ("config.json",)),
    "config is a pointer": (write("config.json", POINTER), ("config.json",)),
    "another model": (config(lambda c: c.update(model_type="llama")), ("model_type", "llama", "glm5_next")),
    "no model type": (config(lambda c: c.pop("model_type")), ("model_type",)),
    "wrong type in config": (
        config(lambda c: c["text_config"].update(hidden_size="many")),
        ("config.json", "hidden_size"),
    ),
    "absurd number in config": (
        config(lambda c: c["text_config"].update(num_hidden_layers=-3)),
        ("config.json", "num_hidden_layers", "-3"),
    ),
    "no weights": (
        lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")],
        ("safetensors",),
    ),
    "shard missing": (lambda folder: (folder / SHARD).unlink(), (SHARD,)),
    "shard truncated": (cut(SHARD, 1000), (SHARD,)),
    "shard too long": (
        lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size + 8),
        (SHARD,),
    ),
    "shard is a pointer": (write(SHARD, POINTER), (SHARD, "Git LFS")),
    "shard empty": (write(SHARD, b""), (SHARD,)),
    "shard of seven bytes": (write(SHARD, b"1234567"), (SHARD,)),
    "shard is a directory": (
        lambda folder: ((folder / SHARD).unlink(), (folder / SHARD).mkdir()),
        (SHARD,),
    ),
    "header longer than the file": (write(SHARD, (1 << 40).to_bytes(8, "little") + b"{}"), (SHARD,)),
    "header is no JSON": (write(SHARD, (8).to_bytes(8, "little") + b"{]      "), (SHARD,)),
    "offsets beyond the file": (
        header(lambda t: t[first_name(t)].update(data_offsets=[0, 1 << 50])),
        (SHARD,),
    ),
    "negative shape": (header(lambda t: t[first_name(t)].update(shape=[-1, 2])), (SHARD,)),
    "overflowing shape": (header(lambda t: t[first_name(t)].update(shape=[1 << 40, 1 << 40])), (SHARD,)),
    "unknown dtype": (header(lambda t: t[first_name(t)].update(dtype="Q7")), (SHARD, "Q7")),
    "tensor missing": (rename_tensor, ("mlp.shared_experts.up_proj.weight",)),
    "tensor of wrong shape": (header(reshape), ("mlp.shared_experts.up_proj.weight",)),
    "tensor of wrong dtype": (header(retype), ("mlp.shared_experts.up_proj.weight", "I16")),
    "index broken": (write("model.safetensors.index.json", b"{"), ("model.safetensors.index.json",)),
    "index names no file": (
        lambda folder: edit_json(
            folder / "model.safetensors.index.json",
            lambda index: index["weight_map"].update({"a.weight": "b.safetensors"}),
        ),
        ("b.safetensors",),
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json", "not found")),
    "broken tokenizer": (write("tokenizer.json", b"{"), ("tokenizer.json", "no valid tokenizer")),
    "tokenizer is a pointer": (write("tokenizer.json", POINTER), ("tokenizer.json", "Git LFS")),
    "broken generation config": (
        write("generation_config.json", b"{"),
        ("generation_config.json", "broken JSON"),
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_fuels(sharded: Path, tmp_path: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    shutil.copytree(sharded, tmp_path / "fuel")
    damage(tmp_path / "fuel")
    check_decode(tmp_path, 1, words, "--fuel", "fuel", *PROMPT)


def test_the_whole_fuel_is_fine(sharded: Path) -> None:
    assert run_decode("--fuel", str(sharded), "--tokens", "2", *PROMPT).status == 0


def test_no_such_fuel(fuel: Path, tmp_path: Path) -> None:
    check_decode(tmp_path, 1, ("fuel nothing", "no such directory"), "--fuel", "nothing", *PROMPT)
    check_decode(tmp_path, 1, ("expected a directory",), "--fuel", str(fuel / "config.json"), *PROMPT)
    check_decode(tmp_path, 1, ("expected a name",), "--fuel", "", *PROMPT)


def test_close_names_are_hinted(fuel: Path) -> None:
    result = run_decode("--fuel", str(fuel)[:-1], *PROMPT)
    assert f"hint: did you mean {fuel}?" in result.err


def test_no_chat_template(fuel: Path, tmp_path: Path) -> None:
    shutil.copytree(fuel, tmp_path / "fuel")
    (tmp_path / "fuel" / "chat_template.jinja").unlink()
    check_decode(tmp_path, 1, ("no chat template",), "--fuel", "fuel", "--chat", *PROMPT)
    (tmp_path / "fuel" / "chat_template.jinja").write_text("{% if %}")
    check_decode(tmp_path, 1, ("broken chat template, line 1",), "--fuel", "fuel", "--chat", *PROMPT)
    (tmp_path / "fuel" / "chat_template.jinja").write_bytes(b"ok \xff")
    words = ("chat_template.jinja: expected UTF-8 text, found byte 0xff at 3",)
    check_decode(tmp_path, 1, words, "--fuel", "fuel", "--chat", *PROMPT)
    (tmp_path / "fuel" / "chat_template.jinja").unlink()
    (tmp_path / "fuel" / "chat_template.jinja").mkdir()
    words = ("chat_template.jinja: cannot be read: ", "directory")
    check_decode(tmp_path, 1, words, "--fuel", "fuel", "--chat", *PROMPT)


# --- the command line ---

USAGE = {
    "unknown option": (("--tokns", "3", *PROMPT), ("--tokns",)),
    "stray argument": (("stray", *PROMPT), ("stray",)),
    "value missing": (("--prompt",), ("--prompt",)),
    "two prompts": (("--prompt", "a", "--prompt-ids", "1"), ("--prompt and --prompt-ids",)),
    "three prompts": (("--prompt", "a", "--prompt-file", "b", "--prompt-ids", "1"), ("found 3",)),
    "chat with ids": (("--chat", "--prompt-ids", "1"), ("--chat", "--prompt-ids")),
    "empty prompt": (("--prompt", ""), ("--prompt: the prompt is empty",)),
    "empty ids": (("--prompt-ids", " "), ("--prompt-ids: the prompt is empty",)),
    "no prompt": ((), ("standard input: the prompt is empty",)),
    "ids that are none": (("--prompt-ids", "1,two"), ("'two' at place 2",)),
    "negative id": (("--prompt-ids", "1,-2"), ("'-2' at place 2",)),
    "huge id": (("--prompt-ids", "1,99999999999999999999"), ("'99999999999999999999'",)),
    "tokens negative": (("--tokens", "-1", *PROMPT), ("--tokens", "from 0", "found -1")),
    "tokens no number": (("--tokens", "many", *PROMPT), ("--tokens", "expected an integer, found 'many'")),
    "tokens absurd": (("--tokens", "9" * 30, *PROMPT), ("--tokens", "found 999")),
    "temperature nan": (("--temperature", "nan", *PROMPT), ("--temperature", "found nan")),
    "temperature inf": (("--temperature", "inf", *PROMPT), ("--temperature", "found inf")),
    "temperature negative": (("--temperature", "-0.5", *PROMPT), ("--temperature", "found -0.5")),
    "temperature no number": (("--temperature", "warm", *PROMPT), ("--temperature", "found 'warm'")),
    "top-k negative": (("--top-k", "-1", *PROMPT), ("--top-k", "found -1")),
    "top-p zero": (("--top-p", "0", *PROMPT), ("--top-p", "(0, 1]", "found 0")),
    "top-p over one": (("--top-p", "1.5", *PROMPT), ("--top-p", "found 1.5")),
    "top-p nan": (("--top-p", "nan", *PROMPT), ("--top-p", "found nan")),
    "min-p one": (("--min-p", "1", *PROMPT), ("--min-p", "[0, 1)", "found 1")),
    "seed negative": (("--seed", "-1", *PROMPT), ("--seed", "found -1")),
    "seed too large": (("--seed", str(2**64), *PROMPT), ("--seed", f"found {2**64}")),
    "sampling": (("--sampling", "hot", *PROMPT), ("--sampling", "greedy, fuel", "found 'hot'")),
    "backend": (("--backend", "tpu", *PROMPT), ("--backend", "auto, cpu, cuda", "found 'tpu'")),
    "precision": (("--prefill-precision", "f16", *PROMPT), ("--prefill-precision", "auto, f32, bf16")),
    "precision of a CPU": (("--prefill-precision", "bf16", *PROMPT), ("--prefill-precision", "float32 only")),
    "dense weights of nobody": (("--split-dense", *PROMPT), ("--split-dense", "number of boosters")),
    "latents of a CPU": (("--kv-dtype", "bf16", *PROMPT), ("--kv-dtype", "float32 only")),
    "threads negative": (("--threads", "-1", *PROMPT), ("--threads", "from 0", "found -1")),
    "output without a name": (("--logits-out", "", *PROMPT), ("--logits-out: expected a file",)),
    "output to -": (("--logits-out", "-", *PROMPT), ("--logits-out: expected a file", "standard output")),
    "output to stdout": (("--logits-out", "/dev/stdout", *PROMPT), ("standard output",)),
    "threads absurd": (("--threads", "100000", *PROMPT), ("--threads", "found 100000")),
    "context zero": (("--max-context", "0", *PROMPT), ("--max-context", "from 1", "found 0")),
    "context negative": (("--max-context", "-5", *PROMPT), ("--max-context", "found -5")),
    "chunk zero": (("--prefill-chunk", "0", *PROMPT), ("--prefill-chunk", "from 1", "found 0")),
    "value for a flag": (("--json=yes", *PROMPT), ("--json",)),
}


@pytest.mark.parametrize("kind", USAGE)
def test_wrong_command_lines(fuel: Path, tmp_path: Path, kind: str) -> None:
    arguments, words = USAGE[kind]
    check_decode(tmp_path, 2, words, "--fuel", str(fuel), *arguments)


def test_a_prompt_that_is_no_utf8(fuel: Path, tmp_path: Path) -> None:
    arguments = ("--fuel", str(fuel), "--prompt", os.fsdecode(b"a\xff"))
    check_decode(tmp_path, 2, ("--prompt: expected UTF-8 text",), *arguments)


FAILURES = {
    "id outside the vocabulary": (("--prompt-ids", "1,5000"), ("id 5000 at place 2", "0 to 1023")),
    "context asked for": (
        ("--prompt-ids", "1,2,3", "--tokens", "10", "--max-context", "12"),
        ("3 tokens of the prompt + 10 to generate = 13", "--max-context is 12"),
    ),
    "context of the model": (
        ("--prompt-ids", "1,2,3", "--tokens", "9000"),
        ("= 9003", "the model holds 8192"),
    ),
    "context over the model's": (
        ("--prompt-ids", "1", "--max-context", "9000"),
        ("--max-context: expected 1 to 8192", "found 9000"),
    ),
    "prompt file missing": (("--prompt-file", "none.txt"), ("--prompt-file", "none.txt", "No such file")),
    "prompt file is a folder": (("--prompt-file", "out"), ("--prompt-file", "out", "directory")),
    "prompt file binary": (("--prompt-file", "binary"), ("--prompt-file binary", "zero byte at 3")),
    "prompt file no UTF-8": (("--prompt-file", "latin"), ("--prompt-file latin", "byte 0xe9 at 3")),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_cannot_be_done(fuel: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "binary").write_bytes(b"abc\0def")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    arguments, words = FAILURES[kind]
    check_decode(tmp_path, 1, words, "--fuel", str(fuel), *arguments)


def test_empty_prompts_from_elsewhere(fuel: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    check_decode(tmp_path, 2, ("the prompt is empty",), "--fuel", str(fuel), "--prompt-file", "empty")
    check_decode(tmp_path, 1, ("standard input", "zero byte"), "--fuel", str(fuel), stdin=b"a\0")


@pytest.mark.parametrize("place", ["none/l", "folder", "/proc/l"])
def test_places_that_cannot_be_written(fuel: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    before = tree(tmp_path)
    result = run_decode("--fuel", str(fuel), *PROMPT, "--logits-out", place, cwd=tmp_path)
    check_error(result, 1, "--logits-out: cannot write", place)
    assert tree(tmp_path) == before


def test_outputs_destroy_no_input(fuel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fuel"
    shutil.copytree(fuel, folder)
    store = tmp_path / "store.safetensors"
    (folder / "model.safetensors").rename(store)
    (folder / "model.safetensors").symlink_to(store)
    (tmp_path / "p").write_text("some text")
    run_rocket("score", "fuel", "--text", "p", "--out", "scores", cwd=tmp_path)
    (tmp_path / "link").symlink_to("p")
    before = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()}
    for place in ("fuel/model.safetensors", "fuel/new", str(store), "fuel/../fuel/config.json"):
        lies = (f"{place} lies in the fuel",)
        result = run_decode("--fuel", "fuel", *PROMPT, "--logits-out", place, cwd=tmp_path)
        check_error(result, 2, "--logits-out", *lies)
        result = run_rocket("score", "fuel", "--text", "p", "--out", place, cwd=tmp_path)
        check_error(result, 2, "--out", *lies)
    for place in ("p", "link"):
        result = run_decode("--fuel", "fuel", "--prompt-file", "p", "--logits-out", place, cwd=tmp_path)
        check_error(result, 2, f"--logits-out: {place} is the file of --prompt-file")
        result = run_rocket("score", "fuel", "--text", "p", "--out", place, cwd=tmp_path)
        check_error(result, 2, f"--out: {place} is the file of --text")
    arguments = ("--text", "p", "--against", "scores", "--out", "scores")
    check_error(run_rocket("score", "fuel", *arguments, cwd=tmp_path), 2, "is the file of --against")
    after = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()}
    assert after == before


def test_memory_over_budget(fuel: Path, tmp_path: Path) -> None:
    arguments = ("--fuel", str(fuel), *PROMPT)
    check_decode(tmp_path, 1, ("MiB",), *arguments, env={"ROCKET_MEMORY_LIMIT": "1M"})


def test_no_cache_to_make_a_fuel_in(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    result = run_rocket("bench", "decode", "--preset", "tiny", env=env, cwd=tmp_path)
    check_error(result, 1, "cannot make a random fuel")


def test_cuda_where_there_is_none(fuel: Path, tmp_path: Path) -> None:
    """A build without it, or one that sees no device."""
    unseen = {"CUDA_VISIBLE_DEVICES": ""}
    options = ("--fuel", str(fuel), *PROMPT)
    check_decode(tmp_path, 1, ("backend cuda: ", "CUDA"), *options, "--backend", "cuda", env=unseen)
    done = run_decode(*options, "--backend", "auto", env=unseen)
    assert done.status == 0
    assert re.search(r"^backend: cpu \(.*CUDA.*\)$", done.err, re.M)
    hint = run_decode(*options, "--backend", "cuda", env=unseen).err.split("hint: ")[1]
    ways = (
        ("nvidia-smi", "CUDA_VISIBLE_DEVICES")
        if _core.cuda_built
        else ("cmake.define.ROCKET_CUDA=ON", "README")
    )
    for way in (*ways, "--backend cpu"):
        assert way in hint


@pytest.mark.parametrize(
    "asked",
    [
        ("--kv-dtype", "bf16"),
        ("--prefill-precision", "bf16"),
        ("--expert-bank", "yes", "--expert-slots", "40"),
    ],
    ids=" ".join,
)
def test_a_cpu_that_nobody_named(fuel: Path, asked: tuple[str, ...]) -> None:
    """What it cannot do is refused with why it was chosen; where it was named, that goes without saying."""
    options = ("--fuel", str(fuel), *PROMPT, *asked)
    why = re.escape(_core.cuda_devices()[1]) if not _core.cuda_built else "no CUDA device.*"
    chosen = run_decode(*options, env={"CUDA_VISIBLE_DEVICES": ""})
    check_error(chosen, 2, f"{asked[0]}: ", "cpu backend")
    assert re.search(rf"; backend auto chose cpu \({why}\)$", chosen.err, re.M)
    named = run_decode(*options, "--backend", "cpu")
    check_error(named, 2, f"{asked[0]}: ", "cpu backend")
    assert "auto chose" not in named.err


# --- rocket ---


SCORE = {
    "no text": (2, (), ("expected --text FILE or --ids FILE, found neither",)),
    "two texts": (2, ("--text", "text", "--ids", "ids"), ("found both",)),
    "empty text": (2, ("--text", "empty"), ("--text empty", "the text is empty")),
    "empty ids": (2, ("--ids", "empty"), ("there are no ids in it",)),
    "no ids": (2, ("--ids", "text"), ("--ids text", "'some'")),
    "one token": (1, ("--ids", "one"), ("expected at least 2 tokens",)),
    "text missing": (1, ("--text", "none"), ("--text", "No such file")),
    "text binary": (1, ("--text", "binary"), ("--text binary", "zero byte at 1")),
    "id outside": (1, ("--ids", "outside"), ("token id 5000 at place 2", "0 to 1023")),
    "context too small": (2, ("--text", "text", "--max-context", "1"), ("--max-context", "found 1")),
    "context too large": (1, ("--text", "text", "--max-context", "9000"), ("expected 2 to 8192",)),
    "out not writable": (1, ("--text", "text", "--out", "none/o"), ("--out: cannot write none/o",)),
    "against nothing": (1, ("--text", "text", "--against", "none"), ("--against", "No such file")),
    "against something else": (1, ("--text", "text", "--against", "text"), ("--against text", "broken JSON")),
    "backend": (2, ("--text", "text", "--backend", "x"), ("--backend",)),
}


@pytest.mark.parametrize("kind", SCORE)
def test_wrong_scores(fuel: Path, tmp_path: Path, kind: str) -> None:
    files = {
        "text": b"some text",
        "ids": b"1,2",
        "empty": b"",
        "one": b"7",
        "outside": b"1,5000",
        "binary": b"a\0",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    before = tree(tmp_path)
    status, arguments, words = SCORE[kind]
    check_error(run_rocket("score", str(fuel), *arguments, cwd=tmp_path), status, *words)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (2, (), ("Missing command",)),
        (2, ("skore",), ("skore",)),
        (2, ("score",), ("FUEL",)),
        (2, ("bench",), ("Missing command",)),
        (2, ("bench", "decode", "--preset", "a", "--fuel", "b"), ("--fuel or --preset, found both",)),
        (1, ("bench", "decode", "--preset", "huge"), ("preset huge",)),
        (2, ("bench", "decode", "--pairs", "0"), ("--pairs",)),
        (2, ("bench", "decode", "--read-seconds", "nan"), ("--read-seconds", "found nan")),
    ],
)
def test_wrong_commands(status: int, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_error(run_rocket(*arguments), status, *words)
