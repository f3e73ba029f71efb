"""Every rule of the HLO linter finds what breaks it, in modules as XLA prints them."""

from __future__ import annotations

import pytest

from paceline.neuron import hlo_lint

CLEAN = """HloModule IrToHlo.9, entry_computation_layout={(f32[4,8]{1,0})->(f32[4]{0})}

%AddComputation.4 (x.5: f32[], y.6: f32[]) -> f32[] {
  %x.5 = f32[] parameter(0)
  %y.6 = f32[] parameter(1)
  ROOT %add.7 = f32[] add(f32[] %x.5, f32[] %y.6)
}

ENTRY %IrToHlo.9 (p0.1: f32[4,8]) -> (f32[4]) {
  %p0.1 = f32[4,8]{1,0} parameter(0)
  %constant.2 = f32[] constant(0)
  %constant.3 = s32[2]{0} constant({0, 1})
  %reduce.8 = f32[4]{0} reduce(f32[4,8]{1,0} %p0.1, f32[] %constant.2), dimensions={1}, to_apply=%AddComputation.4
  ROOT %tuple.9 = (f32[4]{0}) tuple(f32[4]{0} %reduce.8)
}
"""

LINES = {
    "sort": "%s.1 = f32[4,8]{1,0} sort(f32[4,8]{1,0} %p0.1), dimensions={1}, to_apply=%AddComputation.4",
    "dynamic dimension": "%d.1 = f32[<=4,8]{1,0} add(f32[4,8]{1,0} %p0.1, f32[4,8]{1,0} %p0.1)",
    "variadic reduce": "%v.1 = (f32[4]{0}, s32[4]{0}) reduce(f32[4,8]{1,0} %p0.1, s32[4,8]{1,0} %i), dimensions={1}, "
    "to_apply=%AddComputation.4",
    "reduction": "%r.1 = pred[4]{0} reduce(pred[4,8]{1,0} %x, pred[] %y), dimensions={1}, to_apply=%Or.1",
    "integer dot": "%i.1 = s32[4,4]{1,0} dot(s32[4,8]{1,0} %x, s32[8,4]{1,0} %y), lhs_contracting_dims={1}",
    "widened dot": "%p9.1 = bf16[4,8]{1,0} parameter(1)\n  %e.1 = f32[4,8]{1,0} convert(bf16[4,8]{1,0} %p9.1)\n"
    "  %t.1 = f32[8,4]{0,1} transpose(f32[4,8]{1,0} %e.1), dimensions={1,0}\n"
    "  %i.1 = f32[4,4]{1,0} dot(f32[4,8]{1,0} %p0.1, f32[8,4]{0,1} %t.1), lhs_contracting_dims={1}",
    "integer collective": "%a.1 = s32[4]{0} all-reduce(s32[4]{0} %x), to_apply=%AddComputation.4",
    "integer scatter": "%c.1 = s32[4]{0} scatter(s32[4]{0} %x, s32[1,1]{1,0} %y, s32[1]{0} %z), "
    "to_apply=%AddComputation.4",
    "64 bits": "%w.1 = s64[4]{0} add(s64[4]{0} %x, s64[4]{0} %y)",
    "random": "%g.1 = f32[4]{0} rng(f32[] %x, f32[] %y), distribution=rng_uniform",
    "control flow": "%l.1 = (s32[]) while((s32[]) %x), condition=%c, body=%b",
    "custom call": '%k.1 = (f32[4]{0}, s32[4]{0}) custom-call(f32[4,8]{1,0} %p0.1), custom_call_target="TopK"',
    "top-k without k": "%k.1 = (f32[4,2]{1,0}, s32[4,2]{1,0}) custom-call(f32[4,8]{1,0} %p0.1), "
    'custom_call_target="AwsNeuronTopK"',
    "infinite constant": "%n.1 = f32[2]{0} constant({1, -inf})",
    "moving update": "%u.1 = f32[4,8]{1,0} dynamic-update-slice(f32[4,8]{1,0} %p0.1, f32[1,8]{1,0} %x, s32[] %p9, "
    "s32[] %p8)",
    "shift": "%h.1 = s64[4]{0} shift-right-arithmetic(s64[4]{0} %x, s64[4]{0} %y)",
    "unlisted": "%q.1 = f32[4,8]{1,0} erf(f32[4,8]{1,0} %p0.1)",
}
OR = """%Or.1 (x.2: pred[], y.2: pred[]) -> pred[] {
  %x.2 = pred[] parameter(0)
  %y.2 = pred[] parameter(1)
  ROOT %or.2 = pred[] or(pred[] %x.2, pred[] %y.2)
}

"""


def with_line(line: str) -> str:
    head, entry = CLEAN.split("ENTRY", 1)
    return head + OR + "ENTRY" + entry.replace("  %constant.2", f"  {line}\n  %constant.2", 1)


def test_a_clean_module_has_no_finding() -> None:
    assert hlo_lint.lint(CLEAN) == hlo_lint.lint(with_line("%fine.1 = f32[4,8]{1,0} abs(f32[4,8]{1,0} %p0.1)")) == []


def test_there_is_a_breaking_line_for_every_rule() -> None:
    assert set(LINES) == set(hlo_lint.RULES)


@pytest.mark.parametrize("rule", LINES)
def test_a_line_that_breaks_a_rule_is_found(rule: str) -> None:
    assert rule in {finding.rule for finding in hlo_lint.lint(with_line(LINES[rule]))}


def test_length_is_budgeted() -> None:
    assert [finding.rule for finding in hlo_lint.lint(CLEAN, budget=7)] == ["budget"]
    assert hlo_lint.lint(CLEAN, budget=8) == []


def test_what_looks_like_a_breach_and_is_none() -> None:
    fine = [
        "%c.1 = pred[4]{0} compare(s64[4]{0} %x, s64[4]{0} %y), direction=LT",  # is a row number negative?
        "%s.1 = s32[4]{0} shift-right-arithmetic(s32[4]{0} %x, s32[4]{0} %y)",
        '%k.1 = f32[4]{0} custom-call(f32[4,8]{1,0} %p0.1), custom_call_target="AwsNeuronTopK", backend_config="2"',
        "%u.1 = f32[4,8]{1,0} dynamic-update-slice(f32[4,8]{1,0} %p0.1, f32[1,8]{1,0} %x, f32[] %constant.2)",
    ]
    for line in fine:
        assert hlo_lint.lint(with_line(line)) == [], line


def test_instructions_are_read_with_their_parts() -> None:
    module = hlo_lint.parse(CLEAN)
    assert len(module.instructions) == 8
    (reduce,) = module.of("reduce")
    assert reduce.operands == ("p0.1", "constant.2") and reduce.elements == ("f32",)
    assert reduce.attribute("to_apply") == "AddComputation.4"
    root = module.root("AddComputation.4")
    assert root is not None and root.opcode == "add"
    assert module.named("IrToHlo.9", "constant.3") is not None
