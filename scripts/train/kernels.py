# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, N803, N812 -- Triton kernels take untyped pointers
"""What is too slow as plain PyTorch on a GPU: the Sinkhorn projection, and the choice of KDA implementation.

Every function also runs on a CPU, in plain PyTorch, with the same result.
"""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only machine
    triton = None

STREAMS = 4


def sinkhorn_reference(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """logits [..., 4, 4] -> doubly stochastic matrices, as glm5_next defines them."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


if triton is not None:

    @triton.jit
    def _offsets(n, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cell = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        return token[:, None, None] * 16 + cell, (token < n)[:, None, None] & (cell >= 0)

    @triton.jit
    def _sinkhorn_forward(x_ptr, y_ptr, n, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
        at, valid = _offsets(n, BLOCK)
        x = tl.load(x_ptr + at, mask=valid, other=0.0)
        p = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        p = p / tl.sum(p, axis=2, keep_dims=True) + eps
        p = p / (tl.sum(p, axis=1, keep_dims=True) + eps)
        for _ in range(ITERATIONS - 1):
            p = p / (tl.sum(p, axis=2, keep_dims=True) + eps)
            p = p / (tl.sum(p, axis=1, keep_dims=True) + eps)
        tl.store(y_ptr + at, p, mask=valid)

    @triton.jit
    def _sinkhorn_backward(
        x_ptr, dy_ptr, dx_ptr, steps_ptr, n, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Runs forward again, keeping the matrix before each normalisation in steps [2*ITERATIONS, n, 16],
        then back."""
        at, valid = _offsets(n, BLOCK)
        size = n.to(tl.int64) * 16
        x = tl.load(x_ptr + at, mask=valid, other=0.0)
        p = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        soft = p / tl.sum(p, axis=2, keep_dims=True)
        p = soft + eps
        tl.store(steps_ptr + at, p, mask=valid)
        p = p / (tl.sum(p, axis=1, keep_dims=True) + eps)
        for i in range(ITERATIONS - 1):
            tl.store(steps_ptr + (2 * i + 1) * size + at, p, mask=valid)
            p = p / (tl.sum(p, axis=2, keep_dims=True) + eps)
            tl.store(steps_ptr + (2 * i + 2) * size + at, p, mask=valid)
            p = p / (tl.sum(p, axis=1, keep_dims=True) + eps)
        tl.debug_barrier()
        d = tl.load(dy_ptr + at, mask=valid, other=0.0)
        # y = p / (sum p + eps)  =>  dp = (dy - sum(dy * y)) / (sum p + eps)
        for j in range(ITERATIONS - 1):
            i = ITERATIONS - 2 - j
            before = tl.load(steps_ptr + (2 * i + 2) * size + at, mask=valid, other=1.0)
            scale = tl.sum(before, axis=1, keep_dims=True) + eps
            d = (d - tl.sum(d * p, axis=1, keep_dims=True)) / scale
            p = before
            before = tl.load(steps_ptr + (2 * i + 1) * size + at, mask=valid, other=1.0)
            scale = tl.sum(before, axis=2, keep_dims=True) + eps
            d = (d - tl.sum(d * p, axis=2, keep_dims=True)) / scale
            p = before
        scale = tl.sum(soft + eps, axis=1, keep_dims=True) + eps
        d = (d - tl.sum(d * p, axis=1, keep_dims=True)) / scale
        d = soft * (d - tl.sum(d * soft, axis=2, keep_dims=True))
        tl.store(dx_ptr + at, d, mask=valid)


BLOCK = 64


@torch.library.custom_op("sparkler::sinkhorn_gpu", mutates_args=())
def _sinkhorn_gpu(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    n = logits.numel() // 16
    _sinkhorn_forward[(triton.cdiv(n, BLOCK),)](logits, out, n, eps, iterations, BLOCK)
    return out


@_sinkhorn_gpu.register_fake
def _(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("sparkler::sinkhorn_gpu_backward", mutates_args=())
def _sinkhorn_gpu_backward(
    logits: torch.Tensor, grad: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    logits, grad = logits.contiguous(), grad.contiguous()
    out = torch.empty_like(logits)
    n = logits.numel() // 16
    steps = torch.empty(2 * iterations - 1, n, 16, device=logits.device, dtype=torch.float32)
    _sinkhorn_backward[(triton.cdiv(n, BLOCK),)](logits, grad, out, steps, n, eps, iterations, BLOCK)
    return out


@_sinkhorn_gpu_backward.register_fake
def _(logits: torch.Tensor, grad: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    logits, iterations, eps = inputs
    ctx.save_for_backward(logits)
    ctx.settings = (iterations, eps)


def _sinkhorn_vjp(ctx, grad):
    (logits,) = ctx.saved_tensors
    return _sinkhorn_gpu_backward(logits, grad, *ctx.settings), None, None


_sinkhorn_gpu.register_autograd(_sinkhorn_vjp, setup_context=_setup_context)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    if logits.is_cuda:
        return _sinkhorn_gpu(logits, iterations, eps)
    return sinkhorn_reference(logits, iterations, eps)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def kda_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk: int = 16
) -> torch.Tensor:
    """Kimi Delta Attention over chunks. q, k, v, g: [B, S, heads, d], g the log-decay, >= -5; beta [B, S,
    heads].

    With at most 16 steps of at least -5 a chunk, exp of the summed decay and of its negative stay within
    float32, so the decay factors into the two sides of each product.
    """
    dtype, length = q.dtype, q.shape[1]
    q, k, v, g, beta = (
        F.pad(t.float().transpose(1, 2), (0, 0) * (t.dim() - 3) + (0, -length % chunk))
        for t in (q, k, v, g, beta)
    )
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    q, k, v, g = (t.unflatten(2, (-1, chunk)) for t in (q, k, v, g))
    beta = beta.unflatten(2, (-1, chunk)).unsqueeze(-1)
    total = g.cumsum(-2)
    k_up, k_down, q_up = k * total.exp(), k * (-total).exp(), q * total.exp()
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device)
    lower = (beta * (k_up @ k_down.transpose(-1, -2))).masked_fill(ones.triu(), 0)
    attend = (q_up @ k_down.transpose(-1, -2)).masked_fill(ones.triu(1), 0)
    eye = torch.eye(chunk, device=q.device)
    # (I + L)^-1 for strictly lower L of 16 rows: (I - L)(I + L^2)(I + L^4)(I + L^8).
    inverse, square = eye - lower, lower @ lower
    for _ in range(3):
        inverse = inverse @ (eye + square)
        square = square @ square
    u, w = inverse @ (beta * v), inverse @ (beta * k_up)
    last = total[..., -1:, :]
    k_end = k * (last - total).exp()
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        fresh = u[:, :, i] - w[:, :, i] @ state
        out.append(q_up[:, :, i] @ state + attend[:, :, i] @ fresh)
        state = last[:, :, i].transpose(-1, -2).exp() * state + k_end[:, :, i].transpose(-1, -2) @ fresh
    return torch.cat(out, 2)[:, :, :length].transpose(1, 2).to(dtype)


def load_fla(configs: int = 2):
    """chunk_kda of fla-core, with its autotuners cut to `configs` candidates each: on a fresh machine most
    of the first step would otherwise go into compiling candidates that differ by a few per cent."""
    from triton.runtime import autotuner

    original = autotuner.Autotuner.__init__

    def rank(config) -> tuple[int, int]:
        return abs(config.num_warps - 4), abs(config.num_stages - 3)

    def trimmed(self, fn, arg_names, candidates, *args, **kwargs):
        original(
            self,
            fn,
            arg_names,
            sorted(candidates, key=rank)[:configs] if candidates else candidates,
            *args,
            **kwargs,
        )

    autotuner.Autotuner.__init__ = trimmed
    try:
        from fla.ops.kda import chunk_kda
    finally:
        autotuner.Autotuner.__init__ = original

    def kda(q, k, v, g, beta):
        return chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            safe_gate=True,
            lower_bound=-5.0,
            disable_recompute=True,
        )[0]

    return kda
