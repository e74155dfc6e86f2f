#!/usr/bin/env python3
"""Makes the small fuel that ships, from packages to README: corpus, tokenizer, training, quantisation,
measurement.

    train_fuel.py corpus --debs DEBS --packages WHEELS --npm NPM --out CORPUS
    train_fuel.py tokens --corpus CORPUS --out DATA
    train_fuel.py train --data DATA --run RUN --steps N          (a GPU; resumes RUN; --stop-after ends early)
    train_fuel.py weights --run RUN --out WEIGHTS
    train_fuel.py polish --weights WEIGHTS --data DATA --run RUN2  (a CPU will do; then `weights` again)
    train_fuel.py fuel --weights WEIGHTS --data DATA --out FUEL
    train_fuel.py report --weights WEIGHTS --fuel FUEL --data DATA --corpus CORPUS
    train_fuel.py golden --fuel FUEL --out FILE

The packages are downloaded beforehand with the ordinary clients; `train/corpus.py` lists what is read from
each.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def corpus(args: argparse.Namespace) -> None:
    from train import corpus as build

    parts = [build.stdlib_documents()]
    parts += [build.debian_documents(folder) for folder in args.debs]
    parts += [build.factbook_documents(folder) for folder in args.npm]
    parts += [build.package_documents(folder, args.package_megabytes) for folder in args.packages]
    sizes = build.build(chain(*parts), args.out, seed=args.seed, facts=args.facts, functions=args.functions)
    print(json.dumps(sizes, indent=1))


def tokens(args: argparse.Namespace) -> None:
    from train import tokens as streams
    from train.model import SHAPES

    tokenizer = streams.train_tokenizer(
        streams.sample(args.corpus, args.characters), SHAPES[args.shape].vocab
    )
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    print(json.dumps(streams.write_streams(args.corpus, tokenizer, args.out), indent=1))


def train(args: argparse.Namespace) -> None:
    from train.loop import Plan, Trainer

    plan = Plan(**{f.name: getattr(args, f.name) for f in fields(Plan)})
    trainer = Trainer(plan, args.data, args.run, kda=args.kda, compile_parts=args.compile)
    resumed = trainer.resume()
    print(json.dumps({"resumed": resumed, "step": trainer.step, "device": str(trainer.device)}), flush=True)
    trainer.train(args.stop_after, args.until)


def polish(args: argparse.Namespace) -> None:
    from train import loop

    loop.polish(
        args.weights,
        args.data,
        args.run,
        shape=args.shape,
        steps=args.steps,
        rows=args.rows,
        length=args.length,
        rate=args.rate,
        seed=args.seed,
    )


def weights(args: argparse.Namespace) -> None:
    import torch

    from train.fuel import rounded, save_weights
    from train.model import SHAPES, Network, text_config

    net = Network(text_config(SHAPES[args.shape]))
    net.load_state_dict(torch.load(args.run / "state.pt", map_location="cpu", weights_only=True)["net"])
    save_weights(rounded(net), args.out)


def fuel(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    from train.fuel import write_fuel

    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    print(json.dumps(write_fuel(args.weights, tokenizer, args.shape, args.out)))


def report(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    from train import report as measures
    from train.fuel import load_weights, read_fuel

    tokenizer = Tokenizer.from_file(str(args.fuel / "tokenizer.json"))
    original, stored = load_weights(args.weights, args.shape), read_fuel(args.fuel, args.shape)
    figures = measures.measure(original, stored, args.data, args.shape, args.windows, args.drafts)
    figures["samples"] = {p: measures.generate(stored, tokenizer, p, args.sample_tokens) for p in args.prompt}
    figures["sources"] = json.loads((args.corpus / "sources.json").read_text())
    figures["counts"] = json.loads((args.data / "counts.json").read_text())
    args.out.write_text(json.dumps(figures, indent=1) + "\n")


def readme(args: argparse.Namespace) -> None:
    from train.readme import write_readme

    write_readme(
        json.loads(args.figures.read_text()), json.loads(args.training.read_text()), args.fuel, args.shape
    )


def golden(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    from train.golden import write_golden

    write_golden(args.fuel, Tokenizer.from_file(str(args.fuel / "tokenizer.json")), args.shape, args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__)
        sub.set_defaults(function=function)
        sub.add_argument("--shape", default="sparkler", help="sparkler, or tiny to try everything out")
        return sub

    sub = command(corpus)
    for name in ("debs", "npm", "packages"):
        sub.add_argument(
            f"--{name}",
            type=Path,
            action="append",
            default=[],
            help="a folder of downloaded packages; may be repeated",
        )
    sub.add_argument(
        "--package-megabytes", type=float, default=7.0, help="text taken from one package at most"
    )
    sub.add_argument("--facts", type=int, default=60_000, help="documents of generated facts")
    sub.add_argument("--functions", type=int, default=40_000, help="documents of generated functions")
    sub.add_argument("--seed", type=int, default=1)
    sub.add_argument("--out", type=Path, required=True)

    sub = command(tokens)
    sub.add_argument("--corpus", type=Path, required=True)
    sub.add_argument(
        "--characters", type=int, default=40_000_000, help="text that the tokenizer is trained on"
    )
    sub.add_argument("--out", type=Path, required=True)

    sub = command(train)
    sub.add_argument("--data", type=Path, required=True)
    sub.add_argument("--run", type=Path, required=True)
    sub.add_argument("--steps", type=int, default=6000)
    sub.add_argument("--rows", type=int, default=256, help="sequences in a batch")
    sub.add_argument("--warmup", type=int, default=100)
    sub.add_argument("--cooldown", type=float, default=0.4, help="share of the steps with a falling rate")
    for name, default in (("sparse", 0.35), ("quantised", 0.65), ("draft", 0.65)):
        sub.add_argument(
            f"--{name}-from", type=float, default=default, help="share of the steps at which this begins"
        )
    sub.add_argument("--seed", type=int, default=1)
    sub.add_argument(
        "--split", type=float, default=0.0, help="share of tokens with line ends that is cut in two"
    )
    sub.add_argument("--stop-after", type=float, default=1e9, help="seconds after which to save and stop")
    sub.add_argument("--until", type=int, default=None, help="step at which to save and stop")
    sub.add_argument("--kda", choices=("plain", "fla"), default="plain")
    sub.add_argument("--compile", action="store_true")

    sub = command(polish)
    for name in ("weights", "data", "run"):
        sub.add_argument(f"--{name}", type=Path, required=True)
    sub.add_argument("--steps", type=int, default=80)
    sub.add_argument("--rows", type=int, default=16)
    sub.add_argument("--length", type=int, default=64)
    sub.add_argument("--rate", type=float, default=1e-2)
    sub.add_argument("--seed", type=int, default=2)

    sub = command(weights)
    sub.add_argument("--run", type=Path, required=True)
    sub.add_argument("--out", type=Path, required=True)

    sub = command(fuel)
    sub.add_argument("--weights", type=Path, required=True)
    sub.add_argument("--data", type=Path, required=True)
    sub.add_argument("--out", type=Path, required=True)

    sub = command(report)
    for name in ("weights", "fuel", "data", "corpus"):
        sub.add_argument(f"--{name}", type=Path, required=True)
    sub.add_argument("--windows", type=int, default=96, help="held-out windows of each group")
    sub.add_argument("--drafts", type=int, default=8, help="prompts of each group to measure drafts on")
    sub.add_argument("--prompt", action="append", default=["The capital of France is", "def fibonacci(n):"])
    sub.add_argument("--sample-tokens", type=int, default=48)
    sub.add_argument("--out", type=Path, required=True)

    sub = command(readme)
    for name in ("figures", "training", "fuel"):
        sub.add_argument(f"--{name}", type=Path, required=True)

    sub = command(golden)
    for name in ("fuel", "out"):
        sub.add_argument(f"--{name}", type=Path, required=True)
    return parser


def main() -> None:
    args = _parser().parse_args()
    begin = time.monotonic()
    args.function(args)
    print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
