"""Whether a plan can be run: checked before any process starts.

A plan may be made from configurations alone and for models that no backend here divides. Not here: whether there is
room (`planner`, `cluster.core_allocator`), or whether a worker's machine has what its backend needs.
"""

from __future__ import annotations

from paceline.core.errors import ConfigurationError, PlanError
from paceline.decoder.backends.registry import BACKENDS, why_not_cached, why_not_quantized
from paceline.decoder.models.rope_config import check_positions
from paceline.decoder.options import MAX_WIDTH
from paceline.placement.planning.plan import Plan


def check(plan: Plan) -> None:
    """Raise PlanError for the first model that cannot be loaded as it was planned."""
    for item in plan.placements:
        model, degree = item.model, len(item.cores)
        if model.folder is None:
            raise PlanError(f"{item.name} was planned from a configuration alone; give `path` to run it")
        if model.shape.n_positions > model.config.max_position_embeddings:
            raise PlanError(
                f"{item.name} was planned with n_positions={model.shape.n_positions}, more than the "
                f"{model.config.max_position_embeddings} it was trained on (max_position_embeddings); ask for fewer"
            )
        try:
            check_positions(model.config.rope, model.shape.n_positions)
        except ConfigurationError as error:
            raise PlanError(f"{item.name}: {error}") from error
        if (item.role == "draft" or model.speculative.draft) and model.k >= MAX_WIDTH:
            raise PlanError(
                f"{item.name} was planned with k={model.k}, and a target verifies at most {MAX_WIDTH - 1} drafted "
                "tokens a round; ask for fewer"
            )
        row = BACKENDS[model.backend]
        if reason := why_not_quantized(row, model.shape.quantization) or why_not_cached(
            row, model.shape.kv_cache_dtype
        ):
            raise PlanError(f"{item.name}: {reason}")
        if degree > 1 and not BACKENDS[model.backend].divided:
            able = ", ".join(row.name for row in BACKENDS.values() if row.divided)
            raise PlanError(
                f"{item.name} was planned on {degree} cores, and backend={model.backend!r} runs a model on one; give "
                f"`tp_degree: 1`, or a backend that divides a model: {able}"
            )
