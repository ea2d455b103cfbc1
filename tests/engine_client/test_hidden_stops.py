"""Stop strings that are, or that contain, special tokens which the answer does not show."""

import pytest

from banyan.engine_client.text_generator import TextDecoder
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.request_spec import spec_of
from banyan.tokenizer.stop_strings import TextOptions
from tests.server.fakes import SPECIAL, byte_tokenizer

TOKENIZER = byte_tokenizer()
END = SPECIAL[0]


def decoded(text: str, stop: tuple[str, ...], **options: object) -> tuple[str, str | None]:
    """The answer and what stopped it, where the model writes `text` with special tokens in it."""
    sampling = SamplingParams(max_new_tokens=99)
    request = spec_of("x", [65], sampling, TextOptions(stop=stop, **options))
    decoder = TextDecoder(request, TOKENIZER)
    answer = ""
    for token in TOKENIZER.encode(text, add_special_tokens=False, parse_special=True):
        answer += decoder.push((token,))
        if decoder.stopped_by is not None:
            return answer, decoder.stopped_by
    return answer + decoder.finish(), decoder.stopped_by


@pytest.mark.parametrize(
    ("text", "stop", "answer", "by"),
    [
        (f"a{END}b", (END,), "a", END),
        (f"a{END}\nb", (f"{END}\n",), "a", f"{END}\n"),
        (f"a b{END}c", (f"b{END}",), "a ", f"b{END}"),
        (f"a<|user|>{END}b", (f"<|user|>{END}",), "a", f"<|user|>{END}"),
        (f"a{END}b", (f"{END}c",), "ab", None),
        (f"a{END}<|user|>b", (f"{END}c",), "ab", None),
        (f"a{END}b", ("b",), "a", "b"),
        (f"a{END}", (f"{END}c",), "a", None),
        (f"日{END}本", (END,), "日", END),
    ],
)
def test_a_special_token_that_is_not_shown_can_stop_an_answer(
    text: str, stop: tuple[str, ...], answer: str, by: str | None
) -> None:
    assert decoded(text, stop) == (answer, by)


def test_the_text_of_the_stop_stays_where_the_client_wants_it() -> None:
    stop = (f"b{END}", "x")
    assert decoded(f"ab{END}c", stop, no_stop_trim=True) == (f"ab{END}", stop[0])
    assert decoded(f"a{END}b", (f"{END}c",), no_stop_trim=True) == ("ab", None)


def test_special_tokens_that_are_shown_stop_as_text() -> None:
    assert decoded(f"a{END}b", (END,), skip_special_tokens=False) == ("a", END)
    assert decoded(f"a{END}b", (f"{END}c",), skip_special_tokens=False) == (f"a{END}b", None)
    shown = frozenset((TOKENIZER.added[END],))
    assert decoded(f"a{END}b", (END,), shown=shown) == ("a", END)
