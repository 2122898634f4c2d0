"""An asyncio service that answers a request once its record is durable.

    python examples/asyncio_service.py s3://bucket/orders

Ten clients place twenty orders each, at the same time. A client waits for the answer to an order
before it places the next one, so the service must not answer before the order is safe. All clients
share the batches and manifest writes of one producer.
"""

from __future__ import annotations

import asyncio
import json
import sys

from opendata_buffer import Producer, ProducerConfig

CLIENTS = 10
ORDERS = 20


class OrderService:
    """Takes orders and puts them into a queue."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def place(self, order: dict[str, object]) -> int:
        """Accept an order; return the number of its batch, once the order cannot be lost."""
        record = json.dumps(order).encode()
        handle = await self._producer.produce_async([record])
        durable = await handle
        return durable.sequence


async def client(number: int, service: OrderService) -> int:
    """Place orders one after the other; return how many were accepted."""
    for order in range(ORDERS):
        await service.place({"client": number, "order": order})
    return ORDERS


async def main(store: str) -> None:
    """Serve all clients, then close the producer, which flushes the remaining records."""
    with Producer(ProducerConfig(store=store, flush_interval_ms=20)) as producer:
        service = OrderService(producer)
        accepted = await asyncio.gather(*(client(n, service) for n in range(CLIENTS)))
    print(f"{sum(accepted)} orders accepted")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
