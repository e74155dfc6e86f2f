"""The files around a random fuel's weights (config, tokenizer, template) and the safetensors writer."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rocket.random_fuel_quantization import hf_quant_config, quantization_config
from rocket.random_fuel_shape import FuelOptions, RandomFuelError, Shape
from rocket.shards import header_of, index_text, shard_names, split_by_name

if TYPE_CHECKING:
    from rocket.random_fuel import TensorSpec

LAYER_TYPE_NAMES = {
    "release": ("linear_attention", "deepseek_sparse_attention"),
    "transformers": ("linear_attention", "indexed_attention"),
    "full": ("linear_attention", "full_attention"),
}
SPECIAL_TOKENS = [
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
]
THINK_TOKENS = ["<think>", "</think>"]
MIN_TOKENIZER_VOCAB = 256 + len(SPECIAL_TOKENS) + len(THINK_TOKENS)


def special_id(token: str) -> int:
    return 256 + [*SPECIAL_TOKENS, *THINK_TOKENS].index(token)


def vision_config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": shape.hidden_size,
        "projection_intermediate_size": 32,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
    }


def _token_ids(shape: Shape) -> dict[str, Any]:
    if shape.vocab_size < MIN_TOKENIZER_VOCAB:
        return {"pad_token_id": 0, "eos_token_id": [0]}
    ends = [special_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    return {"pad_token_id": ends[0], "eos_token_id": ends}


def text_config(options: FuelOptions) -> dict[str, Any]:
    s = options.shape
    layers = range(s.num_hidden_layers)
    config: dict[str, Any] = {
        name: getattr(s, name)
        for name in s.__dataclass_fields__
        if not name.startswith("linear_") and not name.endswith("_pattern")
    }
    config |= {
        "num_key_value_heads": s.num_attention_heads,
        "qk_rope_head_dim": 0,
        "qk_head_dim": s.qk_nope_head_dim,
        "head_dim": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "mhc": True,
        "mla_use_nope": True,
        "index_kpool_compress": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "dtype": "bfloat16",
        "num_nextn_predict_layers": int(options.draft != "none"),
        "mlp_layer_types": ["sparse" if s.is_moe(i) else "dense" for i in layers],
        "indexer_types": ["full" if s.indexer_full(i) else "shared" for i in layers],
        **_token_ids(s),
    }
    if options.layer_type_names != "absent":
        names = LAYER_TYPE_NAMES[options.layer_type_names]
        config["layer_types"] = [names[0] if s.is_kda(i) else names[1] for i in layers]
    if options.linear_config == "nested":
        config["linear_attn_config"] = {
            "num_heads": s.linear_num_heads,
            "head_dim": s.linear_head_dim,
            "short_conv_kernel_size": s.linear_conv_kernel_dim,
            "gate_lower_bound": s.linear_lower_bound,
            "safe_gate": s.linear_lower_bound is not None,
            "kda_layers": [i for i in layers if s.is_kda(i)],
            "full_attn_layers": [i for i in layers if not s.is_kda(i)],
        }
    else:
        config |= {name: getattr(s, name) for name in s.__dataclass_fields__ if name.startswith("linear_")}
    return config


def model_config(options: FuelOptions, formats: Mapping[str, str]) -> dict[str, Any]:
    text = text_config(options)
    quantization = quantization_config(options, formats)
    extra = {"quantization_config": quantization} if quantization else {}
    if options.layout == "text":
        return {"architectures": ["Glm5NextTextModel"], "model_type": "glm5_next_text", **text, **extra}
    top: dict[str, Any] = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next"}
    if options.layout == "flat":
        return top | text | extra
    if options.shape.vocab_size >= MIN_TOKENIZER_VOCAB:
        names = {"image": "<|image|>", "video": "<|video|>"}
        names |= {f"{kind}_{end}": f"<|{word}_of_{kind}|>" for kind in ("image", "video")
                  for end, word in (("start", "begin"), ("end", "end"))}  # fmt: skip
        top |= {f"{name}_token_id": special_id(token) for name, token in names.items()}
    top |= {"dtype": "bfloat16", "tie_word_embeddings": options.shape.tie_word_embeddings}
    text = {"model_type": "glm5_next_text", **text}
    return top | {"text_config": text, "vision_config": vision_config(options.shape)} | extra


def _byte_letters() -> list[str]:
    """The printable stand-in for each byte that byte-level BPE vocabularies use."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [letters[b] for b in range(256)]


def tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """256 bytes, special tokens, then pairs of letters as far as the vocabulary reaches."""
    letters = _byte_letters()
    specials = [*SPECIAL_TOKENS, *THINK_TOKENS]
    common = [letters[0x20], *"etaoinshrdlucmfwypvbgkjqxz.,"]
    pairs = [(a, b) for a in common for b in common if b != common[0]]
    pairs = sorted(pairs, key=lambda p: common.index(p[0]) + common.index(p[1]))[
        : vocab_size - MIN_TOKENIZER_VOCAB
    ]
    vocab = {token: i for i, token in enumerate([*letters, *specials])}
    vocab |= {a + b: MIN_TOKENIZER_VOCAB + i for i, (a, b) in enumerate(pairs)}
    added = [
        {
            "id": 256 + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL_TOKENS,
        }
        for i, token in enumerate(specials)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[a, b] for a, b in pairs],
        },
    }


CHAT_TEMPLATE = """[gMASK]<sop>
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|><think>
{%- endif -%}
"""


def write_all(directory: Path, options: FuelOptions, formats: Mapping[str, str]) -> None:
    """Everything but the weights. `formats`: the weight format of each module."""

    def write(name: str, data: Any) -> None:
        (directory / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write("config.json", model_config(options, formats))
    write(
        "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "top_p": 0.95, **_token_ids(options.shape)},
    )
    if quantization := hf_quant_config(options, formats):
        write("hf_quant_config.json", quantization)
    if options.tokenizer and options.shape.vocab_size >= MIN_TOKENIZER_VOCAB:
        write("tokenizer.json", tokenizer_json(options.shape.vocab_size))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
        }
        write("tokenizer_config.json", config)
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_tensors(
    directory: Path,
    specs: Sequence["TensorSpec"],
    options: FuelOptions,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    total, done = sum(t.nbytes for t in specs), 0
    try:
        files = split_by_name(specs, options.files)
    except ValueError as e:
        raise RandomFuelError(str(e), "ask for fewer files") from None
    shards = dict(zip(shard_names(len(files)), files, strict=True))
    for name, tensors in shards.items():
        with (directory / name).open("wb") as f:
            f.write(header_of(tensors, unaligned=options.unaligned))
            for t in tensors:
                begin = f.tell()
                for piece in t.pieces():
                    f.write(np.ascontiguousarray(piece).data)
                    done += piece.nbytes
                    if progress:
                        progress(done, total)
                assert f.tell() - begin == t.nbytes, f"{t.name}: wrote {f.tell() - begin} bytes of {t.nbytes}"
    if len(files) > 1 and options.index:
        (directory / "model.safetensors.index.json").write_text(index_text(shards), encoding="utf-8")
