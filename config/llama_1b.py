"""TinyLlama's shape: 1.1B parameters, GQA with 32 query and 4 key/value heads."""

vocab_size = 32000
n_layer = 22
n_head = 32
n_kv_head = 4
n_embd = 2048
d_ff = 5632
block_size = 2048
tie_embeddings = False

max_steps = 10_000
tokens_per_step = 524_288
micro_batch_size = 8
optimizer = "adamw"
learning_rate = 4e-4
min_lr = 4e-5
schedule = "cosine"
warmup_steps = 500
weight_decay = 0.1
eval_interval = 500
eval_tokens = 2_097_152
