"""The engine against the golden files that scripts/make_oracle.py wrote from transformers."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from backends import EXACT, with_backends
from golden_fuels import CASES, CHUNK, GREEDY, LENGTH, Case, check_fuel
from rocket import _core

# Float32 sums of a few hundred terms in another order, through five to eight layers. The reference differs
# from itself (one prefill against token by token) by 2e-5 to 5e-5 standard deviations of the logits.
TOLERANCE = 1e-4


@dataclasses.dataclass
class Golden:
    case: Case
    tensors: dict[str, np.ndarray]
    engine: _core.CoreEngine

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    @property
    def tokens(self) -> list[int]:
        return self.tensors["tokens"].tolist()

    @property
    def std(self) -> float:
        return float(self.tensors["logits"].std())

    def layers(self, prefix: str) -> list[int]:
        return sorted(int(name.split("/")[1]) for name in self.tensors if name.startswith(prefix + "/"))


@pytest.fixture(scope="module", params=with_backends(CASES))
def golden(request: pytest.FixtureRequest, fuel_dir: Path) -> Iterator[Golden]:
    case: Case = request.param[0]
    fuel = case.build(fuel_dir)
    with safe_open(case.file, "np") as f:
        check_fuel(case, fuel, f.metadata()["fuel_sha256"])
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    assert tensors["tokens"].tolist() == case.tokens()
    engine = _core.CoreEngine(
        str(fuel),
        backend=request.param[1],
        threads=2,
        max_context=LENGTH + GREEDY,
        max_rows=128,
        **EXACT,
    )
    yield Golden(case, tensors, engine)
    engine.unload()


def check(
    found: np.ndarray, expected: np.ndarray, scale: float, what: str, tolerance: float = TOLERANCE
) -> float:
    """Largest difference in units of `scale`; fails above the tolerance and on anything not finite."""
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    assert np.isfinite(found).all(), f"{what}: {np.count_nonzero(~np.isfinite(found))} values are not finite"
    difference = np.abs(found.astype(np.float64) - expected) / scale
    worst = float(difference.max())
    at = np.unravel_index(int(difference.argmax()), difference.shape)
    assert worst <= tolerance, f"{what}: {worst:.2e} at {tuple(map(int, at))}, allowed {tolerance:.0e}"
    return worst


def feed_all(golden: Golden, stream: int, ids: list[int]) -> np.ndarray:
    logits = golden.engine.feed(stream, ids, logits="all")
    assert logits is not None
    return logits


def record_run(golden: Golden, ids: list[int]) -> dict[str, list[np.ndarray]]:
    """One step over all the tokens, with its record."""
    golden.engine.set_record(True)
    stream = golden.engine.open()
    try:
        golden.engine.feed(stream, ids, logits="none", chunk=len(ids))
        return golden.engine.record()
    finally:
        golden.engine.close(stream)
        golden.engine.set_record(False)


def test_logits_of_every_prompt_at_every_position(golden: Golden, capsys: pytest.CaptureFixture) -> None:
    worst = 0.0
    for n in golden.case.prompts():
        stream = golden.engine.open()
        logits = feed_all(golden, stream, golden.tokens[:n])
        worst = max(worst, check(logits, golden["logits"][:n], golden.std, f"prompt of {n}"))
        worst = max(worst, check(logits[-1], golden[f"last/{n}"], golden.std, f"last row of a prompt of {n}"))
        golden.engine.close(stream)
    with capsys.disabled():
        print(f"\n{golden.case.name}: logits within {worst:.1e} standard deviations of the reference")


def test_logits_token_by_token(golden: Golden) -> None:
    stream = golden.engine.open()
    for position, token in enumerate(golden.tokens):
        logits, rows = golden.engine.step([_core.Row(token, stream, wants_logits=True)])
        assert list(rows) == [0]
        check(logits[0], golden["logits"][position], golden.std, f"position {position}")
    golden.engine.close(stream)


def test_greedy_tokens(golden: Golden) -> None:
    greedy = _core.SamplingParams()
    for n in golden.case.prompts():
        stream = golden.engine.open()
        golden.engine.feed(stream, golden.tokens[:n])
        found = [golden.engine.sample(greedy, n)]
        while len(found) < GREEDY:
            found.append(golden.engine.decode(stream, found[-1], greedy))
        assert found == golden[f"greedy/{n}"].tolist(), f"after a prompt of {n}"
        golden.engine.close(stream)


def test_logits_of_decode_steps(golden: Golden) -> None:
    n = golden.case.greedy_prompt
    stream = golden.engine.open()
    logits = feed_all(golden, stream, golden.tokens[:n])
    check(logits[-1], golden["greedy_logits"][0], golden.std, "after the prompt")
    for i, token in enumerate(golden[f"greedy/{n}"][:-1].tolist()):
        logits, _ = golden.engine.step([_core.Row(token, stream, wants_logits=True)])
        check(logits[0], golden["greedy_logits"][i + 1], golden.std, f"greedy token {i}")
    golden.engine.close(stream)


def test_hidden_states_after_each_layer(golden: Golden) -> None:
    hidden = record_run(golden, golden.tokens)["hidden"]
    expected = golden["hidden"]
    assert len(hidden) == len(expected)
    for layer, (found, wanted) in enumerate(zip(hidden, expected, strict=True)):
        rows = found.reshape(LENGTH, *wanted.shape[1:])[golden["hidden_rows"]]
        check(rows, wanted, float(wanted.std()), f"layer {layer}")


def test_router_choices(golden: Golden) -> None:
    record = record_run(golden, golden.tokens)
    layers = golden.layers("expert_id")
    assert len(record["expert_id"]) == len(record["expert_weight"]) == len(layers)
    for i, layer in enumerate(layers):
        expected = golden[f"expert_id/{layer}"]
        np.testing.assert_array_equal(
            record["expert_id"][i].reshape(expected.shape), expected, f"layer {layer}"
        )
        weights = golden[f"expert_weight/{layer}"]
        found = record["expert_weight"][i].reshape(weights.shape)
        check(found, weights, float(weights.std()), f"weights of layer {layer}")


def test_selected_tokens(golden: Golden) -> None:
    record = record_run(golden, golden.tokens)["selected"]
    shape = golden.case.shape
    sparse = [i for i in range(shape.num_hidden_layers) if not shape.is_kda(i)]
    assert len(record) == len(sparse)
    for flat, layer in zip(record, sparse, strict=True):
        counts, tokens = np.split(np.asarray(flat).ravel(), [LENGTH])
        assert counts.sum() == len(tokens), f"layer {layer}"
        source = layer if shape.indexer_full(layer) else layer - 1
        found = np.split(tokens, np.cumsum(counts)[:-1])
        for row, (mine, wanted) in enumerate(zip(found, golden[f"selected/{source}"], strict=True)):
            assert mine.tolist() == wanted[wanted >= 0].tolist(), f"layer {layer}, row {row}"


@pytest.mark.parametrize("chunk", [0, 1, CHUNK])
def test_states(golden: Golden, chunk: int) -> None:
    for n in golden.case.state_prompts():
        stream = golden.engine.open()
        golden.engine.feed(stream, golden.tokens[:n], logits="none", chunk=chunk)
        prefix = f"state/{n}/"
        names = [name for name in golden.tensors if name.startswith(prefix)]
        assert len(names) >= golden.case.shape.num_hidden_layers
        for name in names:
            expected = golden[name]
            found = golden.engine.state(stream, name.removeprefix(prefix)).reshape(expected.shape)
            check(found, expected, float(expected.std()) if expected.size else 1.0, f"{name}, {chunk=}")
        golden.engine.close(stream)


def test_a_changed_fuel_is_refused(golden: Golden, fuel_dir: Path) -> None:
    fuel = golden.case.build(fuel_dir)
    with pytest.raises(AssertionError, match="the generator changed"):
        check_fuel(golden.case, fuel, "0" * 64)


def test_score_agrees_with_the_logits(golden: Golden) -> None:
    """Log-probability, rank and arg-max of each next token, against the golden logits in float64."""
    ids, targets = golden.tokens[:-1], golden.tokens[1:]
    stream = golden.engine.open()
    logprob, rank, best = golden.engine.score(stream, ids, targets, 7)
    golden.engine.close(stream)
    logits = golden["logits"][:-1].astype(np.float64)
    top = logits.max(-1)
    expected = logits[np.arange(len(ids)), targets] - top - np.log(np.exp(logits - top[:, None]).sum(-1))
    check(logprob, expected, golden.std, "log-probability")
    np.testing.assert_array_equal(best, logits.argmax(-1))
    target = logits[np.arange(len(ids)), targets][:, None]
    near = TOLERANCE * golden.std
    assert (rank >= (logits > target + near).sum(-1)).all()
    assert (rank <= (logits > target - near).sum(-1)).all()


def test_info_counts_what_is_on_disk(golden: Golden) -> None:
    info, shape = golden.engine.info(), golden.case.shape
    assert (info["vocab"], info["hidden"], info["layers"]) == (
        shape.vocab_size,
        shape.hidden_size,
        shape.num_hidden_layers,
    )
    assert info["moe_layers"] == sum(shape.is_moe(i) for i in range(shape.num_hidden_layers))
    assert (info["draft_tensors"] > 0) == (golden.case.options.draft != "none")
    assert (info["vision_tensors"] > 0) == golden.case.options.vision
