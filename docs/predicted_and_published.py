"""Write the tables of docs/predicted-and-published.md: published trainings beside predictions.

python docs/predicted_and_published.py                                     print the tables
python docs/predicted_and_published.py docs/predicted-and-published.md     write them below the file's mark
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published_degrees import evaluate_run, launch_page, launched_runs, planning_obstacle

from ascend_parallel.text.tables import markdown_table
from ascend_parallel.tuning.published.report import HEADS, cells_of, compare_runs, summary_table

PREDICT, PLANNED = "<!-- predict: below -->\n", "<!-- plan-training: below -->\n"
LAUNCHES = "<!-- launch scripts: below -->\n"


def main() -> None:
    """Print the tables, or write them into the file named."""
    by_predict, by_search, launches = page(compare_runs()), planned(), launch_page(launched_runs())
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        document = inserted(path.read_text(encoding="utf-8"), PREDICT, by_predict)
        document = inserted(document, PLANNED, by_search)
        path.write_text(inserted(document, LAUNCHES, launches), encoding="utf-8")
    else:
        sys.stdout.write(by_predict + by_search + launches)


def planned() -> str:
    """Return the tables of the evaluation behind plan-training."""
    return page(compare_runs(planning_obstacle, evaluate_run))


def page(comparison: Mapping[str, Any]) -> str:
    """Return the tables of a comparison in Markdown."""
    parts = [*markdown_table(*summary_table(comparison["summary"])), ""]
    for table in dict.fromkeys(row["table"] for row in comparison["rows"]):
        rows = [row for row in comparison["rows"] if row["table"] == table]
        cells = [cells_of(row) for row in rows if row["error"] is not None]
        parts += [f"### {table}", "", rows[0]["source"], ""]
        parts += [*markdown_table(HEADS, cells), ""] if cells else []
        left_out = [f"`{row['id']}`: {row['obstacle']}" for row in rows if row["error"] is None]
        parts += ["Not predicted: " + "; ".join(left_out) + ".", ""] if left_out else []
    return "\n".join(parts)


def inserted(document: str, mark: str, text: str) -> str:
    """Return the document with `text` below its mark, up to the next heading of level 2.

    Raises `ValueError` if the mark is missing.
    """
    before, found, after = document.partition(mark)
    if not found:
        raise ValueError(f"the document has no mark {mark.strip()}")
    rest = after.partition("\n## ")
    return f"{before}{mark}\n{text}" + "".join(rest[1:])


if __name__ == "__main__":
    main()
