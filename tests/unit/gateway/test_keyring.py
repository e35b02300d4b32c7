"""Whom a key stands for: those of the settings, and those whose hash is kept."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from gateway import keyring
from gateway.keyring import ADMIN_SCOPES, METRICS_SCOPES, STATIC_SCOPES, Identity, Keyring, StaticKey
from shared import api_keys
from shared.api_keys import ApiKey, new_key, presented
from shared.errors import AuthenticationError, ServiceUnavailableError

NOW = 1_000_000.0


class Records:
    """Redis, as far as a keyring sees it."""

    def __init__(self) -> None:
        self.held: dict[str, ApiKey] = {}
        self.asked: list[str] = []
        self.away = False

    def make(self, **fields: Any) -> str:
        key = new_key()
        mine = presented(key.encode())
        assert mine is not None
        values = {"tenant": "acme", "scopes": ["inference"], **fields}
        self.held[mine.id] = ApiKey(id=mine.id, digest=mine.digest, **values)
        return key

    async def find(self, key_id: str) -> ApiKey | None:
        self.asked.append(key_id)
        if self.away:
            raise ServiceUnavailableError("away")
        return self.held.get(key_id)


def ring(records: Records, *static: StaticKey) -> Keyring:
    return Keyring(static, records.find, clock=lambda: NOW)


async def refused(keys: Keyring, header: str | None) -> str:
    with pytest.raises(AuthenticationError) as caught:
        await keys.identify(header)
    assert (caught.value.status, caught.value.error_code) == (401, "invalid_api_key")
    return caught.value.message


async def test_keys_of_the_settings() -> None:
    records = Records()
    keys = ring(records, StaticKey("one", STATIC_SCOPES), StaticKey("zwei-ö", ADMIN_SCOPES))
    one = await keys.identify("Bearer one")
    assert one == await keys.identify("bearer  one ") and one.scopes == STATIC_SCOPES
    two = await keys.identify("Bearer " + "zwei-ö".encode().decode("latin-1"))
    assert two.tenant != one.tenant and two.scopes == ADMIN_SCOPES
    for name in ("ключ-à", "key-Å"):  # their last bytes are white space where the header is read as text
        three = await ring(records, StaticKey(name, STATIC_SCOPES)).identify(
            "Bearer " + name.encode().decode("latin-1")
        )
        assert three.scopes == STATIC_SCOPES
    assert "one" not in one.tenant + one.key
    for bad in (None, "", "Bearer", "Bearer ", "Basic one", "one", "Bearer tow", "Bearer one two", "Bearer on"):
        await refused(keys, bad)
    assert not records.asked, "nothing of these is a question to Redis"


async def test_a_key_that_was_made_stands_for_its_tenant() -> None:
    records = Records()
    key = records.make(tenant="acme", scopes=["admin", "metrics"])
    identity = await ring(records).identify(f"Bearer {key}")
    assert identity == Identity("acme", records.asked[0], frozenset({"admin", "metrics"}))
    assert records.asked[0] in key and key.split("-")[2] not in records.asked[0]


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({}, True),
        ({"expires_ms": int(NOW * 1e3) + 1}, True),
        ({"expires_ms": int(NOW * 1e3)}, False),
        ({"revoked_ms": 1}, False),
        ({"revoked_ms": 1, "expires_ms": int(NOW * 1e3) + 1}, False),
    ],
)
async def test_what_is_over_opens_nothing(fields: dict[str, int], known: bool) -> None:
    records = Records()
    header = f"Bearer {records.make(**fields)}"
    if known:
        await ring(records).identify(header)
    else:
        assert "expired or was revoked" in await refused(ring(records), header)


async def test_the_id_alone_opens_nothing() -> None:
    records = Records()
    key, other = records.make(), new_key()
    _, key_id, secret = key.split("-")
    last = "a" if secret[-1] != "a" else "b"
    for wrong in (
        f"rw-{key_id}-{other.split('-')[2]}", f"rw-{key_id}-{secret[:-1]}{last}", f"rw-{key_id}", f"rw-{key_id}-",
        f"rw-{key_id}-{secret}x", f"RW-{key_id}-{secret}", f"rw-{other.split('-')[1]}-{secret}", f"{key_id}-{secret}",
        key + "\n", f"rw-{key_id}-{'é' * 43}",
    ):  # fmt: skip
        message = await refused(ring(records), f"Bearer {wrong}x" if wrong.endswith("\n") else f"Bearer {wrong}")
        assert key_id not in message and secret not in message


async def test_away_is_not_wrong() -> None:
    records = Records()
    key = records.make()
    records.away = True
    keys = ring(records, StaticKey("static", STATIC_SCOPES))
    with pytest.raises(ServiceUnavailableError):
        await keys.identify(f"Bearer {key}")
    await refused(keys, "Bearer nonsense")
    assert await keys.identify("Bearer static")


async def test_every_comparison_is_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    class Spy:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(keyring, "hmac", Spy)
    monkeypatch.setattr(api_keys, "hmac", Spy)
    records = Records()
    key = records.make()
    static = [StaticKey("one", STATIC_SCOPES), StaticKey("two", ADMIN_SCOPES), StaticKey("three", METRICS_SCOPES)]
    await ring(records, *static).identify("Bearer one")
    assert len(compared) == 3, "all of them: time must not tell which"
    await ring(records).identify(f"Bearer {key}")
    assert len(compared) == 4 and len(compared[-1][0]) == len(compared[-1][1]) == 64


def test_keys_have_enough_chance_in_them_and_one_form() -> None:
    made = {new_key() for _ in range(200)}
    assert len(made) == 200
    for key in made:
        _, key_id, secret = key.split("-")
        assert len(key_id) == 12 and len(secret) == 43 and 62 ** len(secret) > 2**256
        mine = presented(key.encode())
        assert mine is not None and mine.id == key_id and secret not in mine.digest
