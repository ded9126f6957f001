"""Tiny Shakespeare, character by character, in about a minute on two CPU cores.

python -m data.prepare shakespeare --tokenizer char --name shakespeare_char                    downloads it
python -m data.prepare files PATH/TO/tinyshakespeare.txt --tokenizer char --name shakespeare_char
"""

n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 96
block_size = 128
qk_norm = True
tie_embeddings = False

dataset = "shakespeare_char"
max_steps = 880
tokens_per_step = 2048
micro_batch_size = 16
optimizer = "muon"
learning_rate = 8e-3
schedule = "linear"
warmup_steps = 20
weight_decay = 0.3
eval_interval = 440
