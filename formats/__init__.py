"""Model files of other projects, in and out. `convert.py` is the command line.

Each module reads a format into three things: a ModelConfig, a stream of tensors under our names, and a tokenizer;
`target.write_checkpoint` makes a checkpoint directory of them. `huggingface` also writes.
"""

from .target import new_folder, refuse_existing, weight_shapes, write_checkpoint, write_safetensors

__all__ = ["new_folder", "refuse_existing", "weight_shapes", "write_checkpoint", "write_safetensors"]
