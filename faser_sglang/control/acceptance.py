"""How likely each draft is to be what the target says."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.calibration import Calibration
from faser_sglang.control.rounds import ARMS, Outcome
from faser_sglang.control.types import FloatArray, IntArray

LOW, HIGH = 0.02, 0.99
WINDOW = 2000  # tests that the acceptance by position remembers
PRIOR, PRIOR_TESTS = 0.6, 20.0  # before anything was seen
OWN_TESTS = 6.0  # of the mean request, in a request's own ratio
OWN_MEMORY = 0.96  # a test
UNTESTED = 0.99  # a round without a test: what is not tried is forgotten in time
TOGETHER = 4  # rounds that are learned from at once
SAMPLE = 32  # requests of them whose confidence is looked at


class Acceptance:
    """Acceptance by position, by request, and given the drafter's confidence, for each arm.

    Requests are known by row of the request pool. A request's ratio to the mean starts at one,
    with the weight of ``OWN_TESTS``. Positions that were not verified are not observed; but a
    draft that was withheld from verification counts as much as its confidence promised, else only
    drafts of high confidence would be counted and every estimate would drift upwards.
    """

    def __init__(self, cap: int, pool_rows: int) -> None:
        self.cap = cap
        self._right: FloatArray = np.zeros((ARMS, cap))  # by position
        self._tests: FloatArray = np.zeros((ARMS, cap))
        self._nobody = pool_rows  # a row for requests that are gone
        self._own_right: FloatArray = np.zeros((ARMS, pool_rows + 1))
        self._own_expected: FloatArray = np.zeros((ARMS, pool_rows + 1))
        self._heard: list[tuple[IntArray, Outcome]] = []
        self._turn = 0  # where the next sample of a round starts
        self.calibration = Calibration(ARMS)
        self._update()

    def reset(self, rows: IntArray) -> None:
        """New requests on these rows."""
        self._own_right[:, rows] = 0.0
        self._own_expected[:, rows] = 0.0
        for heard, _ in self._heard:  # of the requests before: learned for all, not for these
            heard[np.isin(heard, rows)] = self._nobody

    def by_position(self) -> FloatArray:
        """[ARMS, cap] of a draft whose predecessors were right; unseen: like the one before."""
        return self._rates

    def expected(self, rows: IntArray, arms: IntArray | int) -> FloatArray:
        """[n, cap] acceptance of each position if its predecessors are right."""
        return _within(self._rates[arms] * self._own(rows, arms)[:, None])

    def given(self, expected: FloatArray, chances: FloatArray, arms: IntArray | int) -> FloatArray:
        """Acceptance given the drafter's confidence.

        Args:
            expected: [n, k] as by ``expected``. chances: [n, k] or [n, 1], 0 where unknown.
            arms: [n], or one for all.
        """
        believed = self.calibration.apply(chances, expected, arms)
        return _within(np.where(chances > 0, believed, expected))

    def observe(self, rows: IntArray, outcome: Outcome) -> None:
        """The last round of these requests; learned from with the next few."""
        self._heard.append((rows.copy(), outcome))
        if len(self._heard) >= TOGETHER:
            self.learn()

    def learn(self) -> None:
        """Learn from what was observed, now."""
        if not self._heard:
            return
        rows = np.concatenate([rows for rows, _ in self._heard])
        outcomes = zip(*(outcome for _, outcome in self._heard), strict=True)
        outcome = Outcome(*(np.concatenate(parts) for parts in outcomes))
        self._heard.clear()
        arms, drafted, verified, accepted, _chances = outcome
        tested = np.minimum(accepted + 1, verified)
        own = self._own(rows, arms)
        # A test of a request that is better than others proves less for its position, else the
        # positions that only good requests reach would look better than they are.
        for arm in range(ARMS):
            first = (arms == arm) & (tested > 0)
            if first.any():
                own[arms == arm] /= own[first].mean()
        tests, hits = self._reached(arms, tested, own), self._reached(arms, accepted)
        own_tests, own_right = tested.astype(float), accepted.astype(float)
        promised = self._promised[arms, tested]
        self._calibrate(rows, outcome, tested)
        short = np.flatnonzero((accepted == verified) & (drafted > verified))
        if short.size:
            weight, right = self._withheld(rows[short], Outcome(*(part[short] for part in outcome)))
            for arm in range(ARMS):
                mine = arms[short] == arm
                tests[arm] += own[short][mine] @ weight[mine]
                hits[arm] += right[mine].sum(axis=0)
            own_tests[short] += weight.sum(axis=1)
            own_right[short] += right.sum(axis=1)
            promised[short] += (weight * self._rates[arms[short]]).sum(axis=1)
        self._learn_own(rows, arms, own_tests, own_right, promised)
        fade = np.exp(-tests / WINDOW)
        self._tests = self._tests * fade + tests
        self._right = self._right * fade + hits
        self._update()

    def _own(self, rows: IntArray, arms: IntArray | int) -> FloatArray:
        """[n] acceptance of each request over that of all."""
        weight = self._weight[arms]
        own: FloatArray = self._own_right[arms, rows] + weight
        own /= self._own_expected[arms, rows] + weight
        return own

    def _reached(
        self, arms: IntArray, counts: IntArray, weights: FloatArray | None = None
    ) -> FloatArray:
        """[ARMS, cap] of how many ``counts`` [n] are beyond each position."""
        size = self.cap + 1
        bins = np.bincount(arms * size + counts, weights, ARMS * size).reshape(ARMS, size)
        return bins[:, :0:-1].cumsum(axis=1)[:, ::-1].astype(float)

    def _withheld(self, rows: IntArray, outcome: Outcome) -> tuple[FloatArray, FloatArray]:
        """What drafts that were withheld count as: tests and hits, [k, cap] each.

        One behind accepted drafts is as good as it promised; those behind it count by the chance
        that they would have been reached.
        """
        arms, drafted, verified, _accepted, chances = outcome
        places = np.arange(self.cap)
        is_withheld = (places >= verified[:, None]) & (places < drafted[:, None]) & (chances > 0)
        believed = self.given(self.expected(rows, arms), np.where(is_withheld, chances, 0.0), arms)
        reach = np.cumprod(np.where(is_withheld, believed, 1.0), axis=1)
        return np.where(is_withheld, reach / believed, 0.0), np.where(is_withheld, reach, 0.0)

    def _calibrate(self, rows: IntArray, outcome: Outcome, tested: IntArray) -> None:
        """Compare confidence with verdicts, for some of the requests; for each in its turn."""
        sample = np.arange(self._turn, self._turn + min(SAMPLE, len(rows))) % len(rows)
        self._turn = (self._turn + SAMPLE) % len(rows)
        arms, chances = outcome.arms[sample], outcome.chances[sample]
        is_tested = (np.arange(self.cap) < tested[sample, None]) & (chances > 0)
        owners, places = np.nonzero(is_tested)
        if owners.size:
            self.calibration.learn(
                chances[owners, places],
                self.expected(rows[sample], arms)[owners, places],
                (places < outcome.accepted[sample][owners]).astype(float),
                arms[owners],
            )

    def _learn_own(
        self,
        rows: IntArray,
        arms: IntArray,
        tests: FloatArray,
        right: FloatArray,
        promised: FloatArray,
    ) -> None:
        people, which = np.unique(rows, return_inverse=True)
        k = len(people)

        def by_request(values: FloatArray | None) -> FloatArray:
            """[ARMS, k] sums."""
            return np.bincount(arms * k + which, values, ARMS * k).reshape(ARMS, k)

        tested_rounds = by_request((tests > 0).astype(float))
        untested_rounds = np.bincount(which, minlength=k) - tested_rounds
        fade = OWN_MEMORY ** by_request(tests) * UNTESTED**untested_rounds
        self._own_right[:, people] = self._own_right[:, people] * fade + by_request(right)
        self._own_expected[:, people] = self._own_expected[:, people] * fade + by_request(promised)

    def _update(self) -> None:
        """What follows from the sums over all requests."""
        rights, tests = self._right.tolist(), self._tests.tolist()
        rates = []
        for arm in range(ARMS):
            before = PRIOR
            for right, tested in zip(rights[arm], tests[arm], strict=True):
                before = (right + PRIOR_TESTS * before) / (tested + PRIOR_TESTS)
                rates.append(before)
        self._rates: FloatArray = np.array(rates).reshape(ARMS, self.cap)
        self._promised: FloatArray = np.zeros((ARMS, self.cap + 1))
        np.cumsum(self._rates, axis=1, out=self._promised[:, 1:])
        mean = [
            (sum(right) + PRIOR_TESTS * PRIOR) / (sum(tested) + PRIOR_TESTS)
            for right, tested in zip(rights, tests, strict=True)
        ]
        self._weight: FloatArray = OWN_TESTS * np.array(mean)  # of a request's prior


def _within(chances: FloatArray) -> FloatArray:
    return np.minimum(np.maximum(chances, LOW, out=chances), HIGH, out=chances)
