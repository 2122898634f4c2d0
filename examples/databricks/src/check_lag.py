"""Fail if a reader of the log is too far behind, so that Databricks notifies someone.

    python check_lag.py --queue /tmp/orders --max-lag-minutes 60

On Databricks it is a task of resources/load_orders.job.yml. It reads the log itself, so it also
sees the pipeline, and a reader whose program does not run at all.
"""

from __future__ import annotations

import argparse
import sys

from opendata_buffer import StoreOptions, admin


def readers_behind(
    queue: str, max_lag_minutes: float, credential: str | None = None, region: str | None = None
) -> list[str]:
    """Return a sentence for each reader whose oldest unread batch is too old."""
    options = StoreOptions(service_credential=credential or None, region=region or None)
    return [
        f"reader {reader.name} of {reader.partition} is {reader.oldest_unread_seconds / 60:.0f} "
        f"minutes behind: {reader.lag} batches wait"
        for reader in admin.list_readers(queue, store_options=options)
        if reader.oldest_unread_seconds is not None
        and reader.oldest_unread_seconds > max_lag_minutes * 60
    ]


def main() -> None:
    """Read the arguments, and exit with an error if a reader is behind."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--queue", required=True)
    arguments.add_argument("--max-lag-minutes", type=float, required=True)
    arguments.add_argument("--service-credential")
    arguments.add_argument("--region")
    given = arguments.parse_args()
    behind = readers_behind(
        given.queue, given.max_lag_minutes, given.service_credential, given.region
    )
    if behind:
        sys.exit("\n".join(behind))


if __name__ == "__main__":
    main()
