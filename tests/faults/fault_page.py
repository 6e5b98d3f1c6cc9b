"""The table of docs/reliability.md: written from what a run saw, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fault_cases import CASES, MARGIN
from fault_trial import Row

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN = "<!-- written by `make faults ARGS=--write-reliability`: begin -->"
_END = "<!-- end -->"
_HEAD = (
    "case",
    "what goes wrong, and how it is made to",
    "where, tiers",
    "what the request got",
    "wait, and its bound",
    "what shows it",
    "afterwards",
)


def write(rows: Mapping[str, Row]) -> str:
    """Replace the page's table. Returns what was done, for the terminal."""
    missing = [name for name in CASES if name not in rows]
    if missing:
        return f"not written, as these cases did not run: {', '.join(missing)}"
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    table = "\n".join(_lines(rows[name] for name in CASES))
    PAGE.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}")
    return f"written from {len(rows)} cases"


def cases_in_page() -> list[str]:
    """The ids in the committed table, in order."""
    table = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [line.split("`")[1] for line in lines]


def _lines(rows: Iterable[Row]) -> Iterable[str]:
    yield _line(_HEAD)
    yield _line(["---"] * len(_HEAD))
    for row in rows:
        case = row.case
        means = f" ({row.means})" if row.means else ""
        bound = f"{case.deadline:g} + {MARGIN:g} s" if case.deadline else f"{MARGIN:g} s"
        yield _line(
            (
                f"`{case.id}`",
                f"{case.fault}: {case.how}{means}",
                f"{case.where}; {case.tiers}",
                row.answer,
                f"{row.wait} (≤ {bound})",
                row.shown,
                row.after,
            )
        )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
