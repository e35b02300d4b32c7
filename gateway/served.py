"""What a request's model name stands for: a pool's base model, or an adapter on one."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.catalogue import Catalogue, Pool
from shared.adapter_record import AdapterRecord
from shared.adapters import Adapters
from shared.errors import InvalidRequestError, ModelNotFoundError
from shared.lora.files import NAME_PATTERN


@dataclass(frozen=True, slots=True)
class Served:
    """What a job is computed with.

    Attributes:
        record: of the adapter as it is now, None for the base model. The job keeps its content whatever becomes of the
            name.
    """

    pool: Pool
    record: AdapterRecord | None = None

    @property
    def adapter(self) -> str | None:
        """The adapter's name."""
        return None if self.record is None else self.record.name

    @property
    def identity(self) -> str | None:
        """Of the adapter's content."""
        return None if self.record is None else self.record.identity


def serves(pool: Pool, record: AdapterRecord) -> bool:
    """Whether a pool's workers would compute with an adapter, as far as settings go."""
    return record.content is not None and record.content.rank <= pool.card.max_lora_rank


class Directory:
    """Finds models by name. Adapters are looked up in Redis each time, so no gateway knows an old one."""

    def __init__(self, catalogue: Catalogue, adapters: Adapters) -> None:
        self._catalogue, self._adapters = catalogue, adapters

    async def find(self, model: str) -> Served:
        """What a name stands for; pools win.

        Raises:
            ModelNotFoundError: nothing; or an adapter that is not loaded, and why.
            ServiceUnavailableError: Redis is away, so it cannot be known.
        """
        pool = self._catalogue.known(model)
        if pool is None and (record := await self._record(model)) is not None:
            return await self._adapted(record, "model")
        return Served(pool or await self._catalogue.find(model))

    async def find_adapter(self, adapter: str, model: str) -> Served:
        """An adapter that was named beside its base model.

        Raises:
            InvalidRequestError: it is another model's.
            ModelNotFoundError, ServiceUnavailableError: as `find`.
        """
        record = await self._record(adapter)
        if record is None:
            raise ModelNotFoundError("adapter: no adapter has this name, see /v1/models", param="adapter")
        served = await self._adapted(record, "adapter")
        if model != record.pool:
            raise InvalidRequestError(
                f"adapter: it belongs to the model {record.pool}, which must be the `model` of the body",
                param="adapter",
            )
        return served

    async def _record(self, name: str) -> AdapterRecord | None:
        return await self._adapters.find(name) if NAME_PATTERN.fullmatch(name) else None

    async def _adapted(self, record: AdapterRecord, param: str) -> Served:
        if record.content is None:
            why = "it is still being loaded" if record.pending is not None else f"its load failed: {record.error}"
            raise ModelNotFoundError(f"{param}: the adapter '{record.name}' is not there: {why}", param=param)
        try:
            pool = await self._catalogue.find(record.pool)
        except ModelNotFoundError:
            raise self._unserved(record, "is not served now", param) from None
        most = pool.card.max_lora_rank
        if not most:
            raise self._unserved(record, "serves no adapters now (its workers need enable_lora)", param)
        if not serves(pool, record):
            why = f"serves ranks up to {most} now (max_lora_rank), the adapter's is {record.content.rank}"
            raise self._unserved(record, why, param)
        return Served(pool, record)

    def _unserved(self, record: AdapterRecord, why: str, param: str) -> ModelNotFoundError:
        return ModelNotFoundError(
            f"{param}: the base model of the adapter '{record.name}', {record.pool}, {why}", param=param
        )
