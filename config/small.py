"""The main job: a small GQA decoder on Python's own standard library, in minutes on two CPU cores."""

n_layer = 3
n_head = 8
n_kv_head = 2
n_embd = 192
block_size = 256
tie_embeddings = False

dataset = "stdlib"
max_steps = 880
tokens_per_step = 4096
micro_batch_size = 16
optimizer = "muon"
learning_rate = 1e-2
schedule = "linear"
warmup_steps = 20
weight_decay = 0.3
eval_interval = 110
sample_prompt = "def main("
