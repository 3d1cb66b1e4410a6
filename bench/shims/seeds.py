"""``sampling_seed`` decides every draw, whatever the batch.

SGLang reads seeds only under --enable-deterministic-inference, which also swaps in matrix products
and a hash that need a GPU. On a CPU in float32 the seeds alone give the same: this switches on
nothing else, and hashes with torch, so that sampled answers can be compared token by token. And
since SGLang draws among ids in another order if any request of the batch sets top_k (a greedy one
does), it always takes that order here.
"""

from types import SimpleNamespace

READER = "sglang.srt.sampling.sampling_batch_info"
SAMPLER = "sglang.srt.layers.sampler"


def patch(module):
    """Called with each of the two modules once it is loaded."""
    if module.__name__ == READER:
        module.get_exec = with_seeds(module.get_exec)
        in_one_order(module.SamplingBatchInfo)
    else:
        module.multinomial_with_seed = draw


def with_seeds(get_exec):
    """SGLang's accessor of its settings, but for the one that makes it read seeds."""

    def seeded():
        settings = get_exec()
        on = SimpleNamespace(enable_deterministic_inference=True)
        return SimpleNamespace(features=settings.features, deterministic=on)

    return seeded


def in_one_order(info):
    """Draw by rank in every batch, not only in those with a top_k."""
    make = info.from_schedule_batch.__func__

    def from_schedule_batch(cls, batch, vocab_size):
        made = make(cls, batch, vocab_size)
        made.need_top_k_sampling = True
        return made

    info.from_schedule_batch = classmethod(from_schedule_batch)


def draw(logprobs, seed, positions):
    """One id a row of ``logprobs`` [n, vocabulary], by its seed [n] and position [n] alone.

    Gumbel noise out of a hash of seed, position and id: multiplications and shifts modulo 2**61.
    """
    import torch

    ids = torch.arange(logprobs.shape[1])
    state = (seed.view(-1, 1) * 1_000_003 + positions.view(-1, 1) * 7_919 + ids) & (2**61 - 1)
    for factor in (0x9E3779B97F4A7C1, 0x2545F4914F6CDD1, 0x5851F42D4C957F3):
        state = (state ^ (state >> 29)) * factor & (2**61 - 1)
    uniform = ((state >> 8).double() + 0.5) / 2**53
    noise = -torch.log(-torch.log(uniform))
    return (logprobs.double() + noise).argmax(dim=-1, keepdim=True)
