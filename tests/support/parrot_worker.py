"""A worker whose model says its prompt again, token by token, then ends: `python -m tests.support.parrot_worker`.

All but the model is real: engine, scheduler, prefix cache, detokenizer, stop rules. So a client decides with the prompt
which tokens come. Needs no torch.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.plan import Sampled, StepPlan
from engine.request import EngineProtocol
from engine.sequence import Sequence
from shared.settings import WorkerSettings
from tests.support.fake_runner import FakeRunner, model_info
from tests.support.tiny_tokenizer import EOS, TOOL, byte_level
from worker.main import run

#: The prompt of a chat is the text of its messages, one behind the other.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONTEXT = 512
NUM_BLOCKS, BLOCK_SIZE = 256, 4
#: Both end an answer, as where a generation config has more than one.
ENDS = (EOS, TOOL)


def parrot(sequence: Sequence) -> int:
    """The prompt's token at the output's position, and the end behind the last."""
    at = sequence.output_len
    return sequence.tokens[at] if at < sequence.prompt_len else EOS


class ParrotRunner(FakeRunner):
    """Takes its time, so that most tokens are published alone."""

    def __init__(self, step_s: float) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, next_token=parrot)
        self._step_s = step_s

    def execute(self, plan: StepPlan) -> list[Sampled | None]:
        """As `FakeRunner.execute`, later."""
        time.sleep(self._step_s)
        return super().execute(plan)


def build(settings: WorkerSettings) -> EngineProtocol:
    """The engine over a runner without a model."""
    tokenizer = byte_level()
    info = replace(
        model_info(max_model_len=CONTEXT, eos=ENDS),
        name="parrot",
        kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
        tokenizer_json=tokenizer.to_str(),
        chat_template=TEMPLATE,
    )
    return Engine(ParrotRunner(settings.sim_step_ms / 1e3), info, tokenizer, SchedulerConfig(max_model_len=CONTEXT))


if __name__ == "__main__":
    sys.exit(run(build=build))
