"""Layer 0: bytes to values and back. Nothing here reads a clock, a store or a setting."""

MIB = 1024 * 1024
"""Bytes in a mebibyte."""
