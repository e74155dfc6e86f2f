"""What a random fuel's config.json and hf_quant_config.json say of its weight formats, as releases say it.

The engine tells formats by the tensors themselves, so none of this decides anything; it is there because a
reader of other fuels must not stumble over it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rocket.inventory import PLAIN_FORMATS, Kind, Parameter
from rocket.random_fuel_formats import expert_format, format_of
from rocket.random_fuel_shape import FuelOptions

PRODUCER = {"name": "modelopt", "version": "0.45.0"}
_PREFIXES = {"nested": "model.language_model.", "flat": "model."}
_ALGORITHMS = {
    **{"nvfp4": "NVFP4", "fp8-tensor": "FP8", "mxfp8": "MXFP8"},
    **dict.fromkeys(("fp8", "fp8-modelopt"), "FP8_PB_WO"),
}
_GROUP_SIZES = {"NVFP4": 16, "MXFP8": 32, "FP8_PB_WO": 128}
_OF_GROUPS = ("nvfp4-packed", "fp8-packed", "fp8-row")  # spellings of compressed-tensors


def formats_of_modules(options: FuelOptions, found: Sequence[Parameter]) -> dict[str, str]:
    """Module -> its weight format, for every module that has a linear weight."""
    own = _own_prefix(options)
    prefix = _PREFIXES.get(options.ignore_prefix, own)
    formats = {}
    for p in found:
        if p.kind in (Kind.LINEAR, Kind.ROUTER, Kind.EMBEDDING):
            name = prefix + p.name.removeprefix(own) if p.name.startswith(own) else p.name
            formats[name] = format_of(options, p)
    return formats


def _own_prefix(options: FuelOptions) -> str:
    return _PREFIXES["nested" if options.layout == "nested" else "flat"]


def _headline(options: FuelOptions) -> tuple[str, ...]:
    """The formats of the parts, BF16 and exceptions by layer left out."""
    if options.patchwork:
        return ("nvfp4", "fp8-modelopt", "fp8-tensor", "mxfp8")
    o = options
    parts = (expert_format(o), o.attention, o.dense_mlp, o.shared, o.head, o.embedding)
    quantised = (f for f in parts if f not in PLAIN_FORMATS)
    return tuple(dict.fromkeys("fp8" if f == "fp8-bf16-scales" else f for f in quantised))


def _unquantised(options: FuelOptions) -> list[str]:
    """Module patterns of the parts that are BF16, and layers whose experts are."""
    prefix = _PREFIXES.get(options.ignore_prefix, _own_prefix(options))
    ignore = ["model.visual*"]
    if options.head == "bf16":
        ignore.append("lm_head")
    if options.embedding == "bf16":
        ignore.append(prefix + "embed_tokens")
    for i in range(options.shape.num_hidden_layers):
        layer = f"{prefix}layers.{i}."
        if options.attention == "bf16":
            ignore.append(layer + "self_attn*")
        if options.shape.is_moe(i):
            ignore.append(layer + "mlp.gate")
            ignore += [layer + "mlp.shared_experts*"] * (options.shared == "bf16")
        elif options.dense_mlp == "bf16":
            ignore.append(layer + "mlp.*")
    ignore += [f"{prefix}layers.{i}*" for i in options.bf16_expert_layers]
    if options.draft != "none" and options.draft_weights == "bf16":
        ignore.append(f"{prefix}layers.{options.shape.num_hidden_layers}*")
    return sorted(ignore)


def _layer_algorithms(formats: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for name, weight_format in formats.items():
        if algorithm := _ALGORITHMS.get(weight_format):
            size = _GROUP_SIZES.get(algorithm)
            layers[name] = {"quant_algo": algorithm} | ({"group_size": size} if size else {})
    return layers


def _modelopt(options: FuelOptions, formats: Mapping[str, str]) -> dict[str, Any]:
    """Of config.json."""
    headline = _headline(options)
    if len(headline) > 1 or options.fp8_expert_layers:
        return {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": _layer_algorithms(formats),
            "producer": PRODUCER,
            "quant_method": "modelopt",
        }
    algorithm = _ALGORITHMS[headline[0]]
    weights: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if algorithm == "NVFP4":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    elif algorithm == "MXFP8":
        weights["group_size"] = 32
    return {
        "config_groups": {
            "group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}
        },
        "ignore": _unquantised(options),
        "quant_algo": algorithm,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def _group(weight_format: str, targets: list[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    kind = "nvfp4-pack-quantized"
    if weight_format == "nvfp4-packed":
        weights |= {"strategy": "tensor_group", "symmetric": True, "observer": "minmax"}
    else:
        kind = "float-quantized"
        weights |= {"num_bits": 8, "group_size": None, "symmetric": True, "observer": "minmax"}
        blocks = {"strategy": "block", "block_structure": [128, 128]}
        weights |= {"strategy": "channel"} if weight_format == "fp8-row" else blocks
    return {
        "format": kind,
        "input_activations": None,
        "output_activations": None,
        "targets": targets,
        "weights": weights,
    }


def _targets(formats: Mapping[str, str], weight_format: str) -> list[str]:
    """Regular expressions, as these files have them: one for each place in a layer."""
    found = {
        re.escape(re.sub(r".*\.layers\.\d+\.", "", name)) for name, f in formats.items() if f == weight_format
    }
    return sorted({"re:.*" + re.sub(r"experts\\\.\d+", r"experts\\.\\d+", place) + "$" for place in found})


def _compressed(options: FuelOptions, formats: Mapping[str, str]) -> dict[str, Any]:
    headline = _headline(options)
    single = len(headline) == 1
    groups = {
        f"group_{i}": _group(f, ["Linear"] if single else _targets(formats, f))
        for i, f in enumerate(headline)
    }
    return {
        "config_groups": groups,
        "format": groups["group_0"]["format"] if single else "mixed-precision",
        "ignore": _unquantised(options),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _official_fp8(options: FuelOptions) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": _unquantised(options),
    }


def _is_modelopt(options: FuelOptions) -> bool:
    headline = _headline(options)
    return bool(headline) and headline != ("fp8",) and not set(headline) & set(_OF_GROUPS)


def quantization_config(options: FuelOptions, formats: Mapping[str, str]) -> dict[str, Any] | None:
    """The part of config.json; none if nothing is quantised, or if a file of its own says it."""
    headline = _headline(options)
    if not headline or options.quantization == "hf":
        return None
    if headline == ("fp8",):
        return _official_fp8(options)
    return _modelopt(options, formats) if _is_modelopt(options) else _compressed(options, formats)


def hf_quant_config(options: FuelOptions, formats: Mapping[str, str]) -> dict[str, Any] | None:
    """The contents of hf_quant_config.json, which ModelOpt writes beside config.json."""
    if not _is_modelopt(options) or options.quantization == "config":
        return None
    config = _modelopt(options, formats)
    algorithm = config["quant_algo"]
    said: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if algorithm == "MIXED_PRECISION":
        said["quantized_layers"] = config["quantized_layers"]
    else:
        size = _GROUP_SIZES.get(algorithm)
        said |= ({"group_size": size} if size else {}) | {"exclude_modules": config["ignore"]}
    return {"producer": PRODUCER, "quantization": said}
