"""One process appends for many: brokered group commit, found through the queue itself.

Producers upload their batches as ever and send only what enters the manifest to the broker,
which writes it for all of them with one compare-and-swap at a time and answers after that has
landed. The broker keeps nothing that storage does not have: the manifest is the truth, and
whatever dies, doubles, pauses or lies, the compare-and-swap decides.

``announcement``  what ``_broker.json`` says, pure
``lease``         reading and changing it, by compare-and-swap
``wire``          the two sides of a connection as machines of bytes, pure
``service``       what a broker does with what it is sent
``server``        the service behind a port
``calls``         what was asked on a connection and is not answered yet, pure
``client``        a connection to a broker
``committer``     appends through a broker, or alone where there is none
``guest``         a queue for who writes by himself and has the broker pause meanwhile
``host``          serves when nobody does
``claims``        which worker holds which batch, pure
``foreman``       hands the queue's batches to workers (``turn``, ``shelf``, ``tenure``)
"""
