"""gpt-oss: calls are messages to functions.NAME, mostly in the commentary channel.

Source: as of frontend.answers.harmony, which reads the messages.
"""

from banyan.parsers import harmony
from banyan.parsers.incremental import Arriving, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, arguments_json, attempt


def _read(source: Arriving, out: Outcome) -> Reading[None]:
    mark = harmony.RECIPIENT if (yield from source.follows(harmony.RECIPIENT)) else ""
    while mark or (mark := (yield from source.until(harmony.OPENERS, out.say))):
        header = yield from harmony.header(source, mark)
        if header is None:
            out.say(mark)
            mark = ""
            continue
        if header.tool:
            yield from attempt(source, out, header.raw, _call(source, out, header.tool))
        mark = harmony.after((yield from source.until(harmony.ENDERS, out.say)))


def _call(source: Arriving, out: Outcome, name: str) -> Reading[None]:
    out.begin(name)
    yield from arguments_json(source, out)
    out.end()
    yield from source.spaces()


def _tag(name: str) -> tuple[str, str]:
    head = f"{harmony.START}assistant{harmony.CHANNEL}commentary to={harmony.FUNCTIONS}{name} "
    return f"{head}{harmony.CONSTRAIN}json{harmony.MESSAGE}", harmony.CALL


FORMAT = ToolFormat(_read, harmony.MARKERS, _tag, harmony.START)
