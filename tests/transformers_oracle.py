"""The reference: transformers' glm5_next in float32 with eager attention and a stable top-k, fed from a fuel.

NVFP4, FP8 and MXFP8 are dequantised here, from the formats' definitions, into an ordinary float32 checkpoint
with the names of the public releases, which transformers then loads by its own conversion rules.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig, Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
MASKED = -1e30  # scores below are of candidates that may not compete
SMALL_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 32,
    "projection_intermediate_size": 32,
    "patch_size": 4,
}


@contextlib.contextmanager
def stable_topk(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Ties in torch.topk go to the lowest index. ``note`` gets the gaps from last chosen to first refused."""

    def topk(
        x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> torch.return_types.topk:
        assert largest
        assert dim in (-1, x.dim() - 1)
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        if k < x.shape[-1]:
            gaps = values[..., k - 1] - values[..., k]
            note(gaps[values[..., k] > MASKED])
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    saved = torch.topk, torch.Tensor.topk
    torch.topk, torch.Tensor.topk = topk, topk
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = saved


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """transformers asks for float32 in many places; here it gets float64: no rounding to speak of."""
    tensor, functional, default = torch.Tensor, torch.nn.functional, torch.get_default_dtype()
    saved = tensor.float, tensor.to, functional.softmax

    def widen(x: object) -> object:
        return torch.float64 if x is torch.float32 else x

    def to(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return saved[1](self, *map(widen, args), **{name: widen(value) for name, value in kwargs.items()})

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return saved[2](x, dim=dim, dtype=widen(dtype))

    tensor.float, tensor.to, functional.softmax = tensor.double, to, softmax
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        tensor.float, tensor.to, functional.softmax = saved
        torch.set_default_dtype(default)


def dequantise(packed: torch.Tensor, scale: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Nibbles [out, in/2] (low one = even column), E4M3 scales [out, in/16], a multiplier -> [out, in]."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = E2M1[nibbles.long()].view(*scale.shape, 16)
    return (values * scale.float()[..., None] * multiplier.reshape(())).flatten(-2)


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 [out, in] with a scale for all, a row, or a block of 128 x 128, or a power of two for 32."""
    values = weight.float()
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        powers = torch.exp2(scale.view(torch.uint8).float() - 127)
        return values * powers.repeat_interleave(32, 1)
    if scale.numel() == 1:
        return values * scale.float().reshape(())
    rows, columns = weight.shape
    if scale.shape in ((rows,), (rows, 1)):
        return values * scale.float().reshape(rows, 1)
    blocks = scale.float().reshape(-(-rows // 128), -1)  # ModelOpt writes [rows, 1, columns, 1]
    blocks = blocks.repeat_interleave(128, 0)[:rows]
    return values * blocks.repeat_interleave(128, 1)[:, :columns]


SCALES = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("input_scale", "input_global_scale"),
)


def read_tensors(fuel: Path) -> dict[str, torch.Tensor]:
    """All tensors of a fuel in float32; a quantised weight and its scales become one ``….weight``."""
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(fuel.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            raw |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    out = {}
    for name, tensor in raw.items():
        base, _, leaf = name.rpartition(".")
        if leaf in SCALES:
            continue
        if leaf == "weight_packed":
            divisor = raw[base + ".weight_global_scale"]
            multiplier = torch.where(divisor == 0, 0.0, 1.0 / divisor)
            out[base + ".weight"] = dequantise(tensor, raw[base + ".weight_scale"], multiplier)
        elif tensor.dtype == torch.uint8:
            out[name] = dequantise(tensor, raw[base + ".weight_scale"], raw[base + ".weight_scale_2"])
        elif tensor.dtype == torch.float8_e4m3fn:
            inverse = raw.get(base + ".weight_scale_inv")
            out[name] = dequantise_fp8(tensor, raw[base + ".weight_scale"] if inverse is None else inverse)
        else:
            out[name] = tensor.float()
    return out


def read_config(fuel: Path) -> Glm5NextConfig:
    data = json.loads((fuel / "config.json").read_text())
    data.pop("quantization_config", None)
    if data["model_type"] == "glm5_next_text":
        text = Glm5NextTextConfig.from_dict(data)
        tied = text.tie_word_embeddings
        config = Glm5NextConfig(text_config=text, vision_config=SMALL_VISION, tie_word_embeddings=tied)
    else:
        data.setdefault("vision_config", SMALL_VISION)
        config = Glm5NextConfig.from_dict(data)
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    return config


def load_model(fuel: Path) -> Glm5NextForConditionalGeneration:
    config = read_config(fuel)
    layers = config.text_config.num_hidden_layers
    tensors = {}
    for name, tensor in read_tensors(fuel).items():
        if f".layers.{layers}." in name or name.startswith("model.visual."):
            continue
        if name.startswith("model.") and not name.startswith("model.language_model."):
            name = name.replace("model.", "model.language_model.", 1)
        tensors[name] = tensor.contiguous()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "generation_config.json").write_text("{}")
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        model, report = Glm5NextForConditionalGeneration.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    missing = [name for name in report["missing_keys"] if "visual" not in name]
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or report["unexpected_keys"] or report["mismatched_keys"]:
        raise ValueError(f"{fuel}: transformers did not take the checkpoint as it is: {missing=}, {report=}")
    return model.eval()


class Oracle:
    """A loaded model, a cache for one stream, and what the last calls left behind."""

    def __init__(self, fuel: Path, float64: bool = False) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)  # the matrices are too small for more
        transformers.logging.set_verbosity_error()
        self.model = load_model(fuel)
        self._precision = float64_throughout if float64 else contextlib.nullcontext
        if float64:
            self.model.double()
        self.text = self.model.model.language_model
        self.config = self.text.config
        self.hidden: list[list[np.ndarray]] = []
        self.router: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.selected: dict[int, list[np.ndarray]] = {}
        self._nearest, self.ties = float("inf"), 0
        self.reset()
        self._add_hooks()

    def nearest(self) -> float:
        """The smallest gap, exact ties apart, between a candidate that was chosen and one that was not."""
        return self._nearest

    def _note_gaps(self, gaps: torch.Tensor) -> None:
        self.ties += int((gaps == 0).sum())
        gaps = gaps[gaps > 0]
        if gaps.numel():
            self._nearest = min(self._nearest, float(gaps.min()))

    def _add_hooks(self) -> None:
        for i, layer in enumerate(self.text.layers):
            layer.register_forward_hook(
                lambda _m, _a, out, i=i: self.hidden[i].append(out[0][0].numpy().copy())
            )
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda _m, _a, out, i=i: self._note_router(i, out))
            if getattr(layer.self_attn, "indexer", None) is not None:
                layer.self_attn.indexer.register_forward_hook(
                    lambda _m, _a, out, i=i: self.selected[i].append(out[0].numpy().copy())
                )
            if i in self.mla_layers():
                source = i if i in self.selected else i - 1
                layer.self_attn.o_proj.register_forward_pre_hook(
                    lambda _m, args, source=source: self._blank_rows(source, args[0])
                )

    def _blank_rows(self, layer: int, attended: torch.Tensor) -> tuple[torch.Tensor]:
        """A row that may look at no token gets zeros; transformers would average over all keys."""
        seen = torch.from_numpy((self.selected[layer][-1] >= 0).any(-1))
        return (attended * seen[None, :, None],)

    def _note_router(self, layer: int, out: tuple[torch.Tensor, ...]) -> None:
        _, weights, indices = out
        order = indices.argsort(-1)
        ids, weights = indices.gather(-1, order), weights.gather(-1, order)
        self.router[layer].append((ids.numpy(), weights.numpy()))

    def reset(self) -> None:
        """Forgets the stream; records start anew."""
        self.cache = DynamicCache(config=self.config)
        self.clear_records()

    def clear_records(self) -> None:
        n = self.config.num_hidden_layers
        self.hidden = [[] for _ in range(n)]
        self.router = {i: [] for i in range(n) if self.config.mlp_layer_types[i] == "sparse"}
        self.selected = {i: [] for i in self.mla_layers() if self.config.indexer_types[i] == "full"}

    def kda_layers(self) -> list[int]:
        return [i for i, t in enumerate(self.config.layer_types) if t == "linear_attention"]

    def mla_layers(self) -> list[int]:
        return [i for i, t in enumerate(self.config.layer_types) if t != "linear_attention"]

    def feed(self, ids: list[int]) -> np.ndarray:
        """Feeds tokens in one call and returns logits [len(ids), vocab]."""
        with stable_topk(self._note_gaps), self._precision():
            out = self.model(input_ids=torch.tensor([ids]), cache=self.cache, use_cache=True)
        return out.logits[0].numpy().copy()

    def greedy(self, logits: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
        """Greedy tokens after the row of logits, and the rows that chose them."""
        tokens, rows = [], [logits]
        for _ in range(count):
            tokens.append(int(rows[-1].argmax()))
            rows.append(self.feed([tokens[-1]])[0])
        return tokens, np.stack(rows[:count])

    def states(self) -> dict[str, np.ndarray]:
        """By the names of Engine::state."""
        out = {}
        for i in self.kda_layers():
            layer = self.cache.layers[i]
            out[f"kda/{i}"] = _only(layer.recurrent_states)[0].numpy().copy()
            conv = _only(layer.conv_states)[0].T.numpy().copy()  # [taps - 1 or more, C], oldest first
            out[f"conv/{i}"] = np.ascontiguousarray(conv[-(self.config.linear_conv_kernel_dim - 1) :])
        for i in self.mla_layers():
            layer = self.cache.layers[i]
            out[f"latent/{i}"] = layer.keys[0, 0].numpy().copy()
            indexer = self.text.layers[i].self_attn.indexer
            if indexer is not None:
                out[f"pooled/{i}"] = indexer.get_pooled_states(layer.indexer_keys)[0][0].numpy().copy()
        return out


def _only(states: Any) -> torch.Tensor:
    """Caches hold one tensor, or a dict or list with one."""
    if isinstance(states, dict):
        (states,) = states.values()
    elif isinstance(states, list):
        (states,) = states
    return states
