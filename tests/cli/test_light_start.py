"""Commands that decode nothing load no PyTorch, and what can be rejected is rejected before weights are opened.

The weights of the models here are no weights: opening them is an error of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click import Context
from typer.main import get_group

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.cli import main
from paceline.core.errors import ConfigurationError, MissingWeightsError, PairingError
from tests.cli.calling import call
from tests.decoder.tiny import Workshop

UNWANTED = ("torch", "transformers", "ray")
PROGRAM = f"""
import json, sys
from typer.testing import CliRunner
from paceline.cli.main import app
for arguments in json.load(sys.stdin):
    before = set(sys.modules)
    done = CliRunner().invoke(app, arguments)
    new = sys.modules.keys() - before
    print(json.dumps([done.exit_code, done.output, [name for name in {UNWANTED!r} if name in new]]))
"""
PLANNING = "paceline.placement.planning.planner; from paceline.placement import Plan, plan, read_models"
COMMANDS = [[name] for name in main.COMMANDS] + [[group, name] for group, rows in main.GROUPS.items() for name in rows]
GENERATE = ["generate", "--target", "TARGET", "--prompt", "def main"]


def outcomes(calls: list[list[str]]) -> list[tuple[int, str, list[str]]]:
    """Exit status, output, and imported modules of commands in a separate process, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(calls), capture_output=True, text=True, check=True
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("modules", "more"),
    [
        ("paceline", ["ray", "msgspec", "paceline.placement"]),
        ("paceline.placement", ["ray", "msgspec", "paceline.placement.planning"]),
        (PLANNING, ["ray", "msgspec", "paceline.placement.remote", "paceline.placement.cluster"]),
        ("paceline.core.protocols, paceline.placement.remote.messages", []),
        ("paceline.placement.cluster.core_allocator, paceline.serving.ray_app, paceline.serving.serve_lifecycle", []),
    ],
    ids=["the package", "placement", "planning", "messages", "services"],
)
def test_modules_that_do_not_decode_import_no_more_than_they_need(modules: str, more: list[str]) -> None:
    unwanted = ["torch", "transformers", *more]
    check = f"import sys, {modules}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_and_lists_need_no_pytorch() -> None:
    calls = [["--version"], ["--help"], ["list"], ["list", "--json"]]
    calls += [[*command, "--help"] for command in [*([group] for group in main.GROUPS), *COMMANDS]]
    for arguments, (status, output, imported) in zip(calls, outcomes(calls), strict=True):
        assert (status, imported) == (0, []), (arguments, output)


def test_generating_imports_neither_compilers_nor_transformers(home: Path) -> None:
    code = """
import sys
from typer.testing import CliRunner
from paceline.cli.main import app
done = CliRunner().invoke(app, sys.argv[1:])
watched = ("torch", "torch._dynamo", "sympy", "transformers", "ray")
print(done.exit_code, [name for name in watched if name in sys.modules])
"""
    pair = ["--target", str(home / "target"), "--draft", str(home / "draft"), "--backend", "native"]
    arguments = [sys.executable, "-c", code, "generate", *pair, "--prompt", "def main", "--max-new-tokens", "4"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout == "0 ['torch']\n"


def test_a_command_ends_without_garbage_collection() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))
from paceline.cli.main import app
app(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"


def test_completion_names_commands_and_options() -> None:
    for words, expected in (("paceline gen", "generate"), ("paceline generate --dra", "--draft")):
        code = f"""
import os, sys
os.environ.update(_PACELINE_COMPLETE="complete_bash", COMP_WORDS={words!r}, COMP_CWORD={str(words.count(" "))!r})
import atexit
atexit.register(lambda: print("torch" in sys.modules))
from paceline.cli.main import app
app(prog_name="paceline")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.split() == [expected, "False"], done.stderr


def test_command_summaries_equal_those_of_the_commands() -> None:
    shown = get_group(main.app)
    found = []
    for name, rows in {"": main.COMMANDS, **main.GROUPS}.items():
        group = shown.commands[name] if name else shown
        group.list_commands(Context(group))
        for command, module in rows.items():
            help_text = get_group(import_module(f"paceline.cli.{module}").app).commands[command].help or ""
            assert " ".join(help_text.split("\n\n")[0].split()) == group.commands[command].help, command
            found.append((module, command))
    modules = {module for module, _ in found}
    every = [(m, name) for m in modules for name in get_group(import_module(f"paceline.cli.{m}").app).commands]
    assert sorted(found) == sorted(every)


def filled(folder: Path, arguments: list[str]) -> list[str]:
    names = {"TARGET": folder / "target", "DRAFT": folder / "draft", "FOLDER": folder}
    for name, value in names.items():
        arguments = [argument.replace(name, str(value)) for argument in arguments]
    return arguments


REFUSALS: list[tuple[list[str], str]] = [
    *(
        ([*GENERATE, *arguments], message)
        for arguments, message in [
            (["--draft", "nosuch"], "draft: expected a folder or one of"),
            (["--draft", "ngram:size=3"], "'size' is not an option"),
            (["--draft", "ngram:prompt_lookup_min=5"], "expected 1 <= prompt_lookup_min <= prompt_lookup_max"),
            (["--draft", "suffix:corpus=nosuch.bin"], "corpus: expected a file of token ids, got nosuch.bin"),
            (["--draft", "DRAFT", "--k", "500"], "got 501"),
            (["--draft", "DRAFT", "--k", "x"], "got 'x'"),
            (["--draft", "medusa"], "medusa:path=DIR"),
            (["--draft", "ngram", "--vocabulary", "intersection"], "expected a draft model with it, got none"),
            (["--synthetic-acceptance", "0.5"], "expected a drafter with it, got draft=None; give a draft"),
            (["--draft", "ngram", "--synthetic-acceptance", "0.5", "--acceptor", "reject"], "one of them"),
            (["--draft", "DRAFT:amp=x"], "got 'x'"),
            (["--draft", "DRAFT:batch_sise=2"], "'batch_sise' is not an option"),
            (["--draft", "ngram", "--fused"], "cannot share a graph"),
            (["--draft", "ngram", "--acceptor", "nosuch"], "got 'nosuch'"),
            (["--draft", "ngram", "--acceptor", "typical:epsilon=7"], "epsilon: expected a number between 0 and 1"),
            (["--draft", "ngram", "--draft", "suffix", "--acceptor", "reject"],
             "acceptor: expected 'match' for a list of drafters, none of"),
            (["--draft", "ngram", "--acceptor", "typical", "--logprobs", "1"], "decides on the device"),
            (["--max-new-tokens", "0"], "max_new_tokens: expected at least 1"),
            (["--temperature", "-1"], "temperature: expected a finite number of at least 0, got"),
            (["--prompt", ""], "the prompt: expected text"),
            (["--backend", "native", "--tp-degree", "2"], "got 2; for tensor parallelism use one of eager, neuron"),
            (["--tp-degree", "0"], "tp_degree: expected a number of ranks of at least 1, got"),
            (["--backend", "eager", "--tp-degree", "2", "--group-query-attention", "thrifty"], "got 'thrifty'"),
            (["--top-p", "2"], "top_p: expected a number above 0 and at most 1"),
            (["--logprobs", "99"], "logprobs: expected a number from 0 to 20"),
            (["--presence-penalty", "3"], "presence_penalty: expected a number from -2 to 2"),
            (["--stop", ""], "stop_strings: expected strings that are not empty, got an"),
            (["--json-schema", "nosuch.json"], "nosuch.json: the file cannot be read"),
            (["--regex", "a", "--json-schema", "nosuch.json"], "give one of them"),
            (["--backend", "nosuch"], "got 'nosuch'"),
            (["--backend", "xla", "--tp-degree", "2"], "tp_degree: expected 1 for backend="),
            (["--backend", "xla", "--kv-cache-dtype", "int8"], "keeps keys and values as amp says"),
            (["--quantization", "nosuch"], "got 'nosuch'"),
            (["--quantization", "gguf"], "expected a GGUF file"),
            (["--kv-cache-dtype", "nosuch"], "got 'nosuch'"),
            (["--amp", "nosuch"], "got 'nosuch'"),
            (["--batch-size", "0"], "batch_size: expected a positive number"),
            (["--n-positions", "4096"], "n_positions: expected at most 512"),
            (["--prompt-file", "nosuch.txt"], "one of them"),
            (["--nosuch"], "No such option"),
        ]
    ),
    (["generate", "--target", "nosuch", "--prompt", "x"], "nosuch: expected a folder"),
    (["generate", "--target", "FOLDER", "--prompt", "x"], "config.json"),
    (["chat", "--target", "TARGET", "--draft", "nosuch"], "draft: expected a folder or one of"),
    (["chat", "--target", "TARGET", "--max-new-tokens", "0"], "expected at least 1"),
    (["compile", "--target", "TARGET", "--draft", "nosuch"], "draft: expected a folder or one of"),
    (["compile", "--target", "TARGET", "--draft", "DRAFT", "--k", "500"], "got 501"),
    (["compile", "--target", "TARGET", "--sampling", "nosuch"], "expected one or more of greedy"),
    (["bench", "--target", "TARGET", "--draft", "nosuch", "--prompts", "FOLDER/prompts.jsonl"],
     "draft: expected a folder or one of"),
    (["bench", "--target", "TARGET", "--draft", "DRAFT", "--prompts", "nosuch.jsonl"],
     "nosuch.jsonl: the file cannot be read"),
    (["bench", "--target", "TARGET", "--draft", "DRAFT", "--prompts", "FOLDER/prompts.jsonl", "--k", "500"], "got 501"),
    (["verify", "--target", "TARGET", "--draft", "nosuch"], "draft: expected a folder or one of"),
    (["verify", "--target", "TARGET", "--batch-sizes", "x"], "expected numbers from 1 on"),
    (["serve", "--target", "TARGET", "--draft", "nosuch"], "nosuch"),
    (["serve", "--target", "TARGET", "--draft", "ngram", "--k", "500"], "expected at most 127 draft tokens"),
    (["serve", "--target", "TARGET", "--draft", "ngram:size=3"], "'size' is not an option"),
    (["serve", "--target", "TARGET", "--backend", "nosuch"], "nosuch"),
    (["serve", "--target", "TARGET", "--host", "0.0.0.0"], "makes the server reachable for others"),
    (["serve", "--target", "nosuch"], "nosuch: expected a folder"),
    (["experiment", "run", "FOLDER/experiment.yaml", "--dry-run"], "nosuch"),
    (["experiment", "run", "nosuch.yaml", "--dry-run"], "nosuch.yaml"),
    (["train", "medusa", "--target", "TARGET", "--data", "x", "--out", "x", "--length", "0"],
      "prompt: expected 1 <= prompt < length, and eval_samples of"),
    (["train", "eagle", "--target", "TARGET", "--data", "x", "--out", "x", "--loss", "kl"],
      "loss: expected one of ce, lk_hybrid, nla, got 'kl'"),
    (["plan", "nosuch.yaml"], "nosuch.yaml: the file cannot be read"),
    (["nosuch"], "No such command"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trap(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft that can be looked at and not be loaded."""
    folder = tmp_path_factory.mktemp("trap")
    for name in ("target", "draft"):
        shutil.copytree(home / name, folder / name)
        (folder / name / "model.safetensors").write_bytes(b"no weights")
    (folder / "prompts.jsonl").write_text('{"prompt": "def main"}\n')
    models = {"targets": ["target"], "drafters": [{"draft": "nosuch"}], "prompt_sets": [{"path": "prompts.jsonl"}]}
    (folder / "experiment.yaml").write_text(json.dumps({"name": "x", **models}))
    return folder


@pytest.fixture(scope="module")
def refused(trap: Path) -> list[tuple[int, str, list[str]]]:
    return outcomes([filled(trap, arguments) for arguments, _ in REFUSALS])


def test_opening_the_test_weights_raises(trap: Path) -> None:
    done = call(*filled(trap, [*GENERATE, "--backend", "eager", "--draft", "ngram", "--n-positions", "64"]))
    assert done.exit_code == 2 and "model.safetensors" in done.stderr


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=lambda number: " ".join(REFUSALS[number][0])[:100])
def test_invalid_options_are_rejected_before_pytorch(refused: list[tuple[int, str, list[str]]], number: int) -> None:
    (status, output, imported), (_, message) = refused[number], REFUSALS[number]
    words = " ".join(output.replace("│", " ").split())  # typer's own errors are in a box
    assert status == 2 and message in words and "Traceback" not in words, output
    assert imported == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nosuch"}, "got 'nosuch'"),
        ({"n_positions": 4096}, "n_positions: expected at most 512"),
        ({"kv_cache_dtype": "nosuch"}, "got 'nosuch'"),
    ],
)
def test_python_calls_are_rejected_before_weights_open(trap: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AutoDecoder.from_pretrained(trap / "target", **{"backend": "eager", **options})  # type: ignore[arg-type]
    with pytest.raises(MissingWeightsError):
        AutoDecoder.from_pretrained(trap / "target", backend="eager")


def test_an_invalid_draft_is_rejected_before_it_is_loaded(workshop: Workshop, trap: Path) -> None:
    target, draft = workshop.decoder(), str(trap / "draft")
    words = "acceptor: expected 'match' for a list of drafters, none of"
    for options, message in (
        ({"draft": f"{draft}:k=500"}, "got 501"),
        ({"draft": f"{draft}:amp=x"}, "got 'x'"),
        ({"draft": ["ngram", draft], "acceptor": "reject"}, words),
        ({"draft": draft}, "the vocabularies of 280"),
    ):
        with pytest.raises((ConfigurationError, PairingError), match=message):
            SpeculativeGenerator(target=target, **options)  # type: ignore[arg-type]
