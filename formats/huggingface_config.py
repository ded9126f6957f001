"""Hugging Face's config.json, to a ModelConfig and back.

Every key is used, known to leave the logits alone, or refused by name: a key that was passed over in silence could make
a model that runs and is wrong. Both spellings are read, of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5
(rope_parameters, dtype); the first is written, since every reader of these files knows it.
"""

from math import isfinite

import torch

from data import UserError
from model import ModelConfig
from rope import DEFAULTS as ROPE_DEFAULTS
from rope import KINDS, format_rope_scaling, original_length, parse_rope_scaling, stretched_theta

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers takes for keys that config.json leaves out.
DEFAULTS = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}

USED = {
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}

# Keys that are features elsewhere, with the values under which they change nothing.
OFF = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),  # it would also put one on o_proj
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_llama_config": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "use_qk_norm": (False,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "quantization_config": (),
}

# Names, habits of a library, randomness in training, settings of generation: none of them moves a logit.
HARMLESS = {
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class"),
    *("attention_dropout", "pretraining_tp", "transformers.js_config", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "_flash_attn_2_enabled", "unsloth_fixed", "unsloth_version", "prefix"),
    *("return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder", "cross_attention_hidden_size", "problem_type"),
    *("tie_encoder_decoder", "chunk_size_feed_forward", "finetuning_task", "id2label", "label2id"),
    *("task_specific_params", "max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty"),
}


def read_config(values: dict, where: str) -> ModelConfig:
    """The ModelConfig of the contents of a config.json.

    Raises:
        UserError: another architecture, or a key that this decoder cannot follow; `where` names the file.
    """
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{where} describes a {kind!r} model; this decoder is of the dense Llama family: {', '.join(ARCHITECTURES)}"
        )
    architectures = values.get("architectures") or [ARCHITECTURES[kind]]
    if architectures != [ARCHITECTURES[kind]]:
        raise UserError(f"{where} says architectures={architectures}, and only {ARCHITECTURES[kind]} can be read")
    _refuse_strangers(values, where)
    values = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None} | DEFAULTS[kind] | values
    length = _number(values, "max_position_embeddings", where)
    rope_theta, rope_scaling, block_size = _read_rope(values, length, where)
    shape = {
        "vocab_size": _number(values, "vocab_size", where),
        "n_layer": _number(values, "num_hidden_layers", where),
        "n_head": _number(values, "num_attention_heads", where),
        "n_kv_head": _number(values, "num_key_value_heads", where, optional=True),
        "n_embd": _number(values, "hidden_size", where),
        "head_dim": _number(values, "head_dim", where, optional=True),
        "d_ff": _number(values, "intermediate_size", where),
        "norm_eps": _number(values, "rms_norm_eps", where, float),
    }
    try:
        return ModelConfig(
            **shape,
            block_size=block_size,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_embeddings=values["tie_word_embeddings"] is True,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            sliding_window=_read_window(values, kind, where),
        )
    except ValueError as error:
        raise UserError(f"{where} describes a model that cannot be: {error}") from None


def _refuse_strangers(values, where):
    for key, value in values.items():
        if key in USED or key in HARMLESS or value is None:
            continue
        if key not in OFF:
            raise UserError(
                f"{where} has the key {key!r}, unknown to this program, which may change the model: "
                "take it out of the file if you know that it does not"
            )
        if value not in OFF[key]:
            raise UserError(f"{where} says {key}={value!r}, which this decoder cannot follow")


def _number(values, key, where, kind=int, optional=False):
    value = values.get(key)
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)) or not isfinite(value):
        raise UserError(f"{where} must give {key} as a number, and has {value!r}")
    return kind(value)


def _read_window(values, kind, where) -> int | None:
    """Tokens each token sees, of a model in which all layers see alike."""
    window = _number(values, "sliding_window", where, optional=True) if kind != "llama" else None
    layers = _number(values, "num_hidden_layers", where)
    sliding = "sliding_attention" if window else "full_attention"
    types = set(values.get("layer_types") or [sliding])
    if kind in ("qwen2", "qwen3"):
        window = window if values.get("use_sliding_window") else None
        first = 28 if values.get("max_window_layers") is None else _number(values, "max_window_layers", where)
        sliding = {"sliding_attention" if window and i >= first else "full_attention" for i in range(layers)}
        types = set(values.get("layer_types") or sliding)
        window = window if types == {"sliding_attention"} else None
    elif types != {sliding}:
        raise UserError(f"{where} has layer_types that do not go with its sliding_window={window}")
    if types not in ({"sliding_attention"}, {"full_attention"}):
        raise UserError(f"{where} has layers of different kinds ({', '.join(sorted(types))}): here all see alike")
    return window


def _read_rope(values, length, where) -> tuple[float, str | None, int]:
    """rope_theta, rope_scaling and block_size."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}  # in transformers, too, the first wins
    if not isinstance(given, dict) or any(isinstance(value, (dict, list)) for value in given.values()):
        raise UserError(f"{where} has rotary positions that differ by layer or channel: {given!r}")
    given = {name: value for name, value in given.items() if value is not None}
    base = {"rope_theta": given.pop("rope_theta", values.get("rope_theta") or 10000.0)}
    theta = _number(base, "rope_theta", where, float)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    given.pop("finetuned", None)  # a note of the first YaRN models
    if given.get("partial_rotary_factor") == 1:
        given.pop("partial_rotary_factor")
    if kind == "default" and not given.keys() - {"factor", "original_max_position_embeddings"}:
        return theta, None, length
    outside = values.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn"):
        given["original"] = outside or given.pop("original_max_position_embeddings", length)
    given.pop("original_max_position_embeddings", None)
    if kind == "dynamic":
        given["original"] = length
    if kind == "yarn":
        given.setdefault("factor", length / given["original"])
    unknown = given.keys() - set(KINDS.get(kind, ()))
    if kind not in KINDS or kind == "ntk" or unknown:
        what = f"rope_type={kind!r}" + (f" with {', '.join(sorted(unknown))}" if kind in KINDS and unknown else "")
        raise UserError(f"{where} asks for {what}, which this decoder does not have")
    try:
        text = format_rope_scaling(kind, {name: float(value) for name, value in given.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{where} has rotary positions that cannot be: {error}") from None
    # Qwen's advice is to add yarn and leave max_position_embeddings as it was; the tables do not depend on it.
    return theta, text, max(length, int(given["factor"] * given["original"])) if kind == "yarn" else length


def write_config(config: ModelConfig, dtype: torch.dtype, bos_id: int | None, eos_ids: list[int]) -> dict:
    """The contents of a config.json that transformers reads as the same model.

    Args:
        dtype: of the stored tensors.
        bos_id, eos_ids: the ids that begin a text (None: none does) and that end one.

    Raises:
        UserError: no architecture there has what this model has.
    """
    if config.qk_norm and config.qkv_bias:
        raise UserError(
            "qk_norm=true with qkv_bias=true has no counterpart in transformers: Qwen3 has the one, Qwen2 the other"
        )
    kind = (
        "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "mistral" if config.sliding_window else "llama"
    )
    if kind == "llama" and config.n_embd % config.n_head:
        kind = "mistral"  # LlamaConfig refuses a hidden_size that the heads do not divide, MistralConfig takes it
    rope_theta, rope_scaling = _write_rope(config)
    values = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
    if kind == "llama":
        values |= {"attention_bias": False, "mlp_bias": False}
    if kind == "mistral":
        values |= {"sliding_window": config.sliding_window}
    if kind in ("qwen2", "qwen3"):
        values |= {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": 0 if config.sliding_window else config.n_layer,
        }
    return values | ({"attention_bias": False} if kind == "qwen3" else {})


def _write_rope(config) -> tuple[float, dict | None]:
    """rope_theta and rope_scaling. The kinds that change the base alone become that base, which all programs know."""
    if config.rope_scaling is None:
        return config.rope_theta, None
    kind, values = parse_rope_scaling(config.rope_scaling)
    if kind == "dynamic" and config.block_size == original_length(config):  # not stretched yet, and it still can be
        return config.rope_theta, {"rope_type": kind, "factor": values["factor"]}
    if kind in ("ntk", "dynamic"):
        return stretched_theta(config), None
    options = {name: value for name, value in values.items() if name != "original"}
    named = {"rope_type": kind, **options}
    if kind == "llama3":
        named = {"rope_type": kind, **ROPE_DEFAULTS[kind], **options}  # transformers has no defaults for these
    if kind != "linear":
        named["original_max_position_embeddings"] = original_length(config)
    if "truncate" in named:
        named["truncate"] = bool(named["truncate"])
    return config.rope_theta, named
