"""The inventory of tensors: against the engine's reader, the oracle's modules, and itself."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_strategies import ODD, architectures, schemes
from rocket import _core
from rocket.architecture import (
    GLM5_NEXT,
    GLM_MOE_DSA,
    Architecture,
    ConfigError,
    VisionTower,
    from_fields,
    read_architecture,
    to_config,
    to_fields,
)
from rocket.inventory import (
    FLAT,
    FORMATS,
    NESTED,
    Bucket,
    Kind,
    Naming,
    Scheme,
    classify,
    default_naming,
    detect_naming,
    encode,
    parameters,
    tensors,
)
from rocket.random_fuel import TensorTable, architecture_of, make_fuel
from rocket.random_fuel_config import text_config
from rocket.random_fuel_shape import FuelOptions


@pytest.mark.parametrize("layout", ["nested", "flat", "text"])
@pytest.mark.parametrize("linear", ["nested", "flat"])
@pytest.mark.parametrize("names", ["release", "transformers", "full"])
def test_configs_are_read_as_the_engine_reads_them(
    tmp_path: Path, layout: str, linear: str, names: str
) -> None:
    options = FuelOptions(ODD, layout=layout, linear_config=linear, layer_type_names=names)
    fuel = make_fuel(tmp_path / "f", options)
    expected = architecture_of(options)
    assert dataclasses.replace(read_architecture(fuel), vision=None) == expected
    if linear == "flat":
        assert from_fields(GLM5_NEXT, text_config(options)) == expected


def test_the_engine_loads_what_the_inventory_lists(tmp_path: Path) -> None:
    """Its loader demands every shape; a wrong one, or one too few, is an error."""
    for options in (FuelOptions(ODD), FuelOptions(ODD, experts="compressed-tensors", layout="flat")):
        fuel = make_fuel(tmp_path / options.layout, options)
        engine = _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=64)
        engine.unload()


def test_a_parameter_too_few_is_missed_by_the_engine(tmp_path: Path) -> None:
    """So the test above can fail."""
    fuel = make_fuel(tmp_path / "f", FuelOptions(ODD))
    data = (fuel / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = "model.language_model.layers.1.self_attn.indexer.wk.weight"
    header[name.replace("wk", "wx")] = header.pop(name)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    (fuel / "model.safetensors").write_bytes(data[:8] + text + data[8 + size :])
    with pytest.raises(_core.FuelError, match=r"indexer\.wk"):
        _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=64)


def test_random_fuels_have_these_tensors() -> None:
    options = FuelOptions(ODD, draft="own-head", vision=True)
    arch = architecture_of(options)
    scheme = Scheme(hyper="bf16", taps="f32")
    listed = list(tensors(parameters(arch, NESTED, draft_own_head=True), scheme))
    made = [(t.name, t.dtype, t.shape) for t in TensorTable(options).specs]
    assert made == [tuple(t) for t in listed]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_encoded_bytes(weight_format: str) -> None:
    out, inp = 160, 320
    bits = {"bf16": 16, "f16": 16, "f32": 32, "nvfp4": 4, "nvfp4-packed": 4, "fp8": 8}
    bits |= {"fp8-row": 8, "mxfp8": 8}
    scales = {"nvfp4": out * inp // 16 + 8, "nvfp4-packed": out * inp // 16 + 4, "mxfp8": out * inp // 32}
    scales["fp8-row"] = 2 * out
    scales["fp8"] = 4 * 2 * 3  # blocks of 128 x 128, the last ones cut
    p = next(p for p in parameters(from_fields(GLM5_NEXT, {})) if p.kind is Kind.LINEAR)
    found = encode(dataclasses.replace(p, shape=(out, inp)), weight_format)
    expected = out * inp * bits[weight_format] // 8 + scales.get(weight_format, 0)
    assert sum(t.nbytes for t in found) == expected
    assert len({t.name for t in found}) == len(found)


def test_names_tell_the_bucket() -> None:
    arch = from_fields(GLM5_NEXT, {"num_hidden_layers": 5, "num_nextn_predict_layers": 1})
    layer = "model.language_model.layers."
    for name, bucket, index, expert in (
        ("lm_head.weight", Bucket.HEAD, -1, -1),
        ("model.language_model.embed_tokens.weight", Bucket.EMBED, -1, -1),
        ("model.language_model.norm.weight", Bucket.SMALL, -1, -1),
        (layer + "0.self_attn.q_proj.weight", Bucket.KDA, 0, -1),
        (layer + "3.self_attn.q_a_proj.weight", Bucket.MLA, 3, -1),
        (layer + "3.self_attn.indexer.k_norm.bias", Bucket.MLA, 3, -1),
        (layer + "0.mlp.gate_proj.weight", Bucket.DENSE_MLP, 0, -1),
        (layer + "4.mlp.gate.weight", Bucket.SMALL, 4, -1),
        (layer + "4.mlp.gate.e_score_correction_bias", Bucket.SMALL, 4, -1),
        (layer + "4.hc_ffn_scale", Bucket.SMALL, 4, -1),
        (layer + "4.mlp.shared_experts.up_proj.weight_scale", Bucket.SHARED, 4, -1),
        (layer + "4.mlp.experts.17.up_proj.weight_scale_2", Bucket.EXPERTS, 4, 17),
        (layer + "4.mlp.experts.17.up_proj.input_scale", Bucket.UNUSED, -1, -1),
        (layer + "5.mlp.experts.17.up_proj.weight", Bucket.DRAFT_EXPERTS, 5, 17),
        (layer + "5.eh_proj.weight", Bucket.DRAFT, 5, -1),
        ("model.visual.blocks.0.attn.qkv.weight", Bucket.VISION, -1, -1),
        ("model.something.else", Bucket.OTHER, -1, -1),
    ):
        assert classify(name, arch, NESTED) == (bucket, index, expert), name


@pytest.mark.parametrize("trunk", ["model.language_model.", "language_model.model.", "model.", ""])
def test_namings_are_told_apart(trunk: str) -> None:
    naming = detect_naming([f"{trunk}layers.0.input_layernorm.weight", "model.visual.x"])
    assert naming.trunk == trunk
    assert naming.head == ("language_model." if trunk.startswith("language_model.") else "")


def test_the_draft_layer_and_the_tower_are_listed_apart() -> None:
    arch = from_fields(GLM5_NEXT, {"num_nextn_predict_layers": 1}, vision=VisionTower())
    found = parameters(arch)
    assert {p.layer for p in found if p.bucket is Bucket.DRAFT} == {45}
    assert not [p for p in found if p.bucket is Bucket.DRAFT and "hc_" in p.name]
    tower = sum(2 * math.prod(p.shape) for p in found if p.bucket is Bucket.VISION)
    assert tower == 1_127_254_016  # as others count the release's


def test_wrong_configs() -> None:
    for field, value, words in (
        ("num_hidden_layers", 0, "num_hidden_layers: expected a whole number of at least 1, found 0"),
        ("hidden_size", "4096", "hidden_size: expected a whole number of at least 1, found '4096'"),
        ("num_experts_per_tok", 300, "expected at most n_routed_experts (256), found 300"),
        ("mlp_layer_types", ["dense"], "mlp_layer_types: expected 78 entries (num_hidden_layers), found 1"),
        ("indexer_types", ["whole"] * 78, "indexer_types[0]: expected full or shared, found 'whole'"),
        ("tie_word_embeddings", 1, "tie_word_embeddings: expected true or false, found 1"),
        ("index_topk_freq", 1.5, "index_topk_freq: expected a whole number, found 1.5"),
    ):
        with pytest.raises(ConfigError) as error:
            from_fields(GLM_MOE_DSA, {field: value})
        assert words in str(error.value)
    with pytest.raises(ConfigError, match="glm5_next or glm_moe_dsa"):
        from_fields("llama", {})


def test_indexers_are_shared_by_schedule() -> None:
    arch = from_fields(GLM_MOE_DSA, {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert [i for i, full in enumerate(arch.indexer_full) if full] == [0, 1, *range(2, 78, 4)]
    found = {p.layer for p in parameters(arch) if "indexer" in p.name}
    assert found == {0, 1, *range(2, 78, 4)}


@settings(max_examples=60, deadline=None)
@given(arch=architectures())
def test_configs_come_back(arch: Architecture) -> None:
    assert from_fields(arch.chemistry, to_fields(arch), vision=arch.vision) == arch
    config = json.loads(json.dumps(to_config(arch)))
    assert config["model_type"] == arch.chemistry


@settings(max_examples=60, deadline=None)
@given(arch=architectures(), scheme=schemes, flat=st.booleans())
def test_inventories_name_each_tensor_once_and_in_its_bucket(
    arch: Architecture, scheme: Scheme, flat: bool
) -> None:
    naming = FLAT if flat else default_naming(arch)
    found = parameters(arch, naming)
    names = [t.name for p in found for t in encode(p, scheme.format_of(p))]
    assert len(set(names)) == len(names)
    assert detect_naming(names) == Naming(naming.trunk)
    for p in found:
        for t in encode(p, scheme.format_of(p), input_scale=False):
            assert classify(t.name, arch, naming) == (p.bucket, p.layer, p.expert), t.name
    assert not [p for p in found if p.bucket is Bucket.OTHER]


# --- against transformers ---------------------------------------------------------------------------------


NEEDS = "needs torch and transformers: pip install '.[oracle]'"


def _fused(name: str) -> bool:
    return ".mlp.experts." in name


@pytest.mark.oracle
def test_glm_moe_dsa_against_transformers() -> None:
    torch = pytest.importorskip("torch", reason=NEEDS)
    from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    fields = {"num_hidden_layers": 8, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields))
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    ours = [t for p in parameters(from_fields(GLM_MOE_DSA, fields)) for t in encode(p, "bf16")]
    assert {t.name: t.shape for t in ours if not _fused(t.name)} == {
        name: shape for name, shape in theirs.items() if not _fused(name)
    }
    assert sum(math.prod(t.shape) for t in ours) == sum(map(math.prod, theirs.values()))


@pytest.mark.oracle
def test_glm5_next_against_transformers() -> None:
    """Modules are renamed and fused in memory, so what is neither must match, and the sums."""
    torch = pytest.importorskip("torch", reason=NEEDS)
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

    fields = {"num_hidden_layers": 8, "index_kpool": 4}
    config = Glm5NextConfig(text_config=fields, vision_config={"out_hidden_size": 4096})
    with torch.device("meta"):
        model = Glm5NextForConditionalGeneration(config)
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    arch = from_fields(GLM5_NEXT, fields, vision=VisionTower())
    ours = {t.name: t.shape for p in parameters(arch) for t in encode(p, "bf16")}
    both = theirs.keys() & ours.keys()
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
    renamed = ("conv1d", "forget_gate", "_hc.", ".mlp.experts.")
    assert not [n for n in theirs.keys() - both if not any(word in n for word in renamed)]
    assert sum(map(math.prod, ours.values())) == sum(map(math.prod, theirs.values()))
