"""SamplingParams: how tokens of one request are chosen. Validated once, at the door."""

import math
from collections.abc import Callable

import msgspec

from banyan.base.errors import RequestError
from banyan.base.table import Table

GREEDY_TEMPERATURE = 1e-6
"""Temperatures below this choose the most likely token."""


LEAST_REPETITION = 1e-6
"""Logits are divided by it, and must stay finite."""


LOGIT_PROCESSORS: Table[Callable[..., object]] = Table(
    "logit processor",
    {
        "whisper": "banyan.runner.sampler:transcript_logits",
        "filters": "banyan.runner.logit_filters:filter_logits",
    },
    plugins="banyan.logit_processors",
)
"""Logit processors of this server, and those that installed packages offer, of the type
runner.sampler.LogitProcessor. Requests name them; code never comes with a request."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the runner needs to choose tokens, and the engine to know when to stop.

    Text-level stops (strings, regexes) stay in the front, which answers with `StopAt`.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    """Randomness is a function of (seed, position), so recomputing gives the same token."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the request: end-of-sequence ids unless ignored, and the caller's own."""
    ignore_eos: bool = False
    processor: str = ""
    """Name of an installed logit processor, in LOGIT_PROCESSORS; "" for none."""
    processor_params: bytes = b""
    """JSON object for the processor."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def check(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range."""
        for name, ok, rule in self._rules(vocab_size):
            if not ok:
                value = getattr(self, name)
                raise RequestError(f"{name} must be {rule}, got {_short(value)}.", param=name)

    def _rules(self, vocab_size: int) -> list[tuple[str, bool, str]]:
        def within(x: float, low: float, high: float) -> bool:
            return math.isfinite(x) and low <= x <= high

        def is_id(x: int) -> bool:
            return 0 <= x < vocab_size

        return [
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"in [0, max_new_tokens({self.max_new_tokens})]",
            ),
            ("temperature", within(self.temperature, 0.0, 1e6), "finite and at least 0"),
            ("top_p", within(self.top_p, 0.0, 1.0) and self.top_p > 0, "in (0, 1]"),
            (
                "top_k",
                self.top_k == -1 or 1 <= self.top_k <= vocab_size,
                "-1 (disable) or at least 1",
            ),
            ("min_p", within(self.min_p, 0.0, 1.0), "in [0, 1]"),
            ("frequency_penalty", within(self.frequency_penalty, -2.0, 2.0), "in [-2, 2]"),
            ("presence_penalty", within(self.presence_penalty, -2.0, 2.0), "in [-2, 2]"),
            (
                "repetition_penalty",
                within(self.repetition_penalty, LEAST_REPETITION, 2.0),
                f"in [{LEAST_REPETITION:g}, 2]",
            ),
            ("seed", -(2**63) <= self.seed < 2**63, "a signed 64-bit integer"),
            ("stop_ids", all(is_id(i) for i in self.stop_ids), f"token ids in [0, {vocab_size})"),
            (
                "logit_bias",
                all(is_id(i) and math.isfinite(b) for i, b in self.logit_bias.items()),
                f"finite values for token ids in [0, {vocab_size})",
            ),
        ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
