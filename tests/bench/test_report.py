"""The plot: a picture where matplotlib is there, one clear line where it is not."""

import sys
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.bench import report
from banyan.bench.dialects import Answer


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[plot\]"):
        report.check_plotting()


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    answers = [Answer(float(n), [(n + 0.5, 1), (n + 0.7, 2), (n + 2.0, 4)]) for n in range(3)]
    path = tmp_path / "out.png"
    report.draw(str(path), answers, "title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tokens_are_counted_by_the_second_they_came_in() -> None:
    answers = [Answer(0.0, [(0.5, 1), (1.2, 3)]), Answer(0.0, [(2.9, 2)])]
    assert report._tokens_by_second(answers, 0.0) == ([0, 1, 2], [1, 2, 2])
