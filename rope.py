"""Rotary frequencies, and the ways to stretch them past the length a model was trained on.

A frequency turns its channel pair by `inv_freq` radians a token. Slow pairs have not gone round once by the end of
the training length, so longer texts show them angles they have never met. Each kind of `rope_scaling` slows some of the
pairs down so that the angles stay known. It is written as one string, the values in the order of `KINDS` or by name:

    linear:2                        all pairs alike (Chen et al. 2023, position interpolation)
    ntk:4                           a larger base: fast pairs hardly, slow ones by the factor (u/bloc97 2023, NTK-aware)
    dynamic:4:2048                  the same, growing with the length past `original` (u/emozilla 2023)
    llama3:8:1:4:8192               by wavelength: long ones by the factor, short ones not (Llama 3.1)
    yarn:4:32768:beta_fast=16       by turns within `original`, with an attention temperature (Peng et al. 2023)

The tables equal those of Hugging Face transformers (`ROPE_INIT_FUNCTIONS`), whose parameter names these are, but for
`original`, there original_max_position_embeddings: the length before stretching. Left out, it is block_size / factor.

Of `dynamic`, the base depends on the length of the text so far. Keys in a cache are turned once and for all, so here it
is set for the longest text, block_size: the same at every length, with a cache and without, and no scaling at all
while block_size is at most `original`.
"""

import math
from dataclasses import replace

import torch

KINDS = {
    "linear": ("factor", "original"),
    "ntk": ("factor", "original"),
    "dynamic": ("factor", "original"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original"),
    "yarn": (
        *("factor", "original", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
DEFAULTS = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0},
}


def parse_rope_scaling(text: str) -> tuple[str, dict[str, float]]:
    """ "yarn:4:32768" -> ("yarn", {"factor": 4.0, "original": 32768.0}), without the defaults.

    Raises:
        ValueError: no such kind or parameter, or a value out of range.
    """
    kind, *words = text.strip().split(":")
    if kind not in KINDS:
        raise ValueError(f"rope_scaling={text!r}: there is no kind {kind!r}, only {', '.join(KINDS)}")
    values = {}
    for place, word in enumerate(words):
        name, equals, number = word.rpartition("=")
        if not equals:
            name = KINDS[kind][place] if place < len(KINDS[kind]) else None
        if name not in KINDS[kind] or name in values:
            raise ValueError(f"rope_scaling={text!r}: write {kind}:{':'.join(KINDS[kind])}, or name=value, each once")
        try:
            values[name] = float({"true": "1", "false": "0"}.get(number.lower(), number))
        except ValueError:
            raise ValueError(f"rope_scaling={text!r}: {name} is {number!r}, which is not a number") from None
    _check(text, kind, values)
    return kind, values


def _check(text, kind, values):
    for name, value in values.items():
        lowest = 1 if name in ("factor", "original") else 0
        if not lowest <= value < 2**31:
            raise ValueError(f"rope_scaling={text!r}: {name}={value:g} must be at least {lowest} and below 2**31")
    if "factor" not in values:
        raise ValueError(f"rope_scaling={text!r} lacks its factor: write {kind}:4 to read texts four times as long")
    full = DEFAULTS.get(kind, {}) | values
    if kind == "llama3" and not 0 < full["low_freq_factor"] < full["high_freq_factor"]:
        raise ValueError(f"rope_scaling={text!r}: low_freq_factor must be above 0 and below high_freq_factor")
    if kind == "yarn" and not 0 < full["beta_slow"] < full["beta_fast"]:
        raise ValueError(f"rope_scaling={text!r}: beta_slow must be above 0 and below beta_fast")


def format_rope_scaling(kind: str, values: dict[str, float]) -> str:
    """The string that `parse_rope_scaling` reads back as these values."""
    number = {name: repr(int(value) if value == int(value) else float(value)) for name, value in values.items()}
    text = ":".join([kind, number["factor"], *(f"{n}={number[n]}" for n in KINDS[kind][1:] if n in number)])
    parse_rope_scaling(text)
    return text


def original_length(config) -> int:
    """Tokens that the model of a ModelConfig read before its positions were stretched."""
    if config.rope_scaling is None:
        return config.block_size
    values = parse_rope_scaling(config.rope_scaling)[1]
    return int(values.get("original", config.block_size / values["factor"]))


def stretched(config, text: str):
    """The ModelConfig with another rope_scaling ("none": without), and the block_size that goes with it.

    `original` is the config's own unless the text names one; block_size becomes factor * original. Only llama3 never
    shortens it: Llama 3.1 was trained to twice that.
    """
    original = original_length(config)
    if text.strip().lower() == "none":
        return replace(config, rope_scaling=None, block_size=original)
    kind, values = parse_rope_scaling(text)
    values = {"original": original} | values
    block_size = int(values["factor"] * values["original"])
    if kind == "llama3":
        block_size = max(block_size, config.block_size)
    return replace(config, rope_scaling=format_rope_scaling(kind, values), block_size=block_size)


def rope_frequencies(config, device=None):
    """The rotary frequencies of a ModelConfig.

    Returns:
        inv_freq: fp32 [D/2], radians per token of channel pair i.
        attention_factor: float, by which cosines and sines are multiplied; the temperature of the softmax falls with
            its square (1.0 for every kind but yarn).
    """
    dim, theta = config.head_dim, config.rope_theta
    if config.rope_scaling is None:
        return _frequencies(theta, dim, device), 1.0
    kind, values = parse_rope_scaling(config.rope_scaling)
    values = DEFAULTS.get(kind, {}) | values | {"original": original_length(config)}
    if kind == "linear":
        return _frequencies(theta, dim, device) / values["factor"], 1.0
    if kind in ("ntk", "dynamic"):
        return _frequencies(stretched_theta(config), dim, device), 1.0
    if kind == "llama3":
        return _llama3(_frequencies(theta, dim, device), values), 1.0
    return _yarn(_frequencies(theta, dim, device), theta, values), _yarn_attention_factor(values)


def stretched_theta(config) -> float:
    """The base of the frequencies of a ModelConfig: rope_theta, but for the kinds that stretch by a larger base."""
    if config.rope_scaling is None:
        return config.rope_theta
    kind, values = parse_rope_scaling(config.rope_scaling)
    growth = values["factor"] if kind == "ntk" else 1.0
    if kind == "dynamic":
        original = original_length(config)
        growth = values["factor"] * max(config.block_size, original) / original - (values["factor"] - 1)
    return config.rope_theta * growth ** (config.head_dim / (config.head_dim - 2))


def _frequencies(theta, dim, device):
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    return 1.0 / theta**exponent


def _llama3(inv_freq, values):
    """Frequencies that turn fewer than low_freq_factor times within `original` are divided by the factor, those that
    turn more than high_freq_factor times are kept, between them both are mixed."""
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    turns = values["original"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / values["factor"] + kept * inv_freq


def _yarn(inv_freq, theta, values):
    """YaRN's "NTK-by-parts", section 3.2: the mix is linear in the channel index, from the pair that turns beta_fast
    times within `original` (kept) to the one that turns beta_slow times (divided by the factor)."""
    dim = 2 * inv_freq.shape[0]

    def pair_that_turns(times):
        return dim * math.log(values["original"] / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(values["beta_fast"]), pair_that_turns(values["beta_slow"])
    if values["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)  # a step, not a division by zero
    pair = torch.arange(dim // 2, device=inv_freq.device, dtype=torch.float32)
    kept = 1 - ((pair - first) / (last - first)).clamp(0, 1)
    return (1 - kept) * inv_freq / values["factor"] + kept * inv_freq


def _yarn_attention_factor(values):
    """YaRN's section 3.4, or the ratio of two such factors that DeepSeek sets with mscale and mscale_all_dim."""

    def temperature(mscale):
        return 0.1 * mscale * math.log(values["factor"]) + 1.0  # factor 1 gives 1

    if "attention_factor" in values:
        return values["attention_factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return temperature(values["mscale"]) / temperature(values["mscale_all_dim"])
    return temperature(1.0)
