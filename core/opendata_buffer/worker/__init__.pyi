from opendata_buffer.worker.worker import ClaimedBatch as ClaimedBatch
from opendata_buffer.worker.worker import Worker as Worker
