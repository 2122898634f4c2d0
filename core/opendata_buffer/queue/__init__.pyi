from opendata_buffer.queue.queue import Queue as Queue
