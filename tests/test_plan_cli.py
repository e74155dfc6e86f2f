"""rocket plan, rocket split and rocket bench host on the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fuel_tools
import plan_tools
from cli_tools import tree
from fuel_tools import Rocket, check_golden
from rocket import _core, bench_host
from rocket import booster as boosters
from rocket.disk_rate import DiskRates

rocket = fuel_tools.rocket  # a fixture
accounts_once, tiny, trace = plan_tools.accounts_once, plan_tools.tiny, plan_tools.trace


# --- golden output ----------------------------------------------------------------------------------------

GOLDEN = {
    "plan-flash-gb10.txt": ("glm-5.3-flash", "--context", "32768", "--kv-dtype", "bf16"),
    "plan-flash-2-gb10.txt": ("glm-5.3-flash", "--booster", "gb10", "--boosters", "2", "--hit-rate", "0.97"),
    "plan-flash-cache-56.txt": ("glm-5.3-flash", "--booster", "gb10", "--expert-cache-gib", "56"),
    "plan-744b-gb300.txt": (
        *("glm-5.3", "--booster", "gb300", "--context", "262144", "--kv-dtype", "bf16"),
        *("--expert-slots", "7360", "--hit-rate", "0.9"),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plans(rocket: Rocket, name: str) -> None:
    assert rocket("plan", *GOLDEN[name]) == 0
    assert rocket.err == ""
    check_golden(name, rocket.out)


def test_the_manifest_chooses_the_booster(rocket: Rocket, tiny: str) -> None:
    for fuel, booster in (("glm-5.3-flash", "gb10"), ("glm-5.3", "gb300"), (tiny, "gb10")):
        assert rocket("plan", fuel, "--json") == 0
        plan = json.loads(rocket.out)
        assert (plan["booster"], plan["boosters"]) == (booster, 1)
        assert plan["choices"][0].startswith(f"booster: {booster}")


def test_ceilings_of_flash(rocket: Rocket) -> None:
    assert rocket("plan", "glm-5.3-flash", "--booster", "gb10", "--boosters", "2", "--json") == 0
    rows = {(row["count"], row["boosters"]): row["tok_s"] for row in json.loads(rocket.out)["ceilings"]}
    assert f"{rows['full table', 1]:.1f}" == "10.5"
    assert f"{rows['full table, all weights split', 2]:.1f}" == "21.1"


def test_requested_and_delivered_cache(rocket: Rocket) -> None:
    """56 GiB make 4,247 slots of 13.50 MiB, 55.99 GiB."""
    assert rocket("plan", "glm-5.3-flash", "--booster", "gb10", "--expert-cache-gib", "56", "--json") == 0
    plan = json.loads(rocket.out)
    assert (plan["slots"], plan["slot_bytes"]) == (4247, 27 << 19)
    assert plan["expert_cache_requested_bytes"] == 56 << 30
    assert plan["expert_cache_delivered_bytes"] == 4247 * (27 << 19)


def test_golden_split(rocket: Rocket, tiny: str, trace: str, tmp_path: Path) -> None:
    out = tmp_path / "split.json"
    arguments = ("--boosters", "3", "--by", "load", "--trace", trace, "--out", str(out))
    assert rocket("split", tiny, *arguments) == 0
    check_golden("split-tiny.txt", rocket.out)
    check_golden("split-tiny.json", out.read_text())
    first = out.read_bytes()
    assert rocket("split", tiny, *arguments, "--json") == 0
    assert out.read_bytes() == first
    summary = json.loads(rocket.out)
    assert summary == {k: v for k, v in json.loads(first).items() if k != "owner"}
    assert (summary["trace"]["fitted_tokens"], summary["trace"]["judged_tokens"]) == (20, 21)


def test_plan_takes_a_split_and_a_trace(rocket: Rocket, tiny: str, trace: str, tmp_path: Path) -> None:
    out = str(tmp_path / "split.json")
    assert (
        rocket("split", tiny, "--boosters", "3", "--by", "coactivation", "--trace", trace, "--out", out) == 0
    )
    assert rocket("plan", tiny, "--split", out, "--trace", trace, "--expert-slots", "20", "--json") == 0
    plan = json.loads(rocket.out)
    assert (plan["boosters"], plan["split"], plan["experts_owned"]) == (3, out, 27)
    assert 0 < plan["step"]["hit_rate"] < 1
    assert "trace.jsonl" in plan["step"]["hit_rate_source"]


def test_a_plans_slots_are_a_slot_map(rocket: Rocket, tiny: str, tmp_path: Path) -> None:
    assert rocket("plan", tiny, "--expert-slots", "43", "--json") == 0
    slots = json.loads(rocket.out)["slots_of_layer"]
    assert sorted(slots.values()) == [8, 8, 9, 9, 9]
    file = tmp_path / "map.json"
    file.write_text(json.dumps(slots))
    assert rocket("plan", tiny, "--slot-map", str(file), "--json") == 0
    assert json.loads(rocket.out)["slots_of_layer"] == slots


# --- bench host -------------------------------------------------------------------------------------------

DISK = DiskRates(read_gb_s=2.5, write_gb_s=1.25, direct=True)
DEVICE = {
    "name": "NVIDIA H200",
    "unified": False,
    "total_bytes": 140 << 30,
    "free_bytes": 139 << 30,
    "read_gb_s": 4623.4,
    "copy_gb_s": 4235.1,
    "pinned_to_gb_s": 55.41,
    "pageable_to_gb_s": 8.2,
    "pinned_from_gb_s": 55.3,
}


def measured(tmp_path: Path, **changes: Any) -> bench_host.Measured:
    fields = {
        "cpu": 'A "CPU"',
        "threads": 8,
        "memory_bytes": 100 << 30,
        "memory_source": "MemAvailable",
        "read_gb_s": 238.04,
        "copy_gb_s": 201.5,
        "device": None,
        "why_no_device": "no CUDA device was found",
        "disk": DISK,
        "disk_folder": tmp_path,
        "disk_mib": 64,
        **changes,
    }
    return bench_host.Measured(**fields)


def test_profile_of_a_cpu(tmp_path: Path) -> None:
    text = bench_host.profile_text(measured(tmp_path), "host", "2026-11-30")
    assert "Host to device: not measured: no CUDA device was found." in text
    profile = boosters.parse(text.encode(), "host.yaml")
    assert profile.unified_memory
    assert profile.link_gb_s is None
    assert (profile.memory_gib.value, profile.reserve_gib.value) == (100, 5)
    assert (profile.read_gb_s.value, profile.copy_gb_s.value) == (238, 201.5)
    assert (profile.disk_read_gb_s.value, profile.disk_read_gb_s.source) == (2.5, "measured")


def test_profile_of_a_device(tmp_path: Path) -> None:
    text = bench_host.profile_text(measured(tmp_path, device=DEVICE, why_no_device=""), "host", "2026-11-30")
    profile = boosters.parse(text.encode(), "host.yaml")
    assert not profile.unified_memory
    assert (profile.name, profile.memory_gib.value, profile.reserve_gib.value) == ("NVIDIA H200", 139, 2)
    assert (profile.read_gb_s.value, profile.copy_gb_s.value) == (4623, 4235)
    assert profile.host_memory_gib is not None
    assert profile.host_memory_gib.value == 100
    assert profile.link_gb_s is not None
    assert profile.link_gb_s.value == 55.41
    assert "not measured" not in text
    assert "55.4 GB/s pinned, 8.2 GB/s pageable" in "\n".join(
        bench_host.report_lines(measured(tmp_path, device=DEVICE), "host.yaml")
    )


def test_profile_of_unified_memory_is_sized_by_the_system(tmp_path: Path) -> None:
    """What the driver calls free leaves out clean page cache there."""
    device = {**DEVICE, "unified": True, "free_bytes": 7 << 30}
    text = bench_host.profile_text(measured(tmp_path, device=device, why_no_device=""), "host", "2026-11-30")
    profile = boosters.parse(text.encode(), "host.yaml")
    assert profile.unified_memory
    assert profile.memory_gib.value == 100
    assert profile.read_gb_s.value == 4623


@pytest.mark.parametrize("memory_mib", [64, 4096, 21_000])
def test_small_machines_get_a_profile_that_plans(tmp_path: Path, memory_mib: int) -> None:
    small = measured(tmp_path, memory_bytes=memory_mib << 20)
    profile = boosters.parse(bench_host.profile_text(small, "host", "2026-11-30").encode(), "host.yaml")
    assert 0 < profile.reserve_bytes < profile.memory_bytes <= memory_mib << 20


def test_bench_host(rocket: Rocket, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", "3G")
    (tmp_path / "disk").mkdir()
    out = tmp_path / "host.yaml"
    short = ("--disk", str(tmp_path / "disk"), "--disk-mib", "8", "--seconds", "0.01", "--out", str(out))
    assert rocket("bench", "host", *short, "--json") == 0
    result = json.loads(rocket.out)
    assert tree(tmp_path) == ["disk", "host.yaml"]
    assert 0.1 < result["read_gb_s"] < 10_000
    assert 0.1 < result["copy_gb_s"] < 10_000
    assert result["disk"]["read_gb_s"] > 0
    assert result["disk"]["write_gb_s"] > 0
    if result["device"] is None:
        assert "not measured" in rocket.err
        assert result["profile"]["memory_gib"]["value"] == 3
    assert boosters.load(str(out)).model_dump() == result["profile"]
    assert rocket("plan", tiny, "--booster", str(out)) == 0


def test_bench_host_that_fails_leaves_nothing(
    rocket: Rocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> DiskRates:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(bench_host, "disk_rates", fail)
    arguments = (
        "bench",
        "host",
        "--seconds",
        "0.01",
        "--disk",
        str(tmp_path),
        "--out",
        str(tmp_path / "host"),
    )
    rocket.fails(1, "--disk", "Input/output error", arguments=arguments)
    assert tree(tmp_path) == []
    rocket.fails(
        1, "--disk", "nowhere", arguments=(*arguments[:5], str(tmp_path / "nowhere"), *arguments[6:])
    )
    assert tree(tmp_path) == []


def test_rates_refuse_nonsense() -> None:
    for rate in (_core.read_rate_gb_s, _core.copy_rate_gb_s, _core.device_rates):
        with pytest.raises(_core.InputError, match="must not be negative"):
            rate(seconds=-1)


@pytest.mark.gpu
def test_rates_of_a_device() -> None:
    device, why = _core.device_rates(0.05)
    if device is None:
        pytest.skip(f"needs a build with CUDA and a device: {why}")
    assert device["free_bytes"] <= device["total_bytes"]
    # Which is the faster one is nothing to count on while other programs use the device.
    assert all(device[rate] > 0 for rate in ("read_gb_s", "copy_gb_s", "pageable_to_gb_s", "pinned_to_gb_s"))


# --- the comparison in fuels/glm-5.3/README.md ------------------------------------------------------------


def test_readme_has_the_plans_numbers(rocket: Rocket) -> None:
    text = (fuel_tools.FUELS / "glm-5.3" / "README.md").read_text()
    plans = {}
    for context, slots in re.findall(r"^\| ([0-9,]+) \| ([0-9,]+) \| [0-9,]+ \|$", text, re.MULTILINE):
        tokens = context.replace(",", "")
        arguments = ("--booster", "gb300", "--kv-dtype", "bf16", "--context", tokens, "--json")
        assert rocket("plan", "glm-5.3", *arguments) == 0
        plans[int(tokens)] = json.loads(rocket.out)
        assert f"{plans[int(tokens)]['slots']:,}" == slots
    assert sorted(plans) == [1 << 18, 1 << 19, 1 << 20]
    plan, longer = plans[1 << 18], plans[1 << 19]
    slots, state = plan["slots_of_layer"].values(), plan["each_booster_bytes"]["state"]
    for number in (
        f"| {plan['slots'] - longer['slots']:,} | 1,568 |",
        f"| {min(slots)} to {max(slots)} | 48 to 96 |",
        f"| {plan['step']['base_ms']:.2f} ms | 22.4 ms |",
        f"| {plan['step']['miss_a_layer_ms']:.2f} ms | 4.27 ms |",
        f"{plan['step']['base_bytes'] / 2**30:.2f} GiB at the data sheet",
        f"{state / 2**30:.2f} GiB, as much as {state / plan['slot_bytes']:,.0f} slots",
        f"The second 256K cost {plan['slots'] - longer['slots']:,},",
    ):
        assert number in text
