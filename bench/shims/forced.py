"""A drafter that replays recorded answers, exactly or wrong at chosen places.

Instead of n-gram lookup, so a server needs no draft model. FASER_FORCED is a JSON file, read at
each prefill: ``answers`` by the request's ``sampling_seed``, as token ids; ``wrong_every`` k makes
each k-th token of an answer wrong, ``wrong_at`` those at the places given by seed; ``faults`` by
seed: "raise", "nan" or "range", from the fifth token on.
"""

import json
import os

MODULE = "faser_sglang.worker.make_drafter"


def patch(module):
    from faser_sglang.worker.lookup_drafter import LookupDrafter

    module.LookupDrafter = make_class(LookupDrafter)


def make_class(base):
    import numpy as np
    import torch

    from faser_sglang.control.rounds import LOOKUP, offer_of

    class ForcedDrafter(base):
        kind = "forced"

        def attach_pools(self, req_to_token_pool, slots):
            super().attach_pools(req_to_token_pool, slots)
            self.answer_of = {}  # by row of the pool: prompt length, answer, fault

        def prefill(self, batch, bonus, hidden, *, is_off):
            with open(os.environ["FASER_FORCED"]) as file:
                forced = json.load(file)
            every = forced.get("wrong_every", 0)
            for row, req in zip(batch.req_pool_indices_cpu.tolist(), batch.reqs, strict=True):
                seed = str(req.sampling_params.sampling_seed)
                answer = list(forced["answers"].get(seed, []))
                places = list(range(every - 1, len(answer), every)) if every else []
                for place in places + forced.get("wrong_at", {}).get(seed, []):
                    answer[place] = answer[place] + 1 if answer[place] < 1000 else answer[place] - 1
                fault = forced.get("faults", {}).get(seed)
                self.answer_of[row] = len(req.origin_input_ids), answer, fault

        def offer(self, rows, lengths):
            limits = np.zeros_like(lengths)
            for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
                prompt, answer, fault = self.answer_of[row]
                left = answer[length + 1 - prompt :][: self.cap]
                limits[i] = len(left)
                self._proposed[row, : len(left)] = left
                if fault and length - prompt >= 5:
                    limits[i] = self.cap
                    self._proposed[row] = {"raise": -3, "nan": -2, "range": 2**40}[fault]
            return offer_of(LOOKUP, limits)

        def draft(self, this_round):
            drafts = super().draft(this_round)
            if (drafts.tokens == -3).any():
                raise RuntimeError("a drafter that raises")
            return drafts._replace(
                tokens=drafts.tokens.clamp(min=0),
                chances=drafts.chances.masked_fill(drafts.tokens == -2, torch.nan),
            )

        def commit(self, this_round, window, verdict, hidden):
            pass

        def _read(self):
            pass

    return ForcedDrafter
