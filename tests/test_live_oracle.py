"""The engine against transformers itself, on random fuels, shapes and prompts."""

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden_fuels import CASES, WILD, Case, variant
from rocket import _core
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import LINEAR_FORMATS, VARIANTS, FuelOptions, RandomFuelError, Shape

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"NOT COMPARED WITH TRANSFORMERS: {' and '.join(MISSING)} missing; pip install '.[oracle]'",
    ),
]

TOLERANCE = 1e-4  # standard deviations of the logits, as in test_parity; here against a float64 reference
CONDITION = 5e-5  # a run whose float32 reference is further off magnifies rounding and says nothing
NEAREST = 1e-5  # a run with a closer decision says nothing: either side of it is right
SHAPES = int(os.environ.get("ROCKET_LIVE_SHAPES", "12"))


class Draw:
    """Deterministic choices."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.PCG64(seed)

    def integer(self, low: int, high: int) -> int:
        return low + int(self._generator.random_raw()) % (high - low + 1)

    def choice(self, *options: object) -> object:
        return options[self.integer(0, len(options) - 1)]


def random_shape(draw: Draw) -> Shape:
    layers, groups = draw.integer(2, 6), draw.choice(1, 1, 2, 3)
    attention = "".join(draw.choice("K", "K", "M") for _ in range(layers))
    if "M" not in attention:  # transformers counts tokens in an attention layer's cache
        attention = attention[:-1] + "M"
    indexer = ""
    for i in range(layers):
        may_share = i > 0 and attention[i - 1 : i + 1] == "MM" and indexer[-1] == "F"
        indexer += draw.choice("S", "F") if may_share else "F"
    pool = draw.choice(1, 2, 4, 5)
    return Shape(
        vocab_size=draw.integer(280, 400),
        hidden_size=16 * draw.integer(1, 6),
        intermediate_size=draw.integer(3, 90),
        moe_intermediate_size=16 * draw.integer(1, 3),
        num_hidden_layers=layers,
        rms_norm_eps=draw.choice(1e-5, 1e-6),
        tie_word_embeddings=draw.choice(False, True),
        num_attention_heads=draw.integer(1, 5),
        q_lora_rank=draw.integer(5, 50),
        kv_lora_rank=draw.integer(5, 40),
        qk_nope_head_dim=draw.integer(3, 40),
        v_head_dim=draw.integer(3, 40),
        index_topk=pool * draw.integer(1, 8),
        index_head_dim=draw.integer(3, 40),
        index_n_heads=draw.integer(1, 5),
        index_kpool=pool,
        index_kpool_always_select_tail=draw.choice(True, True, False),
        linear_num_heads=draw.integer(1, 4),
        linear_head_dim=8 * draw.integer(1, 5),
        linear_conv_kernel_dim=draw.integer(2, 6),
        linear_lower_bound=draw.choice(-5.0, -1.0, None),
        n_routed_experts=groups * draw.integer(4, 8),
        n_shared_experts=draw.integer(1, 2),
        num_experts_per_tok=draw.integer(1, 4),
        n_group=groups,
        topk_group=draw.integer(1, groups),
        norm_topk_prob=draw.choice(True, False),
        routed_scaling_factor=draw.choice(2.5, 1.0),
        swiglu_limit=draw.choice(10.0, 3.0),
        hc_mult=draw.choice(4, 4, 2, 1),
        hc_sinkhorn_iters=draw.choice(20, 1, 4),
        attention_pattern=attention,
        mlp_pattern="".join(draw.choice("D", "S", "S") for _ in range(layers)),
        indexer_pattern=indexer,
    )


def random_options(draw: Draw, seed: int) -> FuelOptions:
    return FuelOptions(
        random_shape(draw),
        seed=seed,
        experts=draw.choice("modelopt", "compressed-tensors", "bf16"),
        small=draw.choice("F32", "BF16", "mixed"),
        wide=draw.choice("F32", "BF16"),
        scalars=draw.choice("auto", "empty", "one"),
        input_scale=draw.choice(True, False),
        zero_global=draw.choice(True, False),
        layout=draw.choice("nested", "flat", "text"),
        layer_type_names=draw.choice("release", "transformers", "full"),
        linear_config=draw.choice("nested", "nested", "flat"),
        files=draw.integer(1, 3),
        index=draw.choice(True, False),
        unaligned=draw.choice(True, False),
        draft=draw.choice("none", "layer", "own-head"),
        vision=draw.choice(True, False),
        tokenizer=False,
        attention=draw.choice("bf16", *LINEAR_FORMATS),
        dense_mlp=draw.choice("bf16", *LINEAR_FORMATS),
        shared=draw.choice("bf16", *LINEAR_FORMATS),
        head=draw.choice("bf16", *LINEAR_FORMATS),
        embedding=draw.choice("bf16", *LINEAR_FORMATS),
        mx_scales=draw.choice("U8", "F8_E8M0"),
        patchwork=draw.choice(False, False, True),
    )


def run_reference(fuel: Path, ids: list[int], split: int, float64: bool) -> tuple[Any, np.ndarray]:
    """A prompt of `split` tokens, then token by token."""
    from transformers_oracle import Oracle

    oracle = Oracle(fuel, float64=float64)
    return oracle, np.concatenate([oracle.feed(ids[:split])] + [oracle.feed([t]) for t in ids[split:]])


def compare(fuel: Path, ids: list[int], split: int) -> bool:
    """Compares logits and states; false if the run says nothing."""
    oracle, expected = run_reference(fuel, ids, split, True)
    std = float(expected.std())
    rounded = run_reference(fuel, ids, split, False)[1]
    if oracle.nearest() < NEAREST or float(np.abs(rounded - expected).max()) / std > CONDITION:
        return False
    engine = _core.CoreEngine(str(fuel), backend="cpu", threads=2, max_context=len(ids), max_rows=64)
    stream = engine.open()
    found = [engine.feed(stream, ids[:split], logits="all")]
    found += [engine.step([_core.Row(t, stream, wants_logits=True)])[0] for t in ids[split:]]
    check(np.concatenate(found), expected, std, "logits")
    for name, wanted in oracle.states().items():
        if wanted.size:
            mine = engine.state(stream, name).reshape(wanted.shape)
            check(mine, wanted, max(float(wanted.std()), 1e-6), name)
    engine.unload()
    return True


def check(found: np.ndarray, expected: np.ndarray, scale: float, what: str) -> None:
    assert found.shape == expected.shape, what
    assert np.isfinite(found).all(), what
    worst = float(np.abs(found - expected).max()) / scale
    assert worst <= TOLERANCE, f"{what}: {worst:.2e} standard deviations off"


@pytest.mark.parametrize("number", range(SHAPES))
def test_random_shapes(number: int, tmp_path: Path) -> None:
    for attempt in range(20):
        seed = 1000 * number + attempt
        draw = Draw(seed)
        options = random_options(draw, seed)
        try:
            fuel = make_fuel(tmp_path / f"f{attempt}", options)
        except RandomFuelError:  # experts a token may exceed the experts that compete
            continue
        length, vocab = draw.integer(2, draw.choice(80, 80, 80, 260)), options.shape.vocab_size
        ids = [draw.integer(0, vocab - 1) for _ in range(length)]
        if compare(fuel, ids, draw.integer(1, length)):
            return
    pytest.fail("no shape of twenty had clear decisions")


@pytest.mark.parametrize("name", VARIANTS)
def test_weight_formats_of_releases(name: str, tmp_path: Path) -> None:
    for seed in range(20):
        fuel = make_fuel(tmp_path / str(seed), variant(name, seed))
        draw = Draw(seed)
        ids = [draw.integer(0, WILD.vocab_size - 1) for _ in range(60)]
        if compare(fuel, ids, 45) >= NEAREST:
            return
    pytest.fail("no seed had clear decisions")


@pytest.mark.parametrize("weight_format", LINEAR_FORMATS)
def test_every_linear_weight_in_one_format(weight_format: str, tmp_path: Path) -> None:
    parts = ("experts", "attention", "dense_mlp", "shared", "head", "embedding")
    for seed in range(20):
        options = variant("bf16", seed, **dict.fromkeys(parts, weight_format), zero_global=True)
        fuel = make_fuel(tmp_path / str(seed), options)
        draw = Draw(seed)
        ids = [draw.integer(0, WILD.vocab_size - 1) for _ in range(40)]
        if compare(fuel, ids, 20) >= NEAREST:
            return
    pytest.fail("no seed had clear decisions")


def test_many_exact_ties(tmp_path: Path) -> None:
    """With one index head, half of all pool scores are exactly 0; the lowest index wins."""
    from transformers_oracle import Oracle

    shape = Shape(
        vocab_size=320, index_n_heads=1, attention_pattern="KMKM", num_hidden_layers=4, index_topk=16
    )
    for seed in range(50, 70):
        fuel = make_fuel(tmp_path / str(seed), FuelOptions(shape, seed=seed))
        draw = Draw(seed)
        ids = [draw.integer(0, 319) for _ in range(120)]
        if compare(fuel, ids, 60):
            oracle = Oracle(fuel)
            oracle.feed(ids)
            assert oracle.ties > 10
            return
    pytest.fail("no seed had clear decisions")


def groups_of_parameters(names: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"layers\.\d+\.", "layers.N.", name), []).append(name)
    return groups


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=lambda c: c.name)
def test_every_weight_matters(case: Case, fuel_dir: Path) -> None:
    """Without any one kind of weight (or with plain norms) the reference moves far beyond the tolerance:
    an engine that forgot one cannot pass."""
    from transformers_oracle import Oracle

    oracle = Oracle(case.build(fuel_dir))
    ids = case.tokens()[:70]
    plain = oracle.feed(ids)
    tensors = dict(oracle.text.named_parameters()) | {
        name: buffer for name, buffer in oracle.text.named_buffers() if "e_score" in name
    }
    weak = []
    for group, names in groups_of_parameters(list(tensors)).items():
        if case.shape.index_kpool == 1 and "index_kpool_compress" in group:
            continue  # the softmax over a pool of one is 1
        saved = {name: tensors[name].detach().clone() for name in names}
        for name in names:
            tensors[name].detach().fill_(1.0 if re.search(r"norm\.weight$|layernorm\.weight$", name) else 0.0)
        oracle.reset()
        moved = float(np.abs(oracle.feed(ids) - plain).max()) / float(plain.std())
        if not moved > 100 * TOLERANCE and not np.isnan(moved):
            weak.append(f"{group}: {moved:.1e}")
        for name in names:
            tensors[name].detach().copy_(saved[name])
    assert not weak, weak
    oracle.reset()
    np.testing.assert_array_equal(oracle.feed(ids), plain)


def test_the_clamp_is_reached(fuel_dir: Path) -> None:
    from transformers_oracle import Oracle

    case = CASES[0]
    oracle = Oracle(case.build(fuel_dir))
    ids = case.tokens()[:40]
    plain = oracle.feed(ids)
    for module in oracle.text.modules():
        if hasattr(module, "swiglu_limit"):
            module.swiglu_limit = 1e9
    oracle.reset()
    assert float(np.abs(oracle.feed(ids) - plain).max()) > 100 * TOLERANCE * float(plain.std())


def test_a_reordered_selection_would_show(fuel_dir: Path) -> None:
    """Past index_topk the choice of tokens matters: with a larger one the reference says something else."""
    from transformers_oracle import Oracle

    case = CASES[0]
    fuel = case.build(fuel_dir)
    options = dataclasses.replace(case.options, shape=dataclasses.replace(case.shape, index_topk=64))
    wider = make_fuel(fuel_dir / "wider", options)
    ids, topk = case.tokens()[:60], case.shape.index_topk
    a, b = Oracle(fuel).feed(ids), Oracle(wider).feed(ids)
    same = topk + case.shape.index_kpool - 1  # up to here every token is chosen either way
    np.testing.assert_allclose(a[:same], b[:same], atol=TOLERANCE * a.std())
    assert np.abs(a[same:] - b[same:]).max() > 100 * TOLERANCE * a.std()
