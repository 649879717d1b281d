"""Names the blocks of a context by hash, so that equal beginnings of contexts have equal names.

A block's hash is that of its tokens and of all tokens before them: equal hashes mean equal rows.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from specgw.engine.kv_cache import BLOCK_SIZE


class BlockHashes:
    """The hashes of one context's full blocks, computed once. The context may only grow.

    Contexts with different salts share nothing: no timing tells one tenant what another asked.
    """

    def __init__(self, salt: str = "") -> None:
        self._chain = [sha256(salt.encode()).digest()]

    def within(self, token_ids: Sequence[int], length: int) -> Sequence[bytes]:
        """Returns the hashes of the full blocks among the first `length` tokens of the context."""
        num_full = length // BLOCK_SIZE
        for start in range((len(self._chain) - 1) * BLOCK_SIZE, num_full * BLOCK_SIZE, BLOCK_SIZE):
            tokens = array("q", token_ids[start : start + BLOCK_SIZE])
            self._chain.append(sha256(self._chain[-1] + tokens.tobytes()).digest())
        return self._chain[1 : num_full + 1]
