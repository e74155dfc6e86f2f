"""The maker of random fuels: files, spellings, determinism, errors."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from fuel_files import read_headers, read_tensor
from rocket import random_fuel as rf
from rocket.random_fuel_formats import e4m3_values
from rocket.random_fuel_shape import PRESETS, FuelOptions, RandomFuelError, Shape

SMALL = Shape(num_hidden_layers=4, n_routed_experts=4, num_experts_per_tok=2)


def test_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    options = FuelOptions(SMALL, seed=3)
    a, b = rf.make_fuel(tmp_path / "a", options), rf.make_fuel(tmp_path / "b", options)
    other = rf.make_fuel(tmp_path / "c", dataclasses.replace(options, seed=4))
    assert rf.fuel_sha256(a) == rf.fuel_sha256(b) != rf.fuel_sha256(other)


def test_the_default_fuel_never_changes(tmp_path: Path) -> None:
    """Golden files and results elsewhere are tied to these bytes."""
    assert rf.fuel_sha256(rf.make_fuel(tmp_path / "f")) == DEFAULT_SHA256


DEFAULT_SHA256 = "65ec585684f623f757fa0b8590d99712748aa6113bf2daec297191680919d2dc"


def test_piece_size_does_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = FuelOptions(dataclasses.replace(SMALL, vocab_size=8192))
    whole = rf.fuel_sha256(rf.make_fuel(tmp_path / "a", options))
    monkeypatch.setattr(rf, "PIECE", 4096)
    assert rf.fuel_sha256(rf.make_fuel(tmp_path / "b", options)) == whole


@pytest.mark.parametrize("experts", ["modelopt", "compressed-tensors", "bf16"])
@pytest.mark.parametrize("layout", ["nested", "flat", "text"])
def test_spellings(tmp_path: Path, experts: str, layout: str) -> None:
    options = FuelOptions(
        SMALL, experts=experts, layout=layout, draft="layer", vision=True, files=3, index=layout == "flat"
    )
    fuel = rf.make_fuel(tmp_path / "f", options)
    headers = read_headers(fuel)
    prefix = "model.language_model." if layout == "nested" else "model."
    expert = f"{prefix}layers.3.mlp.experts.1.gate_proj."
    leaves = {name.removeprefix(expert) for name in headers if name.startswith(expert)}
    assert (
        leaves
        == {
            "modelopt": {"weight", "weight_scale", "weight_scale_2", "input_scale"},
            "compressed-tensors": {"weight_packed", "weight_scale", "weight_global_scale"},
            "bf16": {"weight"},
        }[experts]
    )
    config = json.loads((fuel / "config.json").read_text())
    text = config["text_config"] if layout == "nested" else config
    assert text["hidden_size"] == SMALL.hidden_size
    assert text["num_nextn_predict_layers"] == 1
    assert config["model_type"] == ("glm5_next_text" if layout == "text" else "glm5_next")
    assert ("quantization_config" in config) == (experts != "bf16")
    assert f"{prefix}layers.4.eh_proj.weight" in headers
    assert f"{prefix}layers.4.hc_attn_fn" not in headers
    assert any(name.startswith("model.visual.") for name in headers)
    index = fuel / "model.safetensors.index.json"
    assert index.exists() == (layout == "flat")
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file.name for name, (file, _) in headers.items()}


def test_values_are_in_range_and_not_trivial(tmp_path: Path) -> None:
    options = FuelOptions(dataclasses.replace(SMALL, vocab_size=8192), small="BF16")
    fuel = rf.make_fuel(tmp_path / "f", options)
    layer = "model.language_model.layers.3."
    for name in read_headers(fuel):
        if name.endswith("weight_scale"):
            scale = e4m3_values()[read_tensor(fuel, name)]
            assert np.isfinite(scale).all()
            assert (scale >= 0).all()
        elif not name.endswith(("input_scale", "weight_scale_2")) and "experts." not in name:
            value = read_tensor(fuel, name)
            assert np.isfinite(value).all(), name
            assert value.std() > 0, name
            assert np.abs(value).max() < 20, name
    head = read_tensor(fuel, "lm_head.weight")  # large enough to be made from bit lanes
    assert head.std() == pytest.approx(2 * SMALL.hidden_size**-0.5, rel=0.5)
    assert abs(head.mean()) < 0.01
    gate = read_tensor(fuel, layer + "mlp.experts.0.gate_proj.weight_scale_2")
    up = read_tensor(fuel, layer + "mlp.experts.0.up_proj.weight_scale_2")
    assert gate != up
    assert 0.1 <= gate / up <= 10


def test_zero_global(tmp_path: Path) -> None:
    for experts, leaf in (("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")):
        fuel = rf.make_fuel(tmp_path / experts, FuelOptions(SMALL, experts=experts, zero_global=True))
        layer = "model.language_model.layers.3.mlp.experts."
        assert read_tensor(fuel, f"{layer}0.down_proj.{leaf}") == 0
        assert read_tensor(fuel, f"{layer}1.down_proj.{leaf}") > 0


def test_unaligned(tmp_path: Path) -> None:
    fuel = rf.make_fuel(tmp_path / "f", FuelOptions(SMALL, unaligned=True))
    assert all(entry["at"] % 2 == 1 for _, entry in read_headers(fuel).values())


def test_tokenizer_is_byte_level(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip(
        "tokenizers", reason="the tokenizers package is missing: tokenizer.json is not tried"
    )
    fuel = rf.make_fuel(tmp_path / "f", FuelOptions(SMALL))
    tokenizer = tokenizers.Tokenizer.from_file(str(fuel / "tokenizer.json"))
    text = "The Größe of 数\n\t🚀 at the end"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < SMALL.vocab_size
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    assert tokenizer.encode("<|user|>").ids == [263]
    assert len(tokenizer.encode(" the").ids) < 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 60}, "hidden_size is 60; it must be a multiple of 16"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"index_topk": 30}, "index_topk is 30; it must be a multiple of 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but only 4 experts may compete"),
        ({"n_group": 3}, "4 experts do not fall into 3 groups"),
        ({"n_group": 4}, "a group needs at least 2 experts"),
        ({"topk_group": 2}, "topk_group is 2, but there are only 1 groups"),
        ({"attention_pattern": "KKM"}, "attention_pattern has 3 letters for 4 layers"),
        ({"attention_pattern": "KKXM"}, "only the letters K and M"),
        ({"attention_pattern": "MKKM", "indexer_pattern": "FFFS"}, "layer 3 shares an indexer"),
    ],
)
def test_impossible_shapes(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(RandomFuelError, match=message):
        rf.make_fuel(tmp_path / "f", FuelOptions(dataclasses.replace(SMALL, **change)))
    assert list(tmp_path.iterdir()) == []


def test_existing_output(tmp_path: Path) -> None:
    fuel = rf.make_fuel(tmp_path / "f", FuelOptions(SMALL))
    before = rf.fuel_sha256(fuel)
    with pytest.raises(RandomFuelError, match="not empty"):
        rf.make_fuel(fuel, FuelOptions(SMALL, seed=1))
    assert rf.fuel_sha256(fuel) == before
    rf.make_fuel(fuel, FuelOptions(SMALL, seed=1), force=True)
    assert rf.fuel_sha256(fuel) != before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(RandomFuelError, match="not a fuel"):
        rf.make_fuel(tmp_path / "other", FuelOptions(SMALL), force=True)
    assert (tmp_path / "other" / "letter.txt").exists()
    with pytest.raises(RandomFuelError, match="not a directory"):
        rf.make_fuel(tmp_path / "other" / "letter.txt", FuelOptions(SMALL), force=True)


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RandomFuelError, match="cannot write the fuel"):
        rf.make_fuel(tmp_path / "file" / "f", FuelOptions(SMALL))


def test_an_interrupted_fuel_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        assert 0 < done <= total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rf.make_fuel(tmp_path / "f", FuelOptions(SMALL), progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_sizes_of_presets() -> None:
    bench = rf.counted_bytes(PRESETS["bench"])
    assert bench["parameters"] == pytest.approx(1.07e9, rel=0.01)
    assert bench["token"] == pytest.approx(332e6, rel=0.01)
    flash = rf.counted_bytes(PRESETS["flash-slice"])
    assert flash["token"] == pytest.approx(5.18e9, rel=0.01)
    assert rf.counted_bytes(PRESETS["tiny"])["disk"] < 2e6
