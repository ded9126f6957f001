"""Attention kernels and their plain-PyTorch definitions. Importing this package needs no GPU."""

from kernels.flash_attention import BACKENDS, choose_backend, describe_backend, flash_attention
from kernels.reference import flash_decode

__all__ = ["BACKENDS", "choose_backend", "describe_backend", "flash_attention", "flash_decode"]
