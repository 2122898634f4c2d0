"""What an operator does to a queue: look, check, repair. No flags, no terminal: see ``cli``."""
