"""For the tests of chats: a byte-level tokenizer with turns, templates as real models have them, and a tiny model."""

import json
from dataclasses import asdict

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import checkpoint
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import Specials
from model import ModelConfig, Transformer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The shape of Llama 2's and Mistral's: turns end with the end of text, and strict alternation is demanded.
INSTRUCT = """{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""
# The shape of Qwen 3's: what was thought before the last question is left out.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set parts = content.split('</think>') %}
        {%- if loop.index0 > ns.last %}
            {%- set content = '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '') + \
'\n</think>\n\n' + parts[-1].lstrip('\n') %}
        {%- else %}{% set content = parts[-1].lstrip('\n') %}{% endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def library_tokenizer(merges=(), missing=""):
    """Byte-level BPE of the `tokenizers` library: SPECIALS, the bytes but those `missing`, `merges` of characters."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    vocab = {text: i for i, text in enumerate([*SPECIALS, *alphabet, *("".join(pair) for pair in merges)])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(SPECIALS))
    return library


def chat_tokenizer(template=CHATML, missing="") -> HFTokenizer:
    """The tokenizer of a model for chats; "\\n\\n" is one token, as it is in most."""
    ids = {text: i for i, text in enumerate(SPECIALS)}
    specials = Specials(ids, bos_id=1, stop_ids=frozenset({ids["<|im_end|>"]}), chat_template=template)
    return HFTokenizer("tiny-chat", library_tokenizer([("Ċ", "Ċ")], missing).to_str(), 0, specials)


def write_chat_model(folder, tokenizer=None, dtype=torch.bfloat16, **shape):
    """A checkpoint directory of a random model, as convert.py leaves one: weights, tokenizer, settings of the model."""
    tokenizer = tokenizer or chat_tokenizer()
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "block_size": 64, **shape}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **shape)
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0)).to(dtype)
    checkpoint.save(folder, {"step": 0, "config": asdict(config)}, model, [], tokenizer)
    return folder / "last"


def write_chats(path, chats):
    """A .jsonl of chats, each a list of turns that begin with the user's."""
    roles = ("user", "assistant")
    rows = [[{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)] for turns in chats]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return path
