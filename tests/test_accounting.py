"""Byte accounting: by hand, against the engine's own counts, and properties of any fuel."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fuel_strategies import ODD, architectures, schemes
from fuel_tools import FUELS, Rocket, check_golden, flash, rocket, write_headers
from rocket import _core
from rocket.accounting import (
    GIB,
    RESIDENT,
    Account,
    State,
    account_of_fuel,
    account_of_inventory,
    account_of_tensors,
    expected_union,
    trace_popularity_union,
    trace_union,
)
from rocket.architecture import GLM_MOE_DSA, Architecture, from_fields, read_architecture, to_config
from rocket.bytes_report import disk_rows, resident_rows
from rocket.formats import BECOME_F32
from rocket.inventory import FORMATS, Bucket, Scheme, parameters, tensors
from rocket.random_fuel import architecture_of, make_fuel
from rocket.random_fuel_shape import FuelOptions
from rocket.shards import split_by_name

__all__ = ["flash", "rocket"]


@pytest.fixture(scope="module")
def flash_account(flash: Path) -> Account:
    return account_of_fuel(flash)


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def test_the_flash_table_digit_for_digit(flash_account: Account) -> None:
    a = flash_account
    assert [(label, layers, gib(size)) for label, layers, size in resident_rows(a)] == [
        ("embed + lm_head", None, "2.36"),
        ("KDA attention", 34, "8.72"),
        ("sparse-MLA attention", 11, "2.56"),
        ("dense MLP", 3, "0.84"),
        ("shared experts", 42, "1.97"),
        ("routers, hyper-connections, norms", 45, "0.16"),
    ]
    assert gib(a.resident_bytes) == "16.62"
    assert gib(a.routed_token_bytes) == "4.43"
    assert gib(a.token_bytes_full_table) == "21.05"
    assert gib(a.token_bytes_touched) == "19.87"
    assert gib(a.expert_bytes) == "159.47"
    assert a.slot_bytes == 13.5 * 2**20
    assert len(a.experts) == 42


def test_the_flash_table_is_printed(flash: Path, rocket: Rocket) -> None:
    assert rocket("bytes", str(flash)) == 0
    check_golden("bytes-flash.txt", rocket.out.replace(str(flash), "DIR"))
    rows = {line[:36].strip(): line[36:51].split() for line in rocket.out.splitlines()}
    assert rows["KDA attention"] == ["34", "8.72"]
    assert rows["all routed experts"] == ["42", "159.47"]
    assert rows["per-token weight traffic"] == ["21.05"]


# --- the 744 B model, by hand -----------------------------------------------------------------------------


def test_the_744b_table_by_hand(rocket: Rocket) -> None:
    """From its config: 78 layers, 3 of them dense, 256 experts top-8; BF16 but for the experts."""
    hidden, heads, vocabulary = 6144, 64, 154880
    two = 2  # bytes of BF16
    embed = vocabulary * hidden * two
    q = hidden * 2048 + 2048 + 2048 * heads * (192 + 64)
    kv = hidden * (512 + 64) + 512 + 512 * heads * (192 + 256)
    out = heads * 256 * hidden
    indexer = 2048 * 32 * 128 + hidden * 128 + 2 * 128 + hidden * 32
    attention = 78 * (q + kv + out) + 21 * indexer
    dense = 3 * (3 * hidden * 12288)
    shared = 75 * (3 * hidden * 2048)
    routers, norms = 75 * 256 * hidden, (2 * 78 + 1) * hidden
    small = (routers + norms) * two + 75 * 256 * 4  # the router's bias is F32
    expert = 3 * hidden * 2048
    slot = expert // 2 + expert // 16
    stored_expert = slot + 3 * 4  # with its global scales
    resident = 2 * embed + (attention + dense + shared) * two + small
    routed = 75 * 8 * stored_expert

    assert rocket("bytes", "glm-5.3", "--json") == 0
    found = json.loads(rocket.out)
    buckets = {name: bucket["bytes"] for name, bucket in found["buckets"].items()}
    assert buckets["embed"] == buckets["lm_head"] == embed
    assert buckets["mla"] == attention * two
    assert buckets["dense_mlp"] == dense * two
    assert buckets["shared_experts"] == shared * two
    assert buckets["small"] == small
    assert buckets["experts"] == 75 * 256 * stored_expert
    assert found["slot_bytes"] == slot
    assert found["resident_bytes"] == resident
    assert found["routed_token_bytes"] == routed
    assert found["token_bytes_full_table"] == resident + routed
    assert found["token_bytes_touched"] == resident + routed - embed + hidden * two
    trunk = 2 * embed // two + attention + dense + shared + routers + norms + 75 * 256 * (1 + expert)
    assert found["trunk_parameters"] == trunk
    assert trunk == pytest.approx(744e9, rel=0.001)

    draft = (2 * hidden * hidden + q + kv + out + indexer + expert + 256 * hidden + 5 * hidden) * two
    draft += 256 * 4 + 256 * expert * two  # its experts are BF16 in the release
    assert buckets["draft"] + buckets["draft_experts"] == draft
    total = sum(buckets.values())
    assert total == resident + 75 * 256 * (stored_expert + 3 * 4) + draft  # with activation scales
    # A release of 87 files has 464,822,872,912 bytes with its headers.
    assert total == pytest.approx(464_822_872_912, rel=1e-4)
    assert total == pytest.approx(465e9, rel=0.001)


def test_the_744b_table_is_printed(rocket: Rocket) -> None:
    assert rocket("bytes", "glm-5.3", "--context", "262144", "--kv-dtype", "bf16") == 0
    check_golden("bytes-glm-5.3.txt", rocket.out.replace(str(FUELS), "FUELS"))


# --- against the engine -----------------------------------------------------------------------------------

FUELS_MADE = [
    FuelOptions(ODD),
    FuelOptions(ODD, experts="compressed-tensors", small="mixed", draft="layer"),
    FuelOptions(ODD, experts="bf16", wide="F32", small="BF16", layout="flat"),
    FuelOptions(ODD, draft="own-head", vision=True, files=4, input_scale=False),
]


@pytest.mark.parametrize("options", FUELS_MADE, ids=range(len(FUELS_MADE)))
def test_the_engine_counts_the_same(tmp_path: Path, options: FuelOptions) -> None:
    fuel = make_fuel(tmp_path / "f", options)
    account = account_of_fuel(fuel)
    engine = _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=64)
    info = engine.info()
    engine.unload()
    arch = account.arch
    row = account[Bucket.EMBED].loaded // arch.vocab_size
    dense = account.resident_loaded_bytes - account[Bucket.EMBED].loaded + row
    assert info["slot_bytes"] == account.slot_bytes
    assert info["expert_bytes"] == account[Bucket.EXPERTS].loaded
    assert info["token_bytes"] == dense + arch.moe_layers * arch.num_experts_per_tok * account.slot_bytes
    assert info["draft_bytes"] + info["vision_bytes"] == sum(
        count.stored
        for bucket, count in account.buckets.items()
        if bucket in (Bucket.DRAFT, Bucket.DRAFT_EXPERTS, Bucket.VISION)
    ) + _draft_scales(fuel, arch)
    # The engine pads each tensor to 64 bytes.
    padding = info["dense_bytes"] - account.resident_loaded_bytes
    assert 0 <= padding < 64 * sum(account[bucket].tensors for bucket in RESIDENT)
    state = State(arch)
    assert info["state_bytes_per_stream"] == state.stream_bytes
    assert info["state_bytes_per_token"] == round(state.token_bytes)


WIDE = replace(
    ODD,
    hidden_size=96,
    intermediate_size=160,
    moe_intermediate_size=64,
    q_lora_rank=224,
    kv_lora_rank=288,
    v_head_dim=32,
    linear_head_dim=32,
)


@pytest.mark.parametrize("linear", FORMATS)
def test_the_engine_counts_quantised_weights_the_same(tmp_path: Path, linear: str) -> None:
    """Every format for every linear weight, the experts in the format that comes next in the list."""
    experts = FORMATS[(FORMATS.index(linear) + 1) % len(FORMATS)]
    arch = architecture_of(FuelOptions(WIDE))
    listed = list(tensors(parameters(arch), Scheme(experts=experts, linear=linear, head=experts)))
    fuel = write_headers(tmp_path / "f", listed)
    with (fuel / "model.safetensors").open("r+b") as file:  # zeros that are there, unlike a hole
        begin = 8 + int.from_bytes(file.read(8), "little")
        size = file.seek(0, 2)
        file.seek(begin)
        file.write(bytes(size - begin))
    (fuel / "config.json").write_text(json.dumps(to_config(arch)))
    account = account_of_fuel(fuel)
    engine = _core.CoreEngine(str(fuel), backend="cpu", threads=1, max_context=64)
    info = engine.info()
    engine.unload()
    assert info["slot_bytes"] == account.slot_bytes
    assert info["expert_bytes"] == account[Bucket.EXPERTS].loaded
    # Experts that cannot be used in place lie with the dense weights.
    dense = account.resident_loaded_bytes
    parts = sum(account[bucket].tensors for bucket in RESIDENT)
    if experts in BECOME_F32:
        dense += account[Bucket.EXPERTS].loaded
        parts += account[Bucket.EXPERTS].tensors
    assert 0 <= info["dense_bytes"] - dense < 64 * parts


def _draft_scales(fuel: Path, arch: Architecture) -> int:
    """Activation scales of draft layers, which the engine counts with these layers."""
    layer = f"layers.{arch.num_hidden_layers}."
    found = [t for f in _core.read_headers(str(fuel)) for t in f["tensors"]]
    return sum(t[4] for t in found if layer in t[0] and t[0].endswith(".input_scale"))


# --- properties -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(arch=architectures(), scheme=schemes, files=st.integers(1, 4))
def test_buckets_sum_to_the_files(
    tmp_path_factory: pytest.TempPathFactory, arch: Architecture, scheme: Scheme, files: int
) -> None:
    listed = list(tensors(parameters(arch), scheme))
    try:
        split_by_name(listed, files)
    except ValueError:  # a tensor so large that it leaves a file nothing
        assume(False)
    fuel = write_headers(tmp_path_factory.mktemp("p") / "f", listed, files)
    account = account_of_fuel(fuel, arch)
    on_disk = sum(file.stat().st_size for file in fuel.glob("*.safetensors"))
    assert account.tensor_bytes + account.header_bytes == account.file_bytes == on_disk
    assert account.file_count == files
    assert account.buckets == account_of_inventory(arch, scheme).buckets
    assert sum(count.stored for count in account.experts.values()) == account.expert_bytes
    # The rows of the table are these bytes as well.
    rows = [size for label, _, size in disk_rows(account) if not label.startswith(" ")]
    assert sum(rows) + sum(size for _, _, size in resident_rows(account)) == on_disk


@settings(max_examples=60, deadline=None)
@given(arch=architectures(), scheme=schemes)
def test_what_steps_read(arch: Architecture, scheme: Scheme) -> None:
    account = account_of_inventory(arch, scheme)
    a = account
    assert a.token_bytes_touched <= a.token_bytes_full_table
    assert a.step_bytes(1) == pytest.approx(a.token_bytes_touched)
    steps = [a.step_bytes(rows) for rows in range(1, 65)]
    assert all(one <= more for one, more in itertools.pairwise(steps))
    most = a.resident_bytes + a.expert_bytes + 1
    for rows, size in enumerate(steps, 1):
        assert size <= min(most, rows * steps[0] + 1)
    assert a.trunk_parameters >= a.active_parameters > 0


@settings(max_examples=60, deadline=None)
@given(arch=architectures(), context=st.integers(0, 5000), dtype=st.sampled_from(["f32", "bf16", "fp8"]))
def test_state_grows_by_pages(arch: Architecture, context: int, dtype: str) -> None:
    state = State(arch, dtype)
    pages = -(-context // state.page_tokens)
    assert state.bytes_at(context) == state.stream_bytes + pages * state.page_bytes
    assert state.page_tokens % arch.index_kpool == 0
    assert state.page_bytes == state.token_bytes * state.page_tokens
    traffic = state.traffic(context)
    assert all(size >= 0 for size in traffic.values())
    assert traffic["latent_read"] <= arch.mla_layers * context * state.latent_row_bytes
    most = arch.index_topk + arch.index_kpool - 1
    assert traffic["latent_read"] <= arch.mla_layers * most * state.latent_row_bytes


# --- unions of experts ------------------------------------------------------------------------------------


def test_expected_union() -> None:
    assert expected_union(288, 8, 1) == 8
    assert expected_union(288, 8, 8) == pytest.approx(58.1, abs=0.05)
    assert expected_union(4, 4, 3) == 4
    # All ways in which two rows draw 2 of 4.
    pairs = list(itertools.combinations(range(4), 2))
    mean = np.mean([len({*a, *b}) for a in pairs for b in pairs])
    assert expected_union(4, 2, 2) == pytest.approx(mean)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 6), tokens=st.integers(6, 20))
def test_unions_of_a_trace(seed: int, rows: int, tokens: int) -> None:
    random = np.random.default_rng(seed)
    routes = np.array([[random.permutation(7)[:3] for _ in range(2)] for _ in range(tokens)])
    blocks = [routes[i : i + rows] for i in range(0, tokens - rows + 1, rows)]
    expected = [np.mean([len(set(b[:, layer].ravel().tolist())) for b in blocks]) for layer in range(2)]
    assert trace_union(routes, rows) == pytest.approx(expected)
    apart = trace_popularity_union(routes, 7, rows)
    for layer in range(2):
        share = [np.mean([e in row for row in routes[:, layer]]) for e in range(7)]
        assert apart[layer] == pytest.approx(sum(1 - (1 - s) ** rows for s in share))


def test_a_trace_shorter_than_a_step() -> None:
    with pytest.raises(ValueError, match="at least 4 rows, found 3"):
        trace_union(np.zeros((3, 1, 1), np.int32), 4)


# --- the command ------------------------------------------------------------------------------------------


def test_the_script_prints_the_same(rocket: Rocket) -> None:
    script = FUELS.parent / "scripts" / "runtime" / "active-set-bytes.py"
    env = {**os.environ, "ROCKET_FUELS": str(FUELS)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, timeout=120, check=False)
    assert rocket("bytes", "glm-5.3-flash") == 0
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, rocket.out, b"")


def test_a_trace_gives_columns_of_its_own(tmp_path: Path, rocket: Rocket) -> None:
    fuel = make_fuel(tmp_path / "f", FuelOptions(ODD))
    random = np.random.default_rng(0)
    routes = np.array([[random.permutation(6)[:2] for _ in range(3)] for _ in range(20)])
    lines = [json.dumps({"tok": i, "layers": row.tolist()}) for i, row in enumerate(routes)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    assert rocket("bytes", str(fuel), "--trace", str(trace), "--json") == 0
    steps = {step["rows"]: step for step in json.loads(rocket.out)["steps"]}
    account = account_of_fuel(fuel)
    for rows in (1, 4, 16):
        order = steps[rows]["trace_in_order"]
        assert order["experts_per_layer"] == pytest.approx(np.mean(trace_union(routes, rows)))
        used = dict(zip(sorted(account.experts), trace_union(routes, rows), strict=True))
        assert order["bytes"] == round(account.step_bytes(rows, used))
    assert steps[24]["trace_in_order"] is None
    assert rocket("bytes", str(fuel), "--trace", str(trace)) == 0
    assert "trace, rows in order" in rocket.out
    assert rocket.out.rstrip().splitlines()[-1].split()[-2:] == ["-", "-"]
    rocket.fails(2, "42 lists", "3", arguments=("bytes", "glm-5.3-flash", "--trace", str(trace)))


def test_wrong_options(tmp_path: Path, rocket: Rocket) -> None:
    for option, value, words in (
        ("--context", "0", ("--context", "from 1 to 1048576", "0")),
        ("--context", "2000000", ("--context", "from 1 to 1048576", "2000000")),
        ("--context", "many", ("--context", "an integer", "many")),
        ("--kv-dtype", "f16", ("--kv-dtype", "f32, bf16, fp8", "f16")),
        ("--trace", str(tmp_path), ("--trace", str(tmp_path), "directory")),
    ):
        rocket.fails(2, *words, arguments=("bytes", "glm-5.3-flash", option, value))


def test_a_small_fuel_is_shown_in_mib(tmp_path: Path, rocket: Rocket) -> None:
    fuel = make_fuel(tmp_path / "f", FuelOptions(ODD, draft="layer"))
    assert rocket("bytes", str(fuel)) == 0
    check_golden("bytes-odd.txt", rocket.out.replace(str(fuel), "DIR"))


# --- odd cases --------------------------------------------------------------------------------------------


def test_a_tied_head_is_read_whole() -> None:
    tied = account_of_inventory(from_fields(GLM_MOE_DSA, {"tie_word_embeddings": True}))
    assert tied[Bucket.HEAD].stored == 0
    assert tied.token_bytes_touched == tied.token_bytes_full_table
    assert tied.step_bytes(5) > tied.token_bytes_full_table


def test_layers_with_experts_of_several_formats() -> None:
    """A slot holds the largest; a token reads of each layer what lies there."""
    arch = from_fields(GLM_MOE_DSA, {"num_hidden_layers": 5})
    found = list(tensors(parameters(arch), Scheme()))
    wide = list(tensors(parameters(arch), Scheme(experts="bf16")))
    mixed = [t for t in found if "layers.4.mlp.experts" not in t.name]
    mixed += [t for t in wide if "layers.4.mlp.experts" in t.name]
    account = account_of_tensors(arch, mixed)
    expert = 3 * 6144 * 2048
    assert account.slot_bytes == 2 * expert
    assert account.slot_bytes_of(3) == expert // 2 + expert // 16
    assert account.routed_token_bytes == 8 * (2 * expert + expert // 2 + expert // 16 + 12)


def test_other_tensors_are_counted_apart(tmp_path: Path) -> None:
    fuel = make_fuel(tmp_path / "f", FuelOptions(ODD))
    arch = read_architecture(fuel)
    found = list(tensors(parameters(arch), Scheme()))
    extra = found[0]._replace(name="model.stranger.weight", shape=(7,))
    account = account_of_tensors(arch, [*found, extra])
    assert account[Bucket.OTHER].stored == 14
    assert ("other tensors", None, 14) in disk_rows(account)
