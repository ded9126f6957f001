"""Rotary positions turn pairs of channels. llama2.c and llama.cpp pair neighbours, (2i, 2i + 1); we and Hugging Face
pair the halves of a head, (i, i + D/2). Q and K rows in the other order give the same scores, so moving between the two
is a permutation of rows. A model read in the wrong order still writes fluently for a while: tests look at its loss."""

from torch import Tensor


def to_half_split(rows: Tensor, n_head: int) -> Tensor:
    """q_proj or k_proj, weight [n_head D, C] or bias [n_head D], from neighbouring pairs to halves of a head."""
    pairs = rows.reshape(n_head, -1, 2, *rows.shape[1:])  # [n_head, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
