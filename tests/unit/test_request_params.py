"""A request's own depth: taken up to the cap, anything else refused in one sentence."""

import pytest

from faser_sglang.request_params import max_depth

CAP = 5


@pytest.mark.parametrize(
    "params", [None, {}, {"other": {"max_depth": 1}}, {"faser": None}, {"faser": {}}]
)
def test_a_request_that_says_nothing_admits_the_cap(params):
    assert max_depth(params, CAP) == CAP


@pytest.mark.parametrize("cap", [0, 1, CAP])
def test_every_depth_up_to_the_cap_is_taken(cap):
    for depth in range(cap + 1):
        assert max_depth({"faser": {"max_depth": depth}, "other": 1}, cap) == depth


@pytest.mark.parametrize("depth", [-1, CAP + 1, 2.0, "2", True, False, None, [1]])
def test_any_other_depth_is_refused_with_what_is_allowed(depth):
    with pytest.raises(ValueError) as error:
        max_depth({"faser": {"max_depth": depth}}, CAP)
    message = str(error.value)
    assert repr(depth) in message and f"from 0 to {CAP} (--speculative-num-steps)" in message
    assert message.endswith(".") and ". " not in message


@pytest.mark.parametrize("asked", [3, "x", [], {"depth": 1}, {"max_depth": 1, "min_depth": 0}])
def test_an_unknown_wish_is_refused_with_the_known_one(asked):
    with pytest.raises(ValueError) as error:
        max_depth({"faser": asked}, CAP)
    message = str(error.value)
    assert repr(asked) in message and '{"max_depth": n}' in message
    assert message.endswith(".") and ". " not in message
