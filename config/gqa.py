"""small with four query heads to a key/value head: grouped-query attention."""

from config.small import *  # noqa: F403

n_kv_head = 2
