"""SGLang's arguments as the start-up checks see them, and what a refusal looks like."""

from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs


def flags(**values):
    """SGLang's defaults as a bag of values, ``values`` set."""
    args = ServerArgs(model_path="target")
    bag = SimpleNamespace(**{name: getattr(args, name) for name in ServerArgs.__struct_fields__})
    for name, value in values.items():
        assert hasattr(bag, name)
        setattr(bag, name, value)
    return bag


def refused(call, *args, **kwargs):
    """The message of the refusal, which is one sentence."""
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert message.endswith(".") and ". " not in message and "\n" not in message, message
    return message
