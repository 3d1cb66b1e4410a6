"""Changes to a server under test; Python imports this if its folder is on PYTHONPATH.

``seeds`` always; ``forced`` (a drafter that replays answers) where FASER_FORCED names a file;
``planted`` (faults that the tests must notice) where FASER_PLANTED does; ``rivals`` (other rules
in the controller's place) where FASER_RIVAL names one.
"""

import importlib.util
import os
import sys

import seeds


class Finder:
    """Finds modules, each once, and hands them to their patch when they have been executed."""

    def __init__(self, patches):
        self.patches = patches

    def find_spec(self, name, path=None, target=None):
        patches = self.patches.pop(name, None)
        if patches is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = exec_module
        return spec


PATCHES = {seeds.READER: [seeds.patch], seeds.SAMPLER: [seeds.patch]}
if "FASER_FORCED" in os.environ:
    import forced

    PATCHES[forced.MODULE] = [forced.patch]
if "FASER_RIVAL" in os.environ:
    import rivals

    PATCHES[rivals.MODULE] = [rivals.patch]
if "FASER_PLANTED" in os.environ:
    import planted

    for module in planted.MODULES:
        PATCHES.setdefault(module, []).append(planted.patch)
sys.meta_path.insert(0, Finder(PATCHES))
