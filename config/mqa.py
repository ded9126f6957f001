"""small with one key/value head for all query heads: multi-query attention."""

from config.small import *  # noqa: F403

n_kv_head = 1
