"""Small models, boosters and traces for the tests of planning and splitting."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocket import fuel_account, plan_command, split_command
from rocket.accounting import Account, account_of_inventory
from rocket.architecture import GLM5_NEXT, GLM_MOE_DSA, from_fields
from rocket.booster import Booster
from rocket.random_fuel import make_fuel

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "index_topk": 32,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
}
NEXT = {**SMALL, "index_kpool": 4, "linear_num_heads": 4, "linear_head_dim": 16}

MOE_LAYERS, EXPERTS, TOPK = 5, 16, 4  # of the smallest random fuel
load_account = cache(fuel_account.load_account)  # a large fuel's takes seconds


@pytest.fixture(autouse=True)
def accounts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan_command, split_command):
        monkeypatch.setattr(module, "load_account", load_account)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_fuel(tmp_path_factory.mktemp("fuel") / "tiny"))


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    ids = skewed_ids(41, MOE_LAYERS, EXPERTS, TOPK)
    return str(write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", ids))


# A profile as a file has it.
BOOSTER: dict[str, Any] = {
    "id": "mine",
    "name": "my machine",
    "unified_memory": False,
    "memory_gib": {"value": 24, "source": "measured"},
    "reserve_gib": 1,
    "read_gb_s": 900,
    "copy_gb_s": 800,
    "host_memory_gib": 60,
    "host_reserve_gib": 5,
    "link_gb_s": 25,
    "disk_read_gb_s": 3,
}


@cache
def small_account(chemistry: str = GLM5_NEXT, experts: int = 10, dense: int = 2, layers: int = 6) -> Account:
    fields = dict(NEXT if chemistry == GLM5_NEXT else SMALL)
    fields |= {"n_routed_experts": experts, "first_k_dense_replace": min(dense, layers)}
    fields["num_hidden_layers"] = layers
    if chemistry == GLM_MOE_DSA:
        fields["qk_rope_head_dim"] = 8
    return account_of_inventory(from_fields(chemistry, fields))


def booster_of(memory_bytes: int, reserve_bytes: int = 0, **more: object) -> Booster:
    """A booster with so much memory, to the byte."""
    fields = {
        "id": "test",
        "name": "a test",
        "unified_memory": False,
        "memory_gib": memory_bytes / 2**30,
        "reserve_gib": reserve_bytes / 2**30,
        "read_gb_s": 100,
        "copy_gb_s": 90,
        "host_memory_gib": 64,
        "host_reserve_gib": 5,
        "link_gb_s": 20,
        "disk_read_gb_s": 2,
        **more,
    }
    return Booster.model_validate(fields)


def skewed_ids(tokens: int, layers: int, experts: int, topk: int, seed: int = 0) -> np.ndarray:
    """Routes in which some experts are far busier than others, [tokens, layers, top-k]."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / (1 + np.arange(experts))
    ids = np.empty((tokens, layers, topk), np.int32)
    for layer in range(layers):
        chance = rng.permutation(weights / weights.sum())
        for token in range(tokens):
            ids[token, layer] = np.sort(rng.choice(experts, topk, replace=False, p=chance))
    return ids


def write_trace(file: Path, ids: np.ndarray) -> Path:
    lines = (json.dumps({"tok": i + 1, "layers": layers}) for i, layers in enumerate(ids.tolist()))
    file.write_text("\n".join(lines) + "\n")
    return file
