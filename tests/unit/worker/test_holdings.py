"""What is held, and the budget that follows from it."""

from __future__ import annotations

from engine.request import Capacity
from tests.unit.worker.parts import held
from worker.holdings import Admission, Holdings


def capacity(sequences: int, tokens: int) -> dict[str, Capacity]:
    return dict.fromkeys(("high", "normal", "batch"), Capacity(sequences, tokens))


def test_a_later_taking_replaces_and_the_former_cannot_remove_it() -> None:
    empties: list[int] = []
    holdings = Holdings(lambda: empties.append(1))
    former = held()
    later = held(epoch=2, job_id=former.id)
    holdings.add(former)
    holdings.add(later)
    holdings.remove(former)
    assert holdings.holds(later) and not holdings.holds(former) and len(holdings) == 1 and not empties
    holdings.remove(later)
    holdings.remove(later)
    assert empties == [1] and holdings.get(later.id) is None


def test_budget_is_capacity_less_what_is_on_its_way() -> None:
    admission = Admission(5000)
    assert admission.budget() is None, "nothing before the engine has spoken"
    admission.update(capacity(4, 100), [])
    normal, batch = held(n=2), held(job_class="batch")
    for job in (normal, batch):
        admission.reserve(job)
    budget = admission.budget()
    assert budget is not None and budget.max_job_tokens == 5000
    assert budget.sequences == {"high": 4, "normal": 2, "batch": 1}
    assert budget.tokens == {"high": 100, "normal": 78, "batch": 67}
    admission.update(capacity(1, 50), [normal, batch])
    budget = admission.budget()
    assert budget is not None and budget.sequences["batch"] == 1 and budget.tokens["batch"] == 50


def test_no_room_is_no_budget() -> None:
    admission = Admission(5000)
    admission.update(capacity(1, 100), [])
    admission.reserve(held(job_class="high"))
    assert admission.budget() is None
    admission.update(capacity(3, 0), [])
    assert admission.budget() is None
