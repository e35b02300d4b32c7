"""`LoRARequest`, and the names that adapters go by in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.adapters.library import AdapterLibrary
from shared.errors import AdapterError, InvalidRequestError, ModelNotFoundError, UnsupportedParameterError
from shared.lora.check import check_ranks
from shared.lora.files import NAME_PATTERN, content_identity


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to compute with. The fields are vLLM's.

    Attributes:
        lora_name: what it is called.
        lora_int_id: accepted and not used: adapters are told apart by their content.
        lora_path: folder with `adapter_config.json` and `adapter_model.safetensors`.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


#: An adapter, the name of a registered one, or None for the base model.
Adapted = LoRARequest | str | None


class NamedAdapters:
    """Adapters by name over a library that knows them by content.

    Args:
        library: None where adapters are not enabled.
        max_rank: largest rank that is served.
    """

    def __init__(self, library: AdapterLibrary[Any] | None, max_rank: int) -> None:
        self._library, self._max_rank = library, max_rank
        self._names: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Registered names, sorted."""
        return sorted(self._names)

    def set(self, requests: Sequence[LoRARequest]) -> None:
        """Register these and no others. Running requests of the others go on.

        Raises:
            AdapterError: one cannot be read, or its rank is too high; nothing has changed then.
            InvalidRequestError: a name is not one, or there twice.
            UnsupportedParameterError: adapters are not enabled.
        """
        identities = {request.lora_name: self._identity(request) for request in requests}
        if len(identities) < len(requests):
            raise InvalidRequestError("lora_name: the same name twice", param="lora_name")
        library = self._enabled()
        for identity in set(self._names.values()) - set(identities.values()):
            library.unregister(identity)
        for request in requests:
            library.register(identities[request.lora_name], Path(request.lora_path))
        self._names = identities

    def resolve(self, adapted: Adapted) -> str | None:
        """The identity to compute with; a request registers its adapter, also in the place of another of its name.

        Raises:
            AdapterError: its files cannot be read, or its rank is too high.
            ModelNotFoundError: no adapter has this name.
            UnsupportedParameterError: adapters are not enabled.
        """
        if adapted is None:
            return None
        library = self._enabled()
        if isinstance(adapted, LoRARequest):
            identity = self._identity(adapted)
            library.register(identity, Path(adapted.lora_path))
            self._names[adapted.lora_name] = identity
            return identity
        if adapted not in self._names:
            raise ModelNotFoundError("lora_request: no adapter of this name is registered", param="lora_request")
        return self._names[adapted]

    def _identity(self, request: LoRARequest) -> str:
        self._enabled()
        if NAME_PATTERN.fullmatch(request.lora_name) is None:
            raise InvalidRequestError("lora_name: letters, digits, `._-` and one slash at most", param="lora_name")
        if not request.lora_path:
            raise AdapterError("lora_path: must name the adapter's folder", param="lora_path")
        try:
            check_ranks(Path(request.lora_path), self._max_rank)
            return content_identity(Path(request.lora_path))
        except AdapterError as error:
            raise AdapterError(f"adapter {request.lora_name}: {error.message}", param="lora_path") from None

    def _enabled(self) -> AdapterLibrary[Any]:
        if self._library is None:
            raise UnsupportedParameterError("lora_request: adapters need enable_lora=True", param="lora_request")
        return self._library
