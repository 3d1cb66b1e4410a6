"""SGLang's own server kits, run against FASER as they are.

The facts that two of them ask for need a model that knows them. Where SmolLM2-135M does not, the
test is compared with the same server without speculation instead: see each class.
"""

from __future__ import annotations

import random
import unittest

import pytest
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin

pytestmark = [pytest.mark.server, pytest.mark.models]


class DemoCase(unittest.TestCase):
    """A kit's surroundings: the demo target under FASER."""

    model = "default"

    @pytest.fixture(autouse=True)
    def _bind(self, demo_server):
        self.base_url = demo_server.base_url
        self.process = demo_server.process


class TinyCase(unittest.TestCase):
    """The tiny target under FASER, for kits that are about load and not about text."""

    @pytest.fixture(autouse=True)
    def _bind(self, tiny_servers):
        self.base_url = tiny_servers[1].base_url
        self.process = tiny_servers[1].process


class TestApiContract(BasicAPIContractMixin, DemoCase):
    pass


class TestDecodeCorrectness(BasicDecodeCorrectnessMixin, DemoCase):
    pass


class TestSchedulerStress(BasicSchedulerStressMixin, DemoCase):
    pass


class TestMatchedStop(MatchedStopMixin, DemoCase):
    pass


class TestAbortAll(AbortAllMixin, TinyCase):
    abort_all_max_new_tokens = 450  # the tiny target's context is 512


class TestRadixCache(TinyCase):
    def test_radix_attention(self):
        """The kit's tree, smaller: 401 nodes of up to 256 tokens do not fit a context of 512."""
        random.seed(11)
        whole = radix_cache_server_kit.gen_radix_tree
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                radix_cache_server_kit, "gen_radix_tree", lambda: whole(num_nodes=80, chunk_len=20)
            )
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


del DemoCase, TinyCase  # pytest would collect them as cases of their own
