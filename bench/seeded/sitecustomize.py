"""Put on PYTHONPATH of a server: ``sampling_seed`` decides every draw, whatever the batch.

SGLang reads seeds only under --enable-deterministic-inference, which also swaps in matrix products
that need a GPU. On a CPU in float32 the seeds alone give the same: this switches on nothing else,
so that sampled answers can be compared token by token.
"""

import importlib.util
import sys
from types import SimpleNamespace

NAME = "sglang.srt.sampling.sampling_batch_info"


class Finder:
    """Finds the module once, and patches it when it has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.get_exec = with_seeds(module.get_exec)

        spec.loader.exec_module = exec_module
        return spec


def with_seeds(get_exec):
    """SGLang's accessor of its settings, but for the one that makes it read seeds."""

    def seeded():
        settings = get_exec()
        on = SimpleNamespace(enable_deterministic_inference=True)
        return SimpleNamespace(features=settings.features, deterministic=on)

    return seeded


sys.meta_path.insert(0, Finder())
