"""Residency: when a model is in memory, by the keys of a models file.

  - {name: chat, path: models/chat, pinned: true}
  - {name: code, path: models/code, load: on_demand, idle_ttl_s: 600}
  - {name: many, path: models/many, autoscaling: {min_replicas: 1, max_replicas: 4, target_ongoing_requests: 16}}

Values only. `groups` decides what to unload for another model; `paceline.serving.lifecycle` loads and unloads.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from paceline.core.errors import PlanError
from paceline.placement.planning.yaml_file import STRICT, Seconds

Load = Literal["eager", "on_demand"]

UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 30.0, 600.0  # Ray Serve's defaults


class Autoscaling(pydantic.BaseModel):
    """Number of replicas of a model that Ray Serve keeps; the names are those of its ``autoscaling_config``.

    target_ongoing_requests  requests of one replica at which the number stays as it is; None: its number of slots
    upscale_delay_s          seconds for which there are more before a replica is added
    downscale_delay_s        seconds for which there are fewer before one is removed
    """

    model_config = STRICT

    min_replicas: pydantic.NonNegativeInt = 1
    max_replicas: pydantic.PositiveInt
    target_ongoing_requests: Annotated[float, pydantic.Field(gt=0, le=10**6)] | None = None
    upscale_delay_s: Seconds = UPSCALE_DELAY_S
    downscale_delay_s: Seconds = DOWNSCALE_DELAY_S


class Residency(pydantic.BaseModel):
    """Times when a model is in memory; keys of an entry of ``models``.

    load         eager: from the start. on_demand: from its first request
    pinned       it is never unloaded for another model, nor by the operator before it is unpinned
    idle_ttl_s   seconds without a request after which it is unloaded; its next request loads it again. None: never
    autoscaling  Ray Serve chooses the number of replicas; None: it is fixed
    """

    model_config = STRICT

    load: Load = "eager"
    pinned: bool = False
    idle_ttl_s: Seconds | None = None
    autoscaling: Autoscaling | None = None

    def residency(self, where: str, *, batch_size: int, is_draft: bool, replicas: int | None) -> Residency:
        """Return these keys, checked and completed.

        Raises:
            PlanError: two keys contradict each other, or the model is a draft, which is loaded with its target.
        """
        names = sorted(self.model_fields_set & set(Residency.model_fields))
        if is_draft and names:
            raise PlanError(
                f"{where}: {names[0]} is a key of targets, and a draft is loaded with its target; remove it"
            )
        if self.pinned and (self.load == "on_demand" or self.idle_ttl_s is not None):
            raise PlanError(
                f"{where}: pinned: expected no load and idle_ttl_s with it, since a pinned model is never unloaded; "
                "remove `pinned`, or load and idle_ttl_s"
            )
        scaling = self.autoscaling
        if scaling is None:
            return Residency(load=self.load, pinned=self.pinned, idle_ttl_s=self.idle_ttl_s)
        if replicas is not None:
            raise PlanError(f"{where}: expected either replicas (a fixed number) or autoscaling, got both; remove one")
        if self.pinned or self.load == "on_demand":
            raise PlanError(
                f"{where}: autoscaling: expected no pinned and load with it, since Ray Serve then loads and unloads "
                "the model; set autoscaling.min_replicas to 1 or to 0 instead"
            )
        if scaling.min_replicas > scaling.max_replicas:
            raise PlanError(
                f"{where}: autoscaling.min_replicas: expected at most max_replicas={scaling.max_replicas}, got "
                f"{scaling.min_replicas}; correct one of them"
            )
        if self.idle_ttl_s is not None and scaling.min_replicas:
            raise PlanError(
                f"{where}: idle_ttl_s: expected autoscaling.min_replicas: 0 with it, so that the last replica can "
                "be unloaded; set it, or remove idle_ttl_s"
            )
        target = scaling.target_ongoing_requests or float(batch_size)
        scaling = scaling.model_copy(update={"target_ongoing_requests": target})
        return Residency(load=self.load, idle_ttl_s=self.idle_ttl_s, autoscaling=scaling)
