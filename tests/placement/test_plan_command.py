"""`paceline plan`, the models file and what `neuron-ls` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from transformers import LlamaConfig
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.errors import PlanError
from paceline.placement import INSTANCES, DraftTimeouts, FaultPolicy, plan, read_fault_policy, read_models
from paceline.placement.planning import instances, planner
from paceline.placement.planning.instances import matching
from tests.cli.calling import refused
from tests.placement.wishes import model

CHAT = "{name: chat, config: big, tp_degree: 8, n_positions: 2048, amp: bf16}"
DRAFT = "{name: chat-draft, config: small.json, tp_degree: 2, draft_of: chat}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shape = {"max_position_embeddings": 4096, "vocab_size": 1000}
    LlamaConfig(**shape, hidden_size=512, num_attention_heads=8, num_hidden_layers=4).save_pretrained(tmp_path / "big")
    LlamaConfig(**shape, hidden_size=128, num_attention_heads=4, num_hidden_layers=1).to_json_file(
        tmp_path / "small.json"
    )
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    LlamaConfig(
        **shape, hidden_size=512, num_attention_heads=8, num_hidden_layers=4, rope_parameters=longrope | factors
    ).save_pretrained(tmp_path / "long")
    return tmp_path


def call(home: Path, *entries: str, on: str = "inf2.48xlarge", options: tuple[str, ...] = ()) -> Result:
    (home / "models.yaml").write_text("models:\n" + "".join(f"  - {entry}\n" for entry in entries))
    return CliRunner().invoke(app, ["plan", str(home / "models.yaml"), "--instance", on, *options])


def test_json_has_every_process_with_its_environment(home: Path) -> None:
    done = call(home, CHAT, DRAFT, options=("--json",))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["instance"] == "inf2.48xlarge"
    chat, draft = found["placements"]
    assert (chat["name"], chat["cores"], chat["tp_degree"], chat["replica"]) == ("chat", [0, 7], 8, 0)
    assert (draft["name"], draft["cores"], draft["drafts_for"]) == ("chat-draft", [8, 9], [["chat", 0]])
    assert chat["env"]["NEURON_RT_VISIBLE_CORES"] == "0-7" and chat["env"]["OMP_NUM_THREADS"] == "64"
    assert chat["bytes"] == chat["weight_bytes"] + chat["cache_bytes"] + chat["scratch_bytes"]
    assert found["free"]["cores"] == 14


def test_the_picture_shows_every_core_once(home: Path) -> None:
    done = call(home, CHAT, DRAFT)
    assert done.exit_code == 0, done.output
    assert "  0 [A A]   2 [A A]   4 [A A]   6 [A A]\n  8 [B B]  10 [. .]" in done.stdout
    assert "aligned runs: 1 of 8" in done.stdout and "B  chat-draft, cores 8-9" in done.stdout


def with_policy(home: Path, policy: str) -> Path:
    """A models file with ``fault_policy``."""
    (home / "models.yaml").write_text(f"models: [{CHAT}]\nfault_policy: {policy}\n")
    return home / "models.yaml"


def test_the_fault_policy_is_read_from_the_file(home: Path) -> None:
    text = "{startup_timeout_s: 3600, draft_ahead: true, draft_timeouts: {reply_timeout_s: 0.5, max_failures: 2}}"
    timeouts = DraftTimeouts(reply_timeout_s=0.5, max_failures=2)
    policy = FaultPolicy(startup_timeout_s=3600.0, draft_ahead=True, draft_timeouts=timeouts)
    assert read_fault_policy(with_policy(home, text)) == policy
    call(home, CHAT)
    assert read_fault_policy(home / "models.yaml") == FaultPolicy()


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("{strat: 1}", "'strat' is not a key; use one of startup_timeout_s, stall_timeout_s"),
        ("{makers: {}}", "'makers' is not a key"),
        ("[1]", "fault_policy: expected a mapping"),
        ("{startup_timeout_s: 0}", "fault_policy.startup_timeout_s: expected greater than 0, got 0"),
        ("{startup_timeout_s: .inf}", "fault_policy.startup_timeout_s: expected less than or equal to 604800, got inf"),
        ("{draft_timeouts: {reply_timeout_s: 1" + "0" * 400 + "}}",
         "fault_policy.draft_timeouts.reply_timeout_s: expected a number"),
        ("{draft_ahead: 1}", "fault_policy.draft_ahead: expected true or false"),
        ("{draft_timeouts: 3}", "fault_policy.draft_timeouts: expected a mapping"),
        ("{draft_timeouts: {dead: 3}}", "fault_policy.draft_timeouts.dead is not a key"),
        ("{draft_timeouts: {max_failures: true}}", "fault_policy.draft_timeouts.max_failures: expected a whole number"),
    ],
)  # fmt: skip
def test_an_invalid_fault_policy_is_rejected_by_name(home: Path, policy: str, says: str) -> None:
    refused(says, "plan", with_policy(home, policy), "--instance", "inf2.48xlarge")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["{name: a, config: big, tp_degree: 3}"], "got 3"),
        ([CHAT, CHAT], "name: expected different names, got"),
        ([DRAFT], "expected another model of the file, got 'chat'"),
        ([CHAT, DRAFT, DRAFT.replace("chat-draft", "b")], "'chat': expected one draft"),
        ([CHAT, DRAFT.replace(": 2,", ": 2, batch_size: 3,")], "got 3; set both"),
        ([CHAT, DRAFT.replace(": 2,", ": 2, replicas: 2,")], "one for each of the 1 of its targets"),
        (["{name: a, config: big, tpdegree: 8}"], "'tpdegree' is not a key"),
        (["{name: a, config: big, path: big}"], "expected either `path` (a checkpoint folder) or `config`"),
        (["{name: a b, config: big}"], "name: expected up to 63 letters, digits, '-', '_' or"),
        (["{name: a, config: big, amp: f8}"], "amp: expected one of bf16, f16, f32, got 'f8'"),
        (["{name: a, config: big, batch_size: 0}"], "batch_size: expected"),
        (["{name: a, config: nowhere}"], "does not exist"),
        (["[1, 2]"], "expected a mapping"),
        (["{name: a, config: big, tp_degree: 2, backend: magic}"], "backend: expected one of eager, native"),
        (["{name: a, config: big, group_query_attention: thrifty}"], "got 'thrifty'"),
        ([CHAT.replace(": 8,", ": 8, group_query_attention: shard-over-batch,")], "got 'shard-over-batch'"),
        (["{name: a, config: big, group_query_attention: shard-over-batch}"], "got 'shard-over-batch'"),
        (["{name: a, config: big, tp_degree: 2, replicas: 2}", "{name: a.1, config: big}"],
         "different names, got 'a.1'"),
        (["{name: a, config: big, tp_degree: 8, replicas: 3}", "{name: b, config: big}"], "0 of 24"),
        (["{name: a, config: big, tp_degree: 8, replicas: 400000000}"],
         "a: replicas: expected at most 3 of 8 cores each on inf2.48xlarge (24 cores), got 400000000"),
        ([CHAT.replace(": 8,", ": 8, replicas: 1" + "0" * 30 + ","), DRAFT], "lower replicas"),
        ([CHAT, DRAFT.replace("}", ", quota: {max_slots: 4}}")], "'quota' is not a key"),
        (["{name: a, path: " + "x" * 5000 + "}"], "cannot be searched for"),
        (['{name: a, config: "a\\0b"}'], "cannot be searched for"),
    ],
)  # fmt: skip
def test_an_impossible_plan_exits_with_status_2(home: Path, entries: list[str], says: str) -> None:
    done = call(home, *entries)
    assert done.exit_code == 2 and says in " ".join(done.stderr.split()), done.output
    assert not done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (CHAT, "chat: expected `path` to run it"),
        (CHAT.replace("config", "path"),
         "chat: tp_degree: expected 1 for backend='native', got 8; set `tp_degree: 1`, or"),
        (CHAT.replace("config: big", "path: big, backend: neuron, quantization: q4_0"),
         "chat: backend='neuron' multiplies with no blocks of quantised weights"),
        (CHAT.replace("config: big", "path: big, backend: neuron, kv_cache_dtype: int8"),
         "chat: backend='neuron' keeps keys and values as amp says"),
        (CHAT.replace("config: big", "path: big").replace("2048", "4097"), "at most 4096, which it was trained on"),
        (CHAT.replace("config: big", "path: long"), "chat: n_positions: expected at most 1024 for rope type"),
        (CHAT.replace("config: big", "path: big, backend: eager")
         + "\n  - {name: d, path: big, draft_of: chat, tp_degree: 1, k: 128}",
         "d: k: expected at most 127 draft tokens per round, got 128"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_run_is_rejected_before_anything_starts(home: Path, entry: str, says: str) -> None:
    assert call(home, entry).exit_code == 0
    refused(says, "serve", home / "models.yaml", "--instance", "inf2.48xlarge")
    for backend in ("eager", "neuron"):
        call(home, CHAT.replace("config", "path").replace(": 8,", f": 8, backend: {backend},"))
        planner.check(plan(read_models(home / "models.yaml"), INSTANCES["inf2.48xlarge"]))


def test_files_that_are_not_models_files_are_rejected(home: Path) -> None:
    for text in ("", "models: {a: 1}", "models: []", "other: []", "models: [", "\x00"):
        (home / "models.yaml").write_text(text)
        with pytest.raises(PlanError):
            read_models(home / "models.yaml")
    with pytest.raises(PlanError, match="the file cannot be read"):
        read_models(home / "none.yaml")
    (home / "models.yaml").write_text(f"models:\n  - {CHAT.replace(': 8,', ': 8, tp_degree: 4,')}\n")
    with pytest.raises(PlanError, match="the key 'tp_degree' occurs twice"):
        read_models(home / "models.yaml")
    assert CliRunner().invoke(app, ["plan", str(home / "none.yaml"), "--instance", "tpu"]).exit_code == 2


def test_a_draft_follows_the_replicas_of_its_target(home: Path) -> None:
    call(home, CHAT.replace(": 8,", ": 4, replicas: 3,"), DRAFT)
    assert [model.replicas for model in read_models(home / "models.yaml")] == [3, 3]


def test_neuron_ls_is_parsed() -> None:
    def rows(count: int, cores: int, memory: int, logical: int | None) -> str:
        more = {} if logical is None else {"logical_neuroncore_config": logical}
        ids = list(range(cores))
        one = {"nc_count": cores, "memory_size": memory, "neuroncore_ids": ids, "neuron_processes": [], **more}
        return json.dumps([{"neuron_device": n, **one} for n in range(count)])

    gib = 1 << 30
    assert matching(rows(12, 2, 32 * gib, None)).name == "inf2.48xlarge"
    assert matching(rows(16, 2, 32 * gib, 1)).name == "trn1.32xlarge"
    assert matching(rows(16, 4, 96 * gib, 2)).name == "trn2.48xlarge"
    assert matching(rows(1, 2, 30 * gib, None)).memory == 15 * gib
    for text in ("", "[]", "{}", '[{"nc_count": 2}]', rows(3, 2, gib, None), rows(1, 2, gib, 1)[:-1]):
        with pytest.raises(PlanError, match="--instance"):
            matching(text)


def test_the_default_instance_is_this_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`neuron-ls` on the path: working, failing and missing."""
    rows = [{"nc_count": 2, "memory_size": 32 << 30, "neuroncore_ids": [2 * n, 2 * n + 1]} for n in range(12)]
    tool = home / "neuron-ls"
    monkeypatch.setenv("PATH", f"{home}:/usr/bin:/bin")
    monkeypatch.setattr(instances, "USUAL_PLACE", home / "nowhere")
    call(home, CHAT, DRAFT)
    for answer, says in (
        (f"echo '{json.dumps(rows)}'", ""),
        ("exit 3", "-j failed"),
        ("echo []", "instance: expected equal devices from neuron-ls, got"),
    ):
        tool.write_text(f'#!/bin/sh\n[ "$1" = -j ] && {answer}\n')
        tool.chmod(0o700)
        done = CliRunner().invoke(app, ["plan", str(home / "models.yaml"), "--json"])
        if not says:
            assert json.loads(done.stdout)["instance"] == "inf2.48xlarge", done.output
        else:
            assert done.exit_code == 2 and says in done.stderr and "--instance" in done.stderr
    tool.unlink()
    done = CliRunner().invoke(app, ["plan", str(home / "models.yaml")])
    assert done.exit_code == 2 and "chat: tp_degree: expected one of 1 on cpu, got 8" in done.stderr, "this machine"


def test_a_model_that_runs_is_not_added_again() -> None:
    pytest.importorskip("ray")
    from paceline.serving.deployment import Deployment, _Launched, groups_of

    machine = INSTANCES["inf2.48xlarge"]
    made = plan([model("a"), model("d", draft_of=("a",))], machine)
    running = Deployment(made, FaultPolicy())
    running._launched["a"] = _Launched(groups_of(made)[0], "paceline-a")
    for name in "ad":
        with pytest.raises(PlanError, match=f"{name} already runs"):
            running.add(plan([model(name)], machine))
