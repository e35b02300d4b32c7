"""Orders of clients and disturbances of the pool, all drawn from one seed before anything starts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.chaos.adapters import PREFIX, name_of

#: How a client gets its answer. `stream`: chunks of an OpenAI stream. `whole`: one answer. `follow`: a job and its
#: events. `library`: the same with `ropeway.client`. `fetch`: a job, looked at until it has ended.
Way = Literal["stream", "whole", "follow", "library", "fetch"]

_WAYS: Mapping[Way, int] = {"stream": 8, "whole": 3, "follow": 5, "library": 2, "fetch": 2}

#: Disturbances by how often they come.
WEIGHTS: Mapping[str, int] = {
    "kill_worker": 24,
    "pause_worker": 12,
    "drain_worker": 12,
    "hurry_worker": 6,
    "hang_engine": 6,
    "kill_gateway": 10,
    "drain_gateway": 2,
    "kill_connections": 10,
    "pause_network": 8,
    "cut_network": 6,
    "restart_redis": 4,
    "freeze_redis": 4,
    "fill_redis": 3,
    "pause_pool": 4,
    "reload_adapter": 8,
    "unload_adapter": 4,
    "lose_store": 4,
}
#: Those that need adapters, and of them those that change what a name stands for.
ADAPTER_KINDS = frozenset({"reload_adapter", "unload_adapter", "lose_store"})
RENAMING_KINDS = frozenset({"reload_adapter", "unload_adapter"})
#: Share of orders that ask for an adapter.
_ADAPTED = 0.4

_TEXT = (
    "Why do cable cars not fall? A ropeway carries cabins over the valley while the cable never stops; guides count "
    "them, engineers oil the wheels, and at night the summit station keeps one lamp on for whoever is late."
)
_STOPS: Sequence[Sequence[str]] = (["tower"], [" snow wind", "letter"], ["é"], [".", " the"], ["cabin cabin"])


@dataclass(frozen=True)
class Order:
    """What one client asks for and how it behaves.

    Attributes:
        path, body: of the request.
        key: `Idempotency-Key`.
        cancel_at: cancel after so many events.
        breaks: events, counted over all connections, after which the client drops its connection and comes back.
        leaves_at: event after which it drops its connection for good.
        comes_back: after a loss a stream with a key is asked for anew, from its first token, in place of its events.
        readers: how many read the events at the same time.
        draw: decides what the client leaves to chance.
    """

    number: int
    way: Way
    path: str
    body: dict[str, Any]
    key: str | None = None
    cancel_at: int | None = None
    breaks: tuple[int, ...] = ()
    leaves_at: int | None = None
    comes_back: bool = False
    readers: int = 1
    draw: int = 0

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that is asked for."""
        model = str(self.sampling["model"])
        return model if model.startswith(PREFIX) else None

    @property
    def sampling(self) -> dict[str, Any]:
        """The body with the sampling fields."""
        return self.body["body"] if self.path == "/v1/jobs" else self.body


@dataclass(frozen=True)
class Disturbance:
    """One thing that goes wrong.

    Attributes:
        after: orders that have been taken up by then.
        victim: chooses among those that can be hit, from 0 to below 1.
        seconds: how long it lasts, where it lasts, from 0 to below 1 of its kind's span.
        alone: nothing else is wrong from before it until all that it hit goes on, so that its recovery can be timed.
        gap: seconds until the next one, at least.
    """

    kind: str
    after: int
    victim: float
    seconds: float
    alone: bool
    gap: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A whole run."""

    orders: list[Order] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)


def draw_plan(
    seed: int,
    *,
    jobs: int,
    disturbances: int,
    tokens: tuple[int, int],
    model: str,
    kinds: Sequence[str] = (),
    alone: float = 1 / 3,
    unseeded: float = 0.1,
    adapters: int = 0,
    renamed: bool = True,
) -> Plan:
    """Orders and disturbances of a seed.

    Args:
        tokens: shortest and longest answer.
        model: name that is asked for.
        kinds: of disturbances; empty for all.
        alone: share of kills and drains that are timed.
        unseeded: share of orders that leave the seed to the gateway.
        adapters: how many there are.
        renamed: whether their names may come to stand for other content.
    """
    rng = random.Random(seed)
    draws = [random.Random(rng.getrandbits(64)) for _ in range(jobs)]
    orders = [_order(draw, number, tokens, model, unseeded, adapters) for number, draw in enumerate(draws)]
    without = (frozenset() if adapters else ADAPTER_KINDS) | (frozenset() if renamed else RENAMING_KINDS)
    served = [kind for kind in WEIGHTS if kind not in without]
    if refused := without & set(kinds):
        raise ValueError(f"not in this run: {', '.join(sorted(refused))}")
    return Plan(orders, _disturbances(rng, jobs, disturbances, kinds or served, alone))


def _disturbances(rng: random.Random, jobs: int, count: int, kinds: Sequence[str], alone: float) -> list[Disturbance]:
    unknown = set(kinds) - set(WEIGHTS)
    if unknown:
        raise ValueError(f"no such disturbances: {', '.join(sorted(unknown))}; there are {', '.join(WEIGHTS)}")
    # Each kind as often as its weight says, rather than by chance, so that a short run has all of them.
    turns = {kind: rng.random() / WEIGHTS[kind] for kind in kinds}
    dealt: list[str] = []
    while len(dealt) < count:
        kind = min(turns, key=lambda name: turns[name])
        dealt.append(kind)
        turns[kind] += 1 / WEIGHTS[kind]
    rng.shuffle(dealt)
    # Neither before anything runs nor when nearly all has ended.
    after = sorted(round(jobs * rng.uniform(0.08, 0.9)) for _ in range(count))
    timed = {"kill_worker", "drain_worker", "hurry_worker"}
    return [
        Disturbance(
            kind,
            moment,
            victim=rng.random(),
            seconds=rng.random(),
            alone=kind in timed and rng.random() < alone,
            # One half on top of each other.
            gap=rng.choice([rng.uniform(0.0, 0.2), rng.uniform(0.5, 2.0)]),
        )
        for kind, moment in zip(dealt, after, strict=True)
    ]


def _order(
    rng: random.Random, number: int, tokens: tuple[int, int], model: str, unseeded: float, adapters: int
) -> Order:
    way = rng.choices(list(_WAYS), list(_WAYS.values()))[0]
    chat = rng.random() < 0.5
    if adapters and rng.random() < _ADAPTED:
        model = name_of(rng.randrange(adapters))
    body: dict[str, Any] = {"model": model, **_sampling(rng, tokens, chat, unseeded)}
    text = " ".join(rng.choices(_TEXT.split(), k=rng.choice([3, 12, 60])))
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if rng.random() < 0.2:
        body["prompt_cache_key"] = f"group-{rng.randrange(4)}"
    behaviour: dict[str, Any] = {}
    if rng.random() < 0.4 or way == "whole":
        behaviour["key"] = f"order-{number}"
        behaviour["comes_back"] = way == "whole" or rng.random() < 0.5
    if way in ("stream", "follow"):
        behaviour |= _moods(rng, way, tokens[1], behaviour, body)
    if way in ("stream", "whole"):
        body["stream"] = way == "stream"
        if rng.random() < 0.3:
            body["service_tier"] = rng.choice(["priority", "flex"])
        path = "/v1/chat/completions" if chat else "/v1/completions"
    else:
        path = "/v1/jobs"
        body = {
            "kind": "chat" if chat else "completion",
            "body": body,
            "class": rng.choices(["high", "normal", "batch"], [1, 6, 2])[0],
        }
    return Order(number, way, path, body, draw=rng.getrandbits(32), **behaviour)


def _sampling(rng: random.Random, tokens: tuple[int, int], chat: bool, unseeded: float) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": rng.randint(*tokens)}
    if rng.random() < 0.3:
        fields["temperature"] = 0
    else:
        fields["temperature"] = round(rng.uniform(0.5, 1.2), 2)
        if rng.random() >= unseeded:
            fields["seed"] = rng.getrandbits(31)
    if rng.random() < 0.2 and fields["temperature"] > 0:
        fields["n"] = rng.choice([2, 3])
    if rng.random() < 0.2:
        fields["stop"] = list(rng.choice(_STOPS))
    if rng.random() < 0.15:
        fields |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if rng.random() < 0.3:
        fields["ignore_eos"] = True
    if rng.random() < 0.1:
        fields["min_tokens"] = fields["max_tokens"] // 2
    if rng.random() < 0.1:
        fields["presence_penalty"] = 0.5
    return fields


def _moods(rng: random.Random, way: Way, longest: int, given: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """How a client that reads events behaves. A stream that may be dropped says so, or has a key."""
    moods: dict[str, Any] = {}
    draw = rng.random()
    if draw < 0.1:
        moods["cancel_at"] = rng.randint(1, longest // 2)
    elif draw < 0.3:
        moods["breaks"] = tuple(sorted(rng.randint(1, longest) for _ in range(rng.choice([1, 2, 4]))))
        if way == "stream" and "key" not in given:
            body["background"] = True
    elif draw < 0.36 and way == "stream" and "key" not in given:
        moods["leaves_at"] = rng.randint(1, longest // 2)
    if way == "follow" and rng.random() < 0.2:
        moods["readers"] = 2
    return moods
