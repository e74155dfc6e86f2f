"""Muon for the matrices inside the layers, AdamW for the rest."""

from collections import defaultdict

import torch

from .model import Network

MUON_RMS = 1.2e-3  # root mean square of one update of a matrix, at the peak of the schedule
MUON_DECAY = 2e-4  # share of a matrix that one step takes away, at the peak
MOMENTUM = 0.95
ADAM_RATES = {"embed": 4e-3, "head": 2e-3, "index": 1e-3, "mix": 4e-4, "rest": 2e-3}


def orthogonal(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximately U V^T of each matrix of g [N, rows, cols], by a quintic Newton-Schulz iteration."""
    x = g.to(torch.bfloat16) if g.is_cuda else g.float()
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(-1, -2) if wide else x


def _kind(name: str, p: torch.Tensor) -> str:
    if "indexer" in name:
        return "index"
    if "embed_tokens" in name:
        return "embed"
    if name == "lm_head.weight":
        return "head"
    if p.dim() < 2 or "conv1d" in name:
        return "rest"
    # Few outputs that steer much: routers, stream mixes, the KDA write gate.
    owner = name.split(".")[-2]
    return "mix" if owner in ("gate", "b_proj") or name.endswith("_hc.fn") else "matrix"


class Optimiser:
    def __init__(self, net: Network) -> None:
        kinds: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
        self.shapes: dict[tuple[int, int], list[torch.nn.Parameter]] = defaultdict(list)
        for name, p in net.named_parameters():
            kind = _kind(name, p)
            if kind != "matrix":
                kinds[kind].append(p)
                continue
            rows, cols = p.shape[-2:]
            # Gate and up of an expert lie in one tensor, but are two matrices.
            self.shapes[(rows // 2 if name.endswith("gate_up_proj") else rows, cols)].append(p)
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}
        groups = [
            {"params": ps, "lr": ADAM_RATES[kind], "peak": ADAM_RATES[kind]}
            for kind, ps in sorted(kinds.items())
        ]
        self.adam = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=next(net.parameters()).is_cuda
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update; `scale` is the schedule's factor, 1 at the peak."""
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * scale
        self.adam.step()
        for shape, parameters in self.shapes.items():
            used = [p for p in parameters if p.grad is not None]
            whole = torch.cat(
                [
                    (p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1, *shape)
                    for p in parameters
                ]
            )
            buffer = self.buffers.setdefault(shape, torch.zeros_like(whole))
            buffer.lerp_(whole, 1 - MOMENTUM)
            update = orthogonal(whole.lerp(buffer, MOMENTUM)).float() * (MUON_RMS * scale * max(shape) ** 0.5)
            start = 0
            for p in parameters:
                count = p.numel() // (shape[0] * shape[1])
                if any(p is u for u in used):
                    p.mul_(1 - MUON_DECAY * scale).sub_(update[start : start + count].reshape(p.shape))
                start += count

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for parameters in self.shapes.values():
            for p in parameters:
                p.grad = None

    def state_dict(self) -> dict:
        return {"adam": self.adam.state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        self.buffers = state["buffers"]
