"""The table of docs/reliability.md: written from what a run saw, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fault_cases import CASES, MARGIN
from fault_trial import Row

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN = "<!-- written by `make faults`: begin -->"
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
    """Replace the lines of these cases. Returns what was done, for the terminal."""
    lines = _lines_in_page() | {name: _line(_cells(row)) for name, row in rows.items()}
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    head = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    table = "\n".join([*head, *(lines[name] for name in CASES if name in lines)])
    PAGE.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}")
    missing = ", ".join(name for name in CASES if name not in lines) or "none"
    return f"{len(rows)} lines written; missing: {missing}"


def cases_in_page() -> list[str]:
    """The ids in the table, in order."""
    return list(_lines_in_page())


def _lines_in_page() -> dict[str, str]:
    table = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}


def _cells(row: Row) -> Iterable[str]:
    case = row.case
    yield f"`{case.id}`"
    yield f"{case.fault}: {case.how}" + (f" ({row.means})" if row.means else "")
    yield f"{case.where}; {case.tiers}"
    yield row.answer
    yield f"{row.wait} (at most {f'{case.deadline:g} + ' if case.deadline else ''}{MARGIN:g} s)"
    yield row.shown
    yield row.after


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
