"""Llama 3.1 70B's shape: 70.6B parameters, GQA with 64 query and 8 key/value heads.

Its cache of 131,072 tokens is exactly 40 GiB in bf16; with a key/value head to each query head it would be 320 GiB.
With int8 weights it decodes on one GPU of 141 GB: `python -m bench.decode --seventy`.
"""

vocab_size = 128256
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
d_ff = 28672
block_size = 131072
rope_theta = 500000.0
rope_scaling = "llama3:8:1:4:8192"
tie_embeddings = False

micro_batch_size = 1
tokens_per_step = 131_072
