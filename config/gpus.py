"""What GPUs can do: the ceilings that utilisation is measured against. Dense rates, from the vendors' datasheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    name: str  # what torch.cuda.get_device_name contains, in lower case
    bf16_tflops: float  # dense matrix products, fp32 accumulation
    fp8_tflops: float | None  # None: no fp8 units
    memory_gb: float
    bandwidth_tbs: float
    read_tbs: float | None = None  # what a kernel that only reads was measured to reach here; None: nobody has


# The first row whose words all occur in the device name wins, so the longer names stand before the shorter ones.
GPUS = [
    GPU("b200", 2250, 4500, 180, 8.0),
    GPU("gh200", 989, 1979, 96, 4.0),
    GPU("h200", 989, 1979, 141, 4.8, read_tbs=4.35),
    GPU("h100 nvl", 835, 1671, 94, 3.9),
    GPU("h100 pcie", 756, 1513, 80, 2.0),
    GPU("h100", 989, 1979, 80, 3.35),
    GPU("h800", 989, 1979, 80, 3.35),
    GPU("a100 80gb pcie", 312, None, 80, 1.935),
    GPU("a100 80gb", 312, None, 80, 2.039),
    GPU("a100", 312, None, 40, 1.555),
    GPU("a800", 312, None, 80, 2.039),
    GPU("a10g", 70, None, 24, 0.6),
    GPU("a10", 125, None, 24, 0.6),
    GPU("a40", 149.7, None, 48, 0.696),
    GPU("rtx a6000", 154.8, None, 48, 0.768),
    GPU("l40s", 362, 733, 48, 0.864),
    GPU("l4", 121, 242, 24, 0.3),
    GPU("rtx 6000 ada", 364, 728, 48, 0.96),
    GPU("rtx 5090", 209.5, 419, 32, 1.792),
    GPU("rtx 5080", 112.6, 225.1, 16, 0.96),
    GPU("rtx 4090", 165.2, 330.3, 24, 1.008),
    GPU("rtx 4080", 97.5, 194.9, 16, 0.717),
    GPU("rtx 3090", 71, None, 24, 0.936),
    GPU("rtx 3080", 59.5, None, 10, 0.76),
]


# Words that make another chip of a name: "RTX 4090 Laptop GPU" is not an RTX 4090, and a MIG slice no whole card.
OTHERS = {"laptop", "mobile", "ti", "super", "max", "mig", "nvl"}


def find_gpu(device_name: str) -> GPU | None:
    """The row for a `torch.cuda.get_device_name()`, or None for a GPU that is not in the table."""
    words = device_name.lower().replace("-", " ").split()
    matches = (gpu for gpu in GPUS if all(word in words for word in gpu.name.split()))
    return next((gpu for gpu in matches if not OTHERS & (set(words) - set(gpu.name.split()))), None)
