"""The README's chart shows the figures of benchmarks/results."""

import re
from xml.etree import ElementTree

from benchmarks import chart


def test_the_chart_in_the_tree_is_drawn_from_its_figures() -> None:
    assert chart.PICTURE.read_text(encoding="utf-8") == chart.draw(chart.read_figures())


def test_bars_are_in_proportion_to_their_figures() -> None:
    figures = [chart.Figure("w", "Banyan", 200.0), chart.Figure("w", "other", 50.0)]
    picture = chart.draw(figures)
    ElementTree.fromstring(picture)
    widths = [int(width) for width in re.findall(r'width="(\d+)" height', picture)]
    assert abs(widths[0] - 4 * widths[1]) <= 4
