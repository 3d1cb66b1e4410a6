"""The tally of drafts by confidence against counting them one by one."""

import random

import numpy as np
import torch

from faser_sglang.worker.confidence import BINS, ConfidenceTally
from faser_sglang.worker.drafter import Drafts


def test_tested_and_accepted_drafts_fall_into_the_bin_of_their_chance():
    rng = random.Random(3)
    tally = ConfidenceTally("cpu")
    tested, accepted = [0] * BINS, [0] * BINS
    for _ in range(40):
        size, width = rng.randint(1, 5), rng.randint(1, 6)
        depths = [rng.randint(0, width) for _ in range(size)]
        lengths = [rng.randint(0, depth) + 1 for depth in depths]
        chances = [[rng.choice((0.0, 0.05, 0.3, 0.99, 1.0)) for _ in range(width)] for _ in depths]
        for row, depth, length in zip(chances, depths, lengths, strict=True):
            for place in range(min(depth, length)):
                if row[place] > 0:
                    which = min(int(row[place] * BINS), BINS - 1)
                    tested[which] += 1
                    accepted[which] += place < length - 1
        counts = np.array([rng.randint(depth, width) for depth in depths])  # some are withheld
        tokens = torch.zeros(size, width, dtype=torch.int64)
        drafts = Drafts(tokens, torch.tensor(chances), counts)
        tally.add(drafts, torch.tensor(depths), torch.tensor(lengths, dtype=torch.int32))
    assert tally.snapshot() == {"tested": tested, "accepted": accepted}
    assert sum(accepted) > 0 and sum(tested) > sum(accepted)
