"""The order in which files of tests run: the long ones first, so that no process is left with one at the end.

Files are named, not timed: a run says at its end which file took long and is not named here. All files that use Ray are
one piece of work, so that one cluster is started and a single process waits for it. Contains no tests.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

RAY = (
    "tests/serving/test_serving.py",
    "tests/placement/test_ray.py",
    "tests/serving/test_serve_deploy.py",
    "tests/smollm2/test_served.py",
    "tests/placement/test_core_allocator.py",
    "tests/experiments/test_parallel.py",
    "tests/placement/test_starting.py",
    "tests/serving/test_served_process.py",
)
"""Files that use the fixture `cluster`: the longest piece, most of it spent waiting for other processes."""

LONG = (
    "tests/neuron/test_start_page.py",
    "tests/equality/test_matrix.py",
    "tests/decoder/test_ranks.py",
    "tests/smollm2/test_modes.py",
    "tests/target/test_table_laws.py",
    "tests/target/test_three_ids.py",
    "tests/placement/test_processes.py",
    "tests/smollm2/test_real_model.py",
    "tests/eagle/test_divided_heads.py",
    "tests/decoder/test_batch_buckets.py",
    "tests/checks/test_verify.py",
    "tests/docs/test_blocks.py",
    "tests/placement/test_remote.py",
    "tests/decoder/test_team.py",
    "tests/cli/test_light_start.py",
    "tests/serving/test_edge_engine.py",
    "tests/target/test_depth_laws.py",
    "tests/cli/test_cli.py",
    "tests/decoder/test_families.py",
    "tests/decoder/test_gguf.py",
    "tests/decoder/test_sampling_kinds.py",
    "tests/experiments/test_run.py",
    "tests/contract/test_contract.py",
    "tests/neuron/test_backend.py",
    "tests/serving/test_service_files.py",
    "tests/decoder/test_load_memory.py",
    "tests/decoder/test_family_modes.py",
    "tests/neuron/test_round_cost.py",
    "tests/neuron/test_lowering.py",
    "tests/neuron/test_noise_record.py",
    "tests/neuron/test_loading.py",
    "tests/neuron/test_native.py",
    "tests/neuron/test_sampling_costs.py",
    "tests/neuron/test_prompt_attention.py",
    "tests/neuron/test_float32_integers.py",
    "tests/neuron/test_graph_sampling.py",
    "tests/neuron/test_install.py",
    "tests/decoder/test_coded.py",
    "tests/draft/test_mtp.py",
    "tests/eagle/test_learning.py",
    "tests/decoder/test_buckets.py",
    "tests/docs/test_results.py",
)
"""The other files that take long, the longest first."""

_PLACES = {file: place for place, file in enumerate((*RAY, *LONG))}
_LONG_S = 20.0


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.split("::", 1)[0]


def scope_of(nodeid: str) -> str:
    """Files that run in one process from beginning to end."""
    file = file_of(nodeid)
    return "ray" if file in RAY else file


def arrange(items: list[pytest.Item]) -> None:
    """Put tests of long files first; the order is otherwise as it was."""
    items.sort(key=lambda item: _PLACES.get(file_of(item.nodeid), len(_PLACES)))


def unnamed(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Files that took long and are not named, with their seconds; those of XLA run in one process, in any order."""
    seconds: dict[str, float] = {}
    for report in reports:
        file = file_of(report.nodeid)
        seconds[file] = seconds.get(file, 0.0) + report.duration
    return {
        file: taken
        for file, taken in seconds.items()
        if taken > _LONG_S and file not in _PLACES and not file.startswith("tests/xla/")
    }
