"""The runner for a GPU: passes that the host begins and does not wait for, decodes as recorded passes."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sizes
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.adapters.device import DeviceAdapters
from engine.batch import Batch, build_batch
from engine.device.decode import Decode, DecodeGraphs
from engine.device.graphs import GraphBackend
from engine.device.sampling import NOT_FINITE, DeviceSampler, needs_host
from engine.device.staging import Download, Staging
from engine.logprobs import not_finite
from engine.models.registry import CausalLM
from engine.plan import Sampled, Span, StepPlan
from engine.request import DeviceLostError
from engine.runner import ModelRunner, PassRows
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import Ops
from kernels.transfer import to_device
from shared.errors import EngineError


@contextmanager
def _lost_devices() -> Iterator[None]:
    """An error of the device itself, unlike one of memory, is the end of all that this process does with it."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"the device is lost: {error}") from error


class LaunchedPass:
    """A pass under way, or done.

    Attributes:
        tokens: [samples] int64 on the device, in the order of the spans that sample; None where none does.
        places: of the sequences among them.
    """

    def __init__(self, spans: list[Span], tokens: torch.Tensor | None, device: torch.device) -> None:
        self._sampled = [index for index, span in enumerate(spans) if span.sample]
        self._count = len(spans)
        self.places = {spans[index].sequence: place for place, index in enumerate(self._sampled)}
        self.tokens = tokens
        # Also of nothing: so that the host does not run away from the device.
        self._download = Download(torch.empty(0, dtype=torch.int64, device=device) if tokens is None else tokens)

    def result(self) -> list[Sampled | None]:
        """Wait for it; see `engine.plan.Pending`."""
        answers: list[Sampled | None] = [None] * self._count
        with _lost_devices():
            tokens = self._download.wait()
        for index, token in zip(self._sampled, tokens, strict=True):
            answers[index] = Sampled(None, error=not_finite()) if token == NOT_FINITE else Sampled(token)
        return answers


@dataclass(frozen=True, slots=True)
class _Staged:
    """A pass whose inputs are put and not sent yet.

    Attributes:
        rows: what the host knows of them.
        inputs: of a recorded pass, or of one that is not.
        unknown, sources: [tokens under way] int64: rows whose tokens the last pass gives, and their places there; None
            where there are none.
    """

    rows: PassRows
    inputs: Decode | Batch
    unknown: torch.Tensor | None
    sources: torch.Tensor | None


class DeviceRunner(ModelRunner):
    """A `ModelRunner` that is also an `engine.plan.Launcher`.

    The host waits for the device only where a row needs it: see `needs_host`, and the log probabilities of prompts.

    Attributes:
        eager: leave recorded passes aside.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        ops: Ops,
        num_blocks: int,
        block_size: int,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        super().__init__(model, sampler, ops, num_blocks, block_size, adapters)
        self._staging = Staging(model.device)
        self._layout = replace(self._layout, put=self._staging.put)
        self._draws = DeviceSampler(ops, self.vocab_size)
        self.eager = False
        self._graphs: DecodeGraphs | None = None
        self._last: LaunchedPass | None = None

    def record(self, sizes: Sizes[int], max_model_len: int, slots: int, backend: GraphBackend) -> None:
        """Record decodes of batches of these sizes, ascending; `slots` are the adapters'."""
        adapters = None if self._adapters is None else (self._adapters, slots)
        self._graphs = DecodeGraphs(
            self._model, self._cache, self._layout, sizes, max_model_len, adapters, backend
        )  # fmt: skip
        self._graphs.capture()

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """See `engine.plan.Runner.execute`."""
        if plan.spans and self.launches(plan):
            return self.launch(plan).result()
        with _lost_devices(), torch.inference_mode():
            return super().execute(plan)

    def launches(self, plan: StepPlan) -> bool:
        """See `engine.plan.Launcher.launches`."""
        return not any(span.scored or (span.sample and needs_host(span.sequence)) for span in plan.spans)

    def launch(self, plan: StepPlan) -> LaunchedPass:
        """See `engine.plan.Launcher.launch`."""
        with _lost_devices(), torch.inference_mode():
            self._last = self._launch(plan)
        return self._last

    def _launch(self, plan: StepPlan) -> LaunchedPass:
        spans = plan.spans
        sampling = [span for span in spans if span.sample]
        staged = self._stage(plan)
        draws = self._draws.stage(sampling, self._staging)
        rows = staged.rows.sampled
        chosen = None if rows is None or not sampling else self._staging.put(rows)
        self._staging.send()
        hidden = self._run(staged)
        tokens: torch.Tensor | None = None
        if sampling:
            slots = staged.rows.slots
            if chosen is not None and rows is not None:
                hidden, slots = hidden.index_select(0, chosen), None if slots is None else slots[rows]
            tokens = self._draws.sample(self._unembed(hidden, slots), draws)
        return LaunchedPass(spans, tokens, self._model.device)

    def _pass(self, plan: StepPlan) -> tuple[PassRows, torch.Tensor]:
        staged = self._stage(plan)
        self._staging.send()
        return staged.rows, self._run(staged)

    def _stage(self, plan: StepPlan) -> _Staged:
        """All that comes before the pass, and its inputs."""
        spans = plan.spans
        self._copy(plan.copies)
        self._clean(spans)
        self._staging.begin()
        if self._graphs is not None and not self.eager and self._graphs.serves(plan):
            order = list(range(len(spans)))
            rows = PassRows(order, None, self._slots(spans, order))
            return _Staged(rows, self._graphs.stage(spans, rows.slots, self._staging), *self._under_way(spans, order))
        batch = build_batch(spans, self._layout)
        rows = PassRows(batch.order, batch.sample_rows, self._slots(spans, batch.order))
        return _Staged(rows, batch, *self._under_way(spans, batch.order))

    def _under_way(self, spans: list[Span], order: list[int]) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Rows whose token the last pass gives, and where it is among that one's."""
        row, rows, sources = 0, [], []
        for index in order:
            span = spans[index]
            if span.start >= len(span.sequence.tokens):
                rows.append(row)
                sources.append(self._place(span.sequence))
            row += span.count
        if not rows:
            return None, None
        return self._staging.put(np.array(rows)), self._staging.put(np.array(sources))

    def _place(self, sequence: Sequence) -> int:
        place = None if self._last is None else self._last.places.get(sequence)
        if place is None:
            raise EngineError("a token is neither known nor under way")
        return place

    def _run(self, staged: _Staged) -> torch.Tensor:
        """The forward pass, whose inputs are sent: hidden states."""
        inputs = staged.inputs
        if staged.unknown is not None and staged.sources is not None:
            assert self._last is not None
            assert self._last.tokens is not None
            given = self._last.tokens.index_select(0, staged.sources)
            # A row that failed has no token; what is computed behind it is dropped.
            given = given.clamp_(0, self.vocab_size - 1)
            tokens = inputs.fields[0] if isinstance(inputs, Decode) else inputs.tokens
            tokens.index_copy_(0, staged.unknown, given)
        if isinstance(inputs, Decode):
            assert self._graphs is not None
            return self._graphs.run(inputs)
        return self._forward(inputs, self._lora(staged.rows.slots))

    def _clean(self, spans: list[Span]) -> None:
        """Zero what is begun anew where attention could see behind a sequence's end.

        Which blocks a failed sequence has left behind is known only when later passes are under way already.
        """
        if self._layout.grouped and (begun := sorted(self._begun(spans))):
            self._cache.index_fill_(1, to_device(np.array(begun), self._model.device), 0.0)
        self._tainted.clear()
