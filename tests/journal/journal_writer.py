"""A process that writes a journal until it is killed, and says each event that `append` acknowledged.

Usage: python journal_writer.py JOURNAL SEED [COUNT]   (prints "open N", then one seq a line)
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from llm_bisect.journal import events as kinds
from llm_bisect.journal.store import Journal


def main() -> None:
    path, seed, *count = sys.argv[1:]
    rng = random.Random(int(seed))
    left = int(count[0]) if count else -1
    with Journal.open(Path(path)) as journal:
        print("open", len(journal.events), flush=True)
        while left != 0:
            left -= 1
            lines = ["x" * rng.choice((10, 500, 9_000))] * rng.randint(1, 12)
            event = journal.append(
                kinds.PROBE_FINISHED, {"evidence": {"lines": lines}, "wall_s": rng.random()}
            )
            print(event.seq, flush=True)


if __name__ == "__main__":
    main()
