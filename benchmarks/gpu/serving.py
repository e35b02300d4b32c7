"""The whole engine on a runner: requests in, tokens out, with steps that wait for the device and steps ahead of it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, models

from engine.adapters.library import AdapterLibrary
from engine.adapters.weights import Adapter
from engine.config import SchedulerConfig
from engine.device.runner import DeviceRunner
from engine.engine import Engine
from engine.request import EngineRequest, ModelInfo, StepOutput
from shared.sampling import SamplingParams

#: Tokens of an answer besides those that are timed: while others begin, and to warm up.
SPARE = 16


class Serving:
    """One engine, and requests that all decode."""

    def __init__(
        self, runner: DeviceRunner, adapters: Mapping[str, Adapter], most: int, prompt: int, *, ahead: bool
    ) -> None:
        """For up to `most` requests with `prompt` tokens; `ahead` of the device or in step with it."""
        self._vocab, self._prompt = runner.vocab_size, prompt
        self._adapters = list(adapters)
        library: AdapterLibrary[Adapter] | None = None
        if adapters:
            library = AdapterLibrary(lambda folder: adapters[folder.name], len(adapters))
            for name in adapters:
                library.register(name, Path(name))
        config = SchedulerConfig(
            max_num_seqs=most,
            max_num_batched_tokens=max(2048, most),
            max_model_len=1024,
            enable_prefix_caching=False,
            max_loras=max(1, len(adapters)),
        )
        info = ModelInfo("random", "", 1024, self._vocab, [], 0, "bfloat16", "{}", None)
        tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        self._engine = Engine(runner, info, tokenizer, config, library, runner if ahead else None)

    def decode(self, batch: int, steps: int) -> float:
        """Seconds of a step in which each of so many requests gets a token; every second one is drawn."""
        rng, ready = random.Random(batch), set()
        for index in range(batch):
            prompt = [rng.randrange(self._vocab) for _ in range(self._prompt)]
            adapter = self._adapters[index % len(self._adapters)] if self._adapters else None
            params = SamplingParams(
                temperature=float(index % 2),
                top_p=0.9,
                seed=index,
                max_tokens=steps + SPARE,
                ignore_eos=True,
                detokenize=False,
            )
            self._engine.add(EngineRequest(str(index), prompt, params, adapter=adapter))
        while len(ready) < batch:
            ready.update(output.request_id for output in self._step() if output.choices)
        for _ in range(2):
            self._step()
        began, tokens = time.perf_counter(), 0
        for _ in range(steps):
            tokens += sum(len(delta.token_ids) for output in self._step() for delta in output.choices)
        taken = time.perf_counter() - began
        for index in range(batch):
            self._engine.abort(str(index))
        if tokens != batch * steps:
            raise AssertionError(f"{batch * steps} tokens were to come, {tokens} came")
        return taken / steps

    def _step(self) -> list[StepOutput]:
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()
