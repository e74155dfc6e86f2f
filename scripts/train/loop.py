"""The training loop: dense attention first, then sparse selection, quantised experts and the draft layer."""

import json
import pickle
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import kernels
from .errors import TrainError
from .forward import Forward, Mode
from .fuel import load_weights, quantise_experts
from .model import SHAPES, Network, text_config
from .optim import Optimiser
from .tokens import Batches, check_vocabulary, held_out_windows

BIAS_RATE = 1e-3  # step of the router's bias at the peak of the schedule


@dataclass(frozen=True)
class Plan:
    shape: str = "sparkler"
    steps: int = 6000
    rows: int = 256
    warmup: int = 100
    cooldown: float = 0.4  # share of the steps, at the end, over which the rate falls to nothing
    sparse_from: float = 0.35  # shares of the steps at which each phase begins
    quantised_from: float = 0.65
    draft_from: float = 0.65
    split: float = 0.0  # share of the tokens with line ends that are cut in two; else `polish` afterwards
    seed: int = 1

    def scale(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = (self.steps - step) / (self.steps * self.cooldown)
        return max(0.02, min(1.0, left))

    def mode(self, step: int) -> Mode:
        share = step / self.steps
        return Mode(
            sparse=share >= self.sparse_from,
            index_loss=True,
            quantised=share >= self.quantised_from,
            draft=share >= self.draft_from,
        )


def load_state(path: Path, device: torch.device | str = "cpu") -> dict:
    """A checkpoint as `Trainer.save` or `polish` wrote it."""
    if not path.is_file():
        raise TrainError(f"{path} is missing", "train_fuel.py train writes it")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainError(f"{path} cannot be read: {said}", "remove it; the run then begins again") from None


class Trainer:
    def __init__(self, plan: Plan, data: Path, run: Path, *, kda: str, compile_parts: bool) -> None:
        self.plan, self.data, self.run = plan, data, run
        check_vocabulary(data, SHAPES[plan.shape].vocab)
        run.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        self.shape = SHAPES[plan.shape]
        self.net = Network(text_config(self.shape)).to(self.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        attention = kernels.load_fla() if kda == "fla" else None
        self.forward = Forward(self.net, dtype, attention, compile_parts)
        # Measuring has other shapes and no gradients: compiling for it would cost more than it saves.
        self.plain = Forward(self.net, dtype, attention)
        self.optimiser = Optimiser(self.net)
        self.batches = Batches(data, self.device, plan.seed, split=plan.split)
        self.step = 0
        self.seconds = 0.0  # in all calls
        about = {
            **asdict(plan),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU",
        }
        (run / "plan.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    def save(self, name: str = "state.pt") -> None:
        state = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "generator": self.batches.generator.get_state(),
            "plan": asdict(self.plan),
        }
        torch.save(state, self.run / (name + ".part"))
        (self.run / (name + ".part")).replace(self.run / name)

    def resume(self, name: str = "state.pt") -> bool:
        path = self.run / name
        if not path.exists():
            return False
        state = load_state(path, self.device)
        asked = asdict(self.plan)
        odd = [k for k in asked if state["plan"].get(k) != asked[k]]
        if odd:
            found = ", ".join(f"{k} {state['plan'].get(k)} (asked: {asked[k]})" for k in odd)
            raise TrainError(
                f"{path} is of a run with {found}", "give the arguments it began with, or another --run"
            )
        self.net.load_state_dict(state["net"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.batches.generator.set_state(state["generator"].cpu())
        return True

    def one_step(self, mode: Mode) -> dict[str, torch.Tensor]:
        tokens = self.batches.draw(self.plan.rows, self.shape.context + (3 if mode.draft else 1))
        result = self.forward(tokens, mode)
        total = result.loss + result.index_loss
        for weight, loss in zip((1.0, 0.5), result.draft_losses, strict=False):
            total = total + weight * loss
        self.optimiser.zero_grad()
        total.backward()
        scale = self.plan.scale(self.step)
        self.optimiser.step(scale)
        self._balance(result.loads, scale)
        self.step += 1
        figures = {"loss": result.loss.detach(), "index": result.index_loss.detach()}
        figures |= {f"draft{i + 1}": loss.detach() for i, loss in enumerate(result.draft_losses)}
        figures["least"] = torch.stack([load.min() / load.float().mean() for load in result.loads]).min()
        return figures

    @torch.no_grad()
    def _balance(self, loads: list[torch.Tensor], scale: float) -> None:
        """Raises the bias of experts that had less than their share and lowers the others'."""
        for gate, load in zip(self.net.routers(), loads, strict=False):
            load = load.float()
            gate.e_score_correction_bias += BIAS_RATE * max(scale, 0.05) * torch.sign(load.mean() - load)

    @torch.no_grad()
    def measure(self, mode: Mode, limit: int = 64) -> dict[str, float]:
        """Nats a token on held-out text, by group."""
        out = {}
        for group in self.batches.streams:
            windows = held_out_windows(self.data, group, self.shape.context + 1, limit).to(self.device)
            if len(windows):
                out[group] = self.plain(windows, mode).loss.item()
        return out

    def _log(self, line: dict[str, object]) -> None:
        """To standard output, and to `log.jsonl` beside the checkpoint."""
        text = json.dumps(line)
        print(text, flush=True)
        with (self.run / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def train(self, stop_after: float, until: int | None = None) -> bool:
        """Runs to the plan's end, or until the time or the step given; saves a checkpoint either way. Says
        whether the end was reached."""
        begin = last = time.monotonic()
        before = self.seconds
        until = min(until or self.plan.steps, self.plan.steps)
        seen = self.step
        while self.step < until and time.monotonic() - begin < stop_after:
            mode = self.plan.mode(self.step)
            figures = self.one_step(mode)
            self.seconds = before + time.monotonic() - begin
            if self.step % 50 == 0 or self.step in (1, 2, 10, until):
                values = {k: round(v.item(), 4) for k, v in figures.items()}
                now = time.monotonic()
                speed = (self.step - seen) * self.plan.rows * self.shape.context / (now - last)
                seen, last = self.step, now
                line = {
                    "step": self.step,
                    "seconds": round(self.seconds, 1),
                    "tokens_per_s": round(speed),
                    **values,
                }
                self._log(line)
            if self.step % 500 == 0:
                held = self.measure(Mode(sparse=mode.sparse, quantised=mode.quantised))
                self._log({"step": self.step, "held_out": {k: round(v, 4) for k, v in held.items()}})
                self.save()
        self.save()
        return self.step >= self.plan.steps


def polish(
    weights: Path,
    data: Path,
    run: Path,
    *,
    shape: str,
    steps: int,
    rows: int,
    length: int,
    rate: float,
    seed: int,
) -> None:
    """Teaches a trained network that a line may end after punctuation that its prompt stopped at.

    The tokenizer joins the two, so a network trained without split line ends holds that no line end follows.
    Only the embeddings of such punctuation and the head's rows of bare line ends move, which a CPU does in
    minutes. Writes `state.pt` to `run`.
    """
    check_vocabulary(data, SHAPES[shape].vocab)
    run.mkdir(parents=True, exist_ok=True)
    net = load_weights(weights, shape)
    kept = {k: v.clone() for k, v in net.state_dict().items() if ".experts." in k}
    quantise_experts(net).requires_grad_(False)
    forward = Forward(net, torch.float32)
    batches = Batches(data, torch.device("cpu"), seed, split=0.5)
    used = [batches.ends[batches.ends[:, 0] > 0, column].unique() for column in (0, 1)]
    tables = [net.trunk.embed_tokens.weight, net.lm_head.weight]
    masks = [torch.zeros(len(t), 1).index_fill_(0, at, 1.0) for t, at in zip(tables, used, strict=True)]
    optimiser = torch.optim.Adam([t.requires_grad_() for t in tables], lr=rate, betas=(0.9, 0.95))
    begin = time.monotonic()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 - step / steps)
        ids = batches.draw(rows, length + 1)
        result = forward(ids, Mode())
        optimiser.zero_grad()
        result.loss.backward()
        for table, mask in zip(tables, masks, strict=True):
            table.grad.mul_(mask)
        optimiser.step()
        if step % 10 == 9:
            cut = torch.isin(ids[:, :-1], used[0]) & torch.isin(ids[:, 1:], used[1])
            losses = {
                "loss": round(result.loss.item(), 4),
                "line_ends": round(result.nll[cut].mean().item(), 4),
            }
            print(
                json.dumps({"polish": step + 1, "seconds": round(time.monotonic() - begin, 1)} | losses),
                flush=True,
            )
            torch.save({"net": net.state_dict() | kept}, run / "state.pt")
    torch.save({"net": net.state_dict() | kept}, run / "state.pt")
