"""StepForecast: how long the step in flight will take, so that the next one is planned late (R9).

A plan made early cannot take in a request that arrives a moment later; a plan made late lets the
runner idle. So the loop plans when the step in flight has just enough time left.
"""

SMOOTHING = 0.3
"""Weight of the newest measurement."""
LEAD_S = 0.002
"""Time kept for planning and launching, on top of twice what they have taken."""


class StepForecast:
    """Running means of step seconds by size class (powers of two of tokens), of planning, and of
    launching where that runs beside the step in flight."""

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}
        self._plan_s = self._launch_s = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        before = self._step_s.get(size, seconds)
        self._step_s[size] = before + SMOOTHING * (seconds - before)

    def planned(self, seconds: float) -> None:
        self._plan_s += SMOOTHING * (seconds - self._plan_s)

    def launched(self, seconds: float) -> None:
        self._launch_s += SMOOTHING * (seconds - self._launch_s)

    def wait(self, tokens: int, running_s: float, steps: int = 1) -> float:
        """Seconds until the next step should be planned.

        Args:
            tokens: size of the step that runs now.
            running_s: how long it has been running.
            steps: how many of them follow each other. When several end is known less well, and who
                comes in ends the next plan with its first step: one of them is time kept, too.
        """
        step_s = self._step_s.get(tokens.bit_length(), 0.0)
        expected = max(1, steps - 1) * step_s
        lead = LEAD_S + 2 * (self._plan_s + self._launch_s)
        return max(0.0, expected - running_s - lead)
