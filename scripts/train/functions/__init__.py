# ruff: noqa: E501 -- tables and templates
"""Small Python functions with varied names, annotations, docstrings and examples.

Each entry of ``FUNCTIONS`` is (names, parameters with types, return type, descriptions, bodies, example calls). A body is
indented by four spaces; ``{f}`` stands for the function's name and ``{a}``, ``{b}`` … for its parameters.
"""

import random
from collections.abc import Iterator

from ..facts import ASSISTANT, USER
from . import arithmetic, everyday, sequences
from .kinds import Function

# What a seed generates depends on the order.
FUNCTIONS = [*arithmetic.FUNCTIONS, *sequences.FUNCTIONS, *everyday.FUNCTIONS]


def _render(rng: random.Random, fn: Function, body: str | None = None) -> tuple[str, str, str]:
    """The source of one function, its name and one of its descriptions."""
    name = rng.choice(fn.names)
    names = [rng.choice(options) for options, _ in fn.parameters]
    if len(set(names)) < len(names):
        names = [options[0] for options, _ in fn.parameters]
    body = body or rng.choice(fn.bodies)
    typed = rng.random() < 0.35
    arguments = ", ".join(
        f"{n}: {kind}" if typed else n for n, (_, kind) in zip(names, fn.parameters, strict=True)
    )
    header = f"def {name}({arguments})" + (f" -> {fn.returns}" if typed else "") + ":\n"
    description = rng.choice(fn.descriptions)
    doc = ""
    if rng.random() < 0.5:
        quote = rng.choice(['"""', '"""', '"""', "'''"])
        doc = f"    {quote}{description}{quote}\n"
    fields = {"f": name} | dict(zip("abcd", names, strict=False))
    text = header + doc + body.format(**fields)
    if rng.random() < 0.15:
        text = f"# {description}\n" + text
    imports = [m for m in ("math", "json") if f"{m}." in text]
    if imports and rng.random() < 0.7:
        text = "".join(f"import {m}\n" for m in imports) + "\n\n" + text
    return text, name, description


def _with_example(rng: random.Random, fn: Function, text: str, name: str) -> str:
    shape = rng.random()
    call = f"{name}({rng.choice(fn.examples)})"
    if shape < 0.2:
        return f"{text}\n\nprint({call})\n"
    if shape < 0.35:
        return f'{text}\n\nif __name__ == "__main__":\n    print({call})\n'
    if shape < 0.45:
        return f"{text}\n\nresult = {call}\nprint(result)\n"
    return text


def function_documents(seed: int, count: int) -> Iterator[str]:
    """Python files of one to four small functions, and requests for a function in the form of the chat template."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.12:
            fn = rng.choice(FUNCTIONS)
            text, name, description = _render(rng, fn)
            what = description[0].lower() + description[1:].rstrip(".")
            ask = rng.choice(
                [
                    f"Write a Python function {name}.",
                    f"Write a function in Python: {what}.",
                    f"Please write {name} in Python.",
                ]
            )
            yield f"{USER}\n{ask}{ASSISTANT}\n```python\n{text}```"
            continue
        # The Fibonacci function is what people try first, so it comes more often than the others.
        chosen = rng.sample(FUNCTIONS, rng.choice([1, 1, 1, 2, 2, 3, 4]))
        if rng.random() < 0.06:
            chosen[0] = FUNCTIONS[0]
        parts = []
        for fn in chosen:
            text, name, _ = _render(rng, fn)
            parts.append(_with_example(rng, fn, text, name) if len(chosen) == 1 else text)
        yield "\n\n".join(parts)
