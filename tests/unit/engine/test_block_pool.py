"""Block pool: accounting, prefix cache, keys; and all of it at random against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool, child_key, root_key

ROOT = root_key(None, None)


def chain(*blocks: list[int], root: bytes = ROOT) -> list[bytes]:
    """Keys of consecutive blocks."""
    keys: list[bytes] = []
    for tokens in blocks:
        keys.append(child_key(keys[-1] if keys else root, tokens))
    return keys


def test_a_key_stands_for_the_whole_prefix_and_its_owner() -> None:
    base = chain([1, 2], [3, 4])
    assert base == chain([1, 2], [3, 4])
    assert base[1] != chain([9, 2], [3, 4])[1]
    assert base[1] != chain([3, 4])[0]
    roots = [root_key(*pair) for pair in ((None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "b"))]
    assert len(set(roots)) == len(roots)
    assert len({chain([1, 2], root=root)[0] for root in roots}) == len(roots)


def test_fields_of_the_root_key_do_not_run_into_each_other() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")
    assert root_key("a\x00", None) != root_key("a", "\x00")


def test_linear_combinations_of_tokens_do_not_collide() -> None:
    keys = {child_key(ROOT, [a, b]) for a in range(40) for b in range(40)}
    assert len(keys) == 1600


def test_released_blocks_with_a_key_are_found_again() -> None:
    pool = BlockPool(4, 2)
    keys = chain([1, 2], [3, 4])
    table = pool.allocate(2)
    for block, key in zip(table, keys, strict=True):
        pool.register(block, key)
    pool.release(table)
    assert (pool.free, pool.cached, pool.used) == (2, 2, 0)
    assert pool.match(keys, 9) == table
    assert pool.match(keys, 1) == table[:1]
    pool.take(table)
    assert (pool.free, pool.cached, pool.used) == (2, 0, 2)
    pool.check([table])


def test_blocks_without_a_key_become_empty() -> None:
    pool = BlockPool(3, 2)
    pool.release(pool.allocate(3))
    assert (pool.free, pool.cached) == (3, 0)


def test_the_least_recently_used_tail_is_forgotten_first() -> None:
    pool = BlockPool(4, 2)
    old, new = chain([1, 2], [3, 4]), chain([5, 6], [7, 8])
    for keys in (old, new):
        table = pool.allocate(2)
        for block, key in zip(table, keys, strict=True):
            pool.register(block, key)
        pool.release(table)
    pool.allocate(1)
    assert len(pool.match(old, 9)) == 1
    pool.allocate(1)
    assert pool.match(old, 9) == []
    assert len(pool.match(new, 9)) == 2
    pool.check()


def test_a_second_block_of_the_same_content_stays_nameless() -> None:
    pool = BlockPool(2, 2)
    key = chain([1, 2])[0]
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], key)
    pool.register(second[0], key)
    pool.release(second)
    assert (pool.free, pool.cached) == (1, 0)
    assert pool.match([key], 1) == first
    pool.check([first])


def test_disowned_blocks_are_not_found_and_become_empty() -> None:
    pool = BlockPool(2, 2)
    keys = chain([1, 2])
    table = pool.allocate(1)
    pool.register(table[0], keys[0])
    pool.disown(table)
    assert pool.match(keys, 1) == []
    pool.check([table])
    pool.release(table)
    assert (pool.free, pool.cached) == (2, 0)
    with pytest.raises(ValueError, match="not held"):
        pool.disown(table)


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 2, prefix_caching=False)
    keys = chain([1, 2])
    table = pool.allocate(1)
    pool.register(table[0], keys[0])
    pool.release(table)
    assert pool.match(keys, 1) == []
    assert pool.free == 2


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="not held"):
        pool.release([0])
    with pytest.raises(ValueError, match="not held"):
        pool.register(0, b"key")
    with pytest.raises(ValueError, match="needs blocks"):
        BlockPool(0, 2)
    pool.check([])
    assert pool.free == 2


@pytest.mark.parametrize("damage", ["lost", "twice", "reference", "key"])
def test_check_sees_damage(damage: str) -> None:
    pool = BlockPool(3, 2)
    table = pool.allocate(1)
    pool.register(table[0], b"key")
    tables = [table]
    if damage == "lost":
        pool._free.pop()
    elif damage == "twice":
        pool._free[0] = pool._free[1]
    elif damage == "reference":
        tables = [table, table]
    else:
        pool._by_key.clear()
    with pytest.raises(AssertionError):
        pool.check(tables)


class PoolMachine(RuleBasedStateMachine):
    """Holders that take prefixes from the cache, allocate, register and release in any order."""

    @initialize(blocks=st.integers(1, 8), caching=st.booleans())
    def build(self, blocks: int, caching: bool) -> None:
        self.pool = BlockPool(blocks, 2, prefix_caching=caching)
        self.tables: list[list[int]] = []
        self.chains: list[list[bytes]] = []
        # What was last written to each block, as a real cache would hold it.
        self.content: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def admit(self, tokens: list[int]) -> None:
        keys = chain(*[[token, token] for token in tokens])
        hits = self.pool.match(keys, len(keys) - 1)
        for block, key in zip(hits, keys, strict=False):
            assert self.content[block] == key, "the cache found a block of other content"
        missing = len(keys) - len(hits)
        if missing + self.pool.idle(hits) > self.pool.available:
            return
        self.pool.take(hits)
        fresh = self.pool.allocate(missing)
        held = {block for table in self.tables for block in table}
        assert not held & set(fresh), "a used block was given out again"
        table = hits + fresh
        for block, key in zip(fresh, keys[len(hits) :], strict=True):
            self.content[block] = key
            self.pool.register(block, key)
        self.tables.append(table)
        self.chains.append(keys)

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.available:
            with pytest.raises(ValueError, match="available"):
                self.pool.allocate(count)
            return
        table = self.pool.allocate(count)
        for block in table:
            self.content[block] = b"unfinished"
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            assert self.pool.free + self.pool.used + self.pool.cached == self.pool.num_blocks
            assert self.pool.used == len({block for table in self.tables for block in table})


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
