"""ControlOpExecutor: runs the control ops of a plan on all ranks (load weights, profile, …).

A control op has two phases. Every rank prepares it, the ranks exchange whether they could, and only
if all could do they finish it. A table of functions, one for each kind of op, prepares them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from banyan.base.errors import BanyanError, CapacityError, DeviceError
from banyan.base.log import logger
from banyan.messages.control_ops import ControlOp, ControlOpReply
from banyan.messages.plan import CopyResult, StepPlan, StepResult
from banyan.parallel.groups import Group

log = logger(__name__)

_MAX_TEXT = 2000
_WORD_BYTES = 8
_SHOWN = 8


@dataclass(frozen=True)
class RankReply:
    """What one rank replies after a control op."""

    text: str
    body: bytes = b""
    size_bytes: int = 0
    """As in ControlOpReply."""


class NoRoom(CapacityError):
    """An adapter or model needs more memory than it may have.

    Attributes:
        size_bytes: bytes that it needs on this rank.
    """

    def __init__(self, text: str, size_bytes: int) -> None:
        super().__init__(text)
        self.size_bytes = size_bytes


Finish = Callable[[], RankReply]
"""Finishes a prepared control op; called on every rank or on none. If it raises, the ranks are no
longer in the same state, and the step fails."""


@dataclass(frozen=True)
class Alike:
    """A Finish that requires every rank to have prepared the same thing.

    Attributes:
        what: description, for the error message.
        mark: equal on all ranks if they prepared the same.
    """

    finish: Finish
    what: str
    mark: bytes

    def __call__(self) -> RankReply:
        return self.finish()


PrepareOp = Callable[[ControlOp], Finish]
"""Prepares a control op without changing anything; raises if it is not possible."""


class StepInFlight(Protocol):
    def result(self) -> StepResult: ...
    def copies(self) -> CopyResult | None: ...


class PlanRunner(Protocol):
    def launch(
        self, plan: StepPlan, mask_of: Callable[[int], bytes] | None = None
    ) -> StepInFlight: ...


class ControlOpExecutor:
    """A runner that also runs control ops.

    Args:
        runner: runs the rest of each plan.
        preparers: by kind of control op.
        ranks: ranks that get the same plans.
        device: of the tensors with which the ranks exchange replies.
    """

    def __init__(
        self,
        runner: PlanRunner,
        preparers: Mapping[type[ControlOp], PrepareOp],
        ranks: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._runner = runner
        self._preparers = preparers
        self._ranks = ranks or Group()
        self._device = device or torch.device("cpu")

    def launch(self, plan: StepPlan, mask_of: Callable[[int], bytes] | None = None) -> StepInFlight:
        if not plan.control_ops:
            return self._runner.launch(plan, mask_of)
        replies: list[ControlOpReply] = []
        with torch.inference_mode(mode=False):  # tensors made here are written to later
            for op in plan.control_ops:
                replies.append(self._execute(op))
                if not replies[-1].ok:
                    break
        return _StepWithReplies(self._runner.launch(plan, mask_of), replies)

    def _execute(self, op: ControlOp) -> ControlOpReply:
        finish: Finish | None = None
        try:
            finish = self._prepare(op)
        except NoRoom as error:
            mine = ControlOpReply(False, str(error), size_bytes=error.size_bytes)
        except BanyanError as error:
            mine = ControlOpReply(False, str(error))
        except Exception as error:  # the caller gets the error; the engine continues
            log.exception("a control op failed: %s", type(op).__name__)
            mine = ControlOpReply(False, f"{type(error).__name__}: {error}")
        else:
            mark = finish.mark if isinstance(finish, Alike) else b""
            mine = ControlOpReply(True, body=mark)
        replies = self._gather(mine)
        if finish is None or not all(reply.ok for reply in replies):
            why = _combined_text(
                [(rank, reply.text) for rank, reply in enumerate(replies) if not reply.ok]
            )
            return ControlOpReply(False, why, size_bytes=_most(replies))
        if odd := [rank for rank, reply in enumerate(replies) if reply.body != replies[0].body]:
            what = finish.what if isinstance(finish, Alike) else "it"
            return ControlOpReply(False, f"{what} of {_ranks(odd)} differs from rank 0")
        own = finish()
        replies = self._gather(ControlOpReply(True, own.text, own.body, own.size_bytes))
        text = _combined_text([(rank, reply.text) for rank, reply in enumerate(replies)])
        return ControlOpReply(True, text, replies[0].body, _most(replies))

    def _prepare(self, op: ControlOp) -> Finish:
        prepare = self._preparers.get(type(op))
        if prepare is None:
            raise DeviceError(f"nothing here carries out {type(op).__name__}")
        return prepare(op)

    def _gather(self, mine: ControlOpReply) -> list[ControlOpReply]:
        """Replies of all ranks, in their order."""
        if self._ranks.size == 1:
            return [mine]
        mine = msgspec.structs.replace(mine, text=mine.text[:_MAX_TEXT])
        found: list[ControlOpReply] = []
        for source in range(self._ranks.size):
            content = msgspec.msgpack.encode(mine) if source == self._ranks.rank else b""
            size = torch.tensor([len(content)], dtype=torch.int64, device=self._device)
            length = int(self._ranks.broadcast(size, source))  # sync: between steps
            padded = content.ljust(-(-length // _WORD_BYTES) * _WORD_BYTES, b"\0")
            words = torch.frombuffer(bytearray(padded), dtype=torch.int64).to(self._device)
            received = (
                self._ranks.broadcast(words, source).cpu().numpy().tobytes()
            )  # sync: as above
            found.append(msgspec.msgpack.decode(received[:length], type=ControlOpReply))
        return found


class _StepWithReplies:
    """A step with the replies to its control ops."""

    def __init__(self, pending: StepInFlight, replies: list[ControlOpReply]) -> None:
        self._pending = pending
        self._replies = replies

    def result(self) -> StepResult:
        return msgspec.structs.replace(self._pending.result(), replies=self._replies)

    def copies(self) -> CopyResult | None:
        return self._pending.copies()


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"rank{'s' * (len(numbers) > 1)} {shown}{', …' * (len(numbers) > _SHOWN)}"


def _most(replies: list[ControlOpReply]) -> int:
    return max(reply.size_bytes for reply in replies)


def _combined_text(texts: list[tuple[int, str]]) -> str:
    """The texts with rank numbers; the text alone if all are equal or only rank 0 has one."""
    texts = [(rank, text) for rank, text in texts if text]
    if not texts:
        return ""
    different = {text for _, text in texts}
    if len(different) == 1 and (len(texts) > 1 or texts[0][0] == 0):
        return different.pop()
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts)


def serve_rank(runner: PlanRunner, receive: Callable[[], StepPlan | None]) -> None:
    """Main loop of a rank other than 0: run plans in order until `receive` returns None.

    Only rank 0 replies to the engine.

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
