"""Llama 3.2 1B's shape: 1.24B parameters, GQA with 32 query and 8 key/value heads, head and embedding tied.

For measurements with random weights, and to continue from converted ones; a run from nothing needs a cluster.
"""

vocab_size = 128256
n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
d_ff = 8192
block_size = 131072
rope_theta = 500000.0
rope_scaling = "llama3:32:1:4:8192"
tie_embeddings = True

micro_batch_size = 1
tokens_per_step = 131_072
