"""The HTTP edge as a deployment of Ray Serve. What it answers is in `paceline.serving.api`; it holds no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve

from paceline.serving.api import create_app
from paceline.serving.serve_router import ModelRoute, ServeRouter
from paceline.serving.settings import ApiSettings


@serve.ingress()
class Ingress:
    """``handles``: model -> handle of its deployment."""

    def __init__(self, handles: Mapping[str, Any], settings: ApiSettings) -> None:
        self._router = ServeRouter({model: ModelRoute(handle) for model, handle in handles.items()})
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve calls it in the replica."""
        return create_app(self._router, self._settings)
