"""Requests that sample are rejected on Neuron until the check of the noise has passed with that SDK on that machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.checks import doctor, selftest
from paceline.checks.findings import Finding
from paceline.core.errors import SamplingError, StorageError
from paceline.decoder import environment
from paceline.decoder.backends.base import Graph, Step
from paceline.neuron import backend as neuron
from paceline.neuron import noise_record
from paceline.neuron import sdk as neuron_sdk
from tests.decoder.tiny import Workshop
from tests.neuron.conftest import SDK, forget, load

PROMPT = [[3, 1, 4, 1, 5]]
HOT = {"max_new_tokens": 2, "do_sample": True, "temperature": 1.2, "top_k": 8}
REMEDY = (
    r"refused on backend='neuron' until .* on inf2 with neuronx-cc 2\.23\.6484\.0, .*paceline selftest --backend neuron"
)


@pytest.fixture
def machine(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a noise check; the cheap parts of the self-test run on it."""
    install()
    monkeypatch.setattr(selftest, "VOCABULARY", 40)


def decoder(workshop: Workshop, backend: str = "neuron") -> Any:
    return load(workshop, backend=backend, slots=1)


def check_noise() -> Finding:
    return next(selftest.run("neuron"))


def test_sampling_is_refused_until_the_check_has_passed(workshop: Workshop, machine: None) -> None:
    target = decoder(workshop)
    for call in (target.sample, target.stream):
        with pytest.raises(SamplingError, match=REMEDY) as caught:
            call(PROMPT, **HOT)
        assert caught.value.param == "temperature"
    greedy = target.sample(PROMPT, max_new_tokens=2).tolist()
    assert target.sample(PROMPT, **{**HOT, "temperature": 0.0}).tolist() == greedy
    passed = check_noise()
    assert passed.passed and "recorded" in passed.seen
    assert decoder(workshop).sample(PROMPT, **HOT).tolist() == decoder(workshop, "eager").sample(PROMPT, **HOT).tolist()


def test_a_draft_on_neuron_is_rejected_until_the_check_has_passed(workshop: Workshop, machine: None) -> None:
    pair = SpeculativeGenerator(decoder(workshop), decoder(workshop, "eager"), k=2, acceptor="reject")
    with pytest.raises(SamplingError, match=REMEDY):
        pair.sample(PROMPT, **HOT)


def test_a_record_is_written_atomically_with_its_facts(machine: None) -> None:
    assert check_noise().passed
    (manifest,) = (environment.cache_root() / "neuron" / "noise").glob("*/manifest.json")
    held = json.loads(manifest.read_text())
    assert {name: held[name] for name in SDK} == SDK
    assert (held["target"], held["torch"]) == ("inf2", torch.__version__)
    assert {"instance", "driver", "runtime", "flags", "source", "logical cores"} <= held.keys()
    status = {finding.name: finding.status for finding in doctor.examine()}
    assert status["sampling on 'neuron'"] == "ok"


@pytest.mark.parametrize("what", ["instance", "driver", "runtime", "compiler"])
def test_a_record_of_another_machine_or_version_is_ignored(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    install()
    sdk = neuron_sdk.find()
    noise_record.write(sdk, outcome=True)
    assert noise_record.passed(sdk)
    (tmp_path / "other").write_text("2.27.1\n")
    if what == "compiler":
        versions = {**dict(zip(SDK, sdk.versions, strict=True)), "neuronx-cc": "2.23.9999.0"}
        sdk = neuron_sdk.Sdk(sdk.chip, sdk.minor, tuple(versions.values()), sdk.logical)
    elif what == "instance":
        monkeypatch.setattr(neuron_sdk, "instance_family", lambda: "inf2.48xlarge")
    else:
        monkeypatch.setattr(noise_record, "DRIVER" if what == "driver" else "_RUNTIME", tmp_path / "other")
    assert not noise_record.passed(sdk)
    status = {finding.name: finding.status for finding in doctor.examine()}
    assert status["sampling on 'neuron'"] == ("ok" if what == "compiler" else "note")


@pytest.mark.parametrize("broken", ["wrong words", "raises"])
def test_a_failed_check_removes_an_older_record(machine: None, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    assert check_noise().passed
    forget()
    original = neuron.NeuronBackend.compile

    def compile_wrongly(self: neuron.NeuronBackend, graph: Graph, announce: Callable[[str], None]) -> Step:
        if broken == "raises":
            raise RuntimeError("the device is on fire")
        step = original(self, graph, announce)
        return lambda *given: [out + 1 for out in step(*given)]

    monkeypatch.setattr(neuron.NeuronBackend, "compile", compile_wrongly)
    failed = check_noise()
    assert not failed.passed and failed.seen.startswith(("480 of 480 limbs differ", "RuntimeError"))
    assert not noise_record.passed(neuron_sdk.find())


def test_a_selftest_with_failed_noise_compares_greedy_texts(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "NEW", 3)
    monkeypatch.setattr(selftest, "VOCABULARY", 512)
    monkeypatch.setattr(selftest, "_noise", lambda _backend: (False, "wrong"))
    checks = selftest.run("neuron")
    assert not next(checks).passed
    plain = next(checks)
    assert plain.passed and "greedy texts alone" in plain.seen
    checks.close()  # type: ignore[attr-defined]


def test_a_record_that_cannot_be_written_is_a_named_error(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="PACELINE_CACHE"):
        noise_record.write(neuron_sdk.find(), outcome=True)
