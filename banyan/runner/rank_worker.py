"""The main loop of a rank other than 0: receive a plan, run it, wait for the next.

Decides nothing, and answers nobody but the other ranks about orders: rank 0 speaks for the replica.
"""

from collections.abc import Callable

from banyan.base.errors import DeviceError
from banyan.messages.plan import StepPlan
from banyan.pipeline.runner_stage import PipelineStage
from banyan.runner.control_ops import PlanRunner


def serve_rank(runner: PlanRunner, receive: Callable[[], StepPlan | None]) -> None:
    """Run plans in the order of arrival until `receive` gives None.

    Raises:
        DeviceError: a step failed here. The ranks may no longer be in step, so this one ends.
    """
    while (plan := receive()) is not None:
        result = runner.launch(plan).result()
        if result.error:
            raise DeviceError(
                f"step {plan.step} failed on this rank: {result.error}",
                hint="the replica ends; start it again",
            )


def serve_line(line: PipelineStage, receive: Callable[[], list[StepPlan] | None]) -> None:
    """The same where plans follow each other through stages: each list holds the plan that comes in
    in a turn, if there is one.

    Raises:
        DeviceError: as above.
    """
    while (coming := receive()) is not None:
        plan = coming[0] if coming else None
        pending = line.turn(plan)
        if pending is not None and (error := pending.result().error):
            raise DeviceError(
                f"a step failed on this rank: {error}", hint="the replica ends; start it again"
            )
