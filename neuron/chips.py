"""Facts about Neuron's chips, each with its source: SDK releases, degrees, memory, speed of the engines.

No figure was measured by us. `paceline.placement.planning.instances` reads this table; the installed SDK is in
`paceline.neuron.sdk`. Sources of `CAPABILITIES`: the release notes, the hardware pages of release 2.32, AWS's
`n2-manifest.json` (2026-08-21; packages of a release and the chips of each), and the parallel degrees of NxD
Inference's feature guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Chip(Enum):
    """Neuron accelerators that a backend or a plan can name."""

    INF2 = "inf2"
    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"


@dataclass(frozen=True, slots=True)
class Capability:
    """Capabilities of a chip.

    backends     backends that drive it, the recommended one first
    lines        SDK lines of that backend that were examined: 28 is SDK 2.28
    degrees      tensor-parallel degrees that the runtime supports
    seldom       further ones, which one document names
    cores        logical cores of a chip, by default
    memory       bytes of device memory of such a core
    bandwidth    bytes/s that it reads from device memory
    logical      physical cores a logical core may be made of; the first is the default
    attention    SDK lines from 2.attention on have an attention kernel for prompts that continue after cached rows;
                 None: no release has one for the chip
    """

    backends: tuple[str, ...]
    lines: tuple[int, ...]
    degrees: tuple[int, ...]
    cores: int
    memory: int
    bandwidth: int
    logical: tuple[int, ...] = (1,)
    attention: int | None = None
    seldom: tuple[int, ...] = ()


_GIB = 1 << 30

_OLD, _NEW = "neuron", "neuron-native"

CAPABILITIES = {
    Chip.INF2: Capability((_OLD,), (28, 31), (1, 2, 4, 8, 24), 2, 16 * _GIB, 410 * _GIB, seldom=(12,)),
    Chip.TRN1: Capability((_OLD,), (28, 31), (1, 2, 8, 16, 32), 2, 16 * _GIB, 410 * _GIB),
    Chip.TRN2: Capability(
        (_NEW, _OLD), (28, 29, 30, 31), (1, 2, 4, 8, 16, 32, 64), 4, 24 * _GIB, 725 * 10**9, (2, 1), attention=29
    ),
    Chip.TRN3: Capability((_NEW,), (33,), (1, 2, 4, 8, 16, 32, 64), 4, 36 * _GIB, 1225 * 10**9, (2, 1), attention=33),
}
"""Lines are those of `neuron` where it drives the chip: 2.31 is the last with neuronx_distributed, and stays in
maintenance for Inf2 and Trn1 (announcements of 2026-08-12 and 2026-10-16). Degrees of Trn3 are not documented: those of
Trn2. Of Inf2, one guide names 12 (generative-llm-inference-with-neuron, 2026-08-21), no other list does: it is never
chosen, but accepted. No document names 4 for Trn1, whose runtime refuses it (optimum-neuron#619).

Attention: from 2.29 on NxD Inference calls ``attention_cte`` of the NKI Library through `nki.jit`, on Trainium2 and
newer only. In 2.28 it called private modules of the compiler (`neuronxcc.nki._pre_prod_kernels`), and on trn1 not with
cached rows.
"""


ENDS = (
    "AWS ends support for NxD Core, which backend 'neuron' uses, on Trn2 and Trn3 with SDK 2.34 (announcement of "
    "2026-10-16); use backend='neuron-native'"
)


def chip_of(name: str) -> Chip | None:
    """Return the chip of an instance type, as "inf2.48xlarge", or of a family; None if the chip is not supported."""
    return next((chip for chip in Chip if name.startswith(chip.value)), None)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, its meaning, and its source."""

    value: float
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class Engines:
    """Rates of a logical core, a second: operations of the tensor engine on 16-bit numbers and on float32, and elements
    that an operation of the vector and of the scalar engine goes over.
    """

    tensor_16: float
    tensor_32: float
    vector: float
    scalar: float
    source: str


_HARDWARE = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware"
_SIXTEENTH = "an operation on one element is assumed to take a sixteenth of a second's float32 operations"
_V2 = Engines(
    95e12, 23.75e12, 2.3e12 / 16, 2.9e12 / 16, f"half of {_HARDWARE}/inferentia2.html; neuron-core-v2; {_SIXTEENTH}"
)
ENGINES = {
    Chip.INF2: _V2,
    Chip.TRN1: _V2,
    Chip.TRN2: Engines(
        667e12 / 4, 181e12 / 4, 2e12 / 16, 2.4e12 / 16, f"{_HARDWARE}/trainium2.html; neuron-core-v3; {_SIXTEENTH}"
    ),
    Chip.TRN3: Engines(
        671e12 / 4, 183e12 / 4, 2.4e12 / 16, 2.4e12 / 16, f"{_HARDWARE}/trainium3.html; neuron-core-v4; {_SIXTEENTH}"
    ),
}
GATHERED = Figure(
    128 / 1e-6,
    "single numbers a second that are gathered by their places",
    "nki.isa.dma_copy takes a list of indices from SBUF (SDK 2.33, nki/api), whose tiles have at most 128 partitions "
    "(nki/about/tiling-overview); that an instruction takes one index a partition, and a microsecond, is assumed",
)
COLLECTIVE = Figure(
    45e-6,
    "seconds of a small collective",
    "fitted with the share of the bandwidth to AWS's plain decoding of Llama-2-7B and Llama-2-70B on 24 cores "
    "(`PUBLISHED`), to within 3 %, and rounded so that all others come out within a quarter; that every size up to "
    "160 KB, every degree and every chip takes the same is assumed. A profile of "
    "trn1.32xlarge has 14 us for a collective permute (aws-neuron-sdk#998), and AWS gives 1 to 10 us as the order of "
    "magnitude (neuron-runtime/explore/intranode-collective-comm, SDK 2.32)",
)
COLLECTIVE_SLOW = Figure(
    68e-6,
    "seconds of a small collective, at worst",
    "AWS publishes 6.42 ms per token for Llama-3-8B on 24 cores (about-neuron/benchmarks/inf2); the rest after "
    "reading int8 weights at 80 % of the bandwidth, divided by 65 collectives. A ring of 24 cores is the same: it is "
    "gone round twice, 46 hops of 1 to 2 us each (neuron-runtime/explore/intranode-collective-comm, SDK 2.32)",
)
LAUNCH = Figure(
    437e-6, "seconds of the host for a synchronous call", "vllm-neuron, design/framework/async_execution.md, on trn2"
)
BANDWIDTH_SHARE = Figure(
    0.57, "of the memory's bandwidth that reading weights reaches", "fitted with the collective's seconds, see there"
)
ROW = Figure(
    126e-6,
    "seconds that a further verified token takes, next to its operations",
    "fitted to 0.2 ms for each verified token of Llama-3.1-8B on a Trainium2 chip (tp 4; vLLM's plug-in with DFlash). "
    "The same source has 0.7 ms for Qwen3-4B, which no count of bytes and operations explains: it is the smaller model",
)
MAX_INSTRUCTIONS = Figure(5e6, "instructions of a compiled graph", "the compiler's limit: aws-neuron-sdk#819")
COMPILE = Figure(
    300.0,
    "seconds in which a graph compiles, on one CPU",
    "assumed: with -O1 a step of Llama-2-7B takes minutes, and hours at worst (transformers-neuronx#48, 2023-09)",
)
PROGRAM = Figure(
    10 << 20,
    "bytes of a compiled graph on a core",
    "assumed: 64 bytes for each of the 150,000 instructions counted for a round of Llama-3-8B and Llama-3.2-1B",
)
MICRO_CODE = Figure(
    96 << 20,
    "bytes of micro-code on a physical core, next to the programs",
    "neuron-runtime/explore/device-memory (SDK 2.33, 2026-10-15)",
)
TILE = Figure(
    128 * 512,
    "elements an instruction works on",
    "nl.tile_size of the SDK's matrix multiplication tutorial: pmax 128, gemm_moving_fmax 512, which are limits of the "
    "tensor engine; that other engines are given tiles of that size is assumed",
)


def compile_seconds(graphs: int, compilers: int) -> float:
    """Return the estimated seconds in which graphs compile, ``compilers`` at a time."""
    return -(-graphs // compilers) * COMPILE.value


def announcement(graphs: int, compilers: int, logical: int) -> str:
    """Return what is said before any graph is compiled. ``logical``: physical cores per logical core."""
    memory = logical * MICRO_CODE.value + graphs * PROGRAM.value
    return (
        f"{graphs} graphs, {compilers} at a time: about {compile_seconds(graphs, compilers) / 60:.0f} minutes for "
        f"those that the cache lacks, and about {memory / (1 << 20):.0f} MiB of programs a core, of which "
        f"{logical * 96} MiB are micro-code; an estimate, never measured"
    )


@dataclass(frozen=True, slots=True)
class Published:
    """A published time of plain decoding: what the cost model has to give, within a quarter.

    context       positions of the graph
    quantization  of the weights; None: 16 bits
    use           "fitted": `COLLECTIVE` and `BANDWIDTH_SHARE` were fitted to it; "viewed": it was in view when they
                  were rounded; "predicted": it was compared afterwards
    """

    model: str
    instance: str
    degree: int
    context: int
    seconds: float
    source: str
    slots: int = 1
    quantization: str | None = None
    use: str = "viewed"


_INF2 = "about-neuron/benchmarks/inf2/latency_data_decoder.csv, SDK 2.18, TPOT P50"
_TRN1 = "about-neuron/benchmarks/trn1/latency_data_decoder.csv, SDK 2.18, TPOT P50"
_INF2_BATCH, _TRN1_BATCH = (text.replace("latency", "throughput") for text in (_INF2, _TRN1))
_NXDI = "libraries/nxd-inference/tutorials, trn2-llama3"
PUBLISHED = (
    Published("Llama-2-7B", "inf2.48xlarge", 24, 4096, 6.47e-3, _INF2, use="fitted"),
    Published("Llama-2-70B", "inf2.48xlarge", 24, 1152, 33.15e-3, _INF2, use="fitted"),
    Published("Llama-2-13B", "inf2.48xlarge", 24, 4096, 9.17e-3, _INF2),
    Published("Llama-3-8B", "inf2.48xlarge", 24, 4096, 6.42e-3, _INF2, quantization="int8"),
    Published("Llama-3-70B", "inf2.48xlarge", 24, 1152, 32.47e-3, _INF2),
    Published("Llama-3-8B", "trn1.32xlarge", 32, 4096, 5.86e-3, _TRN1, quantization="int8"),
    Published("Llama-3-70B", "trn1.32xlarge", 32, 1152, 24.48e-3, _TRN1),
    Published(
        "Llama-3-8B", "trn2.48xlarge", 8, 640, 10.52e-3,
        "vllm-neuron, tutorial-eagle3-speculative-decoding-llama-3-1 (2026-08), TPOT of the baseline", slots=2,
    ),
    Published("Llama-3-70B", "trn2.48xlarge", 64, 11520, 19.6e-3, f"{_NXDI}.3-70b-tutorial, TPOT of the baseline"),
    Published("Llama-3-405B", "trn2.48xlarge", 64, 11520, 37.9e-3, f"{_NXDI}.1-405b, TPOT of the baseline"),
    Published("Llama-2-7B", "inf2.48xlarge", 24, 4096, 12.11e-3, _INF2_BATCH, slots=8, use="predicted"),
    Published("Llama-2-13B", "inf2.48xlarge", 24, 4096, 14.90e-3, _INF2_BATCH, slots=8, use="predicted"),
    Published("Llama-2-13B", "inf2.48xlarge", 24, 16384, 13.50e-3, _INF2, use="predicted"),
    Published(
        "Llama-3-8B", "trn1.32xlarge", 32, 4096, 7.65e-3, _TRN1_BATCH, slots=8, quantization="int8", use="predicted"
    ),
    Published("Llama-2-7B", "trn1.32xlarge", 32, 8192, 6.70e-3, _TRN1, use="predicted"),
    Published("Llama-2-70B", "trn1.32xlarge", 32, 1152, 27.21e-3, _TRN1_BATCH, slots=4, use="predicted"),
)  # fmt: skip
MISSED = (
    Published(
        "Llama-3-8B", "inf2.48xlarge", 24, 4096, 10.45e-3, _INF2_BATCH, slots=8, quantization="int8", use="predicted"
    ),
    Published("Llama-3-8B", "inf2.48xlarge", 24, 8192, 7.41e-3, _INF2, quantization="int8", use="predicted"),
)
"""Those of which the model gives less than three quarters."""

DRAFT_LENGTHS = (0, 1, 3, 4)
"""Draft lengths worth a graph on Neuron, where each takes minutes to compile. Published: 48.2 tokens/s with K = 3, 42.5
with K = 7, 31.5 without speculation (P-EAGLE on Trainium2, aws-neuron/nkipy).
"""
