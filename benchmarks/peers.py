"""Race Paceline with other programs on SmolLM2, in turns on one machine. JSON on the last line.

    make peers                                                  all of them
    python benchmarks/peers.py --llama DIR                      llama.cpp alone; DIR has llama-bench and llama-server
    python benchmarks/peers.py --llama DIR --only "int8|Q8_0"   sides whose names match
    python benchmarks/peers.py --llama DIR --turns 1 --keep F   in parts: turns that F has from earlier calls count, too

In a turn every side answers the same prompts greedily, one after the other. `steady` is tokens a second after the
prompts, as the program reports it (llama-bench: its own test of 64 tokens), and `whole` counts the prompts; both are
medians of the turns. `--processor x86-64-v3` takes kernels for AVX2 on our side and keeps PyTorch to it; --ggml names
llama.cpp's libraries of that kind. A side that does not start is named with the reason.

llama-quantize makes llama.cpp's files from the fetched one, its converter those of the draft model and the EAGLE-3 head
of examples/smollm2, which llama.cpp runs as well. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, free_port, publish
from safetensors.torch import load_file, save_file

from paceline.decoder import environment
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.native.compiler import PROCESSORS
from paceline.decoder.weights.hub import checkpoint_path
from paceline.experiments.config import PromptSet
from paceline.experiments.prompts import load_prompts
from paceline.text.tokenizer import load_tokenizer

HEAD, DRAFT = ROOT / "examples" / "smollm2" / "eagle3", ROOT / "examples" / "smollm2" / "draft"
FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
NGRAMS = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "6")
PEERS = ("openvino", "onnxruntime", "mlx", "transformers")
BENCH_TOKENS = 64
MARK = "peers: "
Row = dict[str, Any]  # side, tokens, seconds, prompt_seconds


class Worker:
    """A process that holds the modes of one program (peers_worker.py)."""

    def __init__(self, python: Path, program: str, asked: dict[str, Any], variables: dict[str, str]) -> None:
        command = [str(python), str(Path(__file__).with_name("peers_worker.py")), program]
        pipe, environment = subprocess.PIPE, os.environ | variables
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.names: list[str] = self._answer(asked)

    def _answer(self, question: object) -> Any:
        streams = self._process.stdin, self._process.stdout
        assert streams[0] is not None and streams[1] is not None
        print(json.dumps(question), file=streams[0], flush=True)
        answer = next((line for line in streams[1] if line.startswith(MARK)), None)  # others are the program's own
        if answer is None:
            raise SystemExit("its process ended; see its errors above")
        return json.loads(answer.removeprefix(MARK))

    def run(self, name: str) -> Row:
        return {"side": name, **self._answer(name)}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class LlamaBench:
    """llama-bench, a process in each turn."""

    def __init__(self, program: Path, file: Path, variables: dict[str, str]) -> None:
        self.names = [f"llama.cpp {file.stem}, plain (llama-bench)"]
        self._command = [str(program), "-m", str(file), "-p", "0", "-n", str(BENCH_TOKENS), "-r", "2", "-o", "json"]
        self._command += ["-t", str(environment.threads(environment.cores()))]
        self._variables = variables

    def run(self, name: str) -> Row:
        (found,) = json.loads(subprocess.check_output(self._command, env=os.environ | self._variables))
        return {"side": name, "tokens": BENCH_TOKENS, "seconds": BENCH_TOKENS / found["avg_ts"], "prompt_seconds": None}

    def close(self) -> None:
        """Nothing is left running."""


class LlamaServer:
    """llama-server in one format, with one kind of speculation."""

    def __init__(self, command: Sequence[str], name: str, log: Path, asked: dict[str, Any], variables: dict[str, str]):
        self.names, self._asked = [name], asked
        port, cores = str(free_port()), str(environment.threads(environment.cores()))
        self._url = f"http://127.0.0.1:{port}"
        own = ["--port", port, "-c", "1024", "-np", "1", "-t", cores, "-tb", cores, "--no-ui"]
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [*command, *own], env=os.environ | variables, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait()
        except SystemExit:
            self.close()
            raise

    def _wait(self) -> None:
        for _ in range(600):
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
        raise SystemExit(f"its server did not start; see {self._log.name}")

    def run(self, name: str) -> Row:
        tokens, seconds, prompt = 0, 0.0, 0.0
        for ids in self._asked["prompts"]:
            body = {"prompt": ids, "n_predict": self._asked["new"], "temperature": 0, "cache_prompt": False}
            request = urllib.request.Request(
                f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as answer:
                times = json.load(answer)["timings"]
            tokens += times["predicted_n"]
            seconds, prompt = seconds + times["predicted_ms"] / 1e3, prompt + times["prompt_ms"] / 1e3
        return {"side": name, "tokens": tokens, "seconds": seconds, "prompt_seconds": prompt}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def files(folder: Path, target: Path, tools: Path, converter: Path | None, python: Path) -> dict[str, Path]:
    """llama.cpp's files, made where they are missing: the model in its formats, the head and the draft model."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    (source,) = target.glob("*.gguf")
    for form in FORMATS:
        found[form] = folder / f"{form}.gguf"
        _make(found[form], [tools / "llama-quantize", "--allow-requantize", source], form)
    if converter is None:
        return found
    head = folder / "eagle3"
    if not (head / "config.json").is_file():
        _published(head)
    # The converter knows tokenizers by a hash of what they do; the fetched file says what this one is.
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); import conversion.base as base; "
        "base.TextModel.get_vocab_base_pre = lambda *_: 'smollm'; del sys.argv[1]; "
        f"runpy.run_path({str(converter / 'convert_hf_to_gguf.py')!r}, run_name='__main__')"
    )
    for name, asked in (("draft", [DRAFT]), ("head", [head, "--target-model-dir", target])):
        found[name] = folder / f"{name}.gguf"
        _make(found[name], [python, "-c", code, converter, *asked, "--outtype", "bf16", "--outfile"])
    return found


def _make(file: Path, command: Sequence[Path | str], *after: str) -> None:
    """Run the command that writes a missing file, which gets its name when it is whole."""
    if not file.is_file():
        part = file.with_suffix(".part")
        subprocess.run([*command, part, *after], check=True, capture_output=True)
        part.rename(file)


def _published(folder: Path) -> None:
    """Write our EAGLE-3 head under the names of published ones. The configuration is last."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(HEAD / "model.safetensors")
    named = {re.sub(r"^layer\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    config = json.loads((HEAD / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"num_attention_heads": config["num_heads"], "num_key_value_heads": config["num_kv_heads"]}
    config |= {"rope_theta": config["rope"]["theta"], "eagle_aux_hidden_state_layer_ids": config["layers"]}
    (folder / "config.json").write_text(json.dumps(config))


def sides(options: argparse.Namespace, asked: dict[str, Any], stack: ExitStack, left: dict[str, str]) -> Iterator[Any]:
    """Every side that starts; the others go to ``left`` with the reason."""
    narrow = options.processor != "native"
    variables = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"} if narrow else {}
    makers: dict[str, Callable[[], Any]] = {
        "Paceline": partial(Worker, Path(sys.executable), "paceline", asked, variables)
    }
    if options.llama is not None:
        ggml = {"LD_LIBRARY_PATH": str(options.ggml)} if options.ggml else {}
        made = files(options.folder, Path(asked["model"]), options.llama, options.converter, options.python)
        for form in FORMATS:
            makers[f"llama.cpp {form}, plain"] = partial(LlamaBench, options.llama / "llama-bench", made[form], ggml)
            kinds: dict[str, Sequence[str]] = {"n-gram": NGRAMS}
            if "draft" in made:
                kinds["draft model"] = ("-md", str(made["draft"]), "--spec-draft-n-max", "3")
                kinds["EAGLE-3"] = ("-md", str(made["head"]), "--spec-type", "draft-eagle3", "--spec-draft-n-max", "3")
            for mode, extra in kinds.items():
                command = [str(options.llama / "llama-server"), "-m", str(made[form]), *extra]
                name, log = f"llama.cpp {form}, {mode}", options.folder / f"{form} {mode}.log"
                makers[name] = partial(LlamaServer, command, name, log, asked, ggml)
    for program in PEERS if options.peers else ():
        makers[program] = partial(Worker, options.python, program, asked, variables)
    for name, make in makers.items():
        several = name == "Paceline" or name in PEERS  # their workers leave out those that are not asked for
        if not several and not re.search(options.only, name):
            continue
        try:
            side = make()
        except (SystemExit, OSError) as error:
            left[name] = str(error)
            continue
        stack.callback(side.close)
        yield side


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(row["side"] for row in rows):
        turns = [row for row in rows if row["side"] == name]
        steady = [row["tokens"] / row["seconds"] for row in turns]
        whole = [row["tokens"] / (row["seconds"] + row["prompt_seconds"]) for row in turns if row["prompt_seconds"]]
        found[name] = {
            "steady": round(statistics.median(steady), 1),
            "whole": round(statistics.median(whole), 1) if whole else None,
            "least": round(min(steady), 1),
            "most": round(max(steady), 1),
            "turns": len(turns),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, help="folder of llama-bench, llama-server and llama-quantize")
    parser.add_argument("--ggml", type=Path, help="folder of other libraries of llama.cpp")
    parser.add_argument("--converter", type=Path, help="llama.cpp's sources, to convert draft model and head")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the environment with the peers")
    parser.add_argument("--peers", action="store_true", help=f"also {', '.join(PEERS)}")
    parser.add_argument("--processor", choices=["native", *(one.name for one in PROCESSORS)], default="native")
    parser.add_argument("--only", default="", help="regular expression that names of sides match")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--keep", type=Path, help="file of turns")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="for the models' files")
    options = parser.parse_args()
    target, left = checkpoint_path("smollm2"), dict[str, str]()
    entry = PromptSet(path=str(ROOT / "examples" / "smollm2" / "prompts.jsonl"), per_category=1, chat=True)
    vocabulary = ModelConfig.from_pretrained(target).vocab_size
    prompts = [row.ids for row in load_prompts(entry, load_tokenizer(target), vocabulary).rows]
    asked = {"prompts": prompts, "new": options.new, "only": options.only, "processor": options.processor}
    asked |= {"model": str(target), "head": str(HEAD), "folder": str(options.folder)}
    rows: list[Row] = []
    setting = [options.processor, options.new]
    if options.keep is not None and options.keep.is_file():
        rows = [
            row for line in options.keep.read_text().splitlines() if (row := json.loads(line))["setting"] == setting
        ]
    with ExitStack() as stack:
        running = [(side, name) for side in sides(options, asked, stack, left) for name in side.names]
        for side, name in running * options.turns:
            try:
                rows.append({**side.run(name), "setting": setting})
            except (SystemExit, OSError, subprocess.CalledProcessError) as error:
                left[name] = str(error)
                continue
            print(rows[-1], flush=True)
            if options.keep is not None:
                with options.keep.open("a") as kept:
                    print(json.dumps(rows[-1]), file=kept)
    publish({"processor": options.processor, "new_tokens": options.new, "sides": summary(rows), "left_out": left})


if __name__ == "__main__":
    main()
