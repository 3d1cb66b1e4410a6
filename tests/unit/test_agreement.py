"""What shapes a pass is rank 0's, on every rank."""

from __future__ import annotations

import multiprocessing

import numpy as np
import torch

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


def decide(rank, port, out):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    agreement = Agreement(Group(2))
    depths, arms = agreement.plan(np.array([3, rank]), np.array([rank, 1]))
    drafts = agreement.drafts(Drafts(torch.tensor([[5 + rank]]), torch.tensor([[0.5 * rank]])))
    tokens = agreement.tensor(torch.tensor([[7 - rank, 1], [2, 3]]).T)  # not contiguous
    out.put([depths.tolist(), arms.tolist(), drafts.tokens.tolist(), drafts.chances.tolist()])
    out.put(tokens.tolist())
    torch.distributed.destroy_process_group()


def test_two_ranks_decide_as_the_first():
    from launch.servers import free_port

    context = multiprocessing.get_context("spawn")
    port, out = free_port(), context.Queue()
    ranks = [context.Process(target=decide, args=(rank, port, out)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    said = [out.get(timeout=120) for _ in range(4)]
    for rank in ranks:
        rank.join()
    assert said.count([[3, 0], [0, 1], [[5]], [[0.0]]]) == 2
    assert said.count([[7, 2], [1, 3]]) == 2


def test_one_rank_asks_nobody():
    agreement = Agreement(Group(1))
    depths, arms = np.array([1]), np.array([0])
    assert agreement.plan(depths, arms) == (depths, arms)
    values = torch.ones(2)
    assert agreement.tensor(values) is values
    drafts = Drafts(values, values)
    assert agreement.drafts(drafts) is drafts
