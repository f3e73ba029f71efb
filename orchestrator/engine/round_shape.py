"""What a batch knows of the rounds that serve it. Not here: rounds, and the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What a batch must know of the rounds it is served by.

    max_accept     most proposed tokens that a round can accept
    width          most tokens that a round commits: W of its commits
    max_positions  positions that the drafter can follow; None = all
    kv_buckets     lengths of the target's cache, ascending; the rows of a round never cross the end of a bucket
    batch_buckets  numbers of slots that rounds can be of, ascending: the first ones; () = always all
    """

    max_accept: int
    width: int
    max_positions: int | None = None
    kv_buckets: tuple[int, ...] = ()
    batch_buckets: tuple[int, ...] = ()
