"""A target for speculative decoding: 306M parameters on code, three minutes of one H200.

`python -m bench.speculate --train 3` prepares the text (dataset "code"), trains this and its draft model, code_20m.
"""

n_layer = 24
n_head = 16
n_kv_head = 4
n_embd = 1024
d_ff = 3072
block_size = 1024
tie_embeddings = False

dataset = "code"
compile = False  # of 24 layers it takes a minute, which this run is too short to win back
max_steps = 620
tokens_per_step = 32_768
micro_batch_size = 32
optimizer = "muon"
learning_rate = 2e-3
schedule = "linear"
warmup_steps = 20
weight_decay = 0.1
eval_interval = 310
eval_tokens = 1_048_576
sample_prompt = "def main("
