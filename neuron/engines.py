"""Published figures of a NeuronCore, each with its source, and what had to be assumed. Nothing here was measured by us.

Memory and bandwidth of a core are with the instances (`paceline.placement.planning.instances`).
"""

from __future__ import annotations

from dataclasses import dataclass

_CHIP = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/inferentia2.html"
_CORE = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/neuron-core-v2.html"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, what it is, and where it comes from."""

    value: float
    what: str
    source: str


TENSOR_16 = Figure(
    95e12, "operations a second of the tensor engine on 16-bit numbers", f"190 TFLOPS of two cores: {_CHIP}"
)
TENSOR_32 = Figure(23.75e12, "the same on float32", f"47.5 TFLOPS of two cores: {_CHIP}")
VECTOR = Figure(
    2.3e12 / 16,
    "elements a second that an operation of the vector engine goes over",
    f"2.3 TFLOPS of float32 ({_CORE}), of which one operation on one element is assumed to take a sixteenth",
)
SCALAR = Figure(
    2.9e12 / 16,
    "elements a second of the scalar engine (exponential, logarithm, root)",
    f"2.9 TFLOPS of float32 ({_CORE}), with the same assumption",
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

CORE_V2 = ("inf2", "trn1")
"""Families of instances with NeuronCore-v2, whose figures these are."""

DRAFT_LENGTHS = (0, 1, 3, 4)
"""Lengths of drafts worth a graph on Neuron, where each takes minutes to compile. Published: K = 3 gives 48.2 tokens a
second and K = 7 42.5, where plain decoding has 31.5 (P-EAGLE on Trainium2, aws-neuron/nkipy)."""
