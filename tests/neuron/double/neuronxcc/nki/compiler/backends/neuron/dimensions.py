"""How a kernel's collectives overlap with its work: a name that neuronx_distributed 0.17 imports."""

from __future__ import annotations


class CCPipeline:
    """Nothing of it is used."""
