"""What each kernel is meant to serve, as README's table says; not what its refusals say."""

from __future__ import annotations


def is_meant_to_serve(kernel: str, head_dim: int, scale: float | None = None) -> bool:
    """Of a call within the contract, on a device that the kernel is built for."""
    if kernel == "portable":
        return head_dim in (64, 128)
    if kernel == "hopper":
        return head_dim % 8 == 0 and head_dim <= 256 and (scale is None or scale > 0)
    return True
