"""``broker``: a broker as a process of its own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import click

from opendata_buffer.admin.target import Target
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork, listen_for
from opendata_buffer.cli import options
from opendata_buffer.cli.options import LONG_MS, command
from opendata_buffer.cli.target import target_of
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.queue.queue import no_such_queue
from opendata_buffer.runtime import Runtime

POLL_S = 0.25
"""Seconds between two checks whether it still serves."""

WAIT_S = 2.0
"""Seconds between two checks whether a queue has been created."""

STOP_S = 3.5
"""Seconds for an orderly stop; the process ends within five seconds in any case."""


def _parts(address: str) -> tuple[str, int]:
    """Host and port; an IPv6 address is in brackets."""
    with suppress(ValueError):
        parts = urlsplit(f"//{address}")
        host, port, is_whole = parts.hostname, parts.port, parts.netloc == address
        if host and port is not None and is_whole and "@" not in address:
            return host, port
    raise click.BadParameter(f"{address!r} is no HOST:PORT, for example 0.0.0.0:7420 or [::]:7420")


def _address(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None:
        _parts(text)
    return text


@command(timeout_ms=LONG_MS)
@options.queue
@click.option(
    "--listen",
    callback=_address,
    metavar="HOST:PORT",
    help="Where clients connect; port 0 takes a free one, host 0.0.0.0 all interfaces. Default: a "
    "free port of this machine's address, or of the loopback for a queue in a directory.",
)
@click.option(
    "--advertise",
    callback=_address,
    metavar="HOST:PORT",
    help="The address that clients connect to, if not the one above. Each broker needs its own "
    "address: do not use a load balancer's.",
)
@click.option("--tls-cert", metavar="FILE", help="Certificate, PEM. Clients need no certificate.")
@click.option("--tls-key", metavar="FILE", help="Its private key, PEM.")
@options.create_if_missing
@click.pass_obj
def broker(
    runtime: Any,
    /,
    listen: str | None,
    advertise: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    **queue: Any,
) -> None:
    """Commit for all producers of a queue, and deliver its batches to workers.

    A broker stores nothing: it coordinates commits. It stands by while another broker serves and
    takes over when that one ends, so start two. Waits for a queue that does not exist yet. Runs
    until it is interrupted. Producers and workers find it through the queue. Nothing is lost when
    it is killed.
    """
    if bool(tls_cert) is not bool(tls_key):
        raise click.UsageError("--tls-cert and --tls-key go together")
    target = target_of(runtime, queue, ConsumerConfig)
    store = target.store
    if target.topic is not None:
        raise no_such_queue(store, target.config)
    where = replace(listen_for(store), certificate=tls_cert or "", key=tls_key or "")
    if listen is not None:
        host_name, port = _parts(listen)
        where = replace(where, host=host_name, port=port)
    if advertise is not None:
        where = replace(where, advertise=advertise)
    network = WebSocketNetwork(runtime, where)
    # A standby listens only while it serves: clients of a dead broker must find its address
    # refused, also when it is started again. Listening once reports a wrong address now.
    network.listen().close()
    if not target.config.create_if_missing:
        _wait_for_queue(target)
    election = LeaderElection(store, target.config, runtime, network)
    try:
        _report(election, store.url, runtime)
    finally:
        election.stop(STOP_S)


def _wait_for_queue(target: Target) -> None:
    """Return when there is a queue; say so once while there is none."""
    reader = target.reader()
    told = False
    while reader.find() is None:
        if not told:
            told = True
            click.echo(
                f"waiting: there is no manifest {target.config.manifest_path!r} in "
                f"{target.store.url} yet. A producer creates it, or --create-if-missing"
            )
        target.runtime.sleep(WAIT_S)


def _report(election: LeaderElection, url: str, runtime: Runtime) -> None:
    """Print which broker serves, whenever that changes, until it cannot serve."""
    printed = ""
    while election.failure is None:
        line = printed
        if mine := election.serving:
            line = f"serving {url} at {mine.address} (term {mine.term}, broker {mine.id})"
        elif other := election.stands_by_for:
            term = f"(term {other.term}, broker {other.id})"
            line = f"standing by: {other.address} is announced {term}"
        if line != printed:
            click.echo(line)
            printed = line
        runtime.sleep(POLL_S)
    raise election.failure
