"""How collectives of kernels are set up; steps without kernels read nothing of it."""

from __future__ import annotations


class CollectivesConfig:
    rank_src_tgt_pairs = ((),)  # of rank 0, which is traced

    def __init__(self, **_fields) -> None:
        """Of any fields."""
