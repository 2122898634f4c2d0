"""A broker as a process of its own: ``broker``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.options import (
    SOON_MS,
    create_if_missing_option,
    patient_queue_options,
    queue_fields_of,
)

if TYPE_CHECKING:
    from opendata_buffer.broker.election import LeaderElection

__all__ = ["broker"]

LOOK_S = 0.25
"""Between two looks whether it still serves."""

STOP_S = 3.5
"""For stepping down; the process ends within five seconds whatever happens."""


def split_address(text: str) -> tuple[str, int]:
    """``host:port`` as its parts; an IPv6 address is in brackets.

    Raises:
        ValueError: It is none.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host) is not bracketed:
        raise ValueError(text)
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(text)
    return host, int(port)


def _address(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, int] | None:
    try:
        return None if text is None else split_address(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no HOST:PORT, for example 0.0.0.0:7420 or [::]:7420"
        ) from None


@click.command()
@patient_queue_options
@click.option(
    "--listen",
    callback=_address,
    metavar="HOST:PORT",
    help="Where clients come in; port 0 takes a free one. Default: a free port on all interfaces, "
    "or on the loopback for a queue in a directory.",
)
@click.option(
    "--advertise",
    callback=_address,
    metavar="HOST:PORT",
    help="Where clients find it, if not where it listens. Each broker has an address of its own: "
    "name no load balancer.",
)
@click.option("--tls-cert", metavar="FILE", default="", help="Certificate, PEM. Clients need none.")
@click.option("--tls-key", metavar="FILE", default="", help="Its private key, PEM.")
@create_if_missing_option
@click.pass_obj
def broker(
    runtime: Any,
    /,
    listen: tuple[str, int] | None,
    advertise: tuple[str, int] | None,
    tls_cert: str,
    tls_key: str,
    create_if_missing: bool,
    **queue: Any,
) -> None:
    """Append for all producers of a queue, and hand its batches to workers.

    Stands by while another broker serves and takes over when that one ends, so start two. Runs
    until it is interrupted. Producers and workers find it through the queue; nothing is lost
    when it is killed.
    """
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.broker.election import LeaderElection
    from opendata_buffer.broker.network import WebSocketNetwork, listen_for
    from opendata_buffer.config import ConsumerConfig
    from opendata_buffer.stores.open import open_store

    if bool(tls_cert) is not bool(tls_key):
        raise click.UsageError("--tls-cert and --tls-key go together")
    config = ConsumerConfig(**queue_fields_of(queue))
    store = open_store(config.store, config.store_options)
    if not create_if_missing:
        soon = replace(config, cas_deadline_ms=min(config.cas_deadline_ms, SOON_MS))
        Observer(store, soon, runtime).manifest()
    where = listen_for(store)
    if listen is not None:
        where = replace(where, host=listen[0], port=listen[1])
    if advertise is not None:
        where = replace(where, advertise=_joined(*advertise))
    network = WebSocketNetwork(runtime, replace(where, certificate=tls_cert, key=tls_key))
    # A standby listens only once it serves: a broker that starts again under the address of its
    # dead predecessor must find that address refused. What is wrong with it is told now.
    network.listen().close()
    host = LeaderElection(store, config, runtime, network)
    try:
        _report(host, store.url, runtime)
    finally:
        host.stop(STOP_S)


def _report(host: LeaderElection, url: str, runtime: Any) -> None:
    """Say who serves, whenever that changes, until there is an end."""
    said = ""
    while host.failure is None:
        if mine := host.serving:
            line = f"serving {url} at {mine.address} (term {mine.term}, broker {mine.id})"
        elif other := host.stands_by_for:
            line = (
                f"standing by: {other.address} is announced (term {other.term}, broker {other.id})"
            )
        else:
            line = said
        if line != said:
            click.echo(line)
            said = line
        runtime.sleep(LOOK_S)
    raise host.failure


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
