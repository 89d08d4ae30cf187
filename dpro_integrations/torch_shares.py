"""A batch that the ranks of a torch job share: who takes how many of its samples.

:class:`SharedBatchSampler` is a ``batch_sampler`` for torch's ``DataLoader``. All ranks walk through the same shuffled
data set; of every global batch each takes a run of samples, equal ones until a plan says otherwise, so that a slow rank
can be given fewer. What is trained with stays the same. That a rank's gradient then counts by its samples is
``torch_micro.step``'s work, which sees the batch itself; so a loader may fetch ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
import torch.distributed as dist

from dpro.errors import DproError, PlanError


class SharedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Indices of this rank's samples, batch by batch.

    Args:
        data: the data set, or its length.
        batch_size: of the global batch, over all ranks; a last one that is smaller is left out.
        shuffle: in an order that is drawn anew, alike on all ranks, for each epoch (:meth:`set_epoch`).
        rank, world_size: left out: of the process group.

    Raises:
        DproError: the batch has fewer samples than there are ranks, or can't be dealt out equally.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        self.rank = dist.get_rank() if rank is None else rank
        self.world_size = dist.get_world_size() if world_size is None else world_size
        if batch_size < self.world_size or batch_size % self.world_size:
            raise DproError(f"a batch of {batch_size} can't be dealt out equally to {self.world_size} ranks")
        self.batch_size = batch_size
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        #: samples of each rank
        self.shares: tuple[int, ...] = self._equal()

    def __len__(self) -> int:
        return self.length // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """As ``DistributedSampler``'s: another epoch, another order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        else:
            order = list(range(self.length))
        for number in range(len(self)):
            first = number * self.batch_size + sum(self.shares[: self.rank])
            yield order[first : first + self.shares[self.rank]]

    def check(self, shares: Sequence[int]) -> None:
        """Raises PlanError: they are not of this batch, or a rank would have none."""
        if len(shares) != self.world_size or min(shares) < 1 or sum(shares) != self.batch_size:
            raise PlanError(
                f"{' + '.join(map(str, list(shares)[:8]))} samples are no shares of {self.batch_size} among "
                f"{self.world_size} ranks"
            )

    def deal(self, shares: Sequence[int] | None) -> None:
        """From the next batch on, on all ranks alike: these samples for each rank; None: as many for each.

        Raises:
            PlanError: see :meth:`check`.
        """
        if shares is not None:
            self.check(shares)
        self.shares = self._equal() if shares is None else tuple(shares)

    def _equal(self) -> tuple[int, ...]:
        return (self.batch_size // self.world_size,) * self.world_size
