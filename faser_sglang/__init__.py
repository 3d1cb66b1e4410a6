"""FASER for SGLang: speculative decoding with a draft depth for every request.

Installing the package is enough: SGLang finds it through its entry points, and
``--speculative-algorithm FASER`` works. ``configure`` sets the ``--faser-*`` values for the
Engine API, which takes no unknown keyword.
"""

from faser_sglang.config import configure

__version__ = "0.1.0"

__all__ = ["configure", "__version__"]
