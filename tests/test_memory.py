"""Resident memory: dense weights, the experts that were used, the state, and a fixed rest."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import PRESETS

REST = 200 << 20

# What the process keeps at its peak, and what it may keep by the engine's own count. VmHWM, because ru_maxrss
# also counts what the parent had before the exec.
RUN = """
import json, re, sys
from pathlib import Path
from rocket import Engine
with Engine(sys.argv[1], max_context=512, max_streams=1) as engine:
    tokens = list(engine.generate(list(range(40)), tokens=8, stop=()))
    info, stats = engine.info, engine.core.stats()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"peak": peak, "tokens": len(tokens), **info, **stats}))
"""


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 600 MB of experts, of which a short run uses few."""
    options = PRESETS["tiny"]
    shape = replace(options.shape, n_routed_experts=512, moe_intermediate_size=1024, hidden_size=256)
    return make_fuel(tmp_path_factory.mktemp("fuel") / "many", replace(options, shape=shape))


def test_resident_memory_stays_within_its_bound(many_experts: Path) -> None:
    command = [sys.executable, "-c", RUN, str(many_experts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert found["tokens"] == 8
    state = found["state_bytes_per_stream"] * 2 + found["state_bytes_per_token"] * found["max_context"]
    bound = found["dense_bytes"] + found["streamed_bytes"] + state + REST
    assert found["peak"] < bound
    # The bound says something only if copying all experts would break it.
    assert found["peak"] - found["streamed_bytes"] + found["expert_bytes"] > bound
