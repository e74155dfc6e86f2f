# ruff: noqa: ANN001, ANN201, ANN205, N812 -- weights go in as tensors, tuples of tensors come out
"""The pieces of the forward pass, as functions of tensors, so that each can be compiled on its own."""

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def hc_mix(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, dtype: torch.dtype):
    """-> pre [.., 4], post [.., 4] and the logits of comb [.., 4, 4]."""
    flat = streams.flatten(-2)
    size = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + eps)
    mix = F.linear(flat.to(dtype), fn.to(dtype)).float() * size
    pre = torch.sigmoid(mix[..., :4] * scale[0] + base[:4]) + 1e-6
    post = 2 * torch.sigmoid(mix[..., 4:8] * scale[1] + base[4:8])
    return pre, post, (mix[..., 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))


def hc_read(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return rms((pre.unsqueeze(-1) * streams.float()).sum(-2), weight, eps, dtype)


def hc_write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = post.unsqueeze(-1) * y.unsqueeze(-2).float()
    for m in range(4):
        mixed = mixed + comb[..., m, :].unsqueeze(-1) * streams[..., m, :].unsqueeze(-2).float()
    return mixed.to(streams.dtype)


def kda_inputs(x: Tensor, wq, wk, wv, conv, fa, fb, a_log, dt_bias, wb, ga, gb, heads: int):
    mixed = linear(x, torch.cat((wq, wk, wv)))
    taps = conv.squeeze(1).to(torch.float32)
    padded = F.pad(mixed.float(), (0, 0, taps.shape[1] - 1, 0))
    length = x.shape[1]
    mixed = sum(padded[:, j : j + length] * taps[:, j] for j in range(taps.shape[1]))
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in F.silu(mixed).to(x.dtype).chunk(3, -1))
    forget = (linear(linear(x, fa), fb).float() + dt_bias).unflatten(-1, (heads, -1))
    g = -5.0 * torch.sigmoid(a_log.exp().unsqueeze(-1) * forget)
    beta = torch.sigmoid(linear(x, wb).float())
    gate = linear(linear(x, ga), gb).unflatten(-1, (heads, -1))
    return q, k, v, g, beta, gate


def kda_output(o: Tensor, gate: Tensor, norm: Tensor, wo: Tensor, eps: float) -> Tensor:
    o = rms(o, norm, eps, torch.float32) * torch.sigmoid(gate.float())
    return linear(o.flatten(-2).to(gate.dtype), wo)


def index_keys(x: Tensor, wk, norm_w, norm_b, gate_w) -> tuple[Tensor, Tensor]:
    """The indexer's key and pooling gate of each token [B, S, d], in float32."""
    k = F.layer_norm(linear(x, wk).float(), wk.shape[:1], norm_w, norm_b, 1e-6)
    return k, linear(x, gate_w).float()


def pool_keys(k: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    """Keys and gates [..., pool, d] -> [..., d]."""
    return (torch.softmax(gate + ape, dim=-2) * k).sum(-2)


def index_queries(x: Tensor, q_resid: Tensor, wq, w_heads, heads: int) -> tuple[Tensor, Tensor]:
    return linear(q_resid, wq).unflatten(-1, (heads, -1)), linear(x, w_heads).float() * heads**-0.5


def index_scores(x: Tensor, q_resid: Tensor, wq, wk, norm_w, norm_b, ape, gate_w, w_heads, heads: int):
    """Scores of all complete pools [B, S, P], in float32."""
    pools = x.shape[1] // ape.shape[0]
    q, weight = index_queries(x, q_resid, wq, w_heads, heads)
    k, gate = (
        t[:, : pools * ape.shape[0]].unflatten(1, (pools, -1))
        for t in index_keys(x, wk, norm_w, norm_b, gate_w)
    )
    pooled = pool_keys(k, gate, ape).to(x.dtype)
    score = torch.relu(torch.einsum("bshd,bpd->bhsp", q, pooled).float() * pooled.shape[-1] ** -0.5)
    return torch.einsum("bsh,bhsp->bsp", weight, score)


def visible_pools(length: int, pool: int, device: torch.device) -> Tensor:
    """[S, P]: the pool's last token is at or before the query."""
    ends = torch.arange(length // pool, device=device) * pool + pool - 1
    return ends <= torch.arange(length, device=device).unsqueeze(1)


def best_pools(scores: Tensor, visible: Tensor, count: int, stable: bool) -> Tensor:
    """The `count` best visible pools of each row, as a mask like scores."""
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
    count = min(count, scores.shape[-1])
    if stable:
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        best = scores.topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & visible


def selected_tokens(
    scores: Tensor, visible: Tensor, length: int, topk: int, pool: int, stable: bool
) -> tuple[Tensor, Tensor]:
    """-> tokens to attend to [B, S, S], pools chosen [B, S, P]."""
    chosen = best_pools(scores, visible, topk // pool, stable)
    tokens = F.pad(chosen.repeat_interleave(pool, -1), (0, length - chosen.shape[-1] * pool))
    at = torch.arange(length, device=scores.device)
    tail = (at >= ((at + 1) // pool * pool).unsqueeze(1)) & (at <= at.unsqueeze(1))
    return tokens | tail, chosen


def pool_mass(q: Tensor, k: Tensor, scale: float, pool: int) -> Tensor:
    """Dense causal attention, summed over heads (mean) and over the tokens of each complete pool: [B, S,
    P]."""
    length = q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    weight = torch.softmax(
        (q @ k.transpose(-1, -2)).float().masked_fill(~causal, float("-inf")) * scale, -1
    ).mean(1)
    pools = length // pool
    return weight[..., : pools * pool].unflatten(-1, (pools, pool)).sum(-1)


def index_divergence(scores: Tensor, mass: Tensor, visible: Tensor) -> Tensor:
    """KL of the indexer's distribution over visible pools from the attention mass, mean over the rows that
    see a pool."""
    target = mass * visible
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_p = torch.log_softmax(scores.masked_fill(~visible, -1e9), -1)
    terms = target * (torch.log(target.clamp_min(1e-9)) - log_p)
    rows = visible.any(-1)
    return (terms.sum(-1) * rows).sum() / (rows.sum() * scores.shape[0])


def mla_inputs(x: Tensor, qa, qn, qb, ka, kn, kb, heads: int, nope: int, eps: float):
    q_resid = rms(linear(x, qa), qn, eps, x.dtype)
    q = linear(q_resid, qb).unflatten(-1, (heads, -1)).transpose(1, 2)
    kv = linear(rms(linear(x, ka), kn, eps, x.dtype), kb).unflatten(-1, (heads, -1)).transpose(1, 2)
    return q_resid, q, kv[..., :nope], kv[..., nope:]


def glu(x: Tensor, limit: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def dense_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
    return linear(glu(linear(x, torch.cat((gate, up))), limit), down)


def route(x: Tensor, weight: Tensor, bias: Tensor, k: int, factor: float, stable: bool):
    scores = torch.sigmoid(F.linear(x.float(), weight))
    biased = scores.detach() + bias
    ids = (
        biased.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        if stable
        else biased.topk(k, -1).indices
    )
    picked = scores.gather(-1, ids)
    return scores, ids, picked / (picked.sum(-1, keepdim=True) + 1e-20) * factor


class Dispatch(torch.autograd.Function):
    """Rows of x in expert order. Each row occurs k times, so its gradient is a sum over the inverse
    permutation."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Combine(torch.autograd.Function):
    """Expert outputs back in token order [T, k, H]."""

    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse].unflatten(0, (-1, k))

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1)[order], None, None, None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [N, in] in expert order times weight [E, out, in] of each row's expert."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([F.linear(x[a:b], w) for a, b, w in zip(starts[:-1], starts[1:], weight, strict=True)])


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(linear(hidden, head).float(), labels, reduction="none")
