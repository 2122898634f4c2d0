"""The operations of an operator on queues and topics. The command line is in ``cli``."""
