"""What is known of Neuron's chips, each fact with its source: SDK releases, degrees, memory, speed of the engines.

Nothing here was measured by us. Not here: instance types (`paceline.placement.planning.instances`), which read this
table, and the SDK that is installed (`paceline.neuron.sdk`). Sources of `CAPABILITIES`: the release notes, the hardware
pages of release 2.32, the NxD Inference support notes, and the parallel degrees of its feature guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Chip(Enum):
    """Accelerators that `neuron` has a documented way to."""

    INF2 = "inf2"
    TRN1 = "trn1"
    TRN2 = "trn2"


@dataclass(frozen=True, slots=True)
class Capability:
    """What a chip can be used with.

    first, last  SDK lines 2.first to 2.last that have ModelBuilder for it
    degrees      tensor-parallel degrees the runtime takes
    cores        logical ones of a chip, by default
    memory       bytes of device memory of such a core
    bandwidth    bytes a second that it reads from there
    logical      physical cores a logical core may be made of; the first is the default
    attention    SDK lines from 2.attention on have an attention kernel for prompts that goes on behind rows of a
                 cache; None: no release has one for the chip
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
"""Later lines have no ModelBuilder (maintained until 2.31), earlier ones were not looked at.

Attention: from 2.29 on NxD Inference calls ``attention_cte`` of the NKI Library through `nki.jit`, on Trainium2 and
newer alone. What it called in 2.28 are private modules of the compiler (`neuronxcc.nki._pre_prod_kernels`), and on trn1
not with rows of a cache.
"""


def chip_of(name: str) -> Chip | None:
    """The chip of an instance type, as "inf2.48xlarge", or of a family; None: one without a way to it."""
    return next((chip for chip in Chip if name.startswith(chip.value)), None)


_INFERENTIA2 = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/inferentia2.html"
_CORE_V2 = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/neuron-core-v2.html"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, what it is, and where it comes from."""

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
"""Chips with NeuronCore-v2, whose figures these are."""

DRAFT_LENGTHS = (0, 1, 3, 4)
"""Lengths of drafts worth a graph on Neuron, where each takes minutes to compile. Published: K = 3 gives 48.2 tokens a
second and K = 7 42.5, where plain decoding has 31.5 (P-EAGLE on Trainium2, aws-neuron/nkipy)."""
