"""gpt-oss: calls are messages to functions.NAME, mostly in the commentary channel.

banyan.parsers.harmony reads the messages and names the source.
"""

from banyan.parsers import harmony
from banyan.parsers.incremental import Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_arguments, read_or_text


def _read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    opener = harmony.RECIPIENT if (yield from source.follows(harmony.RECIPIENT)) else ""
    while opener or (opener := (yield from source.until(harmony.OPENERS, out.add_text))):
        header = yield from harmony.read_header(source, opener)
        if header is None:
            out.add_text(opener)
            opener = ""
            continue
        if header.tool:
            yield from read_or_text(source, out, header.raw, _call(source, out, header.tool))
        opener = harmony.next_opener((yield from source.until(harmony.ENDERS, out.add_text)))


def _call(source: StreamingText, out: ToolCallWriter, name: str) -> Reading[None]:
    out.begin_call(name)
    yield from read_arguments(source, out)
    out.end_call()
    yield from source.spaces()


def _tag(name: str) -> tuple[str, str]:
    head = f"{harmony.START}assistant{harmony.CHANNEL}commentary to={harmony.FUNCTIONS}{name} "
    return f"{head}{harmony.CONSTRAIN}json{harmony.MESSAGE}", harmony.CALL


FORMAT = ToolFormat(_read, harmony.MARKERS, _tag, harmony.START)
