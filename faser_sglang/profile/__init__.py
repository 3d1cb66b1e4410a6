"""``python -m faser_sglang.profile``: measures what rounds cost, at leisure."""
