"""Decisions of a round as plain Python and numpy: no torch, no sglang."""
