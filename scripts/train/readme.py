# ruff: noqa: E501 -- tables and templates
"""README.md of a fuel, from measured figures."""

import json
import math
from collections import defaultdict
from pathlib import Path

from .model import SHAPES

GROUP_NAMES = {
    "code": "Python code",
    "docs": "documentation",
    "prose": "books and dictionaries",
    "facts": "generated facts",
    "functions": "generated functions",
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _sources(sources: dict) -> str:
    by_licence: dict[str, list[str]] = defaultdict(list)
    for name, entry in sorted(sources.items(), key=lambda item: item[0].lower()):
        size = sum(entry["groups"].values()) / 1e6
        by_licence[entry["licence"]].append(f"{name} ({size:.1f})" if size >= 0.05 else name)
    return _table(
        ["licence", "packages (MB of text)"], [[k, ", ".join(v)] for k, v in sorted(by_licence.items())]
    )


def _quality(figures: dict) -> str:
    rows = []
    for group, f in figures["groups"].items():
        rows.append(
            [
                GROUP_NAMES[group],
                f"{f['tokens']:,}",
                f"{f['bits_original']:.3f}",
                f"{f['bits_stored']:.3f}",
                f"{100 * f['agreement']:.1f} %",
                f"{f['moved']:.4f}",
            ]
        )
    return _table(
        [
            "held-out text",
            "tokens",
            "bits a byte, BF16",
            "bits a byte, this fuel",
            "same top choice",
            "mean abs. change of log p",
        ],
        rows,
    )


def _drafts(figures: dict) -> str:
    rows = [
        [GROUP_NAMES[g], f"{100 * f['one']:.1f} %", f"{100 * f['two']:.1f} %"]
        for g, f in figures["drafts"].items()
    ]
    return _table(["prompts from", "one token ahead", "two tokens ahead (both right)"], rows)


def _routing(figures: dict, dense: int) -> str:
    rows = [
        [
            str(i + dense),
            f"{r['entropy']:.3f}",
            f"{r['load_entropy']:.3f}",
            f"{100 * r['least']:.0f} %",
            f"{100 * r['most']:.0f} %",
            f"{100 * r['lru25']:.0f} %",
            f"{100 * r['lru50']:.0f} %",
        ]
        for i, r in enumerate(figures["routing"])
    ]
    return _table(
        [
            "layer",
            "entropy of a token's weights (nats)",
            "evenness of load",
            "least used expert",
            "most used expert",
            "LRU hits, 25 % of experts",
            "LRU hits, 50 %",
        ],
        rows,
    )


def _attention(figures: dict, layers: int) -> str:
    numbers = [i for i in range(layers) if i % 4 == 3]
    rows = [
        [str(n), f"{100 * a['chosen']:.1f} %", f"{100 * a['random']:.1f} %", f"{100 * a['best']:.1f} %"]
        for n, a in zip(numbers, figures["attention"], strict=True)
    ]
    return _table(["layer", "chosen by the indexer", "chosen at random", "best possible"], rows)


def _training(run: Path, shape: str) -> str:
    """What `train` wrote of its plan and its progress, as sentences."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "seconds" in line][-1]
    context, steps = SHAPES[shape].context, plan["steps"]
    begin = {name: round(steps * plan[f"{name}_from"]) for name in ("sparse", "quantised", "draft")}
    return f"""{last["step"]:,} steps of {plan["rows"]} sequences of {context} tokens ({last["step"] * plan["rows"] * context / 1e6:.0f} M tokens) on {plan["device"]}, {last["seconds"] / 60:.0f} minutes; bf16 arithmetic on a GPU,
float32 master weights, Muon for the matrices of the layers and AdamW for the rest. MLA layers attended densely for the first {begin["sparse"]:,} steps,
while the indexers learned from the attention mass summed over heads (KL over pools); then to what the indexers select. Routed experts
were quantised in the loop from step {begin["quantised"]:,}, and the draft layer learned from step {begin["draft"]:,}, one and two tokens ahead. The router's bias moved
against each step's load. The rate was constant to step {round(steps * (1 - plan["cooldown"])):,}, then fell to 2 %. Of the tokens that end in line ends, {100 * plan["split"]:.0f} % were cut in
two, since a prompt may stop before the end of its line."""


def _definitions(figures: dict) -> str:
    rows = [
        [
            name,
            *(str(figures[key][k]) for k in ("prompts", "whole", "begun", "wrong", "ended", "ended_whole")),
        ]
        for key, name in (("with_line_end", "with its line end"), ("without_line_end", "without"))
    ]
    return f"""Python as it is spoken: greedy continuations of held-out `def` lines by at most {figures["limit"]} tokens. Most are cut by the limit
within a statement; "so far" are those that are no error yet, which more text could complete.

{_table(["the `def` line", "continued", "parse", "Python so far", "wrong", "end by themselves", "of which parse"], rows)}"""


def write_readme(figures: dict, definitions: dict, run: Path, fuel: Path, shape: str) -> None:
    s = SHAPES[shape]
    size_of = figures["parameters"]
    counts, size = (
        figures["counts"],
        sum(p.stat().st_size for p in fuel.iterdir() if p.name not in ("README.md", "fuel.yaml")),
    )
    train_tokens = {
        k.removeprefix("train-"): v["tokens"] for k, v in counts.items() if k.startswith("train-")
    }
    samples = "\n\n".join(f"```text\n{text.rstrip()}\n```" for text in figures["samples"].values())
    moved = sum(f["moved"] for f in figures["groups"].values()) / len(figures["groups"])
    text = f"""# Sparkler

A small glm5_next model, trained from scratch, so that a fresh clone has something real to decode. It continues Python code,
technical documentation and simple statements of fact. It is not an assistant, it knows little, and what it says may be wrong.

{size_of["all"]:,} parameters ({size_of["experts"]:,} in routed experts, {size_of["draft"]:,} in the draft layer);
{size / 2**20:.1f} MiB on disk. {s.layers} layers, KDA and sparse MLA 3:1, 4 streams, {s.dense_layers} dense layer, {s.experts} experts (top 4) and a
shared one in each other layer, hidden size {s.hidden}, vocabulary {s.vocab}, trained context {s.context}, `index_topk` {s.index_topk} in pools of 4, and
a draft layer. Routed experts are NVFP4 (ModelOpt names), everything else BF16.

Greedy, from the fuel's own weights:

{samples}

## Quality

On held-out documents (1 % of each source, chosen by a hash of their path), in windows of {s.context} tokens, in float32. "BF16" is the
same network with the routed experts' weights before quantisation. The experts were trained with quantisation in the loop,
so that these weights were never used unrounded: the fuel predicts as well as they do, but not the same in every case.

{_quality(figures)}

The unweighted mean change of log p is {moved:.3f} nats.

Greedy draft acceptance, on the fuel's own continuations of held-out text:

{_drafts(figures)}

Routing on held-out text (code, documentation and prose), tokens in reading order. A fair share is 100 %; the entropy of a
uniform choice among four is {math.log(4):.3f} nats; evenness is the entropy of the load over that of equal loads. The LRU caches hold
{s.experts // 4} and {s.experts // 2} of a layer's {s.experts} experts.

{_routing(figures, s.dense_layers)}

Attention mass on complete pools that the {s.index_topk // 4} selected ones hold, over rows where more than {s.index_topk // 4} compete:

{_attention(figures, s.layers)}

{_definitions(definitions)}

## Training

{_training(run, shape)}

Tokens: {", ".join(f"{GROUP_NAMES[g]} {n / 1e6:.1f} M" for g, n in train_tokens.items())}.
`scripts/train/recipe.txt` holds every stage with its arguments and seeds, `scripts/train/packages.tsv` the packages with versions
and hashes; `scripts/train_fuel.py recipe` makes everything again. Corpus, tokenizer, initial weights and batches come out the same;
the trained weights do so on a CPU, while a GPU adds in an order of its own.

## Data and licences

The weights were trained on text from these packages, read from Debian, PyPI and npm. "Public domain" texts are
the novels of Jane Austen, the World English Bible, The Devil's Dictionary, the Jargon File and the World Factbook. The facts and functions
that the scripts generate are part of this repository.

{_sources(figures["sources"])}

WordNet 3.0: Copyright 2006 by Princeton University. All rights reserved. PostgreSQL documentation: Copyright The PostgreSQL Global
Development Group. Python documentation and standard library: Copyright Python Software Foundation.
"""
    (fuel / "README.md").write_text(text, encoding="utf-8")
