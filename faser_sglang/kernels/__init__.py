"""Tensor operations of a round, each with a plain-torch reference. Never imports sglang."""
