"""The broker: one process that appends for many producers and assigns batches to workers.

Producers upload their batches themselves and send only the manifest entries to the broker. The
broker appends the entries of all producers with one compare-and-swap at a time, and answers once
that write has landed. It also assigns batches to workers. Clients find the broker through an object
next to the queue. The broker has no state that is not also in storage. So a broker may die or
pause, or two may run at the same time: the compare-and-swap on the manifest still decides.

``protocol``          handshake, messages, and the proof of the right to write
``tls``               TLS for both ends, and the broker's certificate
``network``           WebSockets of clients, and the port of a broker
``client``            ``_broker.json``: which broker serves; and a connection to it
``committer``         finds the broker, appends through it or directly, and asks it for pauses
``broker``            appends for all clients, and keeps their sessions
``election``          decides which of several processes serves
``claims``            which worker holds which batch; pure functions of a value
``dispatcher``        assigns the queue's batches to workers, in rounds
``worker``            claims batches and works on them
"""
