"""The network: transformers' glm5_next text model, a language-model head, and our draft layer."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextAttention,
    Glm5NextTextModel,
    Glm5NextTextMoE,
    Glm5NextTextRMSNorm,
)


@dataclass(frozen=True)
class Shape:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    dense_layers: int = 1
    intermediate: int = 768
    experts: int = 24
    expert_width: int = 128
    heads: int = 4
    linear_head_dim: int = 64
    q_rank: int = 128
    kv_rank: int = 128
    index_heads: int = 4
    index_dim: int = 32
    index_topk: int = 64
    context: int = 512


SHAPES = {
    "sparkler": Shape(),
    "tiny": Shape(
        vocab=512,
        hidden=64,
        layers=4,
        intermediate=96,
        experts=8,
        expert_width=32,
        heads=2,
        linear_head_dim=32,
        q_rank=32,
        kv_rank=32,
        index_heads=2,
        index_dim=16,
        index_topk=16,
        context=64,
    ),
}


def text_config(shape: Shape, eos_token_id: int = 0) -> Glm5NextTextConfig:
    config = Glm5NextTextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        moe_intermediate_size=shape.expert_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        n_shared_experts=1,
        n_routed_experts=shape.experts,
        num_experts_per_tok=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        q_lora_rank=shape.q_rank,
        kv_lora_rank=shape.kv_rank,
        qk_nope_head_dim=shape.linear_head_dim,
        qk_rope_head_dim=0,
        v_head_dim=shape.linear_head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        tie_word_embeddings=False,
        mlp_layer_types=["dense"] * shape.dense_layers + ["sparse"] * (shape.layers - shape.dense_layers),
        layer_types=["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(shape.layers)],
        indexer_types=["full"] * shape.layers,
        index_topk=shape.index_topk,
        index_head_dim=shape.index_dim,
        index_n_heads=shape.index_heads,
        index_kpool=4,
        index_kpool_always_select_tail=True,
        linear_head_dim=shape.linear_head_dim,
        linear_num_heads=shape.hidden // shape.linear_head_dim,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        hc_mult=4,
        hc_eps=1e-6,
        hc_sinkhorn_iters=20,
        swiglu_limit=10.0,
    )
    config._attn_implementation = "eager"
    return config


class Draft(nn.Module):
    """The draft layer: `eh_proj` over the next token's embedding and the trunk's hidden state, then one MLA
    + MoE block."""

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = Glm5NextTextRMSNorm(size, eps)
        self.hnorm = Glm5NextTextRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = Glm5NextTextRMSNorm(size, eps)
        self.self_attn = Glm5NextTextAttention(config, config.layer_types.index("indexed_attention"))
        self.post_attention_layernorm = Glm5NextTextRMSNorm(size, eps)
        self.mlp = Glm5NextTextMoE(config)
        self.shared_head_norm = Glm5NextTextRMSNorm(size, eps)


class Network(nn.Module):
    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.draft = Draft(config)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Matrices start at 1/sqrt(fan in), those that write to the residual streams at zero; the streams
        start apart."""
        for name, p in self.named_parameters():
            leaf = name.rsplit(".", 2)[-2:]
            if p.dim() == 1:
                continue
            if leaf[0] in ("o_proj", "down_proj") or leaf[-1] == "down_proj" or name == "lm_head.weight":
                p.zero_()
            elif leaf[0] == "embed_tokens":
                p.normal_(0, 0.5)
            elif leaf[-1] == "index_kpool_compress_ape":
                p.zero_()
            elif leaf[0] == "conv1d":
                p.normal_(0, 0.3)
            elif leaf[0] == "gate" or leaf[0].endswith("_hc"):
                p.normal_(0, 0.02)
            else:
                p.normal_(0, 0.6 / math.sqrt(p.shape[-1]))
        for i, layer in enumerate(self.trunk.layers):
            for j, hc in enumerate((layer.attn_hc, layer.ffn_hc)):
                # Streams keep to themselves, and each block reads mostly one of them.
                n = hc.hc_mult
                hc.base.zero_()
                hc.base[:n] = -1.5
                hc.base[(2 * i + j) % n] = 1.5
                hc.base[2 * n :] = (4.0 * torch.eye(n)).flatten()
                hc.scale.fill_(0.3)

    def routers(self) -> list[nn.Module]:
        """The routers of all MoE blocks in layer order, the draft's last."""
        moes = [layer.mlp for layer in self.trunk.layers if isinstance(layer.mlp, Glm5NextTextMoE)] + [
            self.draft.mlp
        ]
        return [moe.gate for moe in moes]
