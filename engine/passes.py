"""Runs plans: as a whole, span by span where that fails, or ahead of time behind a pass that is under way."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.plan import Launcher, Pending, Runner, Sampled, StepPlan
from engine.request import DeviceLostError
from shared.errors import EngineError

logger = logging.getLogger(__name__)

#: What a client is told of an unexpected failure; the log has the rest.
INTERNAL = "the engine failed on this request"

Answers = list[Sampled | None]


@dataclass(slots=True)
class Flight:
    """A pass that is planned, and counted by the scheduler, and whose answers are to come.

    `pending` is None where it has not begun: it is computed when it lands. `held` are the blocks that the pass copies
    from, held until then: should it fail it copies again, whoever has given them back meanwhile.
    """

    plan: StepPlan
    pending: Pending | None
    held: list[int]


class Passes:
    """Passes of one runner; with a launcher, the same runner, one may begin before the last has ended."""

    def __init__(self, runner: Runner, launcher: Launcher | None) -> None:
        self._runner, self._launcher = runner, launcher

    def launch(self, plan: StepPlan) -> Pending | None:
        """Begin a pass; None where it has to be computed by itself, also because it could not begin."""
        if self._launcher is None or not self._launcher.launches(plan):
            return None
        try:
            return self._launcher.launch(plan)
        except DeviceLostError:
            raise
        except Exception:  # it is computed again, and then the guilty are found
            logger.exception("a forward pass over %d spans did not begin", len(plan.spans))
            return None

    def land(self, flight: Flight) -> tuple[StepPlan, Answers, bool]:
        """What a pass has given: the plan that was computed, an answer for each span, and whether it was sound.

        If it was not, nor is what was launched behind it. Spans of sequences that are over may be left out.
        """
        sound = True
        if flight.pending is not None:
            try:
                return flight.plan, _complete(flight.plan, flight.pending.result()), True
            except DeviceLostError:
                raise
            except Exception:  # as in `compute`
                logger.exception("a forward pass over %d spans failed on its way", len(flight.plan.spans))
                sound = False
        plan = flight.plan.still_running()
        return plan, self.compute(plan), sound

    def compute(self, plan: StepPlan) -> Answers:
        """Run a pass; if it fails as a whole, run its spans one by one, so that only the guilty ones fail."""
        if not plan.spans:
            return []
        try:
            return self._run(plan)
        except DeviceLostError:
            raise
        except Exception:  # whatever one row makes the model raise must not end the others
            logger.exception("a forward pass over %d spans failed; running them one by one", len(plan.spans))
        answers: Answers = []
        held = {block for span in plan.spans for block in span.sequence.block_table}
        for position, span in enumerate(plan.spans):
            # Its own copies, and those for sequences without a span in this pass: to copy again does no harm there.
            own = [
                (s, target) for s, target in plan.copies if target in span.sequence.block_table or target not in held
            ]
            alone = StepPlan(spans=[span], decodes=int(position < plan.decodes), copies=own)
            try:
                answers += self._run(alone)
            except DeviceLostError:
                raise
            except Exception:  # as above: this one is guilty
                logger.exception("the forward pass failed for request %s", span.sequence.request_id)
                answers.append(Sampled(-1, error=EngineError(INTERNAL)))
        return answers

    def _run(self, plan: StepPlan) -> Answers:
        return _complete(plan, self._runner.execute(plan))


def _complete(plan: StepPlan, answers: Answers) -> Answers:
    if len(answers) != len(plan.spans):
        raise EngineError(f"the runner answered {len(answers)} of {len(plan.spans)} spans")
    return answers
