"""How long `bisect --help` takes: wall time of the whole process, best of N starts.

    python bench/help_time.py [--runs 5] [--limit-s 0.25]

Exit status 1 where the best is over the limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path


def command() -> list[str]:
    """The installed script beside this interpreter, else the module."""
    script = Path(sys.executable).with_name("bisect")
    return [str(script)] if script.exists() else [sys.executable, "-m", "llm_bisect"]


def once_s(argv: list[str]) -> float:
    """Seconds from start to end of one process. Raises CalledProcessError where it fails."""
    begun = time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - begun


def main() -> int:
    """Measure, print one line, compare with the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=0.25)
    options = parser.parse_args()
    walls_s = [once_s([*command(), "--help"]) for _ in range(options.runs)]
    bare_s = min(once_s([sys.executable, "-c", "pass"]) for _ in range(options.runs))
    best_s = min(walls_s)
    print(
        f"bisect --help: {best_s:.3f} s (best of {len(walls_s)}, worst {max(walls_s):.3f} s; "
        f"python alone {bare_s:.3f} s; limit {options.limit_s} s)"
    )
    return int(best_s > options.limit_s)


if __name__ == "__main__":
    raise SystemExit(main())
