"""Which sequences run, and which of their tokens each step computes. Policy only: no torch, no tokenizer.

Rank decides everything: class first, then order of arrival. Of those that run, the lowest rank is preempted first and
a higher rank never gives way to a lower one, so the highest always gets on and every sequence ends.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from engine.adapters.slots import AdapterSlots, outranked
from engine.block_pool import BlockPool, child_key, root_key
from engine.classes import EVERYONE, Served, Turns
from engine.config import SchedulerConfig
from engine.hit_rate import HitRate
from engine.plan import Span, StepPlan
from engine.request import Capacity
from engine.room import Room
from engine.sequence import Sequence, SequenceState


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


def _turn(sequence: Sequence) -> tuple[int, bool, int]:
    """Order of waiting: a preempted sequence is at the head of its class."""
    return sequence.priority, not sequence.preemptions, sequence.arrival


@dataclass(slots=True)
class _Prefix:
    """What is computed already of a sequence that may be admitted: full blocks to share, and perhaps one to copy.

    Attributes:
        blocks: to be held by it too; all of them are full.
        tokens: in those blocks and in the copied part.
        copied: the block whose first tokens it needs; it will write behind them.
    """

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    copied: int | None = None


class Scheduler:
    """Continuous batching with chunked prefill over one block pool.

    A sequence is admitted when the blocks of all its known tokens are there and some headroom stays for the others.
    Only decoding sequences ask for more later; where none is left, the lowest rank is preempted: it gives its blocks
    back, keeps its tokens, and is computed again when there is room.

    Args:
        slots: of adapters on the device; None where none are served.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, slots: AdapterSlots | None = None) -> None:
        self.config = config
        self.pool = pool
        self.slots = slots
        self.preemptions = 0
        self.prefix_hits = HitRate()
        self._running: list[Sequence] = []  # by rank
        self._waiting: list[Sequence] = []  # by turn
        # Block keys that a running sequence is about to compute, and which one: see `_expected`.
        self._coming: dict[bytes, Sequence] = {}
        # For the next plan: blocks to copy, as (source, destination).
        self._copies: list[tuple[int, int]] = []
        self._turns = Turns()
        # Whether no pass is under way, and whether a preemption has had to wait for that.
        self._settled, self._stuck = True, False

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for admission, preempted ones included."""
        return len(self._waiting)

    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished."""
        return chain(self._running, self._waiting)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.pool.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose `max_len` tokens fit into the whole pool."""
        insort(self._waiting, sequence, key=_turn)

    def schedule(self, *, settled: bool = True) -> StepPlan | None:
        """Choose the tokens of the next pass; preempts and admits. Empty where there is nothing to do.

        Args:
            settled: no pass is under way. Else nobody is preempted, since what a pass under way gives belongs to
                sequences as they are: where one would have to be, the answer is None, and nothing is lost by asking
                again when the pass has landed.
        """
        self._settled, self._stuck = settled, False
        before = self.preemptions
        self._grow()
        # Room that a preemption has just made belongs to those that run.
        if self.preemptions == before and not self._stuck:
            self._admit()
        return None if self._stuck else self._plan()

    def launched(self, plan: StepPlan) -> list[int]:
        """A pass is under way: the next one may be planned behind it.

        Returns:
            The blocks it copies from, which are held for it: to be released when it has landed.
        """
        for span in plan.spans:
            span.sequence.computed = span.start + span.count
            span.sequence.ahead += span.sample
        # What nobody holds has been given back with its copy.
        held = sorted({source for source, _ in plan.copies if self.pool.references(source)})
        self.pool.take(held)
        return held

    def advance(self, span: Span) -> None:
        """The span is in the cache: count it, and make its full blocks findable."""
        sequence, size = span.sequence, self.pool.block_size
        first = span.start // size
        sequence.landed = span.start + span.count
        sequence.computed = max(sequence.computed, sequence.landed)
        sequence.scored += len(span.scored)
        last = sequence.landed // size
        if last == first or not self.pool.prefix_caching:
            return
        keys = self._keys(sequence, last)
        for index in range(first, last):
            self.pool.register(sequence.block_table[index], keys[index])
            if self._coming.get(keys[index]) is sequence:
                del self._coming[keys[index]]

    def finish(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take a sequence out in whatever state it is; its blocks are free at once. Again is no change.

        The blocks of a failed one may hold what is not finite, so nobody is to find them again.
        """
        if sequence.state is SequenceState.RUNNING:
            if failed:
                self.pool.disown(sequence.block_table)
            self._running.remove(sequence)
            self._give_back(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def capacity(self, priority: int) -> Capacity:
        """Room for this class: what higher and equal ones hold or may still need is taken, lower ones count as room.

        A live sequence is counted with its tokens and what it may still generate, at most `output_reserve`.
        """
        sequences = blocks = 0
        for sequence in self.sequences():
            if sequence.priority <= priority:
                sequences += 1
                ahead = min(sequence.max_len, len(sequence.tokens) + self.config.output_reserve)
                blocks += self.blocks_for(ahead)
        room = self.pool.num_blocks - blocks - self._headroom(sequences)
        return Capacity(
            sequences=max(0, self.config.max_num_seqs - sequences), tokens=max(0, room) * self.pool.block_size
        )

    def check(self, held: Iterable[int] = ()) -> None:
        """Verify all invariants of queues, block tables and pool.

        Args:
            held: blocks that a pass under way holds.

        Raises:
            AssertionError: one is broken.
        """
        running, waiting, size = self._running, self._waiting, self.pool.block_size
        _require(all(s.state is SequenceState.RUNNING for s in running), "a running sequence has another state")
        _require(all(s.state is SequenceState.WAITING for s in waiting), "a waiting sequence has another state")
        _require(len(running) <= self.config.max_num_seqs, "more sequences run than may")
        _require(running == sorted(running, key=_rank), "running sequences are out of order")
        _require(waiting == sorted(waiting, key=_turn), "waiting sequences are out of order")
        _require(all(not s.block_table and not s.computed for s in waiting), "a waiting sequence holds blocks")
        _require(all(s.computed < s.length for s in running), "a running sequence has nothing to compute")
        _require(all(s.computed <= len(s.block_table) * size for s in running), "computed tokens without a block")
        _require(all(s.landed <= s.computed for s in running), "more has landed than is computed")
        _require(all(not s.ahead for s in waiting), "a waiting sequence has tokens under way")
        _require(all(s.scored >= min(s.landed, s.prompt_len - 1) for s in running if s.scores), "a score is missing")
        _require(all(owner.state is SequenceState.RUNNING for owner in self._coming.values()), "a stale expectation")
        if self.slots is not None:
            self.slots.check(Counter(s.adapter for s in running if s.adapter is not None))
        self.pool.check([*(sequence.block_table for sequence in running), list(held)])

    def _grow(self) -> None:
        """Give every decoding sequence the block of its next token, the highest rank first."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            size = len(sequence.block_table) * self.pool.block_size
            if len(sequence.tokens) + sequence.ahead > size and not sequence.ends:
                while not self.pool.available and sequence.state is SequenceState.RUNNING:
                    if self._must_settle():
                        return
                    self._preempt(self._running[-1])
                if sequence.state is SequenceState.RUNNING:
                    sequence.block_table += self.pool.allocate(1)
            index += 1

    def _admit(self) -> None:
        index = passed = deferred = 0
        if self.slots is not None:
            self.slots.begin()
        while index < len(self._waiting):
            sequence = self._waiting[index]
            if self._budget(sequence) <= 0:
                return
            if not self._has_slot(sequence):
                if self._stuck:
                    return
                index += 1
                continue
            prefix = self._prefix(sequence)
            if prefix is None:
                deferred += 1
                if deferred > self.config.max_num_seqs:
                    return
                index += 1
            elif self._make_room(sequence, prefix.blocks):
                del self._waiting[index]
                self._start(sequence, prefix)
                for other in self._waiting[:index]:
                    other.bypassed += 1
            elif self._stuck:
                return
            else:
                passed += 1
                # A preempted one is not passed at all: its client sees a stream that stands still.
                fair = not sequence.preemptions and sequence.bypassed < self.config.max_bypasses
                if not fair or passed > self.config.lookahead:
                    return
                index += 1

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether its adapter is on the device or can be brought there now; those of other adapters pass it.

        When enough have, or where it outranks all that use an adapter, a slot is kept for it.
        """
        slots, identity = self.slots, sequence.adapter
        if slots is None or identity is None or slots.available(identity):
            return True
        weaker = outranked(self._running, sequence.priority) if slots.can_claim(identity) else []
        if weaker and self._must_settle():
            return False
        for victim in weaker:
            self._preempt(victim)
        urgent = bool(weaker or sequence.preemptions)
        if urgent or sequence.bypassed >= self.config.max_bypasses:
            slots.claim(identity, at_once=urgent)
        return slots.available(identity)

    def _budget(self, sequence: Sequence) -> int:
        """Tokens of the next pass that are left for it, behind all decodes and the prefills of its class and above."""
        served = self._served()
        if sequence.priority > served.prompts:
            return 0
        running = self._having_rows(served)
        room = Room(self.config, running)
        ahead = sum(room.take(s) - 1 for s in running if s.priority <= sequence.priority and s.remaining > 1)
        return min(self.config.max_num_batched_tokens - len(running) - ahead, room.left(sequence))

    def _served(self) -> Served:
        """Whom the next pass is for."""
        return self._turns.served(self._running) if self.config.batch_prefill_tokens else EVERYONE

    def _having_rows(self, served: Served) -> list[Sequence]:
        """Those of the next pass, by rank."""
        running = [sequence for sequence in self._running if not (sequence.ahead and sequence.ends)]
        return running if served is EVERYONE else [sequence for sequence in running if served.has(sequence)]

    def _prefix(self, sequence: Sequence) -> _Prefix | None:
        """What it need not compute; None where it should wait, since another is just computing more of that."""
        if sequence.scoring:
            return _Prefix()
        shared = _Prefix()
        if sequence.siblings:
            if any(sibling.scoring for sibling in sequence.siblings):
                return None
            found = self._shared(sequence)
            if found is None:
                return None
            shared = found
        if not self._reads_cache(sequence):
            return shared
        hits = self._match(sequence)
        if len(hits) * self.pool.block_size > shared.tokens:
            shared = _Prefix(hits, len(hits) * self.pool.block_size)
        return None if self._expected(sequence, shared.tokens // self.pool.block_size) else shared

    def _shared(self, sequence: Sequence) -> _Prefix | None:
        """What a running choice of the same request has computed of the prompt; None while it is still at it.

        The block in which the prompt ends is shared too, and both would write to it: the newcomer gets a copy.
        """
        running = [sibling for sibling in sequence.siblings if sibling.state is SequenceState.RUNNING]
        if not running:
            return _Prefix()
        wanted = min(sequence.prompt_len, len(sequence.tokens) - 1)
        source = max(running, key=lambda sibling: sibling.computed)
        if source.computed < wanted:
            return None
        full, rest = divmod(wanted, self.pool.block_size)
        return _Prefix(source.block_table[:full], wanted, source.block_table[full] if rest else None)

    def _reads_cache(self, sequence: Sequence) -> bool:
        skips = sequence.scoring or sequence.params.skip_reading_prefix_cache
        return self.pool.prefix_caching and not skips

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its known tokens, but never of the last one: its logits must be computed."""
        limit = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.match(self._keys(sequence, limit), limit)

    def _expected(self, sequence: Sequence, hits: int) -> bool:
        """Whether its first missing block is being computed by another of its class or above: then it waits for that.

        So a burst with one system prompt computes the common prefix once.
        """
        if not self._coming or hits >= (len(sequence.tokens) - 1) // self.pool.block_size:
            return False
        owner = self._coming.get(sequence.block_keys[hits])
        return owner is not None and owner.priority <= sequence.priority

    def _make_room(self, sequence: Sequence, held: list[int]) -> bool:
        """Whether it can be admitted now; preempts sequences of lower classes where that is enough, else nothing.

        `held` are the blocks that it will share.
        """
        need = self.blocks_for(len(sequence.tokens)) - len(held) + self.pool.idle(held)
        room, staying, shared = self.pool.available, len(self._running), frozenset(held)
        victims: list[Sequence] = []
        while staying >= self.config.max_num_seqs or need + self._headroom(staying) > room:
            victim = self._running[staying - 1] if staying else None
            if victim is None or victim.priority <= sequence.priority:
                return False
            victims.append(victim)
            staying -= 1
            room += sum(1 for b in victim.block_table if self.pool.references(b) == 1 and b not in shared)
        if victims and self._must_settle():
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _must_settle(self) -> bool:
        """Whether a preemption has to wait for a pass that is under way."""
        self._stuck |= not self._settled
        return self._stuck

    def _headroom(self, running: int) -> int:
        """Blocks that an admission leaves free: else the growth of those that run would soon undo it."""
        return running + math.ceil(self.config.watermark * self.pool.num_blocks) if running else 0

    def _start(self, sequence: Sequence, prefix: _Prefix) -> None:
        held = len(prefix.blocks)
        self.pool.take(prefix.blocks)
        sequence.block_table = prefix.blocks + self.pool.allocate(self.blocks_for(len(sequence.tokens)) - held)
        sequence.computed = sequence.landed = prefix.tokens
        if prefix.copied is not None:
            # All copies of a pass read before any of them writes: a copy of a copy is made from the original.
            original = {copy: source for source, copy in self._copies}.get(prefix.copied, prefix.copied)
            self._copies.append((original, sequence.block_table[held]))
        if self.slots is not None and sequence.adapter is not None:
            sequence.adapter_slot = self.slots.acquire(sequence.adapter)
        sequence.bypassed = 0
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_rank)
        if sequence.hit_tokens is None:
            self._count_hits(sequence)
        if self.pool.prefix_caching:
            full = len(sequence.tokens) // self.pool.block_size
            for key in self._keys(sequence, full)[held:full]:
                self._coming.setdefault(key, sequence)

    def _count_hits(self, sequence: Sequence) -> None:
        """Once for a request, however many choices it has and however often they are admitted."""
        first = all(sibling.hit_tokens is None for sibling in sequence.siblings)
        sequence.hit_tokens = sequence.computed if first else 0
        if first and self._reads_cache(sequence):
            self.prefix_hits.add(len(sequence.tokens), sequence.computed)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, sequence, key=_turn)

    def _give_back(self, sequence: Sequence) -> None:
        if self._copies:  # it was admitted for a pass that was not planned
            self._copies = [pair for pair in self._copies if pair[1] not in sequence.block_table]
        for key in sequence.block_keys[sequence.landed // self.pool.block_size :]:
            if self._coming.get(key) is sequence:
                del self._coming[key]
        if self.slots is not None and sequence.adapter is not None:
            self.slots.release(sequence.adapter)
            sequence.adapter_slot = -1
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.computed = sequence.landed = 0

    def _plan(self) -> StepPlan:
        spans: list[Span] = []
        prefills: list[Sequence] = []
        served = self._served()
        running = self._having_rows(served)
        for sequence in running:
            if sequence.remaining == 1:
                spans.append(Span(sequence, sequence.computed, 1, True))
            else:
                prefills.append(sequence)
        fills = self.slots.take_fills() if self.slots is not None else []
        plan = StepPlan(spans=spans, decodes=len(spans), copies=self._copies, fills=fills)
        self._copies = []
        if prefills:
            self._add_prefills(spans, prefills, Room(self.config, running))
        if spans:
            self._turns.took(served)
        return plan

    def _add_prefills(self, spans: list[Span], prefills: list[Sequence], room: Room) -> None:
        budget = self.config.max_num_batched_tokens - len(spans)
        for sequence in prefills:
            count = min(budget, room.take(sequence))
            if count <= 0:
                break
            spans.append(_chunk(sequence, count))
            budget -= count

    def _keys(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Keys of its first full blocks, at least `blocks` of them."""
        keys, size = sequence.block_keys, self.pool.block_size
        for index in range(len(keys), blocks):
            parent = keys[-1] if keys else root_key(sequence.adapter, sequence.cache_salt)
            keys.append(child_key(parent, sequence.tokens[index * size : (index + 1) * size]))
        return keys


def _chunk(sequence: Sequence, count: int) -> Span:
    span = Span(sequence, sequence.computed, count, count == sequence.remaining)
    if sequence.scoring:
        end = min(span.start + count, sequence.prompt_len - 1)
        span.scored = range(min(max(span.start, sequence.scored), end), end)
    return span


def _require(condition: bool, what: str) -> None:
    # Not `assert`: the check must also work under `python -O`.
    if not condition:
        raise AssertionError(what)
