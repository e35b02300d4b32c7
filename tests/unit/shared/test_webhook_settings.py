"""Settings of webhooks: what is refused, and that no secret is said."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from shared.settings import GatewaySettings, TasksSettings
from shared.webhook_signing import new_secret


def test_secrets_are_checked_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = new_secret(), "whsec_tooshort"
    monkeypatch.setenv("ROPEWAY_WEBHOOK_SECRETS", json.dumps([good]))
    settings = TasksSettings()
    assert [secret.get_secret_value() for secret in settings.webhook_secrets] == [good]
    assert good not in repr(settings)
    monkeypatch.setenv("ROPEWAY_WEBHOOK_SECRETS", json.dumps([good, bad]))
    with pytest.raises(ValidationError) as caught:
        TasksSettings()
    assert "webhook_secrets" in str(caught.value) and bad not in str(caught.value) and good not in str(caught.value)


@pytest.mark.parametrize("entry", ["http://x", "10.0.0.1/8", ""])
def test_where_webhooks_may_go_is_checked_at_the_start(entry: str) -> None:
    assert GatewaySettings(webhook_allow=["10.0.0.0/8", "hooks.internal"]).webhook_allow
    with pytest.raises(ValidationError, match="webhook_allow"):
        GatewaySettings(webhook_allow=["10.0.0.0/8", entry])
