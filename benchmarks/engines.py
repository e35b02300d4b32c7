"""Several engines over one model: weights are loaded once, everything that keeps a state is made anew."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.common import MODEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engine.engine import Engine


@dataclass
class Engines:
    """Makes engines that differ in what their scheduler may do and in the size of their KV cache."""

    first: Engine

    @classmethod
    def load(
        cls, dtype: str, *, deterministic: bool = False, max_model_len: int = 2048, model: str = MODEL, **settings: Any
    ) -> Engines:
        """Load the model; `settings` are further ones of `EngineConfig`. What is not set is as that has it."""
        from engine.build import build_engine
        from engine.config import EngineConfig

        config = EngineConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            max_model_len=max_model_len,
            num_blocks=1,
            deterministic=deterministic,
            **settings,
        )
        return cls(build_engine(config))

    def make(self, *, num_blocks: int = 512, **settings: Any) -> Engine:
        """An engine with an empty KV cache; `settings` are those of `SchedulerConfig`."""
        from engine.engine import Engine
        from engine.runner import ModelRunner

        old: Any = self.first._runner
        sampler = copy.copy(old._sampler)
        runner = ModelRunner(old._model, sampler, old._ops, num_blocks, old.block_size, share=old._share)
        config = replace(self.first._config, **settings)
        return Engine(runner, self.first.info(), self.tokenizer(), config)

    def tokenizer(self) -> Tokenizer:
        """The model's."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.first.info().tokenizer_json)
