"""A backlog of the class `batch` beside chats: who has rows in which pass, and what a chat waits for."""

from __future__ import annotations

from itertools import count

import pytest

from engine.engine import Engine
from engine.pace import PrefillPace
from tests.support.engine_harness import make_engine, request, run
from tests.support.fake_runner import FakeRunner

HIGH, NORMAL, BATCH = 0, 1, 2
PROMPT = 40  # tokens of each prompt
LIMIT = 64  # of the batch in a pass


def engine_with(
    limit: int = LIMIT, *, seqs: int = 16, kind: type[FakeRunner] = FakeRunner
) -> tuple[Engine, FakeRunner]:
    fake = kind(512, 4)
    return make_engine(
        fake,
        max_num_seqs=seqs,
        max_num_batched_tokens=512,
        batch_prefill_tokens=limit,
        prefill_pace=PrefillPace(1280.0),
        enable_prefix_caching=False,
    ), fake


def add(engine: Engine, name: str, priority: int, *, prompt: int = PROMPT, output: int = 8) -> None:
    ids = [(sum(name.encode()) + i) % 90 for i in range(prompt)]
    engine.add(request(name, ids, max_tokens=output, ignore_eos=True, priority=priority))


def backlog(engine: Engine, lines: int = 60, output: int = 8) -> None:
    for number in range(lines):
        add(engine, f"line {number}", BATCH, output=output)


def rows(fake: FakeRunner, first: int, *, priorities: tuple[int, ...] = (HIGH, NORMAL, BATCH)) -> list[int]:
    """Rows of these classes in each pass from the first one on."""
    passes = zip(fake.plans[first:], fake.priorities[first:], strict=True)
    return [sum(n for (*_, n), p in zip(plan, classes, strict=True) if p in priorities) for plan, classes in passes]


def first_token(engine: Engine, fake: FakeRunner, name: str) -> list[int]:
    """Rows of the passes up to the first token of a chat that arrives right after the last pass began."""
    arrived = len(fake.plans) - 1
    add(engine, name, NORMAL)
    while not any(output.request_id == name and output.choices for output in engine.step()):
        engine.check()
    return rows(fake, arrived)


def test_a_chat_waits_for_one_short_pass_and_its_own() -> None:
    """Rows stand for time: on a CPU a pass takes the longer the more it has. Chats come at all moments of a backlog."""
    waited: dict[int, list[int]] = {0: [], LIMIT: []}
    for limit, sums in waited.items():
        for moment in range(1, 25):
            engine, fake = engine_with(limit, seqs=48)
            backlog(engine, 200)
            for _ in range(moment):
                engine.step()
            passes = first_token(engine, fake, "chat")
            if limit:
                under_way, own = passes
                assert under_way <= LIMIT + 48
                assert own == PROMPT
            sums.append(sum(passes))
    assert max(waited[0]) > 512 + PROMPT
    assert sum(waited[0]) > 2 * sum(waited[LIMIT])


def test_prompts_without_end_leave_the_batch_every_fourth_pass() -> None:
    engine, fake = engine_with()
    backlog(engine, output=200)
    for _ in range(4):
        engine.step()
    names, first = count(), len(fake.plans)
    for _ in range(24):
        add(engine, f"chat {next(names)}", NORMAL, output=1)
        engine.step()
        engine.check()
    batch = rows(fake, first, priorities=(BATCH,))
    assert all(batch[3::4])
    assert not any(batch[i] for i in range(24) if i % 4 != 3)
    assert all(rows(fake, first, priorities=(NORMAL,)))


def test_a_backlog_gets_on_that_comes_when_prompts_never_end() -> None:
    """Nothing of it runs yet: it must be admitted, too."""
    engine, fake = engine_with()
    for number in range(40):
        add(engine, f"chat {number}", NORMAL, output=1)
        if number == 2:
            backlog(engine, 3, output=2)
        engine.step()
    assert sum(rows(fake, 0, priorities=(BATCH,))) == 3 * (PROMPT + 1)


def test_decodes_of_a_batch_take_turns_with_those_of_chats() -> None:
    engine, fake = engine_with()
    backlog(engine, 12, output=200)
    add(engine, "chat", NORMAL, output=200)
    for _ in range(60):
        engine.step()
    first = len(fake.plans)
    for _ in range(20):
        engine.step()
    assert rows(fake, first, priorities=(NORMAL,)) == [1] * 20
    assert sorted(set(rows(fake, first, priorities=(BATCH,)))) == [0, 12]
    assert sum(rows(fake, first, priorities=(BATCH,))) == 10 * 12


def test_prompts_of_a_batch_are_short_together_beside_a_chat() -> None:
    """By the pace of one prompt, however many there are."""
    engine, fake = engine_with()
    add(engine, "chat", NORMAL, output=200)
    engine.step()
    backlog(engine, 20, output=30)
    first = len(fake.plans)
    for _ in range(60):
        engine.step()
    pace = PrefillPace(1280.0)
    prompts = [
        sum(n for *_, n in plan[decodes:]) <= pace.tokens(decodes, 0)
        for plan, decodes in zip(fake.plans[first:], fake.decodes[first:], strict=True)
    ]
    assert all(prompts)
    assert sum(rows(fake, first, priorities=(BATCH,))) > 60 * 10


def test_a_batch_alone_fills_every_pass_up_to_its_bound() -> None:
    engine, fake = engine_with()
    backlog(engine, 16, output=1)
    while engine.has_work():
        engine.step()
    assert rows(fake, 0) == [LIMIT] * 10


def test_a_long_prompt_of_a_chat_takes_the_budget_beside_a_batch() -> None:
    engine, fake = engine_with()
    backlog(engine, output=200)
    for _ in range(4):
        engine.step()
    first = len(fake.plans)
    add(engine, "chat", NORMAL, prompt=500, output=1)
    engine.step()
    assert rows(fake, first) == [500]


def test_streams_go_on_beside_a_prompt_of_a_higher_class() -> None:
    """Prompts of a lower class wait for it; what streams is not held up."""
    engine, fake = engine_with()
    for name in ("stream", "other"):
        add(engine, name, NORMAL, output=100)
    for _ in range(3):
        engine.step()
    first = len(fake.plans)
    add(engine, "urgent", HIGH, prompt=60, output=1)
    add(engine, "later", NORMAL, output=1)
    for _ in range(4):
        engine.step()
    passes = [[name for name, *_ in plan] for plan in fake.plans[first:]]
    alone = ["stream", "other", "urgent"]
    assert sorted(passes) == sorted([alone, alone, alone, [*alone, "later"]])


def test_where_it_is_off_all_classes_share_passes() -> None:
    engine, fake = engine_with(0)
    backlog(engine, 12, output=200)
    add(engine, "chat", NORMAL, output=60)
    for _ in range(20):
        engine.step()
    assert rows(fake, 10) == [13] * 10


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_answers_do_not_depend_on_it(limit: int) -> None:
    def answers(engine: Engine) -> dict[str, object]:
        items = (request(str(i), [*range(i, 50)], n=1 + i % 2, seed=i, priority=i % 3, max_tokens=9) for i in range(9))
        return {name: each.choices for name, each in run(engine, *items).items()}

    assert answers(engine_with(limit, seqs=6)[0]) == answers(engine_with(0)[0])
