"""Pairs of chip and SDK, and the messages for those that do not fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import BackendError, ConfigurationError
from paceline.neuron import backend
from paceline.neuron import sdk as neuron_sdk
from paceline.neuron.chips import CAPABILITIES, Chip
from paceline.neuron.sdk import Sdk
from paceline.placement.planning.instances import INSTANCES
from tests.neuron.conftest import SDK, forget


@pytest.mark.parametrize(
    ("target", "compiler", "line", "examined"),
    [
        ("inf2", "2.23.6484.0", 28, True), ("inf2", "2.26.6360.0", 31, True), ("trn1", "2.26.6360.0", 31, True),
        ("trn2", "2.24.5133.0", 29, True), ("trn2", "2.26.1.0", 31, True),
        ("inf2", "2.24.5133.0", 29, False), ("trn1", "2.27.5334.0", 32, False), ("trn2", "2.28.7631.0", 33, False),
        ("trn2", "2.22.1.0", 27, False),
    ],
)  # fmt: skip
def test_pairs_of_chip_and_sdk_are_accepted_with_a_warning_for_unknown_releases(
    install: Any, caplog: pytest.LogCaptureFixture, target: str, compiler: str, line: int, examined: bool
) -> None:
    install({**SDK, "neuronx-cc": compiler}, target=target)
    found = neuron_sdk.find()
    assert (found.chip.value, found.minor, found.facts()["neuronx-cc"]) == (target, line, compiler)
    warning = f"on {target} releases 2.28, " in caplog.text and "may work or not" in caplog.text
    assert warning is not examined and (not examined or not caplog.records)


def test_torchneuron_is_rejected_by_the_neuron_backend(install: Any) -> None:
    install({**SDK, "torch-neuronx": "2.13.3.0", "neuronx-cc": "2.28.7631.0"}, target="trn2")
    with pytest.raises(BackendError, match=r"torch-neuronx: expected 2\.9, .* got 2\.13\.3\.0; .*neuron-native"):
        neuron_sdk.find()


def test_a_missing_sdk_names_the_remedy(install: Any) -> None:
    install({}, code=False)
    with pytest.raises(BackendError, match=r"needs neuronx-cc, which is not installed; set up the Neuron SDK"):
        backend.NeuronBackend()
    assert "torch_neuronx" not in sys.modules


@pytest.mark.parametrize(
    ("package", "version"),
    # The first three are what the public index has (looked up in November 2026).
    [
        ("torch-neuronx", "1.0"), ("neuronx-cc", "1.0.post1"), ("neuronx-distributed", "0.1"),
        ("torch-neuronx", "0.0.1"), ("neuronx-cc", "1"),
    ],
)  # fmt: skip
def test_placeholders_of_the_public_index_are_recognised(install: Any, package: str, version: str) -> None:
    install({**SDK, package: version})
    with pytest.raises(BackendError, match="is an empty placeholder; uninstall it and"):
        neuron_sdk.find()


def test_every_package_is_known_by_the_module_its_wheel_installs(install: Any, tmp_path: Path) -> None:
    """AWS's own check of the compiler is `python -c "import neuronxcc"`; there is no module neuronx_cc."""
    install(code=False)
    with pytest.raises(BackendError, match="placeholder"):
        neuron_sdk.find()
    for module in neuron_sdk.PACKAGES.values():
        (tmp_path / "site" / module).mkdir()
        (tmp_path / "site" / module / "__init__.py").touch()
    forget()
    assert neuron_sdk.find().minor == 28


@pytest.mark.parametrize(("target", "words"), [("trn3", "TorchNeuron"), ("", "no Neuron"), ("inf1", "no Neuron")])
def test_unsupported_chips_are_rejected(install: Any, monkeypatch: pytest.MonkeyPatch, target: str, words: str) -> None:
    install(target=target)
    if not target:
        monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
        monkeypatch.setattr(neuron_sdk, "instance_family", lambda: "")
    with pytest.raises(BackendError, match=words):
        neuron_sdk.find()


def test_logical_core_settings_are_read(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(target="trn2")
    assert neuron_sdk.find().logical == 2
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert neuron_sdk.find().logical == 1
    for wrong, error in (("8", BackendError), ("two", ConfigurationError)):
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", wrong)
        with pytest.raises(error, match="NEURON_LOGICAL_NC_CONFIG"):
            neuron_sdk.find()


def test_the_environment_is_required_before_the_import(install: Any) -> None:
    install()
    import torch_neuronx  # noqa: F401

    with pytest.raises(BackendError, match="imported before NEURON_RT_EXEC_TIMEOUT"):
        backend.NeuronBackend()


def test_compiler_flags_depend_on_the_chip() -> None:
    old, new = Sdk(Chip.INF2, 28, ("2.23", "2.9", "0.17"), 1), Sdk(Chip.TRN2, 31, ("2.26", "2.9", "0.19"), 2)
    assert "-O1" in old.flags(prompt=True) and "-O2" in old.flags(prompt=False)
    assert "--lnc" not in old.flags(prompt=True) and "--lnc=2" in new.flags(prompt=True)
    assert "--auto-cast=none" in old.flags(prompt=False)
    assert [made.flags(prompt=True).count("e4m3") for made in (old, new)] == [0, 0]
    assert [made.flags(prompt=False, e4m3=True).count("fp8e4m3fn-as-fp8e4m3") for made in (old, new)] == [1, 1]


def test_the_planner_uses_releases_and_degrees_of_the_backend() -> None:
    for name, machine in INSTANCES.items():
        if not machine.sdk:
            continue
        able = CAPABILITIES[Chip(name[:4])]
        assert machine.sdk == f"2.{able.lines[-1]}", f"{name} is planned for a line that backend 'neuron' refuses"
        assert set(machine.degrees) <= set(able.degrees)
        assert not machine.logical or machine.logical == able.logical[0]


@pytest.mark.parametrize(("chip", "good", "bad"), [(Chip.INF2, 24, 16), (Chip.TRN1, 8, 4), (Chip.TRN2, 64, 24)])
def test_supported_degrees_depend_on_the_chip(chip: Chip, good: int, bad: int) -> None:
    sdk = Sdk(chip, 28, (), 1)
    sdk.check_degree(good)
    with pytest.raises(BackendError, match=f"tp_degree: expected .*, got {bad}"):
        sdk.check_degree(bad)
