"""How the ranks of a torch.distributed job agree: through the store where they met at start-up."""

from __future__ import annotations

import os

import torch.distributed as dist

from dpro_integrations.exchange import StoreExchange


def exchange_of_job(tag: str = "") -> StoreExchange:
    """Over the store of the default process group.

    Args:
        tag: tells several tuners of one job apart; equal on all ranks.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d._get_default_store()
    return StoreExchange(store, dist.get_rank(), dist.get_world_size(), f"{restart}/{tag}")
