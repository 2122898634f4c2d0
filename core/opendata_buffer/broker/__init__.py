"""One process appends for many: brokered group commit, found through the queue itself.

Producers upload their batches and send only the manifest's entries to the broker, which writes
them for all producers with one compare-and-swap at a time and answers after that has landed. It
also hands batches to workers. The broker keeps nothing that storage does not have: when brokers
die, double or pause, the compare-and-swap on the manifest decides.

``protocol``          handshake, messages, and the proof of the right to write
``tls``               TLS for both ends, and the broker's certificate
``network``           WebSockets of clients, and the port of a broker
``client``            ``_broker.json``: which broker serves; and a connection to it
``committer``         finds the broker, appends through it or alone, and asks it for pauses
``broker``            appends for all clients; their sessions
``election``          which of several processes serves
``claims``            which worker holds which batch, pure
``dispatcher``        hands the queue's batches to workers, in rounds
``worker``            claims batches and works on them
"""
