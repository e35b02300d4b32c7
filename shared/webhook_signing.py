"""Secrets of webhooks, in the form of the Standard Webhooks specification: `whsec_`, then base64 of 24 to 64 bytes."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Final

from pydantic import SecretStr

PREFIX: Final = "whsec_"
_BYTES: Final = 32


def new_secret() -> str:
    """A secret that nobody guesses."""
    return PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()


def check_secret(text: str) -> str:
    """The secret, if it is one. Raises ValueError, which does not hold it."""
    try:
        size = len(base64.b64decode(text.removeprefix(PREFIX), validate=True))
    except (binascii.Error, ValueError):
        size = 0
    if not text.startswith(PREFIX) or not 24 <= size <= 64:
        raise ValueError(f"a secret must be {PREFIX} and base64 of 24 to 64 bytes behind it")
    return text


def check_secrets(secrets_: list[SecretStr]) -> list[SecretStr]:
    """The secrets, if all are some. Raises ValueError."""
    for secret in secrets_:
        check_secret(secret.get_secret_value())
    return secrets_
