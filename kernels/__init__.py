"""The kernels and their plain-PyTorch definitions. Importing this package needs no GPU."""

from kernels.flash_attention import BACKENDS, choose_backend, describe_backend, flash_attention, why_not_triton
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.reference import flash_decode

__all__ = [
    "BACKENDS",
    "choose_backend",
    "describe_backend",
    "flash_attention",
    "flash_decode",
    "linear_cross_entropy",
    "why_not_triton",
]
