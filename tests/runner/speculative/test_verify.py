"""Which sampled tokens stand, by definition."""

import pytest

from banyan.runner.speculative.drafting import count_accepted


@pytest.mark.parametrize(
    ("drafts", "sampled", "count"),
    [
        ([], [5], 1),
        ([5], [5, 6], 2),
        ([5], [4, 6], 1),
        ([5, 6, 7], [5, 6, 7, 8], 4),
        ([5, 6, 7], [5, 9, 7, 8], 2),
        ([5, 6, 7], [9, 6, 7, 8], 1),
    ],
)
def test_what_stands_ends_with_the_first_token_that_no_draft_foresaw(drafts, sampled, count):
    assert count_accepted(drafts, sampled) == count
