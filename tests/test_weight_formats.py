"""Fuels with the weight formats of releases: how they are spelled, counted, shown, and decoded.

tests/test_parity.py and tests/test_live_oracle.py hold the numbers that they decode to against transformers;
here, whatever may differ between two spellings of the same weights must not change a bit.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fuel_files import read_headers, read_tensor
from fuel_tools import Rocket, rocket
from golden_fuels import variant
from rocket import _core
from rocket.accounting import RESIDENT, account_of_fuel, read_tensors
from rocket.formats import BECOME_F32, weights_of
from rocket.inventory import PLAIN_FORMATS, Bucket, TensorInfo, classify, detect_naming
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import PATCHES, VARIANTS, FuelOptions
from rocket.shards import header_of

__all__ = ["rocket"]

PROMPT = [5, 17, 3, 80, 44, 2, 9, 61, 30, 12]


def logits_of(fuel: Path) -> np.ndarray:
    engine = _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=32, max_rows=16)
    logits = engine.feed(engine.open(), PROMPT, logits="all")
    engine.unload()
    assert logits is not None
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    return logits.copy()


@pytest.fixture(scope="module")
def made(fuel_dir: Path) -> Callable[[FuelOptions], Path]:
    """Makes a fuel, or finds the one that an earlier test made."""
    known: dict[FuelOptions, Path] = {}

    def make(options: FuelOptions) -> Path:
        if options not in known:
            known[options] = make_fuel(fuel_dir / f"formats-{len(known)}", options)
        return known[options]

    return make


Made = Callable[[FuelOptions], Path]


# --- how they are spelled ---------------------------------------------------------------------------------

NVFP4 = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
PACKED = {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"}
FP8 = {"weight": "F8_E4M3", "weight_scale_inv": "F32"}
FP8_PACKED = {"weight": "F8_E4M3", "weight_scale": "BF16"}
FP8_MODELOPT = {"weight": "F8_E4M3", "weight_scale": "F32"}
FP8_TENSOR = {"weight": "F8_E4M3", "weight_scale": "F32"}
FP8_ROW = {"weight": "F8_E4M3", "weight_scale": "BF16"}
MXFP8 = {"weight": "F8_E4M3", "weight_scale": "U8"}
BF16 = {"weight": "BF16"}


def without_input_scale(spelling: dict[str, str]) -> dict[str, str]:
    return {suffix: dtype for suffix, dtype in spelling.items() if suffix != "input_scale"}


# Expert, dense MLP, shared expert, attention, expert of the draft layer.
SPELLINGS = {
    "modelopt": (NVFP4, BF16, BF16, BF16, BF16),
    "modelopt-dense": (NVFP4, NVFP4, BF16, BF16, NVFP4),
    "compressed-tensors": (PACKED, BF16, BF16, BF16, {}),
    "fp8": (FP8, FP8, FP8, FP8, FP8),
    "fp8-rows": (FP8_ROW, FP8_ROW, FP8_ROW, FP8_ROW, {}),
    "mixed-layers": (
        FP8_MODELOPT,
        without_input_scale(NVFP4),
        FP8_TENSOR,
        FP8_TENSOR,
        without_input_scale(NVFP4),
    ),
    "mixed-groups": (PACKED, PACKED, FP8_PACKED, FP8_PACKED, {}),
    "mxfp8": (MXFP8, MXFP8, MXFP8, MXFP8, {}),
    "bf16": (BF16, BF16, BF16, BF16, BF16),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, made: Made) -> None:
    options = variant(name)
    headers = read_headers(made(options))
    prefix = "model." if options.layout == "flat" else "model.language_model."
    places = (
        "layers.4.mlp.experts.5.up_proj",
        "layers.2.mlp.down_proj",
        "layers.3.mlp.shared_experts.gate_proj",
        "layers.3.self_attn.kv_b_proj",
        "layers.5.mlp.experts.0.down_proj",
    )
    for place, expected in zip(places, SPELLINGS[name], strict=True):
        module = f"{prefix}{place}."
        found = {n.removeprefix(module): e["dtype"] for n, (_, e) in headers.items() if n.startswith(module)}
        assert found == expected, place


def test_shapes_of_scales(made: Made) -> None:
    shapes = {name: entry["shape"] for name, (_, entry) in read_headers(made(variant("fp8"))).items()}
    layer = "model.language_model.layers.2."
    assert shapes[layer + "mlp.gate_proj.weight"] == [192, 160]
    assert shapes[layer + "mlp.gate_proj.weight_scale_inv"] == [2, 2]
    shapes = {name: entry["shape"] for name, (_, entry) in read_headers(made(variant("mxfp8"))).items()}
    assert shapes[layer + "mlp.gate_proj.weight_scale"] == [192, 5]
    assert layer + "self_attn.f_b_proj.weight_scale" not in shapes  # 16 columns: left in BF16
    shapes = {
        name: entry["shape"] for name, (_, entry) in read_headers(made(variant("mixed-layers"))).items()
    }
    place = "model.language_model.layers.4.mlp.experts.0.up_proj.weight_scale"
    assert shapes[place] == [1, 1, 2, 1]
    shapes = {name: entry["shape"] for name, (_, entry) in read_headers(made(variant("fp8-rows"))).items()}
    assert shapes[layer + "mlp.gate_proj.weight_scale"] == [192, 1]
    for name, expected in (("modelopt-dense", [1]), ("mixed-layers", [])):
        headers = read_headers(made(variant(name)))
        assert headers[layer + "mlp.gate_proj.weight_scale_2"][1]["shape"] == expected


def test_quantised_values(made: Made) -> None:
    """No NaN among codes and scales; the scales of one weight differ."""
    for name in ("fp8", "fp8-rows", "mxfp8", "patchwork"):
        fuel = made(variant(name))
        for tensor, (_, entry) in read_headers(fuel).items():
            if entry["dtype"] == "F8_E4M3":
                codes = read_tensor(fuel, tensor) & 0x7F
                assert codes.max() <= 0x7E, tensor
                assert len(np.unique(codes)) > min(10, codes.size // 4), tensor
    layer = "model.language_model.layers.2.mlp."
    scales = read_tensor(made(variant("fp8")), layer + "gate_proj.weight_scale_inv")
    assert len(np.unique(scales)) == 4
    assert (scales > 0).all()
    assert len(np.unique(read_tensor(made(variant("mxfp8")), layer + "gate_proj.weight_scale"))) == 3


def test_the_patchwork_has_every_format(made: Made) -> None:
    found, _ = read_tensors(made(variant("patchwork")))
    assert {w.format for w in weights_of(found)} == set(PATCHES)
    assert {t.dtype for t in found if t.dtype == "F8_E8M0"}


def quantisation(fuel: Path) -> tuple[dict | None, dict | None]:
    """What config.json and hf_quant_config.json say."""
    config = json.loads((fuel / "config.json").read_text()).get("quantization_config")
    file = fuel / "hf_quant_config.json"
    return config, json.loads(file.read_text())["quantization"] if file.exists() else None


def test_what_configs_say(made: Made) -> None:
    said = {name: quantisation(made(variant(name))) for name in VARIANTS}
    assert said["bf16"] == (None, None)
    assert said["modelopt"][0] is None
    alone = said["modelopt"][1]
    assert (alone["quant_algo"], alone["group_size"]) == ("NVFP4", 16)
    assert "model.layers.3.self_attn*" in alone["exclude_modules"]  # the tensors have the other prefix
    config, file = said["modelopt-dense"]
    assert config["quant_algo"] == file["quant_algo"] == "NVFP4"
    assert not [pattern for pattern in config["ignore"] if ".0.mlp" in pattern]
    assert said["compressed-tensors"][0]["format"] == "nvfp4-pack-quantized"
    assert said["compressed-tensors"][1] is None
    assert said["fp8"][0]["weight_block_size"] == [128, 128]
    layers = said["mixed-layers"][0]["quantized_layers"]
    assert said["mixed-layers"][1]["quant_algo"] == "MIXED_PRECISION"
    place = "model.language_model.layers."
    assert layers[place + "0.mlp.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers[place + "0.self_attn.o_proj"] == {"quant_algo": "FP8"}
    assert layers[place + "4.mlp.experts.1.up_proj"]["quant_algo"] == "FP8_PB_WO"
    groups = said["mixed-groups"][0]["config_groups"]
    assert [g["format"] for g in groups.values()] == ["nvfp4-pack-quantized", "float-quantized"]
    assert r"re:.*mlp\.experts\.\d+\.up_proj$" in groups["group_0"]["targets"]
    assert r"re:.*self_attn\.o_proj$" in groups["group_1"]["targets"]
    assert "model.language_model.layers.3*" in said["mixed-groups"][0]["ignore"]
    (rows,) = said["fp8-rows"][0]["config_groups"].values()
    assert (rows["format"], rows["weights"]["strategy"]) == ("float-quantized", "channel")
    assert said["mxfp8"][0]["quant_algo"] == "MXFP8"


def test_the_script_makes_variants(made: Made, tmp_path: Path) -> None:
    """Options given beside a variant win over its own."""
    script = Path(__file__).parents[1] / "scripts" / "make_fuel.py"
    command = [sys.executable, str(script), str(tmp_path / "f"), "--draft", "none", "--variant", "fp8"]
    subprocess.run([*command, "--num-hidden-layers", "4"], check=True, capture_output=True)
    found, _ = read_tensors(tmp_path / "f")
    assert {w.format for w in weights_of(found) if "self_attn.o_proj" in w.name} == {"fp8"}
    assert not [t for t in found if ".layers.4." in t.name]
    wrong = subprocess.run([*command[:-1], "fp9"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "fp9" in wrong.stderr


# --- what they are counted as -----------------------------------------------------------------------------

TIED = {"shape": dataclasses.replace(variant("fp8").shape, tie_word_embeddings=True), "embedding": "mxfp8"}
COUNTED = {
    **{name: variant(name) for name in VARIANTS},
    "tied": variant("fp8", **TIED),
    "experts to rewrite": variant("fp8", experts="fp8-bf16-scales", draft="none"),
    "tied rows": variant("fp8-rows", shape=TIED["shape"], embedding="fp8-row", draft="layer"),
    "experts in F16": variant("modelopt", experts="f16", fp8_expert_layers=(4,)),
}


@pytest.mark.parametrize("options", COUNTED.values(), ids=COUNTED)
def test_bytes_sum_to_the_files_and_to_the_engine(options: FuelOptions, made: Made) -> None:
    fuel = made(options)
    account = account_of_fuel(fuel)
    on_disk = sum(file.stat().st_size for file in fuel.glob("*.safetensors"))
    assert account.tensor_bytes + account.header_bytes == account.file_bytes == on_disk
    assert (account.draft_layers, account[Bucket.OTHER].tensors) == (int(options.draft != "none"), 0)

    engine = _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=32)
    info = engine.info()
    engine.unload()
    arch = account.arch
    found, _ = read_tensors(fuel)
    naming = detect_naming([t.name for t in found])
    dense = read = experts_loaded = parts = 0
    for weight in weights_of(found):
        bucket = classify(weight.data.name, arch, naming).bucket
        elements = int(np.prod(weight.data.shape)) * (2 if weight.format.startswith("nvfp4") else 1)
        packed, expanded = weight.loaded_bytes, 0
        taken_apart = weight.name.endswith(("embed_tokens", "kv_b_proj"))
        if taken_apart and weight.format not in (*PLAIN_FORMATS, "fp8-row"):
            packed, expanded = packed - 4 * elements, 4 * elements
        if bucket in RESIDENT:
            dense, parts = dense + packed + expanded, parts + 1 + 2 * bool(expanded)
        if bucket is Bucket.EMBED:
            row = (expanded or packed) // arch.vocab_size
            whole = (packed + row if expanded else packed) if arch.tie_word_embeddings else row
            read += whole
        elif bucket in RESIDENT:
            read += expanded or packed
        elif bucket is Bucket.EXPERTS and (weight.rewrites_scales or weight.format in BECOME_F32):
            experts_loaded, parts = experts_loaded + packed, parts + 2
    chosen = arch.num_experts_per_tok
    routed = sum(layer.loaded * chosen // arch.n_routed_experts for layer in account.experts.values())
    assert info["expert_bytes"] == account[Bucket.EXPERTS].loaded
    assert info["token_bytes"] == read + routed
    assert dense == account.resident_loaded_bytes
    # The engine pads each tensor to 64 bytes.
    assert 0 <= info["dense_bytes"] - dense - experts_loaded < 64 * 2 * parts
    drafts = [t for t in found if f".layers.{arch.num_hidden_layers}." in t.name]
    assert (info["draft_tensors"], info["draft_bytes"]) == (len(drafts), sum(t.nbytes for t in drafts))


# --- what is shown of them --------------------------------------------------------------------------------


def shown(rocket: Rocket, fuel: Path) -> dict[str, set[tuple[str, str]]]:
    """Part -> its formats, each with what becomes of it at load."""
    assert rocket("fuel", "show", str(fuel)) == 0
    lines = rocket.out.splitlines()
    heading = next(line for line in lines if line.startswith("part"))
    at = [heading.index(word) for word in ("format", "weights", "at load")]
    parts: dict[str, set[tuple[str, str]]] = {}
    for line in lines[lines.index(heading) + 1 :]:
        part, cell = line[: at[0]].strip(), line[at[0] : at[1]].strip()
        parts.setdefault(part, set()).add((cell, line[at[2] :].strip()))
    return parts


PLACE = "kept, used where it lies"
REWRITTEN = "kept, scales F32 for each block at load"
EXPANDED = "kept, and expanded to F32 at load"


def test_show_says_what_is_kept_and_what_is_expanded(made: Made, rocket: Rocket) -> None:
    parts = shown(rocket, made(variant("fp8")))
    assert parts["routed experts"] == {("FP8 in blocks", PLACE)}
    assert parts["dense MLP"] == {("FP8 in blocks", "kept")}
    assert parts["sparse-MLA attention"] >= {("FP8 in blocks", "kept"), ("FP8 in blocks", EXPANDED)}
    assert parts["draft experts"] == {("FP8 in blocks", "not loaded")}
    parts = shown(rocket, made(variant("mixed-layers")))
    assert parts["routed experts"] == {("NVFP4, ModelOpt", PLACE), ("FP8 in blocks, ModelOpt", PLACE)}
    assert parts["dense MLP"] == {("NVFP4, ModelOpt", "kept")}
    assert parts["KDA attention"] == {("FP8, one scale", REWRITTEN)}
    assert ("FP8, one scale", EXPANDED) in parts["sparse-MLA attention"]
    assert parts["draft experts"] == {("NVFP4, ModelOpt", "not loaded")}
    parts = shown(rocket, made(variant("mixed-groups")))
    assert parts["routed experts"] == {("NVFP4, compressed-tensors", PLACE), ("BF16", PLACE)}
    assert parts["shared experts"] == {("FP8 in blocks, compressed-tensors", REWRITTEN)}
    parts = shown(rocket, made(variant("fp8-rows")))
    for part in ("routed experts", "dense MLP", "shared experts", "KDA attention", "sparse-MLA attention"):
        assert ("FP8, a scale a row", "F32 at load") in parts[part]
    parts = shown(rocket, made(variant("mxfp8")))
    assert parts["routed experts"] == {("MXFP8", PLACE)}
    assert parts["KDA attention"] == {("MXFP8", "kept"), ("BF16", "kept")}
    assert "draft layer" not in parts
    parts = shown(rocket, made(variant("modelopt-dense")))
    assert parts["dense MLP"] == {("NVFP4, ModelOpt", "kept")}
    assert parts["shared experts"] == {("BF16", "kept")}
    parts = shown(rocket, made(COUNTED["experts to rewrite"]))
    assert parts["routed experts"] == {("FP8 in blocks, scales BF16", REWRITTEN)}


# --- what must not matter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["modelopt-dense", "mixed-layers", "mixed-groups", "fp8"])
def test_configs_decide_nothing(name: str, made: Made, tmp_path: Path) -> None:
    """The tensors tell their format, whatever a config says: nothing, in another place, with other names, or
    what is not so."""
    options = variant(name)
    fuel = made(options)
    expected = logits_of(fuel)
    for change in (
        {"ignore_prefix": "flat"},
        {"ignore_prefix": "nested"},
        {"quantization": "hf"},
        {"quantization": "config"},
    ):
        other = made(dataclasses.replace(options, **change))
        np.testing.assert_array_equal(logits_of(other), expected, str(change))
    lying = tmp_path / "lying"
    shutil.copytree(fuel, lying)
    config = json.loads((lying / "config.json").read_text())
    for said in (None, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}, {"bits": 3}):
        config["quantization_config"] = said
        (lying / "config.json").write_text(json.dumps(config))
        (lying / "hf_quant_config.json").unlink(missing_ok=True)
        np.testing.assert_array_equal(logits_of(lying), expected, str(said))


@pytest.mark.parametrize("name", ["modelopt-dense", "compressed-tensors", "mixed-layers"])
def test_scalars_and_activation_scales_do_not_matter(name: str, made: Made) -> None:
    options = variant(name)
    expected = logits_of(made(options))
    for change in ({"scalars": "empty"}, {"scalars": "one"}, {"input_scale": False}, {"input_scale": True}):
        other = made(dataclasses.replace(options, **change))
        np.testing.assert_array_equal(logits_of(other), expected, str(change))


def test_the_two_names_of_powers_of_two(made: Made) -> None:
    options = variant("mxfp8")
    other = made(dataclasses.replace(options, mx_scales="F8_E8M0"))
    np.testing.assert_array_equal(logits_of(other), logits_of(made(options)))


@pytest.mark.parametrize("draft_weights", ["bf16", "fp8", "nvfp4", "mxfp8"])
def test_drafts_are_left_alone(draft_weights: str, made: Made) -> None:
    options = variant("modelopt", draft="none")
    expected = logits_of(made(options))
    for draft in ("layer", "own-head"):
        other = made(dataclasses.replace(options, draft=draft, draft_weights=draft_weights))
        np.testing.assert_array_equal(logits_of(other), expected, draft)


def widen_small_tensors(fuel: Path, out: Path) -> int:
    """A copy of a fuel whose small tensors are the same numbers in F32; how many were BF16."""
    shutil.copytree(fuel, out)
    found, data, widened = [], [], 0
    for name, (file, entry) in read_headers(fuel).items():
        small = name.endswith(("_base", "_scale", "A_log", "dt_bias", "e_score_correction_bias", "_ape"))
        wide = entry["dtype"] == "BF16" and (small or "conv1d" in name or "norm" in name)
        widened += wide
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        raw = file.read_bytes()[entry["at"] : entry["at"] + size]
        data.append(read_tensor(fuel, name).astype("<f4").tobytes() if wide else raw)
        found.append(TensorInfo(name, "F32" if wide else entry["dtype"], tuple(entry["shape"])))
    (out / "model.safetensors").write_bytes(header_of(found) + b"".join(data))
    return widened


def test_small_tensors_are_read_by_their_dtype(made: Made, tmp_path: Path) -> None:
    """The same numbers in BF16 and in F32: taps, biases, gates' parameters, norms."""
    fuel = made(variant("bf16", draft="none"))
    assert widen_small_tensors(fuel, tmp_path / "f32") > 50
    np.testing.assert_array_equal(logits_of(tmp_path / "f32"), logits_of(fuel))


def test_two_spellings_of_one_weight(made: Made, tmp_path: Path) -> None:
    """ModelOpt's multipliers and compressed-tensors' divisors, of powers of two, mean the same weights."""
    options = variant("modelopt", draft="none", quantization="auto", ignore_prefix="own", input_scale=False)
    fuels = [make_fuel(tmp_path / name, dataclasses.replace(options, experts=name, scalars="empty"))
             for name in ("modelopt", "compressed-tensors")]  # fmt: skip
    for fuel, exponent in zip(fuels, (-9, 9), strict=True):
        for name, (file, entry) in read_headers(fuel).items():
            if name.endswith(("weight_scale_2", "weight_global_scale")):
                with file.open("r+b") as f:
                    f.seek(entry["at"])
                    f.write(np.float32(2.0**exponent).tobytes())
    np.testing.assert_array_equal(logits_of(fuels[0]), logits_of(fuels[1]))


# --- what is wrong with them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "suffix", "missing"),
    [
        ("fp8", "mlp.gate_proj.weight_scale_inv", "weight_scale"),
        ("mxfp8", "mlp.gate_proj.weight_scale", "weight_scale"),
        ("modelopt-dense", "mlp.gate_proj.weight_scale_2", "weight_scale_2"),
        ("modelopt-dense", "mlp.gate_proj.weight_scale", "weight_scale"),
    ],
)
def test_a_missing_scale_is_named(name: str, suffix: str, missing: str, made: Made, tmp_path: Path) -> None:
    fuel = tmp_path / "f"
    shutil.copytree(made(variant(name)), fuel)
    tensor = "model.language_model.layers.0." + suffix
    file = fuel / "model.safetensors"
    raw = file.read_bytes()
    hidden = tensor[:-1] + "X"  # another name of the same length
    assert raw.count(f'"{tensor}"'.encode()) == 1
    file.write_bytes(raw.replace(f'"{tensor}"'.encode(), f'"{hidden}"'.encode()))
    with pytest.raises(_core.FuelError, match=r"layers\.0\.mlp\.gate_proj\.weight") as error:
        _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=32)
    assert missing in str(error.value)
    assert "found none" in str(error.value)
