"""Names: one slot per lane, ids that find their keys, lanes by affinity."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from shared import keys
from shared.errors import JobNotFoundError
from shared.keys import JobId

POOLS = st.from_regex(keys.POOL_PATTERN, fullmatch=True).filter(lambda name: len(name) <= 96)


@given(POOLS, st.integers(0, keys.MAX_LANES - 1))
def test_an_id_finds_its_lane(pool: str, lane: int) -> None:
    job_id = JobId.new(pool, lane)
    assert JobId.parse(str(job_id)) == job_id == JobId.match(str(job_id))


def test_ids_sort_by_time_and_are_unique() -> None:
    first = str(JobId.new("p", 0))
    moment = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == moment:
        pass
    assert first < str(JobId.new("p", 0))
    assert len({str(JobId.new("p", 0)) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "p.0", "p.0." + "0" * 31, "p.0." + "0" * 33, "p.0." + "G" * 32, "p.256." + "0" * 32,
        "p.-1." + "0" * 32, "{p}.0." + "0" * 32, "p.0." + "0" * 32 + "\n", ".0." + "0" * 32, "p:q.0." + "0" * 32,
        "p" * 97 + ".0." + "0" * 32,
    ],
)  # fmt: skip
def test_what_is_not_an_id_finds_no_job(text: str) -> None:
    assert JobId.match(text) is None
    with pytest.raises(JobNotFoundError) as caught:
        JobId.parse(text)
    assert caught.value.status == 404


@given(POOLS, st.integers(0, keys.MAX_LANES - 1))
def test_all_keys_of_a_lane_are_in_one_slot(pool: str, lane: int) -> None:
    job_id = JobId.new(pool, lane)
    names = [
        *keys.lane_streams(pool, lane), keys.job(job_id), keys.events(job_id), keys.stats(pool, lane),
        keys.dead(pool, lane), keys.outbox(pool, lane), keys.last_pull(pool, lane, "owner"),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert len({key_slot(name.encode()) for name in names}) == 1
    shared = [keys.card(pool), keys.tokenizer(pool), keys.workers(pool), keys.worker(pool, "o")]
    assert len({key_slot(name.encode()) for name in shared}) == 1


def test_lanes_are_read_resume_first_then_class_by_class() -> None:
    streams = keys.lane_streams("p", 3)
    assert streams[0] == "rw:{p.3}:q:resume" and len(streams) == 1 + 3 * keys.BUCKETS
    assert [s.split(":q:")[1] for s in streams[1::8]] == ["high:0", "normal:0", "batch:0"]


@pytest.mark.parametrize("name", ["a", "m-135m", "a.b", "A_1.b-2"])
def test_pool_names(name: str) -> None:
    assert keys.POOL_PATTERN.match(name)


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b", "a/b", "a b", "a{b", "a:b", "é", "a\n"])
def test_names_that_no_pool_can_have(name: str) -> None:
    assert not keys.POOL_PATTERN.match(name)


def test_adapter_and_cache_key_decide_the_lane() -> None:
    def lane(adapter: str | None = None, key: str | None = None, prompt: int = 5) -> int:
        return keys.lane_of(1000, adapter=adapter, prompt_cache_key=key, token_ids=[prompt] * 100)

    assert lane(adapter="a") == lane(adapter="a", prompt=7)
    assert lane(key="k") == lane(key="k", prompt=7)
    assert lane() == lane() != lane(prompt=7)
    assert len({lane(adapter="a"), lane(key="a"), lane(adapter="a", key="a"), lane()}) == 4


def test_only_the_first_tokens_of_a_prompt_decide() -> None:
    prefix = list(range(keys.AFFINITY_TOKENS))
    lanes = {
        keys.lane_of(1000, adapter=None, prompt_cache_key=None, token_ids=prefix + [tail] * 50) for tail in range(20)
    }
    assert len(lanes) == 1


def test_short_prompts_go_anywhere() -> None:
    lanes = Counter(keys.lane_of(4, adapter=None, prompt_cache_key=None, token_ids=[1]) for _ in range(400))
    assert set(lanes) == {0, 1, 2, 3}


def test_every_lane_has_one_home_and_a_leaving_worker_moves_only_its_own() -> None:
    owners = [f"worker-{i}" for i in range(5)]
    homes = {lane: owner for owner in owners for lane in keys.home_lanes(owner, owners, 64)}
    assert len(homes) == 64
    left = owners[:-1]
    after = {lane: owner for owner in left for lane in keys.home_lanes(owner, left, 64)}
    assert all(after[lane] == owner for lane, owner in homes.items() if owner != owners[-1])


def test_buckets() -> None:
    buckets = Counter(keys.bucket_of(f"tenant-{i}") for i in range(800))
    assert set(buckets) == set(range(keys.BUCKETS)) and min(buckets.values()) > 50
    assert keys.bucket_of("a") == keys.bucket_of("a")
