"""An option is one field: a field added to its type appears in Python, on the command line, in models files, in the
settings of workers and in experiments, and its value arrives.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.decoder.tiny import Workshop

PROGRAM = """
import dataclasses, inspect, json, sys

folder = sys.argv[1]
from paceline.decoder import options

# In place of the real type before anybody reads it, as if the field stood there.
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(options.LoadOptions):
    vigour: int = dataclasses.field(default=3, metadata={"help": "How hard it tries."})

options.LoadOptions = LoadOptions

from pydantic import Field
from paceline import config

class SpeculativeConfig(config.SpeculativeConfig):
    eagerness: int = Field(default=3, description="How eagerly it drafts.")

config.SpeculativeConfig = SpeculativeConfig

from paceline.engine import sampling_params as sampling

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(sampling.SamplingParams):
    zest: int = sampling._param(3, sampling._Kind("an integer", least=1), "How fresh it is.")

sampling.SamplingParams = SamplingParams

from pathlib import Path
from typer.testing import CliRunner

import paceline
from paceline.auto import AutoDecoder
from paceline.cli.main import app
from paceline.draft_checks import prepared
from paceline.experiments import config as experiments
from paceline.loadable import loadable
from paceline.placement import FaultPolicy, plan
from paceline.placement.cluster import worker_spec
from paceline.placement.planning.instances import instance_named
from paceline.placement.planning.model_specs import models_of
from paceline.registry import DRAFTERS, options_of
from paceline.workers.config import WorkerConfig

found = {"python": "vigour" in inspect.signature(AutoDecoder.from_pretrained).parameters}
found["python too"] = "eagerness" in inspect.signature(paceline.SpeculativeConfig).parameters
found["loaded"] = loadable(folder, LoadOptions.of({"vigour": 5})).options.load.vigour
found["neuron_config"] = paceline.NeuronConfig.from_json(paceline.NeuronConfig(vigour=5).to_json()).load_options.vigour
for command in ("generate", "chat", "bench", "verify", "serve"):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    found[command] = "--vigour" in shown and "How hard it tries." in shown
    found[command + " too"] = command == "bench" or ("--eagerness" in shown and "How eagerly it drafts." in shown)
line = ["serve", "--target", folder, "--name", "m", "--vigour", "5", "--eagerness", "5", "--print-serve-config"]
printed = CliRunner().invoke(app, line).output
found["served"] = "vigour: 5" in printed and "eagerness: 5" in printed
entry = {"name": "m", "path": folder, "vigour": 5, "eagerness": 5}
(model,) = models_of([entry], folder=Path(), where="the file")
found["models file"], found["models file too"] = model.options.vigour, model.speculative.eagerness
placements = plan([model], instance_named("cpu")).placements
settings = worker_spec._settings(placements[0], placements, FaultPolicy())
found["settings"] = settings["vigour"]
found["settings too"], worker = settings["eagerness"], WorkerConfig.from_settings(settings)
found["worker"], found["worker too"] = worker.options.vigour, worker.speculative.eagerness
grid = {"drafters": ["none"], "prompt_sets": ["p"]}
both = [experiments.parse_config({**grid, "targets": ["t"], "vigour": 5, "eagerness": 5}, "f"),
        experiments.parse_config({**grid, "targets": [{"path": "t", "vigour": 5}],
                                  "drafters": [{"draft": "ngram", "eagerness": 5}]}, "f")]
found["experiment"] = [LoadOptions(**experiments.load_options(one, one.targets[0])).vigour for one in both]
cells = [next(experiments.cells(one)) for one in both]
drafting = [experiments.speculative_options(one, cell) for one, cell in zip(both, cells)]
found["experiment too"] = [SpeculativeConfig(**options).eagerness for options in drafting]
target = loadable(folder, LoadOptions(vigour=5))
draft, own = (prepared(SpeculativeConfig(draft=text), target).draft[0].value for text in (folder, f"{folder}:vigour=6"))
found["draft"] = [draft.options.load.vigour, own.options.load.vigour]
for command in ("generate", "chat"):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    found[command + " three"] = "--zest" in shown and "How fresh it is." in shown
line = ["generate", "--target", folder, "--prompt", "x", "--zest", "0"]
found["refused"] = "zest: expected a number of at least 1, got 0" in CliRunner().invoke(app, line).output
one = experiments.parse_config({**grid, "targets": ["t"], "samplings": [{"temperature": 0.5, "zest": 5}]}, "f")
found["experiment three"] = SamplingParams.asked(one.samplings[0].keys).zest

from paceline.serving import model_server
from paceline.serving.openai.requests import CompletionRequest
from paceline.serving.openai.fields import read_body

request = read_body(CompletionRequest, b'{"model": "m", "prompt": "x", "zest": 5}')
found["http"] = model_server.sampling_params(request, None).zest
print(json.dumps(found))
"""


def test_an_added_option_field_appears_in_every_interface(workshop: Workshop) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(workshop.checkpoint())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("experiment") == found.pop("experiment too") == [5, 5] and found.pop("draft") == [5, 6]
    assert all(value in (True, 5) for value in found.values()), found
