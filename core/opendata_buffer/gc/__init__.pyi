from opendata_buffer.gc.collector import GarbageCollector as GarbageCollector
from opendata_buffer.gc.collector import GcReport as GcReport
from opendata_buffer.gc.decision import GcPlan as GcPlan
