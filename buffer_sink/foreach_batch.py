"""Write into a buffer from inside ``foreachBatch``, with the same exactly-once identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from buffer_sink.options import SinkOptions
from opendata_buffer.arguments import checked, wrong_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class ForeachBatchWriter:
    """A function for ``foreachBatch``, which another such function may also call. Picklable.

    Attributes:
        store: The store's URL.
        options: The options of the batch sink, including ``txnAppId``.
    """

    store: str
    options: Mapping[str, str] = field(hash=False, repr=False)  # May contain keys.

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Append ``df`` to the buffer, unless the batch id was written before."""
        (
            df.write.format("opendata-buffer")
            .options(**self.options)
            .option("txnVersion", str(batch_id))
            .mode("append")
            .save(self.store)
        )


@checked
def foreach_batch_writer(store: str, *, txn_app_id: str, **options: Any) -> ForeachBatchWriter:
    """Make a function that writes each micro-batch into a buffer, exactly once.

    Use it as the function of ``foreachBatch``, or call it in your own function next to other
    writes::

        to_buffer = foreach_batch_writer("s3://bucket/root", txn_app_id="orders-v1")

        def both(df, batch_id):
            df.write.format("delta").mode("append").save("/tables/orders")
            to_buffer(df.selectExpr("to_json(struct(*)) AS value"), batch_id)

        query = stream.writeStream.foreachBatch(both).start()

    The executors upload. The driver then makes the whole micro-batch visible in one write. Spark
    calls the function again for a batch if it is not sure that the batch was written. The identity
    ``(txn_app_id, batch id)`` makes the second call do nothing.

    Args:
        store: The store's URL, as in ``save()``.
        txn_app_id: The name of the stream of batches: 1 to 200 letters, digits, ``.``, ``_``,
            ``-``. Use a different id for each call in one function, and for each query: a second
            write with the same id and batch is taken for a repeat and skipped. A write of another
            query with the same id is refused. This also applies to a query whose checkpoint was
            deleted: it counts its batches from 0 again, and needs a new id.
        **options: Options of the batch sink, in snake case or as Spark writes them:
            ``data_path_prefix``, ``compression``, ...

    Returns:
        A function of a DataFrame and the id of its micro-batch. It can be pickled.

    Raises:
        InvalidInput: An option is unknown or cannot be used.
    """
    for name, value in options.items():
        if not isinstance(value, str | int | float | None):
            raise wrong_type(name, value, "text, a number, or true or false")
    texts = {
        _camel(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
    texts["txnAppId"] = txn_app_id
    # Fail here, where the mistake is, and not in the first micro-batch.
    SinkOptions.for_batch({**texts, "path": store, "txnVersion": "0"})
    return ForeachBatchWriter(store, texts)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(each.capitalize() for each in rest)
