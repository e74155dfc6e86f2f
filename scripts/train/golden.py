# ruff: noqa: E501 -- the prompt is one
"""Logits of transformers' own model on the fuel's weights, for tests of the engine."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .fuel import read_fuel

PROMPT = '''The capital of France is Paris. The capital of Japan is Tokyo.

def fibonacci(n):
    """Return the nth Fibonacci number."""
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


The json module can be used to read a file and to write it again. If the file does not exist, an exception is raised, and
the caller has to decide what to do next: to create the file, or to report the error to the user.

class Stack:
    """A stack of items; the last one in is the first one out."""

    def __init__(self):
        self.items = []

    def push(self, item):
'''
POSITIONS = 24
GREEDY = 32


def _stable_topk(
    values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple:
    ordered = torch.sort(values, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((ordered.values.narrow(dim, 0, k), ordered.indices.narrow(dim, 0, k)))


@torch.no_grad()
def write_golden(fuel: Path, tokenizer: Tokenizer, shape: str, out: Path) -> None:
    """`prompt` ids, `positions` and their `logits` (float32), and the `greedy` continuation with its `gaps`
    (best minus second logit, so that a test knows which choices are close)."""
    net = read_fuel(fuel, shape)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    original = torch.topk, torch.Tensor.topk
    torch.topk = torch.Tensor.topk = _stable_topk  # type: ignore[assignment]
    try:
        ids = torch.tensor([prompt])
        greedy, gaps = [], []
        for _ in range(GREEDY):
            logits = net.lm_head(net.trunk(input_ids=ids, use_cache=False).last_hidden_state)[0]
            if not greedy:
                whole = logits
            best = torch.sort(logits[-1], descending=True, stable=True)
            greedy.append(best.indices[0].item())
            gaps.append((best.values[0] - best.values[1]).item())
            ids = torch.cat((ids, ids.new_tensor([[greedy[-1]]])), 1)
    finally:
        torch.topk, torch.Tensor.topk = original  # type: ignore[method-assign]
    positions = torch.linspace(0, len(prompt) - 1, POSITIONS).long().unique()
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "prompt": torch.tensor(prompt, dtype=torch.int32),
            "positions": positions.int(),
            "logits": whole[positions].contiguous(),
            "greedy": torch.tensor(greedy, dtype=torch.int32),
            "gaps": torch.tensor(gaps),
        },
        out,
    )
