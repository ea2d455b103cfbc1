"""Draw the chart of the README: `python -m benchmarks.chart` writes docs/cpu_peers.svg.

The figures are medians of docs/performance.md, copied into benchmarks/results/cpu_peers.tsv.
"""

import csv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "cpu_peers.tsv"
PICTURE = ROOT / "docs" / "cpu_peers.svg"
WIDTH, LEFT, BAR, GAP, HEAD = 760, 150, 24, 8, 58
"""In pixels: the picture, the names' column, a bar, the space between bars, a group's title."""
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 }
.ours { fill: #1a6b41 } .peer { fill: #b4bcc4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ours { fill: #4cb27c } .peer { fill: #57606a }
}
</style>"""


class Figure(NamedTuple):
    workload: str
    engine: str
    tokens_per_s: float


def read_figures(file: Path = FIGURES) -> list[Figure]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t")
        return [Figure(r["workload"], r["engine"], float(r["tokens_per_s"])) for r in rows]


def draw(figures: list[Figure]) -> str:
    """One horizontal bar for each figure, grouped by workload, all on one scale."""
    scale = (WIDTH - LEFT - 70) / max(f.tokens_per_s for f in figures)
    parts: list[str] = []
    y, workload = 0, ""
    for figure in figures:
        if figure.workload != workload:
            workload = figure.workload
            parts.append(f'<text class="title" x="0" y="{y + 30}">{workload}, tokens/s</text>')
            y += HEAD - 14
        width = max(figure.tokens_per_s * scale, 1)
        kind = "ours" if figure.engine == "Banyan" else "peer"
        middle = y + BAR / 2 + 5
        parts += [
            f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{figure.engine}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" rx="3"/>',
            f'<text x="{LEFT + width + 8:.0f}" y="{middle:g}">{figure.tokens_per_s:.0f}</text>',
        ]
        y += BAR + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        'aria-label="Output tokens per second of four engines">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(read_figures()), encoding="utf-8")
