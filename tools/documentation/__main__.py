"""Write every generated file of docs/: `python -m tools.documentation` (`make docs`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.documentation.files import FILES, PAGES


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=PAGES, help="folder to write to (default: docs)")
    folder: Path = parser.parse_args().folder
    for name, make in FILES.items():
        path = folder / name
        path.write_text(make())
        print(path)


if __name__ == "__main__":
    main()
