"""Speed of plain decoding while other programs are busy. JSON on the last line.

    python benchmarks/busy.py                    SmolLM2 and the demo target, beside 0, 1, 2, 4 and 8 busy processes
    python benchmarks/busy.py --models pycode    the demo target alone

A busy process has one thread that never waits. All numbers of processes take turns, and a figure is the mean of the
turns: a median would hide that some turns get less of the machine. ``fair`` is what the threads that decode get of the
speed that they have alone if every thread gets as much of the cores as every other: with T of them beside n others on C
cores, min(1, C / (n + T)). ``given`` is what two processes that never wait really got in the same run, by their own
processor time: other users of the machine and Linux's groups change that. ``of_fair`` and ``of_given`` say how much of
it became speed. llama.cpp (the package llama-cpp-python) decodes the same SmolLM2, if it is installed.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from common import PAIR, llama_cpp, publish

from paceline import AutoDecoder
from paceline.fetch import fetch_model

COUNTS = (0, 1, 2, 4, 8)
NEW = 64  # tokens of a text
PROMPT = list(range(1, 33))
BUSY = "while True: pass"


class Others:
    """Busy processes, of which as many run as are wanted."""

    def __init__(self, most: int) -> None:
        self._all = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(most)]
        for one in self._all:
            one.send_signal(signal.SIGSTOP)

    @contextmanager
    def run(self, count: int) -> Iterator[None]:
        for one in self._all[:count]:
            one.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            for one in self._all[:count]:
                one.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        for one in self._all:
            one.kill()
            one.wait()


def given(threads: int, seconds: float) -> float:
    """Cores that ``threads`` processes without pauses get."""
    alike = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(threads)]
    try:
        time.sleep(0.2)
        begin, before = time.perf_counter(), sum(map(processor_seconds, alike))
        time.sleep(seconds)
        return (sum(map(processor_seconds, alike)) - before) / (time.perf_counter() - begin)
    finally:
        for one in alike:
            one.kill()
            one.wait()


def processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Processor time of a process in user mode."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def ours(path: Path) -> Callable[[], object]:
    decoder = AutoDecoder.from_pretrained(path, n_positions=128)
    return lambda: decoder.sample([PROMPT], max_new_tokens=NEW, eos_token_id=[])


def of_llama_cpp(path: Path) -> Callable[[], object]:
    """The same of llama.cpp, with a thread for every core."""
    model = llama_cpp(next(path.glob("*.gguf")), 128)

    def text() -> None:
        tokens = model.generate(PROMPT, temp=0.0)
        for _ in range(NEW):
            next(tokens)

    return text


def speed(text: Callable[[], object], seconds: float) -> float:
    begin, texts = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        text()
        texts += 1
    return texts * NEW / (time.perf_counter() - begin)


def measure(sides: dict[str, Callable[[], object]], seconds: float, turns: int) -> dict[str, object]:
    threads = torch.get_num_threads()
    speeds: dict[str, dict[int, list[float]]] = {name: {count: [] for count in COUNTS} for name in sides}
    cores: dict[int, list[float]] = {count: [] for count in COUNTS}
    for text in sides.values():
        text()
    others = Others(max(COUNTS))
    try:
        for _ in range(turns):
            for count in COUNTS:
                for name, text in sides.items():
                    with others.run(count):
                        speeds[name][count].append(speed(text, seconds))
                with others.run(count):
                    cores[count].append(given(threads, seconds))
    finally:
        others.end()
    return {name: [row(count, speeds[name], cores, threads=threads) for count in COUNTS] for name in sides}


def row(
    count: int, speeds: dict[int, list[float]], cores: dict[int, list[float]], *, threads: int
) -> dict[str, object]:
    of = {key: statistics.fmean(values[count]) / statistics.fmean(values[0]) for key, values in
          {"speed": speeds, "cores": cores}.items()}  # fmt: skip
    fair = min(1.0, (os.cpu_count() or 1) / (count + threads))
    return {
        "beside": count,
        "tokens_per_s": round(statistics.fmean(speeds[count]), 2),
        "of_alone": round(of["speed"], 3),
        "fair": round(fair, 3),
        "given": round(of["cores"], 3),
        "of_fair": round(of["speed"] / fair, 3),
        "of_given": round(of["speed"] / of["cores"], 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=("smollm2", "pycode"), default=["smollm2", "pycode"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(arguments)
    report: dict[str, object] = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    for name in options.models:
        path = PAIR / "target" if name == "pycode" else fetch_model(name, print)
        sides = {"paceline": ours(path)}
        if name == "smollm2" and find_spec("llama_cpp") is not None:
            sides["llama.cpp"] = of_llama_cpp(path)
        report[name] = measure(sides, options.seconds, options.turns)
    if find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed: nothing is measured beside")
    publish(report)


if __name__ == "__main__":
    main()
