"""What deals out the samples of a batch that ranks share: every sample once, on one rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dpro.errors import DproError, PlanError  # noqa: E402
from dpro_integrations.torch_shares import SharedBatchSampler  # noqa: E402


def samplers(length: int = 50, batch: int = 12, ranks: int = 3, **more: bool) -> list[SharedBatchSampler]:
    return [SharedBatchSampler(length, batch, rank=rank, world_size=ranks, **more) for rank in range(ranks)]


@pytest.mark.parametrize("shares", [None, [6, 5, 1]])
def test_every_sample_once(shares: list[int] | None) -> None:
    """48 of 50: the last batch is not whole. All ranks together have the batches that one device has."""
    made = samplers()
    for sampler in made:
        sampler.deal(shares)
    dealt = [list(sampler) for sampler in made]
    assert [{len(part) for part in parts} for parts in dealt] == [{n} for n in (shares or [4, 4, 4])]
    whole = list(SharedBatchSampler(50, 12, rank=0, world_size=1))
    assert [[i for part in parts for i in part] for parts in zip(*dealt, strict=True)] == whole
    assert len({i for batch in whole for i in batch}) == 48 and len(made[0]) == 4


def test_another_epoch_another_order() -> None:
    one, other = samplers(ranks=2)
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    other.set_epoch(1)
    assert not {i for part in one for i in part} & {i for part in other for i in part}
    assert next(iter(samplers(ranks=2, shuffle=False)[0])) == [0, 1, 2, 3, 4, 5]


def test_shares_change_with_the_next_batch() -> None:
    sampler = samplers(ranks=2)[0]
    sizes = []
    for batch in DataLoader(range(50), batch_sampler=sampler):
        sizes.append(len(batch))
        if len(sizes) == 2:
            sampler.deal([10, 2])
    assert sizes == [6, 6, 10, 10]
    sampler.deal(None)
    assert sampler.shares == (6, 6)


def test_what_it_refuses() -> None:
    for batch, ranks in ((10, 3), (2, 3), (0, 1)):
        with pytest.raises(DproError, match="can't be dealt out"):
            SharedBatchSampler(50, batch, rank=0, world_size=ranks)
    sampler = samplers()[0]
    for wrong in ([12, 0, 0], [4, 4, 5], [6, 6], [13, -2, 1]):
        with pytest.raises(PlanError, match="no shares of 12 among 3 ranks"):
            sampler.deal(wrong)
    assert sampler.shares == (4, 4, 4)
