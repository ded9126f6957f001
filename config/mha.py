"""small with a key/value head for every query head: multi-head attention."""

from config.small import *  # noqa: F403

n_kv_head = 8
