"""KV cache blocks: reference counts, a free list, and the prefix cache over intact free blocks. No torch."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

_KEY_BYTES: Final = 32
_PERSON: Final = b"rw.kv.block"


def root_key(adapter: str | None, cache_salt: str | None) -> bytes:
    """The parent of a first block: what must never be shared between adapters or salts.

    Each field is typed and carries its length, so no two pairs give the same bytes; None differs from "".
    """
    digest = blake2b(digest_size=_KEY_BYTES, person=_PERSON)
    for value in (adapter, cache_salt):
        if value is None:
            digest.update(b"\x00")
        else:
            data = value.encode()
            digest.update(b"\x01" + struct.pack("<Q", len(data)) + data)
    return digest.digest()


def child_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block: a hash over its parent's key and its token ids, so it stands for the whole prefix."""
    return blake2b(
        struct.pack(f"<{len(tokens)}q", *tokens), key=parent, digest_size=_KEY_BYTES, person=_PERSON
    ).digest()


class BlockPool:
    """A fixed number of blocks. Each is free (empty), cached (nobody holds it, its content is intact) or used.

    A cached block is found again by its key until it is the least recently used one when an empty block is needed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # Popped from the end: low ids first. Holds empty blocks only.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Unreferenced blocks with intact content, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Empty blocks."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content can be found again."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free and cached."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._refs[block]

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest known prefix of `keys`, at most `limit` of them. Takes nothing."""
        hits: list[int] = []
        if self.prefix_caching:
            for key in keys[:limit]:
                block = self._by_key.get(key)
                if block is None:
                    break
                hits.append(block)
        return hits

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of the blocks nobody holds: taking them lowers `available`."""
        return sum(1 for block in blocks if not self._refs[block])

    def take(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `match` found."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` empty blocks, held once. Forgets the least recently used cached ones where it must.

        Raises:
            ValueError: more than `available`; nothing is taken.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        blocks: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes) -> None:
        """Make a held block findable. Its last token must be computed. The first block of a key stays the one."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is not held")
        if self.prefix_caching and self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, in order of position. The last ones are forgotten first: a prefix outlives its tail."""
        for block in reversed(blocks):
            if not self._refs[block]:
                raise ValueError(f"block {block} is released but not held")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def disown(self, blocks: Iterable[int]) -> None:
        """Make held blocks unfindable: their content is not to be trusted."""
        for block in blocks:
            if not self._refs[block]:
                raise ValueError(f"block {block} is not held")
            self._forget(block)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify all invariants; with the block tables of all holders, also that references are exactly theirs.

        Raises:
            AssertionError: one is broken.
        """
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._refs) if count}
        _require(len(free) == len(self._free), "a block is twice in the free list")
        _require(not free & cached and not free & used and not cached & used, "a block has two states")
        _require(len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost")
        _require(min(self._refs) >= 0, "a reference count is negative")
        _require(all(self._keys[block] is None for block in free), "a free block still has a key")
        _require(all(self._keys[block] is not None for block in cached), "a cached block has no key")
        named = {key: block for block, key in enumerate(self._keys) if key is not None}
        _require(named == self._by_key, "keys and blocks disagree")
        if tables is not None:
            held: Counter[int] = Counter()
            for table in tables:
                _require(len(set(table)) == len(table), "a block is twice in one table")
                held.update(table)
            _require(all(held[block] == count for block, count in enumerate(self._refs)), "references are not held")

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None


def _require(condition: bool, what: str) -> None:
    # Not `assert`: the check must also work under `python -O`.
    if not condition:
        raise AssertionError(what)
