"""What repair does about a check's problems."""

from __future__ import annotations

from opendata_buffer.admin.fsck import Finding, Kind, Report, check_queue
from opendata_buffer.admin.repair import LEFT, MENDED_BY, plan_repair, repair
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore

RUNTIME = SystemRuntime()
CONFIG = ConsumerConfig(store="memory://repair")


def finding(sequence: int, kind: Kind, location: str = "x") -> Finding:
    return Finding(sequence, location, "text", kind)


def test_every_kind_of_problem_is_mended_or_left_with_a_reason() -> None:
    notes = {Kind.UNREAD, Kind.METADATA}
    assert set(MENDED_BY) | set(LEFT) == set(Kind) - notes
    assert not set(MENDED_BY) & set(LEFT)


def test_of_an_object_that_is_queued_three_times_the_first_entry_stays() -> None:
    repeats = [finding(n, Kind.REPEATED, "a") for n in (1, 4, 6)]
    other = finding(5, Kind.REPEATED, "b")
    plan = plan_repair(Report(problems=[*repeats[:2], other, repeats[2]]))
    assert [each.sequence for each in plan.mend] == [4, 6]


def test_a_repair_that_is_run_again_finds_nothing_to_do() -> None:
    store = MemoryStore()
    locations = [batch_key("ingest", RUNTIME.ulid()) for _ in range(3)]
    store.put(locations[0], encode_batch([b"a"]))
    store.put(locations[2], b"garbage")
    store.put("ingest/manifest", Manifest.empty().append([NewEntry(x) for x in locations]).raw)
    plan = plan_repair(check_queue(store, CONFIG, RUNTIME))
    told: list[tuple[int, int]] = []
    done = repair(store, CONFIG, plan.mend, RUNTIME, advance=lambda *each: told.append(each))
    assert [(each.sequence, each.kind) for each in done] == [
        (1, Kind.MISSING), (2, Kind.UNREADABLE),
    ]  # fmt: skip
    assert told == [(1, 2), (2, 2)]
    assert plan_repair(check_queue(store, CONFIG, RUNTIME)).mend == ()
