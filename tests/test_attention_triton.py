"""The Triton kernels against the definition, run by Triton's interpreter where there is no GPU.

The interpreter shows wrong algebra, masks and bounds. What it cannot show (races, bf16, speed) is tested in tests/gpu
and by the compiler in test_kernel_lint.py.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when the kernels are imported

import math  # noqa: E402
import warnings  # noqa: E402

import pytest  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from kernels import choose_backend, describe_backend, flash_attention, tiles  # noqa: E402
from kernels import flash_attention as flash_attention_function  # noqa: E402
from kernels.interpreter import INTERPRETED  # noqa: E402
from tests.attention_cases import LAYOUTS, MASKS, Case, check, inputs, run, textbook  # noqa: E402
