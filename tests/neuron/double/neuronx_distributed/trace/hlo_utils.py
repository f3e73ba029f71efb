"""What ModelBuilder V2 does to traced modules for a priority model. A layout here is: every matrix is transposed."""

from __future__ import annotations

import json
from pathlib import Path


def mark_weights_for_wlo(trace_artifacts, weights_to_skip_layout_optimization=None):
    skipped = weights_to_skip_layout_optimization or set()
    if invalid := skipped - set(trace_artifacts.weight_name_to_idx):
        raise RuntimeError(f"Invalid weights in skip set: {invalid}")
    hlo, shapes = trace_artifacts.hlo, trace_artifacts.metaneff.weights
    hlo.marked = set(trace_artifacts.weight_name_to_idx) - skipped
    hlo.laid = {name for name in hlo.marked if len(shapes[name][0]) == 2}


def apply_layout_transformation(trace_artifacts, priority_model_trace_artifacts, wlo_artifacts, key=None):
    if priority_model_trace_artifacts.hlo.marked is None:
        raise RuntimeError("the priority model was not marked")
    if not trace_artifacts.weight_name_to_idx:
        raise RuntimeError(f"{key}: no weights were found in the graph")
    wanted = json.loads(Path(wlo_artifacts.wrapped_neff_hlo_filepath).read_text())
    trace_artifacts.hlo.laid = set(wanted) & set(trace_artifacts.weight_name_to_idx)
