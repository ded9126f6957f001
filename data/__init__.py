"""Text to token shards to batches.

Reading order: errors, tokenizer, hf_tokenizer, reading, sources, download, files, chat, tokenise, prepare, shards,
mixture, loader.

Importing this package does not import torch; only `data.loader` does.
"""

from .errors import UserError, exit_cleanly
from .mixture import MixedDataset, open_datasets, parse_mixture, split_parts, weighted_totals
from .shards import Dataset, Tokens, open_dataset
from .tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Dataset",
    "MixedDataset",
    "Tokenizer",
    "Tokens",
    "UserError",
    "exit_cleanly",
    "load_tokenizer",
    "open_dataset",
    "open_datasets",
    "parse_mixture",
    "split_parts",
    "weighted_totals",
]
