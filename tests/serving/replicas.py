"""Replicas of this process, without cores and Ray, and handles of models that come and go; no tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from paceline.serving.metrics import MetricSet
from paceline.serving.model_server import ModelServer
from paceline.serving.ray_guard import Readers
from paceline.serving.replica import ModelReplica, _Requests


class BareReplica(ModelReplica):
    """Over a model server."""

    def __init__(self, server: ModelServer) -> None:
        self._server, self._metrics = server, MetricSet("m", "0")
        self._readers, self._requests = Readers(), _Requests()

    def _check(self) -> None:
        """Its engine is well."""


class LocalHandle:
    """A deployment's handle. While there is no replica of it in ``replicas``, a request waits, as it does at Serve."""

    def __init__(self, name: str, replicas: Mapping[str, BareReplica]) -> None:
        self._name, self._replicas, self._method = name, replicas, ""

    def options(self, **_: object) -> LocalHandle:
        return self

    def __getattr__(self, method: str) -> LocalHandle:
        if method.startswith("_"):
            raise AttributeError(method)
        asked = LocalHandle(self._name, self._replicas)
        asked._method = method
        return asked

    def remote(self, *arguments: object) -> Any:
        return Answer(self, arguments) if self._method == "stream" else self._asked(arguments)

    def broadcast(self, method: str, *arguments: object) -> LocalHandle:
        if self._name not in self._replicas:
            raise RuntimeError(f"nobody answers {method}")
        asked: LocalHandle = getattr(self, method)
        asked._arguments = arguments  # type: ignore[attr-defined]
        return asked

    async def results_async(self, **_: object) -> list[Any]:
        try:
            return [await self._asked(self.__dict__["_arguments"])]
        except Exception as error:
            return [error]

    async def _there(self) -> BareReplica:
        while self._name not in self._replicas:
            await asyncio.sleep(0.005)
        return self._replicas[self._name]

    async def _asked(self, arguments: tuple[object, ...]) -> Any:
        return await getattr(await self._there(), self._method)(*arguments)


class Answer:
    """Items of a stream."""

    def __init__(self, handle: LocalHandle, arguments: tuple[Any, ...]) -> None:
        self._handle, self._arguments = handle, arguments

    async def __aiter__(self) -> AsyncIterator[Any]:
        replica = await self._handle._there()
        async for message in replica.stream(*self._arguments):
            yield message

    def cancel(self) -> None:
        """Reader that has disconnected."""
