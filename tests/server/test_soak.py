"""Nothing is lost under random load, aborts and disconnects."""

from __future__ import annotations

import pytest

from bench import soak

pytestmark = [pytest.mark.server, pytest.mark.models, pytest.mark.soak]


def test_no_slot_and_no_answer_is_lost_in_ninety_seconds(head_servers):
    """SGLang checks its account at every pass of this server, and ends it at the first leak.

    It also takes requests out of the running batch by force.
    """
    faser = head_servers["hybrid"]
    expected = soak.reference(head_servers["none"])
    outcome = soak.run(faser, expected, seconds=90, seed=11)
    assert outcome.errors == []
    assert min(outcome.fates[fate] for fate in ("answered", "aborted", "disconnected")) > 5
    assert outcome.most > 0
    assert soak.settle(faser) == 0
