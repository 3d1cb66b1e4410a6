"""Faults that the tests must notice, switched on by name while the server runs.

FASER_PLANTED is a file that holds the name of one of FAULTS, or nothing.
"""

import os

PLACES = {
    "faser_sglang.worker.verify": ["window off by one", "stale slot", "wrong row"],
    "faser_sglang.worker.outputs": ["penalty skipped"],
    "faser_sglang.worker.sampling": ["seed by row"],
    "sglang.srt.constrained.xgrammar_backend": ["no rollback"],
    "faser_sglang.worker.draft_kv": ["unwritten slots shared"],
}
MODULES = list(PLACES)
FAULTS = [fault for faults in PLACES.values() for fault in faults]


def is_on(fault):
    with open(os.environ["FASER_PLANTED"]) as file:
        return file.read().strip() == fault


def patch(module):
    for fault in PLACES[module.__name__]:
        PLANT[fault](module, fault)


def replace(owner, name, fault, make):
    """``owner.name`` becomes ``make(original)``'s result while ``fault`` is on."""
    original = getattr(owner, name)
    changed = make(original)

    def either(*args, **kwargs):
        return (changed if is_on(fault) else original)(*args, **kwargs)

    setattr(owner, name, either)


def accept_one_more(module, fault):
    def make(original):
        def changed(sampled, drafts, depths, *rest):
            verdict = original(sampled, drafts, depths, *rest)
            lens = (verdict.accept_lens + 1).minimum(depths.to(verdict.accept_lens.dtype) + 1)
            bonus = verdict.tokens.gather(1, lens[:, None].long() - 1).squeeze(1)
            return verdict._replace(accept_lens=lens, bonus=bonus)

        return changed

    replace(module, "ragged_accept", fault, make)


def write_to_the_slot_before(module, fault):
    def make(original):
        def changed(*args):
            packed = original(*args)
            packed.slots.copy_(packed.slots.roll(1))
            return packed

        return changed

    replace(module, "pack_rows", fault, make)


def read_the_row_before(module, fault):
    def make(original):
        def changed(self, this_round, window, offsets, drafts, logits_output, barrier=None):
            logits = logits_output.next_token_logits
            logits_output.next_token_logits = logits.roll(1, 0)
            return original(self, this_round, window, offsets, drafts, logits_output, barrier)

        return changed

    replace(module.RowSampler, "sample", fault, make)


def skip_penalties(module, fault):
    replace(module.OutputRecord, "has_penalties", fault, lambda _: lambda self, rows: False)


def seed_by_row(module, fault):
    def make(original):
        def changed(self, *args):
            info = original(self, *args)
            if info.sampling_seed is not None:
                info.sampling_seed = info.sampling_seed * 0 + self.torch.arange(
                    len(info.sampling_seed)
                )
            return info

        return changed

    module.RowSampler.torch = module.torch
    replace(module.RowSampler, "_expand", fault, make)


def keep_the_grammar(module, fault):
    replace(module.XGrammarGrammar, "rollback", fault, lambda _: lambda self, k: None)


def share_unwritten(module, fault):
    replace(module.DraftKv, "first_missing", fault, lambda _: lambda self, table, rows, lens: lens)


PLANT = {
    "window off by one": accept_one_more,
    "stale slot": write_to_the_slot_before,
    "wrong row": read_the_row_before,
    "penalty skipped": skip_penalties,
    "seed by row": seed_by_row,
    "no rollback": keep_the_grammar,
    "unwritten slots shared": share_unwritten,
}
