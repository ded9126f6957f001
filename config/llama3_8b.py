"""Llama 3.1 8B's shape: 8.03B parameters, GQA with 32 query and 8 key/value heads.

For measurements with random weights, and to continue from converted ones; a run from nothing needs a cluster.
"""

vocab_size = 128256
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
d_ff = 14336
block_size = 131072
rope_theta = 500000.0
rope_scaling = "llama3:8:1:4:8192"
tie_embeddings = False

micro_batch_size = 1
tokens_per_step = 131_072
