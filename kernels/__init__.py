"""The kernels and their plain-PyTorch definitions. Importing this package needs no GPU."""

from kernels.decode_linear import decode_linear
from kernels.flash_attention import BACKENDS, choose_backend, describe_backend, flash_attention, why_not_triton
from kernels.flash_decode import flash_decode, rope_and_attend
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.rope_cache import rope_and_cache, rope_angles

__all__ = [
    "BACKENDS",
    "choose_backend",
    "decode_linear",
    "describe_backend",
    "flash_attention",
    "flash_decode",
    "linear_cross_entropy",
    "rope_and_attend",
    "rope_and_cache",
    "rope_angles",
    "why_not_triton",
]
