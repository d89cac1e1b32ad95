"""Tries random sequences of a user's calls, and tells what it found."""

import argparse
import random

from tests.scenarios import driver, search
from tests.scenarios.ways import WAYS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="for all ways together")
    parser.add_argument("--way", choices=[*WAYS], action="append", help="these ways only")
    parser.add_argument("--seed", type=int, help="the first one; by default at random")
    parser.add_argument("--count", type=int, default=10**9, help="so many seeds at most")
    parser.add_argument("--most", type=int, default=10, help="findings of a way, then it stops")
    parser.add_argument("--show", action="store_true", help="show the sequence of --seed only")
    asked = parser.parse_args()
    ways = asked.way or [*WAYS]
    first = random.SystemRandom().randrange(10**9) if asked.seed is None else asked.seed
    if asked.show:
        print(*[x for way in ways for x in driver.made(way, first)], sep="\n")
        return 0
    is_well = True
    for way in ways:
        seconds = 60 * asked.minutes / len(ways)
        found = search.search(way, seconds, first, asked.count, asked.most)
        print(
            f"{way}: {found.sequences} sequences from seed {first}, {found.calls} calls, "
            f"{found.refusals.total()} refusals, {len(found.findings)} findings, "
            f"{found.seconds:.0f} s"
        )
        for text, count in found.refusals.most_common():
            print(f"{count:6} times  {text}")
        print(*found.findings, sep="\n\n", flush=True)
        is_well &= not found.findings
    return not is_well


if __name__ == "__main__":
    raise SystemExit(main())
