"""One response on its way: the model's turns, and between them the calls of tool servers.

Ends by itself: after so many turns or calls the model is asked for an answer without tools.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from banyan.base.errors import RequestError
from banyan.requests.generation import run
from banyan.server.errors import Json
from banyan.server.openai.chat.plan import ChatPlan
from banyan.server.responses.answer import ResponseAnswer
from banyan.server.responses.request import ResponsesRequest
from banyan.server.responses.tools import MAX_TURNS, ServerCalls
from banyan.server.state import Service


@dataclass(frozen=True)
class Running:
    """One response that is being made.

    Attributes:
        plan: of the first turn.
        plan_turn: of each turn after that; takes the request as it is for this turn, and the
            output items so far.
        calls: answers what is called of tool servers.
        over: called before the last event is seen.
    """

    service: Service
    request: ResponsesRequest
    plan: ChatPlan
    plan_turn: Callable[[ResponsesRequest, list[Json]], Awaitable[ChatPlan]]
    calls: ServerCalls
    answer: ResponseAnswer
    over: Callable[[], None]

    async def events(self) -> AsyncGenerator[Json, None]:
        """The events of the response; RequestError when it fails."""
        answer, plan, num_turns = self.answer, self.plan, 0
        try:
            while True:
                async with aclosing(run(self.service.generator, plan.asked)) as chunks:
                    async for _, chunk in chunks:
                        begun = [] if answer.has_begun else answer.begin()
                        for event in self._seen([*begun, *answer.events(chunk)]):
                            yield event
                if answer.is_over:
                    return
                for index, item in answer.waiting:
                    for event in answer.answered(index, await self.calls.outcome(item)):
                        yield event
                if reason := self._reason_to_end():
                    for event in self._seen(answer.end(reason)):
                        yield event
                    return
                num_turns += 1
                plan = await self.plan_turn(self._rest(num_turns), answer.items)
                answer.turn(plan)
        finally:
            await self.calls.close()

    def fail(self, error: RequestError) -> list[Json]:
        """The events that end a response which cannot be completed."""
        return self._seen(self.answer.fail(error))

    def _seen(self, events: list[Json]) -> list[Json]:
        if self.answer.is_over:
            self.over()
        return events

    def _reason_to_end(self) -> str:
        """Why no turn follows the calls that were answered; "" when one does."""
        if self.answer.needs_client:
            return "stop"
        left = self._tokens_left()
        return "length" if left is not None and left <= 0 else ""

    def _tokens_left(self) -> int | None:
        longest = self.request.max_output_tokens
        return None if longest is None else longest - self.answer.output_tokens

    def _rest(self, num_turns: int) -> ResponsesRequest:
        """The request for the next turn: a call that was demanded has been made."""
        may_call = num_turns < MAX_TURNS and self.calls.limit > 0
        return msgspec.structs.replace(
            self.request,
            tool_choice="auto" if may_call else "none",
            max_output_tokens=self._tokens_left(),
        )
