"""What a webhook says, and who it says it is."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from gateway.prompts import PromptEncoder
from shared.keys import JobId
from shared.webhook_calls import Claimed
from shared.webhook_signing import check_secret, new_secret
from tasks.webhook_message import headers, special_ids, webhook_id
from tasks.webhook_run import LONGEST_PAUSE_S, pause_s
from tests.unit.gateway import support

JOB_ID = str(JobId("pool", 3, "0" * 31 + "7"))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLAIMED = Claimed(JOB_ID, 1, "https://hooks.test/", "t", "job.completed", '{"text":"ä\\n"}'.encode(), TRACE)


def sent(claimed: Claimed = CLAIMED, *secrets: str, now: datetime | None = None) -> dict[str, str]:
    found = headers(claimed, secrets, now or datetime.now(UTC))
    return {name.decode(): value.decode() for name, value in found}


def test_receivers_can_verify_it() -> None:
    secret = new_secret()
    names = sent(CLAIMED, secret)
    assert Webhook(secret).verify(CLAIMED.body, names) == {"text": "ä\n"}
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(CLAIMED.body + b" ", names)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(CLAIMED.body, names | {"webhook-id": "msg_2"})
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret()).verify(CLAIMED.body, names)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(CLAIMED.body, sent(CLAIMED, secret, now=datetime.now(UTC) - timedelta(minutes=6)))


def test_while_a_secret_is_replaced_both_verify_it() -> None:
    old, new = new_secret(), new_secret()
    names = sent(CLAIMED, new, old)
    assert names["webhook-signature"].count("v1,") == 2
    for secret in (old, new):
        Webhook(secret).verify(CLAIMED.body, names)


def test_the_specification_s_own_example() -> None:
    """Of its text: this secret, id, time and payload give this signature."""
    at = datetime.fromtimestamp(1614265330, UTC)
    signature = Webhook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").sign(
        "msg_p5jXN8AQM9LWM0D4loKWxJek", at, '{"test": 2432232314}'
    )
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_an_id_is_the_same_for_each_try_and_has_no_dot() -> None:
    assert webhook_id(JOB_ID) == "msg_" + "0" * 31 + "7"
    again = dataclasses.replace(CLAIMED, attempt=5)
    assert sent(again, new_secret())["webhook-id"] == sent(CLAIMED, new_secret())["webhook-id"]


@pytest.mark.parametrize("trace", ["", "nonsense", TRACE + "\r\nx: y", TRACE[:-1]])
def test_only_a_trace_is_passed_on_as_one(trace: str) -> None:
    assert sent(CLAIMED, new_secret())["traceparent"] == TRACE
    assert "traceparent" not in sent(dataclasses.replace(CLAIMED, trace=trace), new_secret())


@pytest.mark.parametrize(
    "text", ["", "whsec_", "whsec_!!!", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + "YQ==", "whsec_" + "A" * 92]
)
def test_what_is_no_secret(text: str) -> None:
    check_secret(new_secret())
    with pytest.raises(ValueError, match="a secret must be") as caught:
        check_secret(text)
    assert text == "" or text not in str(caught.value) or text == "whsec_"


def test_pauses_grow_with_jitter_and_have_bounds() -> None:
    for attempt in range(1, 60):
        pauses = [pause_s(attempt, 5.0, 0.0) for _ in range(50)]
        whole = min(LONGEST_PAUSE_S, 5.0 * 2 ** (attempt - 1))
        assert 0.75 * whole <= min(pauses) <= max(pauses) <= 1.25 * whole and len(set(pauses)) > 1
    assert pause_s(1, 5.0, 100.0) == 100.0
    assert pause_s(1, 5.0, 1e9) == LONGEST_PAUSE_S


def test_special_ids_are_those_of_the_tokenizer() -> None:
    bundle = support.bundle()
    assert special_ids(bundle) == PromptEncoder(support.card(), bundle).special_ids != frozenset()
