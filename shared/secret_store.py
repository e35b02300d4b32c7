"""The secret that gateways have in common where none is set: made by the first that needs it, kept in Redis."""

from __future__ import annotations

import secrets
from typing import Final

from shared import keys
from shared.errors import ForeignDataError
from shared.jobstore import JobStore

_BYTES: Final = 32


class SecretStore(JobStore):
    """A job store with the secret under which gateways sign tokens."""

    async def secret(self) -> bytes:
        """The secret; made if there is none.

        Raises:
            ForeignDataError: what is there is none.
        """
        await self._ask("SET", keys.token_secret(), secrets.token_hex(_BYTES), "NX")
        held = await self._ask("GET", keys.token_secret())
        if not isinstance(held, bytes) or len(held) != 2 * _BYTES:
            raise ForeignDataError("the secret of tokens is not one that was written here")
        return held
