"""Memory that was freed, given back to the system.

glibc keeps what is freed in its heap. While a model is built, that is the parts of matrices that were joined; whether
the next ones fit there depends on addresses, so the peak of a load grows by a number of megabytes that nobody chose.
Not here: caches of decoders, and memory of the files that are read.
"""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Ask the allocator to give the pages that it holds free back to the system; where it cannot, nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: malloc_trim(3)
    if trim is not None:
        trim(ctypes.c_size_t(0))
