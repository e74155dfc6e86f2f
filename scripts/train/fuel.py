"""A trained network as a fuel on disk, in the form of the public glm5_next releases, and back."""

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .errors import TrainError
from .model import SHAPES, Network, text_config
from .nvfp4 import dequantise, quantise, round_trip
from .tokens import END

PREFIX = "model.language_model."
SHARD = 15 * 2**20
KEPT_F32 = ("A_log", "dt_bias", "base", "scale", "e_score_correction_bias", "index_kpool_compress_ape")
RENAMED = [
    (r"\.forget_gate\.", "."),
    (r"\.attn_hc\.(fn|base|scale)$", r".hc_attn_\1"),
    (r"\.ffn_hc\.(fn|base|scale)$", r".hc_ffn_\1"),
    (r"\.shared_head_norm\.", ".shared_head.norm."),
]

CHAT_TEMPLATE = """{%- for message in messages -%}
<|{{ message.role }}|>
{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% endif -%}
"""


def stored_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.rsplit(".", 1)[-1] in KEPT_F32 else torch.bfloat16


def rounded(net: Network) -> dict[str, torch.Tensor]:
    """The network's state as it is kept: BF16, a few small tensors in float32."""
    return {k: v.detach().to("cpu", stored_dtype(k)).contiguous() for k, v in net.state_dict().items()}


def save_weights(state: dict[str, torch.Tensor], out: Path) -> None:
    """`weights-N.safetensors`, each below SHARD bytes: the trained network before quantisation."""
    out.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    size = number = 0
    for name, tensor in [*sorted(state.items()), ("", torch.empty(0))]:
        room = tensor.numel() * tensor.element_size()
        if shard and (size + room > SHARD or not name):
            save_file(shard, out / f"weights-{number}.safetensors")
            shard, size, number = {}, 0, number + 1
        if name:
            shard[name] = tensor
            size += room


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise TrainError(f"{path} cannot be read: {error}", "write it again") from None


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What `save_weights` wrote."""
    paths = sorted(folder.glob("weights-*.safetensors"))
    if not paths:
        raise TrainError(f"{folder} holds no weights-N.safetensors", "train_fuel.py weights writes them")
    state: dict[str, torch.Tensor] = {}
    for path in paths:
        state |= _tensors(path)
    return state


def network(state: dict[str, torch.Tensor], shape: str, where: Path) -> Network:
    """A network of these weights, in float32."""
    net = Network(text_config(SHAPES[shape]))
    expected = net.state_dict()
    odd = sorted(k for k in expected.keys() | state.keys() if _size(expected, k) != _size(state, k))
    if odd:
        raise TrainError(
            f"{where}: {odd[0]} is {_size(state, odd[0])}, but in the shape {shape!r} it is "
            f"{_size(expected, odd[0])}",
            f"give the --shape they were trained with: one of {', '.join(SHAPES)}",
        )
    net.load_state_dict({k: v.float() for k, v in state.items()})
    return net.eval()


def _size(state: dict[str, torch.Tensor], name: str) -> str:
    return str(list(state[name].shape)) if name in state else "absent"


def load_weights(folder: Path, shape: str) -> Network:
    return network(read_weights(folder), shape, folder)


@torch.no_grad()
def quantise_experts(net: Network) -> Network:
    """Replaces the routed experts by what their stored form stands for."""
    for name, p in net.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            gate, up = p.chunk(2, 1)
            p.copy_(torch.cat((round_trip(gate), round_trip(up)), 1))
        elif name.endswith("experts.down_proj"):
            p.copy_(round_trip(p))
    return net


def _disk_name(name: str, layers: int) -> str:
    name = name.replace("trunk.", PREFIX, 1) if name.startswith("trunk.") else name
    name = name.replace("draft.", f"{PREFIX}layers.{layers}.", 1) if name.startswith("draft.") else name
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _expert_tensors(prefix: str, projection: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    packed, scale, overall = quantise(weight.float())
    out = {}
    for e in range(weight.shape[0]):
        base = f"{prefix}.{e}.{projection}"
        out[f"{base}.weight"] = packed[e].contiguous()
        out[f"{base}.weight_scale"] = scale[e].contiguous()
        out[f"{base}.weight_scale_2"] = overall[e].float().clone()
    return out


def disk_tensors(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The tensors of the fuel: routed experts in NVFP4 with ModelOpt's names, everything else as kept."""
    out: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        name = _disk_name(key, layers)
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            prefix = name.removesuffix(".gate_up_proj")
            out |= _expert_tensors(prefix, "gate_proj", gate) | _expert_tensors(prefix, "up_proj", up)
        elif name.endswith("experts.down_proj"):
            out |= _expert_tensors(name.removesuffix(".down_proj"), "down_proj", tensor)
        elif name.endswith(".conv1d.weight"):
            for letter, part in zip("qkv", tensor.chunk(3, 0), strict=True):
                out[name.replace(".conv1d.", f".{letter}_conv1d.")] = part.contiguous()
        else:
            out[name] = tensor.contiguous()
    return out


def config_json(shape: str) -> dict:
    text = text_config(SHAPES[shape]).to_dict()
    for key in (
        "_name_or_path",
        "transformers_version",
        "architectures",
        "output_router_logits",
        "router_aux_loss_coef",
        "head_dim",
    ):
        text.pop(key, None)
    text = {k: v for k, v in text.items() if v is not None and not k.startswith("_")}
    text |= {"model_type": "glm5_next_text", "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": None,
            "ignore": [
                "lm_head",
                "*embed_tokens*",
                "*self_attn*",
                "*shared_experts*",
                "*mlp.gate",
                "*eh_proj*",
                f"{PREFIX}layers.0.mlp*",
            ],
        },
    }


def write_fuel(weights: Path, tokenizer: Tokenizer, shape: str, out: Path) -> dict[str, int]:
    """Everything but fuel.yaml and README.md. Returns counts for them."""
    out.mkdir(parents=True, exist_ok=True)
    state = read_weights(weights)
    network(state, shape, weights)  # refuses another shape's
    tensors = disk_tensors(state, SHAPES[shape].layers)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    end = tokenizer.token_to_id(END)
    files = {
        "config.json": config_json(shape),
        "generation_config.json": {"do_sample": False, "eos_token_id": end},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    experts = sum(v.numel() for k, v in state.items() if ".experts." in k)
    return {
        "parameters": sum(v.numel() for v in state.values()),
        "expert_parameters": experts,
        "draft_parameters": sum(v.numel() for k, v in state.items() if k.startswith("draft.")),
        "bytes": sum(p.stat().st_size for p in out.iterdir()),
    }


def read_fuel(folder: Path, shape: str) -> Network:
    """The network that the fuel stands for, in float32."""
    disk = _tensors(folder / "model.safetensors")
    try:
        return network(_state(disk, shape), shape, folder)
    except KeyError as error:
        raise TrainError(
            f"{folder / 'model.safetensors'}: no tensor {error} in it",
            "give the --shape it was trained with, or write it again: train_fuel.py fuel",
        ) from None


def _state(disk: dict[str, torch.Tensor], shape: str) -> dict[str, torch.Tensor]:
    """The state of the network that the fuel's tensors stand for."""
    state = {}
    for key, current in Network(text_config(SHAPES[shape])).state_dict().items():
        name = _disk_name(key, SHAPES[shape].layers)
        if ".experts." in name:
            prefix, which = name.rsplit(".", 1)
            parts = [which.removesuffix("_proj")] if which == "down_proj" else ["gate", "up"]
            rows = []
            for e in range(current.shape[0]):
                rows.append(
                    torch.cat(
                        [
                            dequantise(
                                *(
                                    disk[f"{prefix}.{e}.{p}_proj.weight{s}"]
                                    for s in ("", "_scale", "_scale_2")
                                )
                            )
                            for p in parts
                        ]
                    )
                )
            state[key] = torch.stack(rows)
        elif name.endswith(".conv1d.weight"):
            state[key] = torch.cat([disk[name.replace(".conv1d.", f".{letter}_conv1d.")] for letter in "qkv"])
        else:
            state[key] = disk[name]
    return state
