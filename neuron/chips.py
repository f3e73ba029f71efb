"""Facts about Neuron's chips, each with its source: SDK releases, degrees, memory, speed of the engines.

No figure was measured by us. `paceline.placement.planning.instances` reads this table; the installed SDK is in
`paceline.neuron.sdk`. Sources of `CAPABILITIES`: the release notes, the hardware pages of release 2.32, the NxD
Inference support notes, and the parallel degrees of its feature guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Chip(Enum):
    """Accelerators supported by the backend `neuron`."""

    INF2 = "inf2"
    TRN1 = "trn1"
    TRN2 = "trn2"


@dataclass(frozen=True, slots=True)
class Capability:
    """Capabilities of a chip.

    first, last  SDK lines 2.first to 2.last include ModelBuilder for it
    degrees      tensor-parallel degrees that the runtime supports
    cores        logical cores of a chip, by default
    memory       bytes of device memory of such a core
    bandwidth    bytes/s that it reads from device memory
    logical      physical cores a logical core may be made of; the first is the default
    attention    SDK lines from 2.attention on have an attention kernel for prompts that continue after cached rows;
                 None: no release has one for the chip
    """

    first: int
    last: int
    degrees: tuple[int, ...]
    cores: int
    memory: int
    bandwidth: int
    logical: tuple[int, ...] = (1,)
    attention: int | None = None


_GIB = 1 << 30

CAPABILITIES = {
    Chip.INF2: Capability(28, 28, (1, 2, 4, 8, 24), 2, 16 * _GIB, 410 * _GIB),
    Chip.TRN1: Capability(28, 28, (1, 2, 8, 16, 32), 2, 16 * _GIB, 410 * _GIB),
    Chip.TRN2: Capability(28, 31, (1, 2, 4, 8, 16, 32, 64), 4, 24 * _GIB, 725 * 10**9, (2, 1), attention=29),
}
"""Later lines have no ModelBuilder (maintained until 2.31), earlier ones were not examined.

Attention: from 2.29 on NxD Inference calls ``attention_cte`` of the NKI Library through `nki.jit`, on Trainium2 and
newer only. In 2.28 it called private modules of the compiler (`neuronxcc.nki._pre_prod_kernels`), and on trn1 not with
cached rows.
"""


def chip_of(name: str) -> Chip | None:
    """Return the chip of an instance type, as "inf2.48xlarge", or of a family; None if the chip is not supported."""
    return next((chip for chip in Chip if name.startswith(chip.value)), None)


_INFERENTIA2 = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/inferentia2.html"
_CORE_V2 = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/neuron-core-v2.html"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, its meaning, and its source."""

    value: float
    what: str
    source: str


TENSOR_16 = Figure(
    95e12, "operations a second of the tensor engine on 16-bit numbers", f"190 TFLOPS of two cores: {_INFERENTIA2}"
)
TENSOR_32 = Figure(23.75e12, "the same on float32", f"47.5 TFLOPS of two cores: {_INFERENTIA2}")
VECTOR = Figure(
    2.3e12 / 16,
    "elements a second that an operation of the vector engine goes over",
    f"2.3 TFLOPS of float32 ({_CORE_V2}), of which one operation on one element is assumed to take a sixteenth",
)
SCALAR = Figure(
    2.9e12 / 16,
    "elements a second of the scalar engine (exponential, logarithm, root)",
    f"2.9 TFLOPS of float32 ({_CORE_V2}), with the same assumption",
)
GATHERED = Figure(
    128 / 1e-6,
    "single numbers a second that are gathered by their places",
    "nki.isa.dma_copy takes a list of indices from SBUF (SDK 2.33, nki/api), whose tiles have at most 128 partitions "
    "(nki/about/tiling-overview); that an instruction takes one index a partition, and a microsecond, is assumed",
)
COLLECTIVE = Figure(
    15e-6,
    "seconds of a small collective",
    "14 us of a collective permute in a profile of trn1.32xlarge (aws-neuron-sdk#998; some cores take far longer); AWS "
    "gives 1 to 10 us as the order of magnitude of the latency, and a single step to messages below 1 MB where chips "
    "route them (neuron-runtime/explore/intranode-collective-comm, SDK 2.32); that every size up to 160 KB and every "
    "degree takes the same is assumed",
)
COLLECTIVE_SLOW = Figure(
    68e-6,
    "seconds of a small collective, at worst",
    "AWS publishes 6.42 ms a token for Llama-3-8B on 24 cores (about-neuron/benchmarks/inf2); what is left of it after "
    "reading the weights at 80 % of the bandwidth, divided by 65 collectives. A ring of 24 cores would be the same: it "
    "is gone round twice, 46 hops of 1 to 2 us each (neuron-runtime/explore/intranode-collective-comm, SDK 2.32)",
)
LAUNCH = Figure(
    437e-6, "seconds of the host for a synchronous call", "vllm-neuron, design/framework/async_execution.md, on trn2"
)
BANDWIDTH_SHARE = Figure(0.8, "of the memory's bandwidth that reading weights reaches", "assumed")
MAX_INSTRUCTIONS = Figure(5e6, "instructions of a compiled graph", "the compiler's limit: aws-neuron-sdk#819")
TILE = Figure(
    128 * 512,
    "elements an instruction works on",
    "nl.tile_size of the SDK's matrix multiplication tutorial: pmax 128, gemm_moving_fmax 512, which are limits of the "
    "tensor engine; that other engines are given tiles of that size is assumed",
)

CORE_V2 = (Chip.INF2, Chip.TRN1)
"""Chips with NeuronCore-v2, to which these figures apply."""

DRAFT_LENGTHS = (0, 1, 3, 4)
"""Draft lengths worth a graph on Neuron, where each takes minutes to compile. Published: 48.2 tokens/s with K = 3, 42.5
with K = 7, 31.5 without speculation (P-EAGLE on Trainium2, aws-neuron/nkipy).
"""
