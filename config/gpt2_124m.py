"""GPT-2 small's size: 124M parameters, with rotary positions, RMSNorm and SwiGLU in place of GPT-2's parts."""

vocab_size = 50257
n_layer = 12
n_head = 12
n_kv_head = 12
n_embd = 768
d_ff = 2048
block_size = 1024
tie_embeddings = True

max_steps = 2000
tokens_per_step = 524_288
micro_batch_size = 32
optimizer = "muon"
learning_rate = 2e-3
schedule = "wsd"
warmup_steps = 100
weight_decay = 0.1
eval_interval = 250
eval_tokens = 10_485_760
