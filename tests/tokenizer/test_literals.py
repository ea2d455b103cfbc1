"""One pattern for many texts finds what trying each of them finds."""

from hypothesis import given
from hypothesis import strategies as st

from banyan.tokenizer.tokenizer import any_of

TEXT = st.text(alphabet="ab|(", min_size=1, max_size=5)


@given(st.lists(TEXT, max_size=12), st.text(alphabet="ab|(", max_size=20))
def test_the_leftmost_and_there_the_longest_text_is_found(texts: list[str], where: str) -> None:
    found = any_of(texts).search(where)
    expected = [(start, -len(text)) for text in texts for start in [where.find(text)] if start >= 0]
    if not expected:
        assert found is None
        return
    start, length = min(expected)
    assert found is not None and found.span() == (start, start - length)


def test_sixty_thousand_texts_are_one_small_pattern() -> None:
    texts = [f"<|reserved_{i}|>" for i in range(60_000)]
    pattern = any_of(texts)
    assert pattern.sub("", "".join(reversed(texts)) + "<|reserved_60000|>") == "<|reserved_60000|>"
