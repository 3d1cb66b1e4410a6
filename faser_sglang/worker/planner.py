"""What each round drafts and verifies: the policy, with what it must know of requests and time."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from faser_sglang.config import FaserConfigError
from faser_sglang.control.controller import Controller
from faser_sglang.control.policy import FixedDepth
from faser_sglang.control.record import OutcomeRecord
from faser_sglang.control.rounds import MODEL, Offer, Policy, no_offer
from faser_sglang.control.trace import TraceWriter
from faser_sglang.control.types import FloatArray, IntArray
from faser_sglang.request_params import max_depth
from faser_sglang.worker.make_policy import make_policy, needs_table, settings_of
from faser_sglang.worker.packing import Round
from faser_sglang.worker.round_costs import RoundTimer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.config import FaserConfig
    from faser_sglang.control.cost import CostTable
    from faser_sglang.worker.agreement import Agreement
    from faser_sglang.worker.drafter import Drafter, Drafts

logger = logging.getLogger(__name__)


class Planner:
    """Plans rounds, and remembers them until it is known what became of them.

    Args:
        cap: the largest depth. context_len, pool_rows: of the target. seed: of random depths.
        trace: where to record rounds, if anywhere.
    """

    def __init__(
        self,
        config: FaserConfig,
        drafter: Drafter,
        agreement: Agreement,
        *,
        cap: int,
        context_len: int,
        pool_rows: int,
        seed: int,
        device: torch.device | str,
        trace: str | None = None,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.agreement = agreement
        self.cap = cap
        self.context_len = context_len
        self.seed = seed
        self.timer = RoundTimer(device)
        self.policy: Policy = FixedDepth(0)  # until ``start``
        self.controller: Controller | None = None
        self._trace = None if trace is None else TraceWriter(trace)
        self._record = OutcomeRecord(pool_rows, cap)
        self._last_position: IntArray = np.zeros(pool_rows, np.int64)
        self._max_depth: IntArray = np.zeros(pool_rows, np.int64)

    @property
    def is_off(self) -> bool:
        """Nothing is ever drafted."""
        return self.config.mode == "off" or self.cap == 0

    def start(self, table: CostTable | None) -> None:
        """Start-up is over; ``table`` says what rounds cost, where that is asked."""
        if self.is_off:
            return
        if table is not None:
            self.controller = Controller(self.cap, len(self._max_depth), table)
        self.policy = self._policy()

    def check_switch(self, **changes: Any) -> FaserConfig:
        """The configuration with other values of ``depth``, ``stop`` or ``trim``.

        Raises FaserConfigError for values that this server cannot serve.
        """
        if self.is_off:
            raise FaserConfigError("this server was started so that it never drafts.")
        config = dataclasses.replace(self.config, **changes)
        config.check_cap(self.cap)
        if needs_table(config) and self.controller is None:
            raise FaserConfigError(
                "this server has not measured what rounds cost; start it with --faser-depth auto."
            )
        return config

    def switch(self, **changes: Any) -> None:
        """Serve by other values from the next round on; raises as ``check_switch``."""
        self.config = self.check_switch(**changes)
        self.policy = self._policy()
        logger.info("FASER goes on with %s.", ", ".join(f"{k} {v}" for k, v in changes.items()))

    def _policy(self) -> Policy:
        if not needs_table(self.config):
            return make_policy(self.config, self.cap, self.seed)
        assert self.controller is not None, "start measures where it is needed"
        self.controller.settings = settings_of(self.config)
        return self.controller

    def begin(self, batch: ScheduleBatch) -> None:
        """New requests on their rows of the pool."""
        rows = batch.req_pool_indices_cpu.numpy()
        ends = np.asarray(batch.prefix_lens, np.int64) + np.asarray(batch.extend_lens, np.int64)
        self._record.begin(rows, ends)
        for policy in {self.policy, self.controller} - {None}:
            policy.reset(rows)
        self._last_position[rows] = [
            len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1 for req in batch.reqs
        ]
        self._max_depth[rows] = [
            max_depth(req.sampling_params.custom_params, self.cap) for req in batch.reqs
        ]

    def plan(self, batch: ScheduleBatch) -> tuple[Round, int]:
        """This round, and the rows of the draft model's first pass.

        The host knows every length: the scheduler waited for them.
        """
        rows = batch.req_pool_indices_cpu.numpy()
        lengths = batch.seq_lens_cpu.numpy().astype(np.int64)
        self.timer.report(getattr(self.policy, "cost", None))
        outcome = self._record.settle(rows, lengths)
        self.policy.observe(rows, outcome)
        if self._trace is not None:
            self._trace.write(rows, lengths, outcome)
        offer = self._offer(rows, lengths)
        plan = self.agreement.plan(self.policy.plan(rows, lengths, offer))
        this_round = Round(
            batch=batch,
            rows=batch.req_pool_indices,
            rows_cpu=rows,
            lengths=batch.seq_lens.to(torch.int64),
            lengths_cpu=lengths,
            bonus=batch.spec_info.bonus_tokens,
            depths=torch.from_numpy(plan.depths).to(batch.seq_lens.device),
            depths_cpu=plan.depths,
            drafted_cpu=np.zeros_like(rows),
            plan=plan,
        )
        drafts_itself = (plan.arms == MODEL) & (plan.depths > 0)
        return this_round, int((offer.behind + 1)[drafts_itself].sum())

    def choose(self, this_round: Round, drafts: Drafts | None) -> Round:
        """The round with the depths that are to be verified.

        Where the plan trims, the host waits for the drafter's probabilities here.
        """
        drafted = verified = this_round.drafted_cpu
        chances = None
        if drafts is not None:
            drafted = verified = drafts.counts
            if self._wants_chances or this_round.plan.trims:
                chances = drafts.chances.cpu().numpy().astype(np.float64)
            if this_round.plan.trims:
                verified = this_round.plan.trim(_known(chances), drafted)
            this_round = this_round.with_depths(verified, drafted)
        rows, lengths = this_round.rows_cpu, this_round.lengths_cpu
        self._record.note(rows, lengths, this_round.arms_cpu, drafted, verified, chances)
        return this_round

    def describe(self) -> dict[str, Any]:
        """Values in force, for ``/server_info``."""
        return {
            "depth": self.config.depth,
            "stop": "on" if self.config.stops else "off",
            "trim": "on" if self.config.trims else "off",
            "controller": None if self.controller is None else self.controller.describe(),
        }

    @property
    def _wants_chances(self) -> bool:
        return self._trace is not None or self.policy is self.controller

    def _offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        """What can be drafted, within each request's own limits."""
        if self.is_off:
            return no_offer(len(rows))
        offer = self.drafter.offer(rows, lengths)
        most = np.clip(self._limits(rows, lengths), 0, self.cap)
        return offer._replace(limits=np.clip(offer.limits, 0, most))

    def _limits(self, rows: IntArray, lengths: IntArray) -> IntArray:
        """The deepest draft [n] that can be of use, has room and is admitted.

        A window of depth d ends at position length + d. No token is emitted behind a request's
        last one, so drafts for positions beyond it are useless; the target's context ends at
        ``context_len`` - 1.
        """
        useful = self._last_position[rows] - 1 - lengths
        in_context = self.context_len - 1 - lengths
        return np.minimum(np.minimum(useful, in_context), self._max_depth[rows])


def _known(chances: FloatArray | None) -> FloatArray:
    assert chances is not None
    return chances
