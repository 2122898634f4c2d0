"""Play histories and let the referees judge them: ``./run referees --help``."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tests.referees import faults
from tests.referees.judges import judged, missing
from tests.referees.play import KINDS, TOPICS


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run referees", description="See tests/referees.")
    parser.add_argument("--histories", type=int, default=40, help="default %(default)s")
    parser.add_argument("--calls", type=int, help="calls of each history; default 1,000 to 10,000")
    parser.add_argument("--kind", choices=KINDS, help="default: all, one after the other")
    parser.add_argument("--where", choices=["threads", "processes", "s3"], help="default 18:1:1")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="seed of the first history"
    )
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1), help="default %(default)s"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first refused history")
    parser.add_argument(
        "--faults", nargs="*", metavar="NAME", help="seed all faults, or the named ones"
    )
    given = parser.parse_args()
    if (why := missing()) is not None:
        print(why)
        return 1
    if given.faults is not None:
        return faults.run(given.faults, given.jobs)
    total, refused, began = Counter[str](), 0, time.monotonic()
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        played = []
        for seed in range(given.seed, given.seed + given.histories):
            rng = random.Random(seed)
            # Processes take seconds to start, so they play one of ten histories, half of these on
            # S3.
            where = given.where or rng.choices(["threads", "processes", "s3"], [18, 1, 1])[0]
            kind = given.kind or list(KINDS)[seed % len(KINDS)]
            # Each call of a transaction needs many requests.
            most = 3 if kind in TOPICS else 10
            calls = given.calls or round(1_000 * most ** rng.random())
            played.append(pool.submit(judged, kind, seed, where, calls))
        for future in as_completed(played):
            name, where, count, wrong = future.result()
            total.update({where: 1, "calls": count})
            refused += bool(wrong)
            print("\n  ".join([name + (" REFUSED" if wrong else ""), *wrong])[:4_000], flush=True)
            if wrong and given.stop:
                pool.shutdown(cancel_futures=True)
                break
    took = time.monotonic() - began
    print(f"{given.histories} histories in {took:.0f} s, {dict(total)}; {refused} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
