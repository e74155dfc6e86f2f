"""What `rocket fuel show` says of a checkpoint's formats, and what the engine makes of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from fuel_strategies import ODD, architectures, schemes
from fuel_tools import FUELS, Rocket, check_golden, flash, rocket
from rocket.accounting import RESIDENT, account_of_tensors
from rocket.architecture import GLM5_NEXT, Architecture, from_fields
from rocket.formats import NOT_LOADED, StoredWeight, format_rows, treatment, weights_of
from rocket.inventory import (
    Bucket,
    Kind,
    Parameter,
    Scheme,
    TensorInfo,
    default_naming,
    encode,
    parameters,
    tensors,
)
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import FuelOptions

__all__ = ["flash", "rocket"]


def weight(name: str, weight_format: str, bucket: Bucket = Bucket.MLA) -> StoredWeight:
    parameter = Parameter(name, (256, 384), Kind.LINEAR, bucket)
    return weights_of(encode(parameter, weight_format))[0]


N = 256 * 384
PLACE = "model.language_model.layers.3."


@pytest.mark.parametrize(
    ("weight_format", "stored", "loaded", "what"),
    [
        ("f32", 4 * N, 4 * N, "kept"),
        ("bf16", 2 * N, 2 * N, "kept"),
        ("f16", 2 * N, 4 * N, "F32 at load"),
        ("nvfp4", N // 2 + N // 16 + 8, N // 2 + N // 16, "kept"),
        ("nvfp4-packed", N // 2 + N // 16 + 4, N // 2 + N // 16, "kept"),
        ("fp8", N + 4 * 2 * 3, N + 4 * 2 * 3, "kept"),
        ("mxfp8", N + N // 32, N + N // 32, "kept"),
    ],
)
def test_linear_weights(weight_format: str, stored: int, loaded: int, what: str) -> None:
    w = weight(PLACE + "self_attn.o_proj", weight_format)
    assert (w.format, w.stored_bytes, w.loaded_bytes) == (weight_format, stored, loaded)
    assert treatment(w, Bucket.MLA) == what
    expert = weight(PLACE + "mlp.experts.3.up_proj", weight_format)
    in_place = "kept, used where it lies" if what == "kept" else what
    assert treatment(expert, Bucket.EXPERTS) == in_place
    for bucket in (Bucket.DRAFT, Bucket.DRAFT_EXPERTS, Bucket.VISION, Bucket.OTHER):
        assert treatment(w, bucket) == NOT_LOADED


@pytest.mark.parametrize("name", ["self_attn.kv_b_proj", "embed_tokens"])
def test_weights_that_are_taken_apart_are_expanded(name: str) -> None:
    for weight_format in ("nvfp4", "nvfp4-packed", "fp8", "mxfp8"):
        w = weight(PLACE + name, weight_format)
        assert treatment(w, Bucket.MLA) == "kept, and expanded to F32 at load"
        kept = weight(PLACE + "self_attn.o_proj", weight_format)
        assert w.loaded_bytes == kept.loaded_bytes + 4 * N
    assert treatment(weight(PLACE + name, "bf16"), Bucket.MLA) == "kept"


def test_scales_that_become_f32() -> None:
    name = PLACE + "self_attn.o_proj"
    data = TensorInfo(name + ".weight", "F8_E4M3", (256, 384))
    for scale in (
        TensorInfo(name + ".weight_scale_inv", "BF16", (2, 3)),
        TensorInfo(name + ".weight_scale", "F32", ()),
        TensorInfo(name + ".weight_scale", "F32", (1,)),
    ):
        (w,) = weights_of([scale, data])
        assert treatment(w, Bucket.MLA) == "kept, scales F32 for each block at load"
        assert treatment(w, Bucket.EXPERTS) == treatment(w, Bucket.MLA)
        assert w.loaded_bytes == N + 4 * 2 * 3


@pytest.mark.parametrize("shape", [(256, 1), (256,)])
@pytest.mark.parametrize("name", ["self_attn.o_proj", "self_attn.kv_b_proj", "embed_tokens"])
def test_a_scale_for_each_row_makes_f32(shape: tuple[int, ...], name: str) -> None:
    data = TensorInfo(PLACE + name + ".weight", "F8_E4M3", (256, 384))
    for dtype, width in (("F32", 4), ("BF16", 2), ("F16", 2)):
        scale = TensorInfo(PLACE + name + ".weight_scale", dtype, shape)
        (w,) = weights_of([data, scale])
        assert (w.format, w.stored_bytes, w.loaded_bytes) == ("fp8-row", N + 256 * width, 4 * N)
        for bucket in (Bucket.MLA, Bucket.EXPERTS):
            assert treatment(w, bucket) == "F32 at load"


def test_spellings_of_fp8() -> None:
    """Block scales by compressed-tensors' name stay as they are in F32; MXFP8's may have either name."""
    name = PLACE + "self_attn.o_proj"
    data = TensorInfo(name + ".weight", "F8_E4M3", (256, 384))
    for dtype, what in (("F32", "kept"), ("BF16", "kept, scales F32 for each block at load")):
        (w,) = weights_of([data, TensorInfo(name + ".weight_scale", dtype, (2, 3))])
        assert (w.format, treatment(w, Bucket.MLA), w.loaded_bytes) == ("fp8-packed", what, N + 4 * 2 * 3)
    assert treatment(w, Bucket.EXPERTS) == what
    for suffix in (".weight_scale", ".weight_scale_inv"):
        for dtype in ("U8", "F8_E8M0"):
            (w,) = weights_of([data, TensorInfo(name + suffix, dtype, (256, 12))])
            assert (w.format, treatment(w, Bucket.MLA), w.loaded_bytes) == ("mxfp8", "kept", N + N // 32)
            assert treatment(w, Bucket.EXPERTS) == "kept, used where it lies"


def test_small_tensors_become_f32() -> None:
    for dtype, what in (("BF16", "F32 at load"), ("F16", "F32 at load"), ("F32", "kept")):
        for name, shape in (
            ("self_attn.q_conv1d.weight", (24, 1, 4)),
            ("self_attn.q_conv1d.weight", (24, 4)),
            ("self_attn.A_log", (24,)),
            ("self_attn.indexer.k_norm.bias", (24,)),
            ("hc_attn_scale", (3,)),
        ):
            (w,) = weights_of([TensorInfo(PLACE + name, dtype, shape)])
            assert treatment(w, Bucket.KDA) == what
            assert w.loaded_bytes == 4 * w.data.nbytes // {"F32": 4}.get(dtype, 2)
    (fn,) = weights_of([TensorInfo(PLACE + "hc_attn_fn", "BF16", (24, 64))])
    assert treatment(fn, Bucket.SMALL) == "kept"


def test_show_of_the_flash_weights(flash: Path, rocket: Rocket) -> None:
    assert rocket("fuel", "show", str(flash)) == 0
    check_golden("show-flash-weights.txt", rocket.out.replace(str(flash), "DIR"))


@pytest.mark.parametrize("name", ["glm-5.3-flash", "glm-5.3"])
def test_show_of_a_manifest(name: str, rocket: Rocket) -> None:
    assert rocket("fuel", "show", name) == 0
    check_golden(f"show-{name}.txt", rocket.out.replace(str(FUELS), "FUELS"))


def test_list(rocket: Rocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocket.fuel.search_path", lambda: [FUELS])
    monkeypatch.setattr("rocket.fuel_command.known_fuels", dict)
    assert rocket("fuel", "list") == 0
    check_golden("list.txt", rocket.out)
    monkeypatch.setattr("rocket.fuel.search_path", list)
    rocket.fails(1, "no fuels are known", arguments=("fuel", "list"))


def test_formats_of_a_mixed_checkpoint(tmp_path: Path, rocket: Rocket) -> None:
    options = FuelOptions(
        replace(ODD, indexer_pattern=""),
        experts="compressed-tensors",
        bf16_expert_layers=(4,),
        small="mixed",
        draft="own-head",
        vision=True,
        files=2,
    )
    fuel = make_fuel(tmp_path / "f", options)
    assert rocket("fuel", "show", str(fuel)) == 0
    check_golden("show-mixed-weights.txt", rocket.out.replace(str(fuel), "DIR"))


@settings(max_examples=40, deadline=None)
@given(arch=architectures(), scheme=schemes)
def test_rows_sum_to_the_account(arch: Architecture, scheme: Scheme) -> None:
    found = list(tensors(parameters(arch), scheme))
    rows = format_rows(found, arch, default_naming(arch))
    account = account_of_tensors(arch, found)
    assert sum(row.stored_bytes for row in rows) == account.tensor_bytes
    loaded = sum(account[bucket].loaded for bucket in (*RESIDENT, Bucket.EXPERTS))
    assert sum(row.loaded_bytes for row in rows) == loaded
    assert all(row.format_name and row.treatment for row in rows)


def test_a_format_that_is_not_known() -> None:
    arch = from_fields(GLM5_NEXT, {})
    strange = TensorInfo(PLACE + "self_attn.o_proj.weight", "I32", (4, 4))
    (row,) = format_rows([strange], arch, default_naming(arch))
    assert row.format_name == "I32"
