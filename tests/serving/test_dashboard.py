"""The dashboard: Grafana's own schema knows it, and its queries are PromQL over metrics that a replica exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.serving.metrics import METRICS, Metric
from tests.serving.test_metrics import filled

promql = pytest.importorskip("promql_parser", reason="pip install 'paceline[dev]'")

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
COMMON = {"model_name", "engine"}


def test_grafanas_schema_knows_every_field() -> None:
    """Read into the types that Grafana generates of its schema, and written again, it has lost nothing."""
    pytest.importorskip("grafana_foundation_sdk", reason="pip install 'paceline[dev]'")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import dashboard, prometheus, stat, timeseries

    register_default_plugins()
    read = dashboard.Dashboard.from_json(DASHBOARD)
    assert missing(DASHBOARD, json.loads(JSONEncoder().encode(read))) == []
    assert read.panels and len(read.panels) == len(DASHBOARD["panels"]) == len({panel.id_val for panel in read.panels})
    for panel in read.panels:
        assert isinstance(panel, dashboard.Panel), "no row is used"
        assert isinstance(panel.options, timeseries.Options | stat.Options), panel.title
        assert panel.targets and all(isinstance(target, prometheus.Dataquery) for target in panel.targets), panel.title
        assert len({target.ref_id for target in panel.targets}) == len(panel.targets), panel.title
    assert missing({"a": [{"b": 1}]}, {"a": [{}]}) == ["/a/0/b"], "what is missing is found"


def missing(one: Any, other: Any, path: str = "") -> list[str]:
    """Positions where a JSON value is not inside another one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [at for key in one for at in missing(one[key], other.get(key), f"{path}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [at for number, value in enumerate(one) for at in missing(value, other[number], f"{path}/{number}")]
    return [] if one == other else [path]


def exported() -> dict[str, Metric]:
    """Name of every series of a replica in which everything has happened -> its row."""
    rows = {row.name: row for row in METRICS}
    return {
        sample.name: rows[family.name]
        for family in text_string_to_metric_families(filled().text())
        if family.name in rows  # the others are when a counter was made
        for sample in family.samples
    }


def selected(node: Any, inside: str = "") -> Iterator[tuple[str, str]]:
    """Every series that a query asks for, and the function that it is given to."""
    kind = type(node).__name__
    if kind == "VectorSelector":
        yield node.name, inside
    elif kind == "MatrixSelector":
        yield node.vector_selector.name, inside
    elif kind == "Call":
        for one in node.args:
            yield from selected(one, node.func.name)
    elif kind == "BinaryExpr":
        yield from selected(node.lhs)
        yield from selected(node.rhs)
    elif kind in ("AggregateExpr", "ParenExpr"):
        yield from selected(node.expr, inside)
    else:
        assert kind == "NumberLiteral", f"{kind} is not looked through here"


def aggregated(node: Any) -> Iterator[tuple[set[str], set[str]]]:
    """Labels by which series are added up, and these series."""
    for name in ("lhs", "rhs", "expr"):
        if hasattr(node, name):
            yield from aggregated(getattr(node, name))
    for one in getattr(node, "args", ()):
        yield from aggregated(one)
    if type(node).__name__ == "AggregateExpr" and node.modifier is not None:
        yield set(node.modifier.labels), {name for name, _ in selected(node)}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_promql_over_what_is_exported(query: str) -> None:
    tree, series = promql.parse(query), exported()
    for name, function in selected(tree):
        assert name in series, f"{name} is not exported"
        assert (function == "rate") == (series[name].kind != "gauge"), f"{name} is a {series[name].kind}"
    for labels, names in aggregated(tree):
        for name in names:
            row = series[name]
            own = {*row.labels, *COMMON, *(["le"] if row.kind == "histogram" else [])}
            assert labels <= own, f"{name} has no {labels - own}"


def test_every_metric_is_shown() -> None:
    asked = {exported()[name].name for query in QUERIES for name, _ in selected(promql.parse(query))}
    assert {row.name for row in METRICS} - asked == {"vllm:request_time_per_output_token_seconds"}
    assert len(QUERIES) > 15
