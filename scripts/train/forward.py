# ruff: noqa: ANN202, N812 -- weights go in as tensors, tuples of tensors come out; F is what everybody calls it
"""The forward pass for training and measuring: the arithmetic of transformers' glm5_next, arranged for large
batches.

transformers' own forward loops over experts, computes the indexer without gradients and spends most of its
time in small kernels. This one takes the weights from its modules and computes the same function (tests
compare the two); it adds the losses that train the indexer, and the draft layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from . import kernels
from .model import Network
from .nvfp4 import fake_quantised
from .parts import (
    Combine,
    Dispatch,
    best_pools,
    cross_entropy,
    dense_mlp,
    glu,
    grouped,
    hc_mix,
    hc_read,
    hc_write,
    index_divergence,
    index_keys,
    index_queries,
    index_scores,
    kda_inputs,
    kda_output,
    linear,
    mla_inputs,
    pool_keys,
    pool_mass,
    rms,
    route,
    selected_tokens,
    visible_pools,
)

Tensor = torch.Tensor


@dataclass
class Mode:
    """What one pass computes."""

    sparse: bool = True  # attend only to what the indexer selected
    index_loss: bool = False
    quantised: bool = False  # routed experts as they will be stored
    draft: bool = False
    stable: bool = False  # ties in selections go to the lowest index (slower)
    collect: bool = False  # keep routes and attention statistics


@dataclass
class Result:
    loss: Tensor
    nll: Tensor  # [B, S] of the trunk
    hidden: Tensor  # [B, S, H], normed
    index_loss: Tensor
    draft_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)  # tokens of each expert, by MoE block
    routes: list[Tensor] = field(default_factory=list)  # [B*S, top-k] expert ids, by MoE block
    scores: list[Tensor] = field(default_factory=list)  # [B*S, experts] router scores
    held: list[dict[str, Tensor]] = field(default_factory=list)  # attention mass by MLA layer


class Forward:
    """Runs a Network. `compile_parts` fuses the pieces between matrix products (GPU)."""

    def __init__(
        self, net: Network, dtype: torch.dtype, kda: Callable | None = None, compile_parts: bool = False
    ) -> None:
        self.net, self.config, self.dtype = net, net.config, dtype
        self.kda = kda or kernels.kda_plain
        self.fn = {
            f.__name__: torch.compile(f, dynamic=False) if compile_parts else f
            for f in (
                hc_mix,
                hc_read,
                hc_write,
                kda_inputs,
                kda_output,
                index_scores,
                pool_mass,
                index_divergence,
                mla_inputs,
                dense_mlp,
                glu,
                cross_entropy,
                fake_quantised,
                route,
            )
        }

    def __call__(self, tokens: Tensor, mode: Mode) -> Result:
        """tokens [B, S + 1], or [B, S + 3] with drafts."""
        length = tokens.shape[1] - (3 if mode.draft else 1)
        ids, labels = tokens[:, :length], tokens[:, 1 : length + 1]
        result = Result(None, None, None, torch.zeros((), device=tokens.device))  # type: ignore[arg-type]
        net, eps = self.net, self.config.rms_norm_eps
        streams = (
            F.embedding(ids, net.trunk.embed_tokens.weight).unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        )
        for layer in net.trunk.layers:
            streams = self._block(
                streams,
                layer.attn_hc,
                layer.input_layernorm,
                lambda x, a=layer.self_attn: self._attention(x, a, mode, result),
            )
            streams = self._block(
                streams,
                layer.ffn_hc,
                layer.post_attention_layernorm,
                lambda x, m=layer.mlp: self._ffn(x, m, mode, result),
            )
        hidden = rms(streams.float().mean(2), net.trunk.norm.weight, eps, self.dtype)
        nll = self.fn["cross_entropy"](hidden.flatten(0, 1), net.lm_head.weight, labels.flatten())
        result.nll, result.loss, result.hidden = nll.view(labels.shape), nll.mean(), hidden
        if mode.draft:
            self._draft(hidden.detach(), tokens, length, mode, result)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.net.lm_head.weight).float()

    def _block(
        self, streams: Tensor, hc: nn.Module, norm: nn.Module, inner: Callable[[Tensor], Tensor]
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        pre, post, logits = self.fn["hc_mix"](streams, hc.fn, hc.base, hc.scale, eps, self.dtype)
        comb = kernels.sinkhorn(logits, self.config.hc_sinkhorn_iters, self.config.hc_eps)
        y = inner(self.fn["hc_read"](streams, pre, norm.weight, eps, self.dtype))
        return self.fn["hc_write"](streams, y, post, comb)

    def _attention(self, x: Tensor, a: nn.Module, mode: Mode, result: Result) -> Tensor:
        if hasattr(a, "conv1d"):
            f = a.forget_gate
            q, k, v, g, beta, gate = self.fn["kda_inputs"](
                x,
                a.q_proj.weight,
                a.k_proj.weight,
                a.v_proj.weight,
                a.conv1d.weight,
                f.f_a_proj.weight,
                f.f_b_proj.weight,
                f.A_log,
                f.dt_bias,
                a.b_proj.weight,
                a.g_a_proj.weight,
                a.g_b_proj.weight,
                a.num_heads,
            )
            o = self.kda(q, k, v, g, beta.to(q.dtype))
            return self.fn["kda_output"](o, gate, a.o_norm.weight, a.o_proj.weight, self.config.rms_norm_eps)
        q_resid, q, k, v = self._mla(x, a)
        tokens = self._select(x, q_resid, q, k, a, mode, result)
        if tokens is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=a.scaling)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=tokens.unsqueeze(1), scale=a.scaling)
        return linear(o.transpose(1, 2).flatten(-2), a.o_proj.weight)

    def _mla(self, x: Tensor, a: nn.Module):
        return self.fn["mla_inputs"](
            x,
            a.q_a_proj.weight,
            a.q_a_layernorm.weight,
            a.q_b_proj.weight,
            a.kv_a_proj_with_mqa.weight,
            a.kv_a_layernorm.weight,
            a.kv_b_proj.weight,
            a.num_heads,
            a.qk_nope_head_dim,
            self.config.rms_norm_eps,
        )

    def _select(
        self, x: Tensor, q_resid: Tensor, q: Tensor, k: Tensor, a: nn.Module, mode: Mode, result: Result
    ) -> Tensor | None:
        """The tokens that each row may attend to (None: all before it), and the indexer's loss and
        statistics."""
        ix, pool, length = a.indexer, self.config.index_kpool, x.shape[1]
        if length < pool or not (mode.sparse or mode.index_loss):
            return None
        # The indexer is trained by its own loss alone; nothing of that loss reaches the trunk.
        scores = self.fn["index_scores"](
            x.detach(),
            q_resid.detach(),
            ix.wq_b.weight,
            ix.wk.weight,
            ix.k_norm.weight,
            ix.k_norm.bias,
            ix.index_kpool_compress_ape,
            ix.index_kpool_compress_gate,
            ix.weights_proj.weight,
            ix.n_heads,
        )
        visible = visible_pools(length, pool, x.device)
        if mode.index_loss:
            with torch.no_grad():
                mass = self.fn["pool_mass"](q.detach(), k.detach(), a.scaling, pool)
            result.index_loss = result.index_loss + self.fn["index_divergence"](scores, mass, visible)
        if not mode.sparse:
            return None
        tokens, chosen = selected_tokens(
            scores.detach(), visible, length, self.config.index_topk, pool, mode.stable
        )
        if mode.collect:
            mass = pool_mass(q, k, a.scaling, pool)
            result.held.append({"mass": mass, "chosen": chosen, "visible": visible})
        return tokens

    def _ffn(self, x: Tensor, m: nn.Module, mode: Mode, result: Result) -> Tensor:
        limit = self.config.swiglu_limit
        if not hasattr(m, "experts"):
            return self.fn["dense_mlp"](x, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight, limit)
        shared = m.shared_experts
        out = self.fn["dense_mlp"](
            x, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight, limit
        )
        flat = x.flatten(0, 1)
        k = m.gate.top_k
        scores, ids, weights = self.fn["route"](
            flat, m.gate.weight, m.gate.e_score_correction_bias, k, m.gate.routed_scaling_factor, mode.stable
        )
        order = ids.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        load = torch.zeros(m.gate.num_experts, device=x.device, dtype=torch.int64)
        load.scatter_add_(0, ids.flatten(), torch.ones_like(order))
        result.loads.append(load)
        if mode.collect:
            result.routes.append(ids)
            result.scores.append(scores)
        gate_up, down = m.experts.gate_up_proj, m.experts.down_proj
        if mode.quantised:
            gate, up = gate_up.chunk(2, 1)
            quantise = self.fn["fake_quantised"]
            gate_up, down = torch.cat((quantise(gate), quantise(up)), 1), quantise(down)
        ends = load.cumsum(0).to(torch.int32)
        rows = Dispatch.apply(flat, order, inverse, k)
        rows = grouped(self.fn["glu"](grouped(rows, gate_up, ends), limit), down, ends)
        picked = Combine.apply(rows, order, inverse, k)
        return out + (picked * weights.unsqueeze(-1).to(picked.dtype)).sum(1).view(x.shape)

    def draft_input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The residual that enters the draft layer: the embedding of the next token beside the hidden
        state."""
        d, eps = self.net.draft, self.config.rms_norm_eps
        embedded = F.embedding(ids, self.net.trunk.embed_tokens.weight).detach()
        pair = torch.cat(
            (rms(embedded, d.enorm.weight, eps, self.dtype), rms(hidden, d.hnorm.weight, eps, self.dtype)), -1
        )
        return linear(pair, d.eh_proj.weight).float()

    def draft_finish(self, residual: Tensor, attended: Tensor, mode: Mode, result: Result) -> Tensor:
        """Everything of the draft layer after its attention: normed output [B, S, H]."""
        d, eps = self.net.draft, self.config.rms_norm_eps
        residual = residual + attended.float()
        residual = (
            residual
            + self._ffn(
                rms(residual, d.post_attention_layernorm.weight, eps, self.dtype), d.mlp, mode, result
            ).float()
        )
        return rms(residual, d.shared_head_norm.weight, eps, self.dtype)

    def draft_step(self, ids: Tensor, hidden: Tensor, mode: Mode, result: Result) -> tuple[Tensor, tuple]:
        """One draft step over whole sequences. Returns the normed output, and what a second step attends
        to."""
        d, eps = self.net.draft, self.config.rms_norm_eps
        residual = self.draft_input(ids, hidden)
        x = rms(residual, d.input_layernorm.weight, eps, self.dtype)
        q_resid, q, k, v = self._mla(x, d.self_attn)
        tokens = self._select(x, q_resid, q, k, d.self_attn, mode, result)
        a = d.self_attn
        if tokens is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=a.scaling)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=tokens.unsqueeze(1), scale=a.scaling)
        out = self.draft_finish(
            residual, linear(o.transpose(1, 2).flatten(-2), a.o_proj.weight), mode, result
        )
        return out, (x, k, v)

    def draft_second(self, ids: Tensor, hidden: Tensor, past: tuple, mode: Mode, result: Result) -> Tensor:
        """The second step of each position's own draft. Row t stands at place t + 1 of the draft's sequence:
        it sees the first steps' keys up to place t, and its own."""
        d, eps = self.net.draft, self.config.rms_norm_eps
        residual = self.draft_input(ids, hidden)
        x = rms(residual, d.input_layernorm.weight, eps, self.dtype)
        q_resid, q, k, v = self._mla(x, d.self_attn)
        first_x, first_k, first_v = past
        length = q.shape[2]
        if mode.sparse:
            tokens, own_seen = self._second_selection(first_x, x, q_resid, mode)
        else:
            tokens = torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril()
            own_seen = torch.ones(1, length, dtype=torch.bool, device=q.device)
        before = (q @ first_k.transpose(-1, -2)).float().masked_fill(~tokens.unsqueeze(1), -1e30)
        own = (q * k).float().sum(-1, keepdim=True).masked_fill(~own_seen[:, None, :, None], -1e30)
        weight = torch.softmax(torch.cat((before, own), -1) * d.self_attn.scaling, -1).to(v.dtype)
        o = weight[..., :-1] @ first_v + weight[..., -1:] * v
        return self.draft_finish(
            residual, linear(o.transpose(1, 2).flatten(-2), d.self_attn.o_proj.weight), mode, result
        )

    @torch.no_grad()
    def _second_selection(
        self, first_x: Tensor, x: Tensor, q_resid: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor]:
        """-> earlier tokens [B, S, S] and whether the own token [B, S] is among those that a second draft
        step attends to."""
        ix, pool, length = self.net.draft.self_attn.indexer, self.config.index_kpool, x.shape[1]
        parts = (ix.wk.weight, ix.k_norm.weight, ix.k_norm.bias, ix.index_kpool_compress_gate)
        first, second = index_keys(first_x, *parts), index_keys(x, *parts)
        pools = length // pool
        pooled = pool_keys(
            *(t[:, : pools * pool].unflatten(1, (pools, -1)) for t in first), ix.index_kpool_compress_ape
        )
        # The pool that the row's own token completes, if it does: the three first-step tokens before it, and
        # itself.
        shifted = [
            torch.stack([*(F.pad(f, (0, 0, n, 0))[:, :length] for n in range(pool - 2, -1, -1)), s], 2)
            for f, s in zip(first, second, strict=True)
        ]
        own = pool_keys(*shifted, ix.index_kpool_compress_ape)
        q, weight = index_queries(x, q_resid, ix.wq_b.weight, ix.weights_proj.weight, ix.n_heads)
        scale = own.shape[-1] ** -0.5
        old = torch.relu(torch.einsum("bshd,bpd->bshp", q.float(), pooled) * scale)
        new = torch.relu(torch.einsum("bshd,bsd->bsh", q.float(), own) * scale)
        scores = torch.cat(
            (torch.einsum("bsh,bshp->bsp", weight, old), (weight * new).sum(-1, keepdim=True)), -1
        )
        at = torch.arange(length, device=x.device)
        completes = (at + 2) % pool == 0
        visible = torch.cat((visible_pools(length, pool, x.device), completes.unsqueeze(1)), 1)
        chosen = best_pools(scores, visible, self.config.index_topk // pool, mode.stable)
        tokens = F.pad(chosen[..., :-1].repeat_interleave(pool, -1), (0, length - pools * pool))
        # Earlier tokens of the pool that holds place t + 1.
        recent = (at >= ((at + 1) // pool * pool).unsqueeze(1)) & (at <= at.unsqueeze(1))
        own_seen = chosen[..., -1] | ~completes
        return tokens | (recent & own_seen.unsqueeze(-1)), own_seen

    def _draft(self, hidden: Tensor, tokens: Tensor, length: int, mode: Mode, result: Result) -> None:
        head = self.net.lm_head.weight.detach()
        first, past = self.draft_step(tokens[:, 1 : length + 1], hidden, mode, result)
        second = self.draft_second(tokens[:, 2 : length + 2], first, past, mode, result)
        result.loads[-2:] = [result.loads[-2] + result.loads[-1]]
        for out, labels in ((first, tokens[:, 2 : length + 2]), (second, tokens[:, 3 : length + 3])):
            result.draft_losses.append(
                self.fn["cross_entropy"](out.flatten(0, 1), head, labels.flatten()).mean()
            )
