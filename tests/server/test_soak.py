"""Nothing is lost under random load, aborts and disconnects."""

from __future__ import annotations

import pytest

from bench import soak

pytestmark = [pytest.mark.server, pytest.mark.models, pytest.mark.soak]


def test_no_slot_is_lost_in_ninety_seconds(tiny_servers):
    """SGLang checks its account at every pass of this server, and ends it at the first leak."""
    faser = tiny_servers[1]
    fates, most = soak.run(faser, count=None, seconds=90)
    assert min(fates[fate] for fate in ("answered", "aborted", "disconnected")) > 5
    assert most > 0
    assert soak.settle(faser) == 0
