"""Measures a fuel on held-out text and writes its README."""

import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .forward import Forward, Mode, Result
from .model import SHAPES, Network
from .tokens import check_vocabulary, held_out_windows

Tensor = torch.Tensor
ROWS = 8


def _passes(forward: Forward, windows: Tensor, mode: Mode) -> Iterator[tuple[Tensor, Result]]:
    for part in windows.split(ROWS):
        with torch.no_grad():
            yield part, forward(part, mode)


def compare(original: Network, stored: Network, windows: Tensor) -> dict[str, float]:
    """Nats a token of both, and how far the stored network's predictions are from the original's."""
    runs = [Forward(net, torch.float32) for net in (original, stored)]
    mode = Mode(stable=True)
    same = moved = nll_original = nll_stored = 0.0
    count = 0
    for (_, a), (_, b) in zip(_passes(runs[0], windows, mode), _passes(runs[1], windows, mode), strict=True):
        same += (runs[0].logits(a.hidden).argmax(-1) == runs[1].logits(b.hidden).argmax(-1)).sum().item()
        moved += (a.nll - b.nll).abs().sum().item()
        nll_original += a.nll.sum().item()
        nll_stored += b.nll.sum().item()
        count += a.nll.numel()
    return {
        "tokens": count,
        "agreement": same / count,
        "moved": moved / count,
        "original": nll_original / count,
        "stored": nll_stored / count,
    }


def lru_hits(routes: Tensor, capacity: int) -> float:
    """Share of expert reads that an LRU cache of one layer serves, after it has filled. routes [T, k]."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = reads = 0
    for i, row in enumerate(routes.tolist()):
        for expert in sorted(row):
            if i >= 64:
                reads += 1
                hits += expert in cache
            cache[expert] = None
            cache.move_to_end(expert)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / max(1, reads)


def routing(stored: Network, windows: Tensor) -> list[dict[str, float]]:
    """Figures of each MoE block of the trunk over all windows, the tokens in reading order."""
    forward = Forward(stored, torch.float32)
    routes: list[list[Tensor]] = []
    scores: list[list[Tensor]] = []
    for _, result in _passes(forward, windows, Mode(stable=True, collect=True)):
        routes.append(result.routes)
        scores.append(result.scores)
    out = []
    for layer in range(len(routes[0])):
        ids, score = (torch.cat([part[layer] for part in parts]) for parts in (routes, scores))
        experts = score.shape[1]
        load = torch.bincount(ids.flatten(), minlength=experts).double()
        share = load / load.sum()
        weight = score.gather(1, ids).double()
        weight = weight / weight.sum(-1, keepdim=True)
        out.append(
            {
                "entropy": -(weight * weight.log()).sum(-1).mean().item(),
                "load_entropy": -(share * share.clamp_min(1e-12).log()).sum().item() / math.log(experts),
                "least": (load.min() / load.mean()).item(),
                "most": (load.max() / load.mean()).item(),
                "lru25": lru_hits(ids, experts // 4),
                "lru50": lru_hits(ids, experts // 2),
            }
        )
    return out


def attention_held(stored: Network, windows: Tensor) -> list[dict[str, float]]:
    """For each MLA layer: how much of the mass on complete pools the chosen ones hold, where not all are
    chosen."""
    forward = Forward(stored, torch.float32)
    budget = stored.config.index_topk // stored.config.index_kpool
    sums: dict[int, list[float]] = {}
    for _, result in _passes(forward, windows, Mode(stable=True, collect=True)):
        for layer, held in enumerate(result.held):
            mass = held["mass"] * held["visible"]
            seen = held["visible"].sum(-1)
            rows = (seen > budget).expand(mass.shape[0], -1)
            total = mass.sum(-1)[rows]
            best = mass.topk(budget, -1).values.sum(-1)[rows]
            entry = sums.setdefault(layer, [0.0, 0.0, 0.0, 0.0])
            entry[0] += ((mass * held["chosen"]).sum(-1)[rows] / total).sum().item()
            entry[1] += (budget / seen.expand(mass.shape[0], -1)[rows]).sum().item()
            entry[2] += (best / total).sum().item()
            entry[3] += rows.sum().item()
    return [{"chosen": a / n, "random": r / n, "best": b / n} for a, r, b, n in sums.values()]


@torch.no_grad()
def continue_greedily(forward: Forward, prompts: Tensor, count: int) -> Tensor:
    """prompts [B, P] -> [B, P + count], recomputing everything for each token (small sizes only)."""
    ids = prompts
    for _ in range(count):
        padded = torch.cat((ids, ids.new_zeros(ids.shape[0], 1)), 1)
        hidden = forward(padded, Mode(stable=True)).hidden[:, -1]
        ids = torch.cat((ids, forward.logits(hidden).argmax(-1, keepdim=True)), 1)
    return ids


def draft_acceptance(stored: Network, windows: Tensor, prompt: int, count: int) -> dict[str, float]:
    """Greedy: the share of drafts that equal what the trunk then says, one and two tokens ahead."""
    forward = Forward(stored, torch.float32)
    text = continue_greedily(forward, windows[:, :prompt], count)
    mode = Mode(stable=True, draft=True)
    with torch.no_grad():
        length = text.shape[1] - 3
        result: Result = forward(text, Mode(stable=True, draft=False))
        hidden = result.hidden[:, :length]
        first, past = forward.draft_step(text[:, 1 : length + 1], hidden, mode, result)
        second = forward.draft_second(text[:, 2 : length + 2], first, past, mode, result)
    at = slice(prompt - 1, length)  # drafts of generated tokens only
    one = (forward.logits(first).argmax(-1) == text[:, 2 : length + 2])[:, at]
    # The second step is fed the true token; where the first draft was right, that is the drafted one.
    two = (forward.logits(second).argmax(-1) == text[:, 3 : length + 3])[:, at] & one
    return {
        "one": one.float().mean().item(),
        "two": two.float().mean().item(),
        "given_one": (two.sum() / one.sum().clamp_min(1)).item(),
    }


def generate(stored: Network, tokenizer: Tokenizer, text: str, count: int) -> str:
    forward = Forward(stored, torch.float32)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    return tokenizer.decode(continue_greedily(forward, ids, count)[0].tolist(), skip_special_tokens=False)


def measure(
    original: Network, stored: Network, data: Path, shape: str, windows_per_group: int, drafts: int
) -> dict:
    check_vocabulary(data, SHAPES[shape].vocab)
    context = SHAPES[shape].context
    counts = json.loads((data / "counts.json").read_text())
    state = original.state_dict()
    out: dict = {"groups": {}, "drafts": {}, "counts": counts}
    out["parameters"] = {
        "all": sum(v.numel() for v in state.values()),
        "experts": sum(v.numel() for k, v in state.items() if ".experts." in k),
        "draft": sum(v.numel() for k, v in state.items() if k.startswith("draft.")),
    }
    mixed = []
    for group in ("code", "docs", "prose", "facts", "functions"):
        windows = held_out_windows(data, group, context + 1, windows_per_group)
        if not len(windows):
            continue
        figures = compare(original, stored, windows)
        per_byte = counts[f"test-{group}"]["tokens"] / counts[f"test-{group}"]["bytes"] / math.log(2)
        figures |= {
            "bits_original": figures["original"] * per_byte,
            "bits_stored": figures["stored"] * per_byte,
        }
        out["groups"][group] = figures
        if group in ("code", "docs", "prose"):
            mixed.append(windows[: max(1, windows_per_group // 3)])
            rows = windows[torch.linspace(0, len(windows) - 1, drafts).long()]
            prompt = min(64, context // 2)
            out["drafts"][group] = draft_acceptance(stored, rows, prompt, min(128, context - prompt))
    out["routing"] = routing(stored, torch.cat(mixed))
    out["attention"] = attention_held(stored, torch.cat(mixed))
    return out
