"""The fuel that ships: whole, as its manifest says, and transformers' numbers on its own weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from rocket import _core
from rocket.cli import main

ROOT = Path(__file__).parents[1]
FUEL = ROOT / "fuels" / "sparkler"
GOLDEN = ROOT / "tests" / "golden" / "sparkler.safetensors"
MIB = 2**20

# As in test_parity: float32 sums in another order.
TOLERANCE = 1e-4
CLOSE = 1e-3  # logits: a greedy choice with less between best and second may go either way


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FUEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def engine():
    core = _core.CoreEngine(str(FUEL), backend="cpu", threads=2, max_context=512, max_rows=128)
    yield core
    core.unload()


def test_it_fits_the_repository():
    assert sum(file.stat().st_size for file in FUEL.iterdir()) <= 24 * MIB


def test_the_manifest_agrees_with_the_weights(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["rocket", "fuel", "validate", str(FUEL / "fuel.yaml"), "--weights", str(FUEL)]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code, capsys.readouterr()


def test_logits_are_those_of_transformers(engine, golden):
    stream = engine.open()
    logits = engine.feed(stream, golden["prompt"].tolist(), logits="all")
    engine.close(stream)
    found, expected = logits[golden["positions"]], golden["logits"]
    assert np.isfinite(found).all()
    worst = float(np.abs(found - expected).max() / expected.std())
    assert worst <= TOLERANCE


def test_greedy_continuation_is_that_of_transformers(engine, golden):
    greedy = _core.SamplingParams()
    stream = engine.open()
    prompt = golden["prompt"].tolist()
    engine.feed(stream, prompt, logits="last")
    token = engine.sample(greedy, len(prompt))
    for expected, gap in zip(golden["greedy"].tolist(), golden["gaps"].tolist(), strict=True):
        if gap < CLOSE:
            break
        assert token == expected
        token = engine.decode(stream, token, greedy)
    engine.close(stream)
    assert golden["gaps"][:8].min() > CLOSE, "the golden run should start with clear choices"


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_config_agree(tokenizer):
    config = json.loads((FUEL / "config.json").read_text())["text_config"]
    generation = json.loads((FUEL / "generation_config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert generation == {"do_sample": False, "eos_token_id": config["eos_token_id"]}
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|endoftext|>"


def test_known_prompts_go_on_sensibly(engine, tokenizer):
    def go_on(prompt, count):
        stream = engine.open()
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        engine.feed(stream, ids, logits="last")
        out = [engine.sample(_core.SamplingParams(), len(ids))]
        while len(out) < count:
            out.append(engine.decode(stream, out[-1], _core.SamplingParams()))
        engine.close(stream)
        return tokenizer.decode(out)

    assert go_on("The capital of France is", 4).startswith(" Paris")
    body = go_on("def fibonacci(n):", 48)
    names: dict = {}
    exec("def fibonacci(n):" + body.split("\n\n\n")[0], names)
    assert [names["fibonacci"](n) for n in range(10)] == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
