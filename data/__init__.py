"""Text to token shards to batches. Reading order: errors, tokenizer, sources, prepare, shards, loader.

Importing this package does not import torch; only `data.loader` does.
"""

from .errors import UserError, exit_cleanly
from .shards import Dataset, Tokens, open_dataset
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["Dataset", "Tokenizer", "Tokens", "UserError", "exit_cleanly", "load_tokenizer", "open_dataset"]
