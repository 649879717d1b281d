"""Which KV cache blocks hold which prefix, by hash. Knows no tokens and no holders.

`kv_cache.py` decides which blocks are forgotten, and when; `block_hashes.py` computes the hashes.
"""

from collections.abc import Iterable, Sequence


class PrefixCache:
    """The blocks whose rows may be used by any sequence that begins with the same tokens."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._hashes

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest prefix that is held."""
        found = []
        for one in hashes:
            block = self._blocks.get(one)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, block_hash: bytes) -> None:
        """Names a block. If another has the same rows already, it stays the one to be found."""
        if self._blocks.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes blocks unknown, those that are not known among them."""
        for block in blocks:
            block_hash = self._hashes.pop(block, None)
            if block_hash is not None:
                del self._blocks[block_hash]
