"""A publisher's name: the record beside the topic that decides its transactions."""

from __future__ import annotations

from collections.abc import Sequence

from opendata_buffer.commit.ledger import Attempt, Ledger
from opendata_buffer.commit.record import Verdict
from opendata_buffer.errors import (
    InvalidInput,
    OpenDataBufferError,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.topic.intents import AckIntents
from opendata_buffer.topic.transaction import OpenTransaction

__all__ = ["PublisherName", "app_of", "name_of"]

_PREFIX = "publisher."

_QUERY = "publisher"
"""Stands in the commit record where a Spark query has its id, so that neither takes the other's."""


class PublisherName:
    """Decides the transactions of one publisher's name, and fences other instances of it.

    Not thread-safe.

    Args:
        name: 1 to 190 characters of ``A-Z a-z 0-9 . _ -``.
        ledger: Where the record is kept.

    Raises:
        InvalidInput: The name is not allowed.
    """

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._app = app_of(name)
        self._ledger = ledger

    def claim(self, partitions: Sequence[str]) -> None:
        """Take the name over: complete what the last instance had committed, roll back the rest.

        Raises:
            Superseded: Another instance was opened at the same moment.
            OpenDataBufferError: Storage failed; claim it again.
        """
        self._ledger.recover(self._app, _QUERY, partitions)

    def next_transaction(self) -> Transaction:
        """The one behind the last that was committed."""
        return Transaction(self._app, self._ledger.committed(self._app) + 1)

    def check_applied(self, intents: AckIntents) -> None:
        """Whether saved intents need nothing more: what the record names was applied by the claim.

        Raises:
            InvalidInput: They are another publisher's, or of a transaction that was rolled back.
        """
        if intents.txn is None or intents.txn.app != self._app:
            raise InvalidInput("the intents are of another publisher: apply them with that one")
        found = self._ledger.told(intents.txn, intents.producer)
        # The record knows the last transaction by its producer, so one that was published
        # instead, under the same number, is told apart from it.
        is_last = intents.txn.batch == self._ledger.committed(self._app)
        if found is Verdict.OPEN or (found is Verdict.REPEATED and is_last):
            raise InvalidInput(
                f"transaction {intents.txn.batch} was rolled back, because it was not committed "
                "before its publisher went on or was opened again: publish it again"
            )

    def commit(self, intents: AckIntents, current: OpenTransaction) -> None:
        """Write the transaction into the record, and then acknowledge it in its partitions.

        Raises:
            Superseded: A later instance of the name lives.
            TransientStorageError: The message says whether the transaction is committed.
            OpenDataBufferError: As that.
        """
        assert current.txn is not None
        attempt = Attempt(current.txn, current.producer, intents.clocks, _QUERY)
        if not self._ledger.decide(attempt):
            # Another instance has committed a transaction of this number.
            raise Superseded(self._app, current.txn.batch)
        try:
            self._ledger.settle(attempt, current.since)
        except OpenDataBufferError as error:
            raise TransientStorageError(
                f"{current.txn} is committed, and not visible in all partitions yet: "
                f"{error} Open the publisher again: it completes that."
            ) from error


def app_of(name: str) -> str:
    """The app that stands in the locations of a publisher's transactions.

    Raises:
        InvalidInput: The name has other characters than an app id, or too many.
    """
    try:
        if name:
            return Transaction(f"{_PREFIX}{name}", 0).app
    except InvalidInput:
        pass
    raise InvalidInput(
        f"publisher name is {name!r:.80}: use 1 to 190 characters of A-Z a-z 0-9 . _ -"
    )


def name_of(app: str) -> str:
    """The publisher's name, from the app that stands in the locations of its transactions."""
    return app.removeprefix(_PREFIX)
