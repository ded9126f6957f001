"""Train on from a model that is there: python train.py config/finetune.py --init_from OUT --dataset NAME

The shape and the tokenizer are the checkpoint's, so the dataset is prepared with `--tokenizer OUT`. Chats and documents
stand alone in their windows (doc_mask); a chat longer than block_size is cut.
"""

block_size = 512

doc_mask = True
max_steps = 300
tokens_per_step = 16384
micro_batch_size = 8
learning_rate = 2e-5
warmup_steps = 20
schedule = "linear"
weight_decay = 0.0
beta2 = 0.999
eval_interval = 50
