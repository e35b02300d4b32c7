"""Settings: described, from the environment, checked."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shared.settings import CommonSettings, GatewaySettings, WorkerSettings


@pytest.mark.parametrize("kind", [CommonSettings, GatewaySettings, WorkerSettings])
def test_every_field_is_described(kind: type[CommonSettings]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_the_environment_is_read_with_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_REDIS_URL", "redis://elsewhere/1")
    monkeypatch.setenv("ROPEWAY_API_KEYS", '["key-1", "key-2"]')
    monkeypatch.setenv("ROPEWAY_SOMETHING_OF_ANOTHER_PROCESS", "x")
    settings = GatewaySettings()
    assert settings.redis_url == "redis://elsewhere/1"
    assert [key.get_secret_value() for key in settings.api_keys] == ["key-1", "key-2"]
    assert "key-1" not in repr(settings)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GatewaySettings, "PORT", "70000"),
        (GatewaySettings, "DEADLINE_S", "0"),
        (GatewaySettings, "MAX_QUEUED_JOBS", "0"),
        (WorkerSettings, "LANES", "257"),
        (WorkerSettings, "ENGINE", "warp"),
        (WorkerSettings, "LEASE_S", "-1"),
        (CommonSettings, "LOG_LEVEL", "loud"),
    ],
)
def test_a_mistyped_setting_is_an_error(
    monkeypatch: pytest.MonkeyPatch, kind: type[CommonSettings], name: str, value: str
) -> None:
    monkeypatch.setenv(f"ROPEWAY_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        kind()
