#!/usr/bin/env python3
"""Writes the golden files of tests/golden from transformers (needs torch and transformers).

Prints how much the reference disagrees with itself (float32 against float64, one prefill against
token-by-token decoding, and prefixes against the whole), and how near its closest decisions are: a
decision nearer than the noise would make a golden file that no other correct program could reproduce, so
such a case is refused. Top-k decisions after the prompt are only reported: greedy text that repeats itself
makes pools that are nearly the same, and either will do.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]

from rocket.launch import FUEL_MAKING, require_packages  # noqa: E402

require_packages(FUEL_MAKING | {name: name for name in ("safetensors", "torch", "transformers")})

import numpy as np  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from golden_fuels import CASES, GREEDY, LENGTH, Case  # noqa: E402
from rocket.random_fuel import fuel_sha256  # noqa: E402
from transformers_oracle import Oracle  # noqa: E402

MARGIN = 2e-5  # smallest gap allowed from the last chosen to the first refused of a top-k, ties apart
GREEDY_MARGIN = 4e-4  # the same for a greedy token, in logits


def sorted_selection(rows: np.ndarray, width: int) -> np.ndarray:
    """Each row's positions ascending, filled up with -1."""
    out = np.full((len(rows), width), -1, np.int16)
    for i, row in enumerate(rows):
        chosen = np.sort(row[row >= 0])
        out[i, : len(chosen)] = chosen
    return out


def whole_run(oracle: Oracle, case: Case, tensors: dict[str, np.ndarray]) -> None:
    tokens = case.tokens()
    oracle.reset()
    tensors["tokens"] = np.array(tokens, np.int32)
    tensors["logits"] = oracle.feed(tokens)
    rows = case.hidden_rows()
    tensors["hidden_rows"] = np.array(rows, np.int32)
    tensors["hidden"] = np.stack([np.concatenate(h)[rows] for h in oracle.hidden])
    for layer, calls in oracle.router.items():
        tensors[f"expert_id/{layer}"] = np.concatenate([c[0] for c in calls]).astype(np.int16)
        tensors[f"expert_weight/{layer}"] = np.concatenate([c[1] for c in calls])
    for layer, calls in oracle.selected.items():
        width = min(case.shape.index_topk + case.shape.index_kpool - 1, LENGTH)
        tensors[f"selected/{layer}"] = sorted_selection(np.concatenate(calls), width)


def prompt_runs(oracle: Oracle, case: Case, tensors: dict[str, np.ndarray]) -> dict[str, float]:
    tokens, std = case.tokens(), float(tensors["logits"].std())
    worst = {"prefix": 0.0, "greedy": np.inf}
    for n in case.prompts():
        oracle.reset()
        logits = oracle.feed(tokens[:n])
        worst["prefix"] = max(worst["prefix"], float(np.abs(logits - tensors["logits"][:n]).max()) / std)
        tensors[f"last/{n}"] = logits[-1].copy()
        if n in case.state_prompts():
            tensors |= {f"state/{n}/{name}": value for name, value in oracle.states().items()}
        greedy, rows = oracle.greedy(logits[-1], GREEDY)
        top = np.sort(rows, -1)
        worst["greedy"] = min(worst["greedy"], float((top[:, -1] - top[:, -2]).min()))
        tensors[f"greedy/{n}"] = np.array(greedy, np.int16)
        if n == case.greedy_prompt:
            tensors["greedy_logits"] = rows
    return worst


def rounding(fuel: Path, case: Case, tensors: dict[str, np.ndarray]) -> float:
    """How far the float32 reference is from itself in float64."""
    exact = Oracle(fuel, float64=True).feed(case.tokens())
    return float(np.abs(tensors["logits"] - exact).max()) / float(tensors["logits"].std())


def decode_noise(oracle: Oracle, case: Case, tensors: dict[str, np.ndarray]) -> float:
    """The largest difference between one prefill and token by token, in standard deviations of the logits."""
    oracle.reset()
    rows = np.concatenate([oracle.feed([t]) for t in case.tokens()])
    return float(np.abs(rows - tensors["logits"]).max()) / float(tensors["logits"].std())


def make(case: Case, directory: Path) -> None:
    begin = time.monotonic()
    fuel = case.build(directory)
    oracle = Oracle(fuel)
    tensors: dict[str, np.ndarray] = {}
    whole_run(oracle, case, tensors)
    nearest, ties = oracle.nearest(), oracle.ties
    if not nearest >= MARGIN:
        raise SystemExit(f"{case.name}: a top-k decision nearer than {MARGIN}; choose another seed")
    worst = prompt_runs(oracle, case, tensors)
    worst["decode"] = decode_noise(oracle, case, tensors)
    print(
        f"{case.name}: float32 against float64 {rounding(fuel, case, tensors):.1e}, prefill against decode "
        f"{worst['decode']:.1e}, prefixes against the whole "
        f"{worst['prefix']:.1e} standard deviations of the logits; nearest top-k {nearest:.1e} "
        f"({ties} exact ties; {oracle.nearest():.1e} with the text), nearest greedy {worst['greedy']:.1e}; "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )
    if not worst["greedy"] >= GREEDY_MARGIN:
        raise SystemExit(f"{case.name}: a greedy token nearer than {GREEDY_MARGIN}; choose another seed")
    metadata = {"fuel_sha256": fuel_sha256(fuel), "noise": f"{worst['decode']:.3e}"}
    case.file.parent.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, case.file, metadata)
    print(f"{case.file.relative_to(ROOT)}: {case.file.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", help=f"any of {', '.join(c.name for c in CASES)}; default: all")
    names = parser.parse_args().case
    if unknown := set(names) - {c.name for c in CASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            if not names or case.name in names:
                make(case, Path(directory))


if __name__ == "__main__":
    main()
