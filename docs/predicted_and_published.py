"""Write the tables of docs/predicted-and-published.md: published trainings beside predictions.

python docs/predicted_and_published.py                                     print the tables
python docs/predicted_and_published.py docs/predicted-and-published.md     write them below the file's mark
"""

from __future__ import annotations

import sys
from pathlib import Path

from ascend_parallel.tuning.published.report import compare_runs, page

MARK = "<!-- tables: below -->\n"


def main() -> None:
    """Print the tables, or write them into the file named."""
    text = page(compare_runs())
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(inserted(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        sys.stdout.write(text)


def inserted(document: str, text: str) -> str:
    """Return the document with `text` below its mark; raises `ValueError` if the mark is missing."""
    before, mark, _ = document.partition(MARK)
    if not mark:
        raise ValueError(f"the document has no mark {MARK.strip()}")
    return f"{before}{MARK}\n{text}"


if __name__ == "__main__":
    main()
