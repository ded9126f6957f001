"""nanoGPT's shakespeare_char shape with this decoder; a minute or two on one GPU.

python -m data.prepare shakespeare --tokenizer char --name shakespeare_char                    downloads it
python -m data.prepare files PATH/TO/tinyshakespeare.txt --tokenizer char --name shakespeare_char
"""

n_layer = 6
n_head = 6
n_kv_head = 6
n_embd = 384
block_size = 256
tie_embeddings = False
dropout = 0.2

dataset = "shakespeare_char"
max_steps = 700
tokens_per_step = 16_384
micro_batch_size = 64
optimizer = "muon"
learning_rate = 4e-3
schedule = "linear"
warmup_steps = 50
weight_decay = 1.0
eval_interval = 50
