"""The main function of a drafter's process (`python -m paceline.placement.remote.process`, its order on stdin)."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import cast

from paceline.placement.cluster.roles import maker
from paceline.placement.host import environment
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.quota import Quota
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.server import DrafterPool, DraftServer


def main() -> None:
    """Check the environment, take the cores, make the drafter, and serve until the parent is gone."""
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_follow_parent, daemon=True, name="paceline-parent").start()
    environment.check(tuple((name, value) for name, value in order["env"]))
    if order["cores"]:
        CoreLocks(CoreRange(*order["cores"])).acquire()
    drafters = cast(DrafterPool, maker(order["maker"])(order["settings"]))
    DraftServer(
        listen(Address.parse(order["address"])), bytes.fromhex(order["secret"]), drafters, quota=Quota(**order["quota"])
    ).run()


def _follow_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # the main thread may be deep in a model; there is nothing to save


if __name__ == "__main__":
    main()
