"""Block-wise prefix caching: keys.py names blocks, blocks.py and residency.py hold them, store.py keeps them on disk.

with opened(path, Capacity(n_ctx=2048, n_seq=16)) as backend:
    cache = PrefixCache(backend, budget_tokens=8192, ram_bytes=2**30)
    limits = limits_of(backend, max_num_seqs=8, prefix_tokens=cache.budget_tokens)
    records = Engine(backend, limits, prefix=cache).run(requests)  # RequestRecord.cached_tokens
    cache.counters()  # query_tokens, hit_tokens, evictions, collisions
"""

from quantlab.engine.prefix_cache.cache import PrefixCache
from quantlab.engine.prefix_cache.keys import Prompt, block_key, root_key
from quantlab.engine.prefix_cache.store import BlockStore

__all__ = ["BlockStore", "PrefixCache", "Prompt", "block_key", "root_key"]
