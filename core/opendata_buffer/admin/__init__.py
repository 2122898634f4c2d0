"""Administer queues, logs, and topics: their readers, retention, partitions, and state.

The functions that are named here are public; the modules below are not. They are loaded when one of
them is first used. The command line is in ``cli``, and does the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opendata_buffer import lazy_names

if TYPE_CHECKING:
    from opendata_buffer.admin.operations import UNCHANGED as UNCHANGED
    from opendata_buffer.admin.operations import TrimResult as TrimResult
    from opendata_buffer.admin.operations import add_partitions as add_partitions
    from opendata_buffer.admin.operations import add_v1_reader as add_v1_reader
    from opendata_buffer.admin.operations import create_topic as create_topic
    from opendata_buffer.admin.operations import delete_reader as delete_reader
    from opendata_buffer.admin.operations import describe as describe
    from opendata_buffer.admin.operations import drain_partition as drain_partition
    from opendata_buffer.admin.operations import enable_log as enable_log
    from opendata_buffer.admin.operations import list_partitions as list_partitions
    from opendata_buffer.admin.operations import list_readers as list_readers
    from opendata_buffer.admin.operations import reset_reader as reset_reader
    from opendata_buffer.admin.operations import set_retention as set_retention
    from opendata_buffer.admin.operations import trim_queue as trim_queue
    from opendata_buffer.admin.queue_status import Status as Status
    from opendata_buffer.admin.readers import LogSettings as LogSettings
    from opendata_buffer.admin.readers import ReaderStatus as ReaderStatus
    from opendata_buffer.admin.readers import ResetPlan as ResetPlan
    from opendata_buffer.admin.topic_status import TopicStatus as TopicStatus

_NAMES = {
    "operations": [
        "UNCHANGED",
        "TrimResult",
        "add_partitions",
        "add_v1_reader",
        "create_topic",
        "delete_reader",
        "describe",
        "drain_partition",
        "enable_log",
        "list_partitions",
        "list_readers",
        "reset_reader",
        "set_retention",
        "trim_queue",
    ],
    "readers": ["LogSettings", "ReaderStatus", "ResetPlan"],
    "queue_status": ["Status"],
    "topic_status": ["TopicStatus"],
}
_MODULES = lazy_names.modules_of(_NAMES)

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    return lazy_names.load(globals(), _MODULES, name, "OF_ADMIN")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
