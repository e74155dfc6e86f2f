"""Models and weight formats to test with: one of odd sizes, and drawn ones."""

from hypothesis import strategies as st

from rocket.architecture import GLM5_NEXT, GLM_MOE_DSA, Architecture, VisionTower, from_fields
from rocket.inventory import FORMATS, QUANTISED_FORMATS, Scheme
from rocket.random_fuel_shape import Shape

# Every size its own number, so that no two can be mixed up.
ODD = Shape(
    vocab_size=288,
    hidden_size=80,
    intermediate_size=112,
    moe_intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=3,
    q_lora_rank=40,
    kv_lora_rank=36,
    qk_nope_head_dim=20,
    v_head_dim=28,
    index_topk=24,
    index_head_dim=12,
    index_n_heads=5,
    linear_num_heads=2,
    linear_head_dim=24,
    linear_conv_kernel_dim=3,
    n_routed_experts=6,
    n_shared_experts=2,
    num_experts_per_tok=2,
    hc_mult=3,
    attention_pattern="KMKMM",
    mlp_pattern="DSSDS",
    indexer_pattern="FFFFS",
)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Small models of both chemistries, every size drawn on its own."""
    chemistry = draw(st.sampled_from([GLM5_NEXT, GLM_MOE_DSA]))
    layers = draw(st.integers(1, 5))
    experts = draw(st.integers(1, 5))
    pool = draw(st.sampled_from([1, 2, 4]))

    def kinds(names: tuple[str, str]) -> list[str]:
        return draw(st.lists(st.sampled_from(names), min_size=layers, max_size=layers))

    fields = {
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": 32 * draw(st.integers(1, 4)),
        "intermediate_size": 32 * draw(st.integers(1, 5)),
        "moe_intermediate_size": 32 * draw(st.integers(1, 3)),
        "num_hidden_layers": layers,
        "num_attention_heads": draw(st.integers(1, 4)),
        "q_lora_rank": 32 * draw(st.integers(1, 3)),
        "kv_lora_rank": 32 * draw(st.integers(1, 3)),
        "qk_nope_head_dim": draw(st.integers(1, 20)),
        "v_head_dim": 32 * draw(st.integers(1, 2)),
        "index_head_dim": draw(st.integers(1, 20)),
        "index_n_heads": draw(st.integers(1, 5)),
        "n_routed_experts": experts,
        "n_shared_experts": draw(st.integers(1, 2)),
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "num_nextn_predict_layers": draw(st.integers(0, 2)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_layer_types": kinds(("dense", "sparse")),
        "indexer_types": ["full", *kinds(("full", "shared"))[1:]],
    }
    if chemistry == GLM_MOE_DSA:
        return from_fields(chemistry, {**fields, "qk_rope_head_dim": draw(st.integers(0, 8))})
    fields |= {
        "index_kpool": pool,
        "index_topk": pool * draw(st.integers(1, 9)),
        "linear_num_heads": draw(st.integers(1, 3)),
        "linear_head_dim": 32 * draw(st.integers(1, 2)),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "hc_mult": draw(st.integers(1, 4)),
        "layer_types": kinds(("linear_attention", "indexed_attention")),
    }
    small = VisionTower(1, 32, 2, 16, 32, 24, 3, 2, 2, 2)
    return from_fields(chemistry, fields, vision=draw(st.sampled_from([None, small])))


schemes = st.builds(
    Scheme,
    experts=st.sampled_from(FORMATS),
    linear=st.sampled_from(FORMATS),
    shared=st.sampled_from([None, *QUANTISED_FORMATS]),
    dense_mlp=st.sampled_from([None, *FORMATS]),
    draft=st.sampled_from([None, "bf16"]),
    draft_experts=st.sampled_from([None, "bf16"]),
    small=st.sampled_from(["f32", "bf16"]),
    taps=st.sampled_from(["f32", "bf16"]),
    router=st.sampled_from(["f32", "bf16"]),
    hyper=st.sampled_from(["f32", "bf16"]),
    input_scale=st.booleans(),
)
