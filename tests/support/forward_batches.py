"""A stand-in for ``packing.make_forward_batch``: a forward batch is what it was made of."""

from types import SimpleNamespace


def make_forward_batch(batch, runner, mode, *, spec_info=None, extend_lens=None, slots, **passed):
    assert len(passed["rows"]) == len(passed["members"])
    return SimpleNamespace(
        batch=batch,
        runner=runner,
        mode=mode,
        spec_info=spec_info,
        extend_lens=extend_lens,
        out_cache_loc=slots,
        # What a ForwardBatch adds of its own.
        batch_size=len(passed["rows"]),
        seq_lens_sum=int(passed["seq_lens_cpu"].sum()),
        out_cache_loc_virtual=None,
        mrope_positions=None,
        global_num_tokens_cpu=None,
        **passed,
    )
