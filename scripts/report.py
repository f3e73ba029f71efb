"""Tables of docs/results.md and benchmarks/results/README.md, and charts in docs/images, from benchmarks/results.

Each JSON file there is the last line that a benchmark printed (scripts/measure writes them). A table stands between the
markers `<!-- report:NAME -->` and `<!-- /report -->`; the text around it is written by hand and stays as it is. Where a
measurement is missing the command that makes it stands in place of the table. Nothing is measured here.

    python scripts/report.py            tables and charts (`make charts`)
    python scripts/report.py --tables   tables alone, without matplotlib
    python scripts/report.py --check    write nothing; exit status 1 if a table or a chart is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import report_charts
import report_formats
from report_tables import TABLES, Reports

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "results.md", RESULTS / "README.md")
IMAGES = ROOT / "docs" / "images"

MODES = "benchmarks/modes.py benchmarks/experiments"

# Name of a measurement: the command that makes it, for scripts/measure.
COMMANDS = {
    "modes": f"{MODES}/modes.yaml",
    "modes-t1": f"{MODES}/modes.yaml --temperature 1",
    "chat": f"{MODES}/chat.yaml --beside transformers llama.cpp",
    "chat-t07": f"{MODES}/chat.yaml --temperature 0.7",
    "rules": f"{MODES}/rules.yaml --temperature 0.7",
    "rules-t1": f"{MODES}/rules.yaml --temperature 1",
    "sampling": "benchmarks/sampling.py",
    "pair": "benchmarks/fused.py --part pair",
    "30m": "benchmarks/fused.py --part 30m --alpha 0.8 --count 3 --new 96",
    "110m": "benchmarks/fused.py --part 110m --alpha 0.8 --count 3 --new 96",
    "disagreements": "benchmarks/disagreements.py",
    "plan-speed": "benchmarks/plan_speed.py --out build/plan-speed",
    "latency": "benchmarks/latency.py",
    **{f"formats-{shape}": f"benchmarks/formats.py --shape {shape}" for shape in report_formats.SHAPES},
    "perplexity": "benchmarks/perplexity.py --model smollm2",
    "long": "benchmarks/long.py",
    "load": "benchmarks/load.py",
    "serve": "-m benchmarks.serve --target examples/pycode/target --draft examples/pycode/draft --k 4 auto plain "
    "--rates 5 15 --gaps",
}
ALL_TABLES = {
    **TABLES,
    "latency": (("latency",), report_formats.latency),
    "formats": (tuple(f"formats-{shape}" for shape in report_formats.SHAPES), report_formats.formats),
    "perplexity": (("perplexity",), report_formats.perplexity),
    "long": (("long",), report_formats.long),
    "load": (("load",), report_formats.load),
    "serve": (("serve",), report_formats.serve),
}


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Every measurement there is, by name. The page shows one machine and one commit, so a mixture is refused."""
    reports = {name: json.loads(path.read_text()) for name in COMMANDS if (path := folder / f"{name}.json").is_file()}
    for key in ("machine", "commit"):
        values = {json.dumps(report[key]): name for name, report in reports.items()}
        if len(values) > 1:
            listing = "; ".join(f"{name}.json: {value}" for value, name in values.items())
            raise SystemExit(f"the measurements differ in {key} ({listing}); run scripts/measure at one commit")
    return reports


def block(name: str, reports: Reports) -> str:
    """What stands between the markers of a table."""
    needs, make = ALL_TABLES[name]
    if not needs or any(need in reports for need in needs):
        return make(reports)
    return "\n".join(["Not measured at this commit yet:", "", *(f"    python {COMMANDS[need]}" for need in needs)])


def page(text: str, reports: Reports) -> str:
    """The page with its tables made anew; a marker with an unknown name is a KeyError."""
    return re.sub(
        r"(<!-- report:(\w+) -->\n).*?(<!-- /report -->)",
        lambda match: f"{match[1]}\n{block(match[2], reports)}\n\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="no charts")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something is out of date")
    parser.add_argument("--commands", action="store_true", help="print the name and command of every measurement")
    options = parser.parse_args()
    if options.commands:
        print("\n".join(f"{name} {command}" for name, command in COMMANDS.items()))
        return 0
    reports = load()
    texts = {path: page(path.read_text(), reports) for path in PAGES}
    if options.check:
        stale = [path.name for path, text in texts.items() if text != path.read_text()]
        stale += report_charts.stale(reports, IMAGES)
        for name in stale:
            print(f"{name} is out of date; run `make charts`")
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    if not options.tables:
        report_charts.draw(reports, IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
