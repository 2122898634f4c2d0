"""A queue's manifest and the small objects beside it, changed only by compare-and-swap."""
