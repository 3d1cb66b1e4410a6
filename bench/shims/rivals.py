"""Other rules in the controller's place, for comparison: FASER_RIVAL names one.

All draft with the same drafters, are given the same cost table and verify in the same way.
"""

import os

MODULE = "faser_sglang.worker.planner"


def patch(module):
    module.Controller = make_class(os.environ["FASER_RIVAL"], module.Controller)


def make_class(name, base):
    return {"one-depth": one_depth, "batch-adaptive": batch_adaptive, "dspark": dspark}[name](base)


def one_depth(base):
    """The controller, but every request of a round gets the same depth."""
    import numpy as np

    class OneDepth(base):
        def _depths(self, found, expected, survival, drafts_itself, limits):
            depths = super()._depths(found, expected, survival, drafts_itself, limits)
            same = int(np.rint(depths.mean())) if depths.any() else 0
            return np.minimum(limits, max(same, int(depths.any())))

    return OneDepth


def batch_adaptive(base):
    """SGLang's own rule for --speculative-adaptive: steps by batch size and accepted drafts."""
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    from faser_sglang.control.policy import FixedDepth

    class BatchAdaptive(base):
        def __init__(self, cap, pool_rows, table, settings=None):
            super().__init__(cap, pool_rows, table, settings)
            self._steps = AdaptiveSpeculativeParams(3)

        def observe(self, rows, outcome):
            accepted = outcome.accepted[outcome.verified > 0]
            self._steps.on_verify_complete(accepted.tolist() or [0], len(rows))

        def plan(self, rows, lengths, offer):
            self.depth = min(self._steps.get_steps_for_batch(len(rows)), self.cap)
            return FixedDepth(self.depth).plan(rows, lengths, offer)

    return BatchAdaptive


def dspark(base):
    """DSPARK: drafts at full depth, and the rows to verify by the survival of earlier rounds.

    SGLang's own function finds the budget, off survival two rounds old; the budget goes to the
    drafts of this round that are most likely to survive.
    """
    import numpy as np
    import torch
    from sglang.srt.speculative.dspark_components.dspark_planner import (
        DSparkScheduleConfig,
        compute_verify_token_budget,
    )
    from sglang.srt.speculative.dspark_components.dspark_sps import SpsAdditiveCostTable

    from faser_sglang.control.rounds import FixedPlan, first_arm, limits_of

    class Dspark(base):
        def __init__(self, cap, pool_rows, table, settings=None):
            super().__init__(cap, pool_rows, table, settings)
            self.costs = additive(table)
            self.older = np.ones((pool_rows, cap))
            self.newer = np.ones((pool_rows, cap))

        def reset(self, rows):
            self.older[rows] = self.newer[rows] = 1.0

        def observe(self, rows, outcome):
            pass

        def plan(self, rows, lengths, offer):
            arms = first_arm(offer)
            return Budget(limits_of(offer, arms), arms, rows, self)

    class Budget(FixedPlan):
        trims = True

        def __init__(self, depths, arms, rows, rule):
            super().__init__(depths, arms)
            self.rows, self.rule = rows, rule

        def trim(self, chances, counts):
            rule, depth = self.rule, chances.shape[1]
            survival = np.zeros((len(counts), rule.cap))
            survival[:, :depth] = np.cumprod(chances, axis=1)
            survival[:, :depth] *= np.arange(depth) < counts[:, None]
            history = rule.older[self.rows]
            rule.older[self.rows] = rule.newer[self.rows]
            rule.newer[self.rows] = survival
            budget = compute_verify_token_budget(
                history_survival_probs=torch.from_numpy(history),
                cfg=DSparkScheduleConfig(gamma=rule.cap),
                sps_table=rule.costs,
            ).budget
            order = np.argsort(-survival.ravel(), kind="stable")
            order = order[: min(budget, np.count_nonzero(survival))]
            return np.bincount(order // rule.cap, minlength=len(counts))

    def additive(table):
        """Seconds of a round: a constant, a part by requests and a part by rows."""
        draft = [f + 7 * s for f, s in zip(table.first, table.step, strict=True)]
        beside = [1e-3 * (d + h) for d, h in zip(draft, table.host, strict=True)]
        rows, times = [], []
        points = sorted(
            (n * w, 1e-3 * table.verify[i][j])
            for i, n in enumerate(table.requests)
            for j, w in enumerate(table.windows)
        )
        for row, seconds in points:
            if not rows or row > rows[-1]:
                rows.append(row)
                times.append(max([seconds, *times]))
        return SpsAdditiveCostTable(
            bias_seconds=1e-6,
            bs_probes=list(table.requests),
            alpha_seconds=beside,
            m_probes=rows,
            theta_seconds=times,
        )

    return Dspark
