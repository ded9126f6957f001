"""The draft model that goes with code_300m: 21M parameters, a fourteenth, on the same text with the same tokenizer.

Few and wide layers: at this size the time of a step is the number of its kernels, not the bytes of its weights.
"""

n_layer = 3
n_head = 10
n_kv_head = 2
n_embd = 640
d_ff = 2304
block_size = 1024
tie_embeddings = True

dataset = "code"
compile = False  # a run of half a minute is too short to win it back
max_steps = 1000
tokens_per_step = 32_768
micro_batch_size = 32
optimizer = "muon"
learning_rate = 3e-3
schedule = "linear"
warmup_steps = 100
weight_decay = 0.1
eval_interval = 1000
eval_tokens = 1_048_576
sample_prompt = "def main("
