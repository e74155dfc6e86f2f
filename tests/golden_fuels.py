"""The golden cases: which random fuels, which prompts, and what tests/golden/*.safetensors hold about them.

A case has one token sequence. Its prompts are the prefixes whose lengths cross pool, index_topk and chunk
borders by one token each way. Files hold, from transformers in float32:
  tokens [n]
  logits [n, vocab]              at every position
  last/<p> [vocab]               the last row of a run of the prefix of length p
  greedy/<p> [64]                what follows it
  greedy_logits [64, vocab]      the rows that chose greedy/<greedy_prompt>, each from a decode step
  hidden [layers, rows, N, H]    after each layer, at the positions hidden_rows
  expert_id/<layer>, expert_weight/<layer> [n, topk]   ascending ids
  selected/<layer> [n, width]    ascending positions, filled up with -1
  state/<p>/<name>               after the prefix of length p, by the names of Engine::state
"""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from rocket.random_fuel import fuel_sha256, make_fuel
from rocket.random_fuel_shape import VARIANTS, FuelOptions, Shape

GOLDEN = Path(__file__).parent / "golden"
LENGTH = 100
GREEDY = 64
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    options: FuelOptions

    @property
    def shape(self) -> Shape:
        return self.options.shape

    @property
    def file(self) -> Path:
        return GOLDEN / f"{self.name}.safetensors"

    def tokens(self) -> list[int]:
        raw = np.random.PCG64(self.options.seed + 1).random_raw(LENGTH)
        return [int(x) % self.shape.vocab_size for x in raw]

    def prompts(self) -> list[int]:
        """Lengths of the prompts, ascending."""
        pool, topk = self.shape.index_kpool, self.shape.index_topk
        middles = (pool, topk, topk + pool, CHUNK)
        lengths = {1, LENGTH} | {m + d for m in middles for d in (-1, 0, 1)}
        return sorted(n for n in lengths if 1 <= n <= LENGTH)

    def hidden_rows(self) -> list[int]:
        pool, topk = self.shape.index_kpool, self.shape.index_topk
        borders = (pool, topk, topk + pool, CHUNK)
        return sorted({0, LENGTH - 1} | {m + d for m in borders for d in (-1, 0)})

    def state_prompts(self) -> list[int]:
        return [self.shape.index_kpool + 1, self.shape.index_topk + 1, LENGTH]

    @property
    def greedy_prompt(self) -> int:
        """The prompt whose greedy continuation keeps its logits; it decodes across index_topk."""
        return self.shape.index_topk - 1

    def build(self, directory: Path) -> Path:
        """Makes the fuel, or finds it where an earlier call with the same options left it."""
        tag = hashlib.sha256(repr(self.options).encode()).hexdigest()[:12]
        path = directory / f"{self.name}-{tag}"
        return path if path.is_dir() else make_fuel(path, self.options)


_ODD = Shape(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=40,
    moe_intermediate_size=16,
    num_hidden_layers=5,
    rms_norm_eps=3e-5,
    tie_word_embeddings=True,
    num_attention_heads=3,
    q_lora_rank=40,
    kv_lora_rank=24,
    qk_nope_head_dim=20,
    v_head_dim=12,
    index_topk=24,
    index_head_dim=24,
    index_n_heads=3,
    index_kpool=8,
    index_kpool_always_select_tail=False,
    linear_num_heads=3,
    linear_head_dim=24,
    linear_conv_kernel_dim=3,
    linear_lower_bound=-3.0,
    n_routed_experts=10,
    num_experts_per_tok=2,
    swiglu_limit=4.0,
    hc_mult=2,
    hc_sinkhorn_iters=3,
    attention_pattern="MKKMK",
    mlp_pattern="SDSSD",
)

# Weights of more than one block of 128 rows and columns, the last ones cut short.
WILD = Shape(
    vocab_size=96,
    hidden_size=160,
    intermediate_size=192,
    moe_intermediate_size=32,
    num_hidden_layers=5,
    q_lora_rank=64,
    index_n_heads=2,
    linear_num_heads=2,
    v_head_dim=40,
    n_routed_experts=6,
    num_experts_per_tok=2,
    hc_mult=2,
)
SHORT = dataclasses.replace(WILD, num_hidden_layers=4)  # keeps golden files small


def variant(name: str, seed: int = 0, **changes: object) -> FuelOptions:
    """A small fuel with the weight formats of a release (rocket.random_fuel_shape.VARIANTS)."""
    return FuelOptions(**{"shape": WILD, "seed": seed, "tokenizer": False, **VARIANTS[name], **changes})


CASES = [
    # As ModelOpt releases are: nested names, shards with an index; draft and vision tensors to leave alone.
    Case("modelopt", FuelOptions(Shape(), seed=4, files=3, draft="layer", vision=True)),
    # As compressed-tensors releases are, flat, in one file; two index heads make exact ties frequent.
    Case(
        "compressed",
        FuelOptions(
            Shape(vocab_size=320, index_n_heads=2),
            seed=1,
            experts="compressed-tensors",
            bf16_expert_layers=(5,),
            small="BF16",
            wide="F32",
            zero_global=True,
            layout="flat",
            layer_type_names="full",
            linear_config="flat",
            unaligned=True,
        ),
    ),
    # Expert groups, no pooling, unbounded decay, BF16 experts, shards without an index.
    Case(
        "groups",
        FuelOptions(
            Shape(
                vocab_size=320,
                num_hidden_layers=6,
                index_topk=16,
                index_kpool=1,
                index_kpool_always_select_tail=False,
                linear_lower_bound=None,
                n_group=4,
                topk_group=2,
                num_experts_per_tok=3,
                norm_topk_prob=False,
                routed_scaling_factor=1.25,
                attention_pattern="KMKKMK",
                mlp_pattern="DSSSSS",
            ),
            seed=9,
            experts="bf16",
            small="mixed",
            layout="text",
            layer_type_names="transformers",
            files=2,
            index=False,
        ),
    ),
    # Indexers shared by the layer right after; two shared experts; a draft with a head of its own.
    Case(
        "shared",
        FuelOptions(
            Shape(
                vocab_size=320,
                num_hidden_layers=6,
                n_shared_experts=2,
                attention_pattern="KMMKMM",
                mlp_pattern="DDSSSS",
                indexer_pattern="FFSFFS",
            ),
            seed=4,
            scalars="one",
            draft="own-head",
        ),
    ),
    # No tail (the first rows see nothing at all), odd sizes, two streams, three taps, tied embeddings.
    Case("odd", FuelOptions(_ODD, seed=4, input_scale=False, tokenizer=False)),
    # Official FP8, MXFP8, NVFP4 in the dense MLPs as well, and every format at once.
    Case("fp8", variant("fp8", 4, shape=SHORT)),
    Case("mxfp8", variant("mxfp8", 1, shape=SHORT)),
    Case("dense", variant("modelopt-dense", 1, shape=SHORT)),
    Case("patchwork", variant("patchwork", 1, shape=SHORT)),
]


def check_fuel(case: Case, fuel: Path, recorded: str) -> None:
    """A golden file says nothing about a fuel with other bytes."""
    found = fuel_sha256(fuel)
    if found != recorded:
        raise AssertionError(
            f"{case.file.name} belongs to a fuel with sha256 {recorded}, but {fuel} has {found}: "
            f"the generator changed; run scripts/make_oracle.py {case.name}"
        )
