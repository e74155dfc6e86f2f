"""NVFP4: E2M1 nibbles, one E4M3 scale for 16 columns, one float32 scale for a tensor."""

import torch

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0


def _nearest(magnitude: torch.Tensor) -> torch.Tensor:
    """Index of the nearest E2M1 magnitude; ties go to the even mantissa."""
    index = (magnitude > 0.25).to(torch.uint8)
    for bound, closed in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        index += magnitude >= bound if closed else magnitude > bound
    return index


def _split(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [..., out, in] -> scaled blocks [..., out, in/16, 16], E4M3 block scales, global scales
    [...]."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    overall = amax.amax((-1, -2)) / (E2M1_MAX * E4M3_MAX)
    safe = torch.where(overall > 0, overall, 1.0)[..., None, None]
    scale = (amax / E2M1_MAX / safe).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = scale.float() * safe
    scaled = torch.where(step[..., None] > 0, blocks / torch.where(step > 0, step, 1.0)[..., None], 0.0)
    return scaled, scale, overall


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> packed U8 [..., out, in/2] (low nibble = even column), E4M3 scales [..., out, in/16], global scale
    [...]."""
    scaled, scale, overall = _split(weight)
    code = _nearest(scaled.abs()) | ((scaled < 0).to(torch.uint8) << 3)
    code = code.flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale, overall


def dequantise(packed: torch.Tensor, scale: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
    """The float32 weight [..., out, in]."""
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=packed.device)
    step = scale.float() * overall.float()[..., None, None]
    return (table[code].unflatten(-1, (-1, BLOCK)) * step[..., None]).flatten(-2)


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    """What the weight becomes when it is stored as NVFP4, in float32."""
    scaled, scale, overall = _split(weight)
    table = torch.tensor(E2M1, device=weight.device)
    value = table[_nearest(scaled.abs()).long()] * torch.sign(scaled)
    safe = torch.where(overall > 0, overall, 1.0)[..., None, None]
    return (value * (scale.float() * safe)[..., None]).flatten(-2)


def fake_quantised(weight: torch.Tensor) -> torch.Tensor:
    """The stored value forward, the identity backward."""
    return weight + (round_trip(weight.detach()) - weight.detach())
