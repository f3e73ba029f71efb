"""One program of `peers.py`, in a separate process and environment: python benchmarks/peers_worker.py PROGRAM

It reads lines of JSON: first what is asked, which it answers with the names of the modes that it has loaded, then the
name of a mode, which it answers with tokens, and seconds after and for the prompts, as the program reports them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

Asked = dict[str, Any]
Times = tuple[int, float, float]  # tokens, seconds after the prompt, seconds of the prompt
Mode = Callable[[list[int]], Times]


def paceline(asked: Asked) -> Iterator[tuple[str, Callable[[], Mode]]]:
    """Our formats, each with the drafters that are the fastest on this model."""
    from paceline.decoder.native import build
    from paceline.decoder.native.compiler import KERNELS, PROCESSORS
    from paceline.experiments.config import ExperimentConfig, cells
    from paceline.experiments.measure import Bench, run_group
    from paceline.experiments.prompts import Prompt, Prompts

    for one in PROCESSORS:
        if one.name == asked["processor"]:
            build.NATIVE = KERNELS.with_flags(*one.flags)
    prompts = Prompts("prompts", tuple(Prompt(str(n), "", tuple(ids)) for n, ids in enumerate(asked["prompts"])), ())
    drafters = [{"name": "plain", "draft": "none"}, {"name": "suffix, k = 6", "draft": "suffix", "k": 6}]
    drafters += [{"name": f"EAGLE-3, k = {k}", "draft": asked["head"], "k": k} for k in (1, 2, 3, 4)]
    values = {"targets": asked["model"], "drafters": drafters, "prompt_sets": "prompts", "baseline": False}
    for form in ("bf16", "int8", "q4_0"):
        load = {} if form == "bf16" else {"quantization": form}
        config = ExperimentConfig.model_validate({**values, "max_new_tokens": asked["new"], "load": load})
        bench = Bench(config)
        for cell in cells(config):

            def make(bench: Bench = bench, cell: Any = cell) -> Mode:
                generator, params = bench.generator(cell, prompts), bench.params(cell, 0, 1)

                def run(ids: list[int]) -> Times:
                    found = run_group(generator, [Prompt("", "", tuple(ids))], params)
                    prompt = found.statistics.prefill_seconds
                    return found.statistics.new_tokens, found.seconds - prompt, prompt

                return run

            yield f"Paceline {form}, {cell.drafter.label}", make


def openvino(asked: Asked) -> Iterator[tuple[str, Callable[[], Mode]]]:
    """OpenVINO GenAI, which reads llama.cpp's files."""
    import numpy
    import openvino
    import openvino_genai

    def make(form: str, lookup: bool) -> Mode:
        file = str(Path(asked["folder"]) / f"{form}.gguf")
        pipe = openvino_genai.LLMPipeline(file, "CPU", **({"prompt_lookup": True} if lookup else {}))
        config = openvino_genai.GenerationConfig(max_new_tokens=asked["new"], do_sample=False)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = 4, 3

        def run(ids: list[int]) -> Times:
            answer = pipe.generate(openvino.Tensor(numpy.array([ids])), config)
            tokens, first = len(answer.tokens[0]), answer.perf_metrics.get_ttft().mean / 1e3
            return tokens, answer.perf_metrics.get_generate_duration().mean / 1e3 - first, first

        return run

    for form in ("Q8_0", "Q4_0"):
        yield f"OpenVINO GenAI {form}, plain", lambda form=form: make(form, False)
        yield f"OpenVINO GenAI {form}, prompt lookup", lambda form=form: make(form, True)


def onnxruntime(asked: Asked) -> Iterator[tuple[str, Callable[[], Mode]]]:
    """onnxruntime-genai; it has no server or benchmark, so its calls are timed."""
    import onnxruntime_genai

    def make(form: str, grams: int) -> Mode:
        folder = Path(asked["folder"]) / f"onnx-{form}"
        if not folder.is_dir():
            part = folder.with_suffix(".part")
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", asked["model"], "-o", str(part)]
            cache = ["-c", str(folder.with_name("cache"))]
            subprocess.run([*builder, "-p", form, "-e", "cpu", *cache], check=True, stdout=sys.stderr)
            part.rename(folder)
        model = onnxruntime_genai.Model(str(folder))

        def run(ids: list[int]) -> Times:
            params = onnxruntime_genai.GeneratorParams(model)
            params.set_search_options(max_length=len(ids) + asked["new"], do_sample=False)
            if grams:
                params.set_speculative_options(ngram_size=grams, max_draft_tokens=4)
            begin = perf_counter()
            generator = onnxruntime_genai.Generator(model, params)
            generator.append_tokens(ids)
            generator.generate_next_token()
            first = perf_counter()
            while not generator.is_done():
                generator.generate_next_token()
            return generator.token_count() - len(ids), perf_counter() - first, first - begin

        return run

    for form in ("int4", "fp32"):
        yield f"onnxruntime-genai {form}, plain", lambda form=form: make(form, 0)
        yield f"onnxruntime-genai {form}, n-gram", lambda form=form: make(form, 3)


def mlx(asked: Asked) -> Iterator[tuple[str, Callable[[], Mode]]]:
    from mlx_lm import load, stream_generate

    def make() -> Mode:
        model, tokenizer = load(asked["model"])

        def run(ids: list[int]) -> Times:
            *_, last = stream_generate(model, tokenizer, ids, max_tokens=asked["new"])
            return last.generation_tokens, last.generation_tokens / last.generation_tps, len(ids) / last.prompt_tps

        return run

    yield "mlx-lm bf16, plain", make


def transformers(asked: Asked) -> Iterator[tuple[str, Callable[[], Mode]]]:
    """transformers; it has no benchmark, so `generate` is timed, once with a single token."""
    import torch
    from transformers import AutoModelForCausalLM

    def make(lookup: int | None) -> Mode:
        model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16)

        def run(ids: list[int]) -> Times:
            x = torch.tensor([ids])
            call = {"attention_mask": torch.ones_like(x), "do_sample": False}
            begin = perf_counter()
            model.generate(x, max_new_tokens=1, **call)
            first = perf_counter()
            out = model.generate(x, max_new_tokens=asked["new"], prompt_lookup_num_tokens=lookup, **call)
            return out.shape[1] - len(ids), perf_counter() - first - (first - begin), first - begin

        return run

    yield "transformers bf16, plain", lambda: make(None)
    yield "transformers bf16, prompt lookup", lambda: make(4)


def main() -> None:
    asked: Asked = json.loads(sys.stdin.readline())
    modes: dict[str, Mode] = {}
    programs = {"paceline": paceline, "openvino": openvino, "onnxruntime": onnxruntime, "mlx": mlx}
    for name, make in (programs | {"transformers": transformers})[sys.argv[1]](asked):
        if re.search(asked["only"], name):
            modes[name] = make()
            modes[name](asked["prompts"][0])  # what is compiled, allocated or read at the first call
    print("\npeers:", json.dumps(list(modes)), flush=True)
    for line in sys.stdin:
        mode = modes[json.loads(line)]
        found = [mode(ids) for ids in asked["prompts"]]
        tokens, seconds, prompt = (sum(part) for part in zip(*found, strict=True))
        print("\npeers:", json.dumps({"tokens": tokens, "seconds": seconds, "prompt_seconds": prompt}), flush=True)


if __name__ == "__main__":
    main()
