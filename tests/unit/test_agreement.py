"""What shapes a pass is rank 0's, on every rank."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch

from faser_sglang.control.rounds import FixedPlan
from faser_sglang.worker.agreement import Agreement
from faser_sglang.worker.drafter import Drafts


class Group:
    """SGLang's coordinator, as far as it is used, over torch's gloo."""

    def __init__(self, size):
        self.world_size = size
        self.ranks = list(range(size))
        self.cpu_group = self.device_group = None

    def broadcast(self, values, src):
        torch.distributed.broadcast(values, src=self.ranks[src])
        return values


class Ranked(FixedPlan):
    """Decides by rank: rank 0 goes on with the first of each two, and verifies one draft."""

    def __init__(self, rank, stops, trims):
        super().__init__(np.array([3, rank]), np.array([rank, 1]))
        self.rank, self.stops, self.trims = rank, stops, trims

    def goes_on(self, members, chances):
        return (members + self.rank) % 2 == 0

    def trim(self, chances, counts):
        return np.full_like(counts, 1 + self.rank)


def decide(rank, port, out):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    agreement = Agreement(Group(2))
    for ways in ((False, False), (True, False), (False, True), (True, True)):
        own = ways if rank == 0 else (not ways[0], not ways[1])
        plan = agreement.plan(Ranked(rank, *own))
        said = [plan.depths.tolist(), plan.arms.tolist(), plan.stops, plan.trims]
        on = plan.goes_on(np.array([0, 1, 2]), np.zeros((3, 1)))
        said += [on.dtype.name, on.tolist()]
        said.append(plan.trim(np.zeros((2, 3)), np.array([3, 3])).tolist())
        out.put(said)
    counts = np.array([3 - rank, 2])[::-1]  # not contiguous
    own = Drafts(torch.tensor([[5 + rank]]), torch.tensor([[0.5 * rank]]), counts)
    drafts = agreement.drafts(own)
    tokens = agreement.tensor(torch.tensor([[7 - rank, 1], [2, 3]]).T)  # not contiguous
    out.put([part.tolist() for part in drafts])
    out.put(tokens.tolist())
    out.put(agreement.numbers(np.arange(3, dtype=np.int32) + rank).tolist())
    out.put(agreement.value({"table": [1.5, rank], "path": f"/rank/{rank}"}))
    torch.distributed.destroy_process_group()


def test_two_ranks_decide_as_the_first():
    from launch.servers import free_port

    context = multiprocessing.get_context("spawn")
    port, out = free_port(), context.Queue()
    ranks = [context.Process(target=decide, args=(rank, port, out)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    said = [out.get(timeout=120) for _ in range(16)]
    for rank in ranks:
        rank.join()
    for ways in ((False, False), (True, False), (False, True), (True, True)):
        decided = [[3, 0], [0, 1], *ways, "bool", [True, False, True], [1, 1]]
        assert said.count(decided) == 2, ways
    assert said.count([[[5]], [[0.0]], [2, 3]]) == 2
    assert said.count([[7, 2], [1, 3]]) == 2
    assert said.count([0, 1, 2]) == 2
    assert said.count({"table": [1.5, 0], "path": "/rank/0"}) == 2


@pytest.mark.parametrize("name", ["plan", "drafts", "tensor", "numbers", "value"])
def test_one_rank_asks_nobody(name):
    anything = object()
    assert getattr(Agreement(Group(1)), name)(anything) is anything
