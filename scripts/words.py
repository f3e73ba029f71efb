"""Words of every page against its budget, and the faults of language that a pattern can find in pages and in code.

    python scripts/words.py [--verbose]

Words are counted as `wc -w` does, code and tables included. Exit status 1 if a page or all of them are over
budget, a page has no budget, or a fault is found. Patterns of prose look at every sentence; those of summaries look
at the cells of tables and at items of lists, which have to be understood alone, as the first line of a docstring has.
In code, kinds D look at the first paragraphs of docstrings, E1 and E2 at the texts of errors, H1 at help texts, and P4
at all three.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from structure import PARTS

ROOT = Path(__file__).resolve().parents[1]
TOTAL = 40_000
DECISION = 400
"""Budget of each page of docs/decisions."""

BUDGETS = {
    "README.md": 900, "CHANGELOG.md": 900, "CONTRIBUTING.md": 550, "SECURITY.md": 300,
    "docs/index.md": 350, "docs/quickstart.md": 550, "docs/start-neuron.md": 480, "docs/start-measure.md": 500,
    "docs/models.md": 1100, "docs/quantization.md": 1100, "docs/drafters.md": 1350, "docs/generate.md": 850,
    "docs/compile.md": 650, "docs/structured.md": 700, "docs/medusa.md": 1000, "docs/eagle.md": 1500,
    "docs/huggingface.md": 550, "docs/serving.md": 1400, "docs/operations.md": 1250, "docs/openai-api.md": 1300,
    "docs/placement.md": 1750, "docs/scale.md": 500, "docs/experiments.md": 1650, "docs/verify.md": 650,
    "docs/study.md": 1400, "docs/results.md": 1900, "docs/comparison.md": 700, "docs/neuron.md": 980,
    "docs/neuron-internals.md": 1320, "docs/migration.md": 1340, "docs/configuration.md": 850,
    "docs/extending/drafter.md": 1100, "docs/extending/acceptance.md": 500, "docs/extending/backend.md": 550,
    "docs/extending/model.md": 1000, "docs/cli.md": 100, "docs/errors.md": 250, "docs/features.md": 530,
    "docs/troubleshooting.md": 550, "docs/glossary.md": 750, "docs/architecture.md": 1900, "docs/log.md": 400,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of fault: the pattern that finds it, where it looks, and the cure."""

    name: str
    pattern: str
    summaries: bool
    cure: str


NUMBER = r"(?<![\w.,-])\d"
"""Begin of a number that is not a part of a name, such as the 3 of EAGLE-3."""

IDIOMS = (
    r"\b(lent|borrow(s|ed)?|stand-ins?|aims?|plainly|no bit|kinds? of sampling|rungs?|limbs?|hung up|stopped process"
    r"|whole again|stays? away|begins? alike|at the door|(is|are) refused|go(es)? on|went on|tells|for nothing"
    r"|filled up|put together again|too dear|mended?|gives? way"
    r"|(ms|bytes|seconds|tokens) an? (token|round|second|weight|step|request))\b"
)
"""Words that only this project used, or used in another sense; the field has others."""

KINDS = (
    Kind("D1", r"^(What|Where|Which|Who|Whose)\b(?!.*\?)", True, "a noun phrase"),
    Kind("D2", r"^(Of|As|Until|Since|While|Within)\b", True, "name the thing first"),
    Kind("D3", r"^See `", True, "remove it"),
    Kind("D4", r"^(It|They|Nobody|Somebody|All is|Every one is) \w", True, "say what it does"),
    Kind("D5", r"\b(nobody|somebody|anybody|whoever|is told|are told|hears)\b", False, "name the process"),
    Kind("D6", r"\b(behind|beside|beneath)\b(?! (a|the|its) (proxy|firewall|load balancer))", False, "after, next to"),
    Kind("D7", r"\b(so (many|much|long) (?!that|as)|as many as|of such an?)\b", False, "name the quantity"),
    Kind("D8", r"(?<!there )\b(is|are|be) no (?!longer|more\b)", False, "is not a, must be a"),
    Kind("D9", r"\b(here|there)\b(?! (is|are|was|were|may|must|can|has|be)\b)", False, "name the place"),
    Kind("D10", r"\b(anew|meanwhile|besides|alone|by itself|of (its|their|our) own|of now)\b", False, "again, only"),
    Kind("P1", r"^(?:\S+ +){41}|(\b(that|which|whose|who|where)\b.*){3}", False, "one fact a sentence"),
    Kind("P2", rf"({NUMBER}((?!{NUMBER}).)*){{6}}", False, "a table, or one number and a link"),
    Kind("P3", r"^(?-i:What|Of|Where|Who) (?!.*\?)", False, "subject, verb, object"),
    Kind("P4", IDIOMS, False, "the field's word"),
    Kind("E1", r"says otherwise|in the air|does not take|repeat nothing|is refused by name", False, "name the key"),
    Kind("E2", r"^error: [^;]*$", True, "say what to do after a semicolon"),
    Kind("H1", r"^(So|Of|Where) [a-z](?!.*\?)", True, "begin with what it sets"),
)


ELSEWHERE = ("tests", "benchmarks", "scripts", "examples", "findings")
"""Folders outside the product, in which errors may lack a remedy."""

BUILT_IN = frozenset({"AttributeError", "NotImplementedError", "TypeError", "OSError", "AssertionError"})
"""Errors for programmers, whose text needs no remedy."""


def pages(root: Path = ROOT) -> list[Path]:
    return [*(root / name for name in BUDGETS if "/" not in name), *sorted((root / "docs").rglob("*.md"))]


def words(text: str) -> int:
    return len(text.split())


def _prose(text: str) -> str:
    """Without code, comments and links' targets."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}\S.*$|<!--.*?-->", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def summaries(text: str) -> Iterator[str]:
    """Cells after the first of a row, and items of lists."""
    for line in _prose(text).splitlines():
        if line.startswith("|"):
            yield from (cell.strip(" *") for cell in line.strip("|").split("|")[1:])
        elif found := re.match(r"(?:-|\d+\.) +(.*)", line):
            yield found[1].strip("*")


def sentences(text: str) -> Iterator[str]:
    joined = re.sub(r"(?<=\S)\n(?=[^\n#|\-])", " ", _prose(text))
    for line in joined.splitlines():
        yield from re.split(r"(?<=[.!?:])\s+|\|", re.sub(r"`[^`]*`", "`", line))


def faults(text: str) -> Iterator[tuple[Kind, str]]:
    """Every fault of a page with the place where it was found."""
    for kind in KINDS:
        for place in (summaries if kind.summaries else sentences)(text):
            if re.search(kind.pattern, place, 0 if kind.summaries else re.IGNORECASE):
                yield kind, place


def _text(node: ast.AST) -> str:
    """Text of a string, with `x` for every placeholder; empty if the node is not a string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "`x`" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def code_faults(source: str) -> Iterator[tuple[Kind, int, str]]:
    """Every fault of a module: in docstrings, in texts of errors (E1, E2), in help texts and descriptions (H1)."""
    docstrings = [kind for kind in KINDS if kind.name.startswith("D") or kind.name == "P4"]
    errors = [kind for kind in KINDS if kind.name in ("E1", "P4")]
    helps = [kind for kind in KINDS if kind.name in ("D1", "D2", "D4", "H1", "P4")]
    without_remedy = next(kind for kind in KINDS if kind.name == "E2")
    for node in ast.walk(ast.parse(source)):
        texts: list[tuple[str, list[Kind]]] = []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append((" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()), docstrings))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error") and node.args:
            said = max(map(_text, node.args), key=len)
            texts.append((said, errors))
            if " " in said and ";" not in said and not said.endswith("`x`") and ast.unparse(node.func) not in BUILT_IN:
                yield without_remedy, node.lineno, said
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            texts.append((_text(node.value), helps))
        elif isinstance(node, ast.Dict):  # a dataclass field's metadata
            pairs = zip(node.keys, node.values, strict=True)
            texts += [(_text(value), helps) for key, value in pairs if key is not None and _text(key) == "help"]
        for text, kinds in texts:
            for kind in kinds:
                if re.search(kind.pattern, text, 0 if kind.summaries else re.IGNORECASE):
                    yield kind, getattr(node, "lineno", 1), text


def budget(name: str) -> int | None:
    return DECISION if name.startswith("docs/decisions/") else BUDGETS.get(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="print every page and every kind, not only the faults")
    verbose = parser.parse_args().verbose
    wrong, total, counts = [], 0, dict.fromkeys((kind.name for kind in KINDS), 0)
    for path in pages():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        count, most = words(text), budget(name)
        total += count
        if verbose:
            print(f"{count:6,} of {most or 0:6,}  {name}")
        if most is None or count > most:
            wrong.append(f"{name}: {count} words, budget {most}; shorten it, or change scripts/words.py")
        for kind, place in faults(text):
            counts[kind.name] += 1
            wrong.append(f"{name}: {kind.name}: {place[:90]!r}; {kind.cure}")
    for part in (*PARTS, *ELSEWHERE):
        for path in sorted((ROOT / part).rglob("*.py")):
            for kind, line, place in code_faults(path.read_text(encoding="utf-8")):
                if part in ELSEWHERE and not kind.name.startswith(("D", "P")):
                    continue
                counts[kind.name] += 1
                wrong.append(f"{path.relative_to(ROOT).as_posix()}:{line}: {kind.name}: {place[:90]!r}; {kind.cure}")
    if total > TOTAL:
        wrong.append(f"all pages: {total} words, budget {TOTAL}; shorten one")
    if verbose:
        print(f"{total:6,} of {TOTAL:6,}  all pages\n" + "  ".join(f"{name} {count}" for name, count in counts.items()))
    print("\n".join(wrong), end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
