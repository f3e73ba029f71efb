"""Tables and charts of docs/results.md, docs/study.md and benchmarks/results, from the JSON files in that folder.

Each file there but study.json is the last line that a benchmark printed (scripts/measure writes them); study.json is
what `study_figures.py` asks of the experiments of scripts/study. A table stands between the markers
`<!-- report:NAME -->` and `<!-- /report -->`, or `<!-- study:NAME -->` and `<!-- /study -->`; the text around it is
written by hand. Where a measurement is missing the command that makes it stands in place of the table.

    python scripts/report.py                         tables and charts (`make charts`)
    python scripts/report.py --tables                tables alone, without matplotlib
    python scripts/report.py --check                 write nothing; exit status 1 if a page or a chart is out of date
    python scripts/report.py --collect build/study   ask the experiments of scripts/study first
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report_charts
from report_tables import SHAPES, TABLES, Reports
from study_tables import BLOCKS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "results.md", ROOT / "docs" / "study.md", RESULTS / "README.md", RESULTS / "study.md")
IMAGES = ROOT / "docs" / "images"
STUDY = RESULTS / "study.json"

MODES = "benchmarks/modes.py benchmarks/experiments"

# Name of a measurement: the command that makes it, for scripts/measure.
COMMANDS = {
    "modes": f"{MODES}/modes.yaml",
    "modes-t1": f"{MODES}/modes.yaml --temperature 1",
    "chat": f"{MODES}/chat.yaml --transformers",
    "chat-t07": f"{MODES}/chat.yaml --temperature 0.7",
    "rules": f"{MODES}/rules.yaml --temperature 0.7",
    "rules-t1": f"{MODES}/rules.yaml --temperature 1",
    "sampling": "benchmarks/sampling.py",
    "latency": "benchmarks/latency.py",
    **{f"formats-{shape}": f"benchmarks/formats.py --shape {shape} --llama .venv-gguf/tools/bin" for shape in SHAPES},
    "perplexity": "benchmarks/perplexity.py --model smollm2",
    "long": "benchmarks/long.py",
    "load": "benchmarks/load.py",
    "serve": "-m benchmarks.serve --target examples/pycode/target --draft examples/pycode/draft --k 4 auto plain "
    "--rates 5 15 --gaps",
}


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Every measurement there is, by name. The page shows one machine and one commit, so a mixture is rejected."""
    reports = {name: json.loads(path.read_text()) for name in COMMANDS if (path := folder / f"{name}.json").is_file()}
    for key in ("machine", "commit"):
        values = {json.dumps(report[key]): name for name, report in reports.items()}
        if len(values) > 1:
            listing = "; ".join(f"{name}.json: {value}" for value, name in values.items())
            raise SystemExit(f"the measurements differ in {key} ({listing}); run scripts/measure at one commit")
    return reports


def block(name: str, reports: Reports) -> str:
    """Text between the markers of a table of measurements."""
    needs, make = TABLES[name]
    if not needs or any(need in reports for need in needs):
        return make(reports)
    return "\n".join(["Not measured at this commit yet:", "", *(f"    python {COMMANDS[need]}" for need in needs)])


def page(text: str, reports: Reports, study: Mapping[str, Any]) -> str:
    """The page with new tables; a marker with an unknown name is a KeyError."""

    def made(match: re.Match[str]) -> str:
        found = block(match[3], reports) if match[2] == "report" else BLOCKS[match[3]](study)
        return f"{match[1]}\n{found}\n\n<!-- /{match[2]} -->"

    return re.sub(r"(<!-- (report|study):(\w+) -->\n).*?<!-- /\2 -->", made, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="no charts")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something is out of date")
    parser.add_argument("--commands", action="store_true", help="print the name and command of every measurement")
    parser.add_argument("--collect", type=Path, help="folder of scripts/study, whose figures are kept")
    options = parser.parse_args()
    if options.commands:
        print("\n".join(f"{name} {command}" for name, command in COMMANDS.items()))
        return 0
    if options.collect is not None:
        from study_figures import collect

        STUDY.write_text(json.dumps(collect(options.collect)) + "\n")
    reports, study = load(), json.loads(STUDY.read_text())
    texts = {path: page(path.read_text(), reports, study) for path in PAGES}
    charts = report_charts.due(reports, study)
    stale = [path.name for path, text in texts.items() if text != path.read_text()]
    if options.check:
        stale += report_charts.stale(charts, IMAGES)
        for name in stale:
            print(f"{name} is out of date; run `make charts`")
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    if not options.tables:
        report_charts.draw(charts, IMAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
