"""Writes `trained_rows.json`: hashes of rows that every processor must train, by optimizer and dtype.

Run it only to add cases, or where a version trains other rows on purpose and CHANGELOG.md says so.
"""

from __future__ import annotations

import json
from pathlib import Path

from support.golden_rows import CASES, trained


def main() -> None:
    hashes = {f"{optimizer} {dtype}": trained(optimizer, dtype) for optimizer, dtype in CASES}
    Path(__file__).with_name("trained_rows.json").write_text(json.dumps(hashes, indent=2) + "\n")


if __name__ == "__main__":
    main()
