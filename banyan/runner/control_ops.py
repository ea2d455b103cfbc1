"""ControlOpExecutor: carries out the orders of a plan together with the other ranks, around a
runner.

Every rank gets ready, all of them tell each other whether they are, and only when all are does it
happen. Knows nothing of what the orders are: one carrier for each kind does.
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
    """What one rank has to say once an order is carried out."""

    text: str
    body: bytes = b""
    size_bytes: int = 0
    """As ControlOpReply has it."""


class NoRoom(CapacityError):
    """What is to be taken needs more memory than it may have.

    Attributes:
        size_bytes: that it needs on this rank.
    """

    def __init__(self, text: str, size_bytes: int) -> None:
        super().__init__(text)
        self.size_bytes = size_bytes


Finish = Callable[[], RankReply]
"""Carries out what has been got ready; called on every rank or on none. If it raises, the ranks are
no longer alike, and the step fails."""


@dataclass(frozen=True)
class Alike:
    """A Finish that needs every rank to have got ready the same.

    Attributes:
        what: is got ready, for whoever asked.
        mark: equal where it is the same.
    """

    finish: Finish
    what: str
    mark: bytes

    def __call__(self) -> RankReply:
        return self.finish()


PrepareOp = Callable[[ControlOp], Finish]
"""Gets ready for an order and changes nothing yet; raises what stands in the way."""


class StepInFlight(Protocol):
    def result(self) -> StepResult: ...
    def copies(self) -> CopyResult | None: ...


class PlanRunner(Protocol):
    def launch(
        self, plan: StepPlan, mask_of: Callable[[int], bytes] | None = None
    ) -> StepInFlight: ...


class ControlOpExecutor:
    """A runner that takes orders as well.

    Args:
        runner: runs the rest of each plan.
        carriers: by the kind of order.
        ranks: that get the same plans.
        device: whose memory they can tell each other things in.
        stepped: called whenever a step with rows has run.
    """

    def __init__(
        self,
        runner: PlanRunner,
        preparers: Mapping[type[ControlOp], PrepareOp],
        ranks: Group | None = None,
        device: torch.device | None = None,
        stepped: Callable[[], None] | None = None,
    ) -> None:
        self._runner = runner
        self._preparers = preparers
        self._ranks = ranks or Group()
        self._device = device or torch.device("cpu")
        self._stepped = stepped

    def launch(self, plan: StepPlan, mask_of: Callable[[int], bytes] | None = None) -> StepInFlight:
        if not plan.control_ops:
            pending = self._runner.launch(plan, mask_of)
            self.has_run(plan)
            return pending
        replies: list[ControlOpReply] = []
        with torch.inference_mode(mode=False):  # what they make, others may write to
            for order in plan.control_ops:
                replies.append(self._carry_out(order))
                if not replies[-1].ok:
                    break
        return _Answered(self._runner.launch(plan, mask_of), replies)

    def has_run(self, plan: StepPlan) -> None:
        """A plan without orders has been through the layers that are here."""
        if self._stepped is not None and plan.rows:
            self._stepped()

    def _carry_out(self, order: ControlOp) -> ControlOpReply:
        finish: Finish | None = None
        try:
            finish = self._prepare(order)
        except NoRoom as error:
            mine = ControlOpReply(False, str(error), size_bytes=error.size_bytes)
        except BanyanError as error:
            mine = ControlOpReply(False, str(error))
        except Exception as error:  # what failed is told to whoever asked; the engine goes on
            log.exception("an order cannot be carried out: %s", type(order).__name__)
            mine = ControlOpReply(False, f"{type(error).__name__}: {error}")
        else:
            mark = finish.mark if isinstance(finish, Alike) else b""
            mine = ControlOpReply(True, body=mark)
        told = self._gather(mine)
        if finish is None or not all(reply.ok for reply in told):
            why = _joined([(r, t.text) for r, t in enumerate(told) if not t.ok])
            return ControlOpReply(False, why, size_bytes=_most(told))
        if odd := [rank for rank, reply in enumerate(told) if reply.body != told[0].body]:
            what = finish.what if isinstance(finish, Alike) else "it"
            return ControlOpReply(False, f"{what} of {_ranks(odd)} is not that of rank 0")
        said = finish()
        told = self._gather(ControlOpReply(True, said.text, said.body, said.size_bytes))
        text = _joined([(r, t.text) for r, t in enumerate(told)])
        return ControlOpReply(True, text, told[0].body, _most(told))

    def _prepare(self, order: ControlOp) -> Finish:
        prepare = self._preparers.get(type(order))
        if prepare is None:
            raise DeviceError(f"nothing here carries out {type(order).__name__}")
        return prepare(order)

    def _gather(self, mine: ControlOpReply) -> list[ControlOpReply]:
        """What every rank says, in their order."""
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
            heard = self._ranks.broadcast(words, source).cpu().numpy().tobytes()  # sync: as above
            found.append(msgspec.msgpack.decode(heard[:length], type=ControlOpReply))
        return found


class _Answered:
    """A step with the replies to its orders."""

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


def _most(told: list[ControlOpReply]) -> int:
    return max(reply.size_bytes for reply in told)


def _joined(told: list[tuple[int, str]]) -> str:
    """What the ranks say, by number; once what all of them say alike, or rank 0 alone."""
    told = [(rank, text) for rank, text in told if text]
    if not told:
        return ""
    texts = {text for _, text in told}
    if len(texts) == 1 and (len(told) > 1 or told[0][0] == 0):
        return texts.pop()
    return "; ".join(f"rank {rank}: {text}" for rank, text in told)
