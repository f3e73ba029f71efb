"""`paceline chat` and `generate --chat`: the template, the conversation's memory, and the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import decode
from paceline.cli.decode import Modes, history
from paceline.cli.main import app
from paceline.cli.options import load_draft
from paceline.core.errors import PromptError, RequestError
from paceline.generator import SpeculativeGenerator
from paceline.outputs import RequestOutput
from paceline.text.chat import ChatSession, chat_ids
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import call, last, refused

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)
SHORT = ("--backend", "eager", "--amp", "f32", "--n-positions", 96, "--max-new-tokens", 6)


@pytest.fixture(scope="module")
def chatty(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a chat template: w1 before every message, w2 before an answer."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(target, folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": TEMPLATE}))
    return folder


def talk(folder: Path, *lines: str, options: tuple[object, ...] = ()) -> tuple[list[str], str]:
    """Output of a conversation: the answers, and everything else."""
    arguments = ["chat", "--target", str(folder), *map(str, (*SHORT, *options))]
    done = CliRunner().invoke(app, arguments, input="".join(f"{line}\n" for line in lines))
    assert done.exit_code == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], done.stderr


def answer(folder: Path, text: str, *options: object) -> str:
    """Result of `generate` for a text with its template applied."""
    made = last(call("generate", "--target", folder, *SHORT, "--json", *options, "--prompt", text))
    return str(made["text"]).strip()


def test_a_question_goes_through_the_template(chatty: Path) -> None:
    expected = answer(chatty, "w1 w5 w2")
    assert answer(chatty, "w5", "--chat") == expected
    assert answer(chatty, "w5") != expected
    assert talk(chatty, "w5")[0] == [expected]


def test_answers_are_remembered_until_reset(chatty: Path) -> None:
    first = answer(chatty, "w1 w5 w2")
    second = answer(chatty, f"w1 w5 w1 {first} w1 w6 w2")
    alone = answer(chatty, "w1 w6 w2")
    assert second != alone
    assert talk(chatty, "w5", "w6", "/reset", "w6")[0] == [first, second, alone]


def test_tokens_depend_on_the_seed_and_not_on_the_mode(chatty: Path) -> None:
    hot = ("--temperature", 1.0)
    lines = ("w5", "/reset", "/draft ngram", "w5", "/stats", "/reset", "/mode plain", "w5", "/reset", "/seed 9", "w5")
    answers, rest = talk(chatty, *lines, options=hot)
    assert rest.count("[cut at 6 tokens: --max-new-tokens]") == 4, "it does not look like the model's own end"
    assert answers[0] == answers[1] == answers[2] == answer(chatty, "w1 w5 w2", *hot)
    assert answers[3] == answer(chatty, "w1 w5 w2", *hot, "--seed", 9) != answers[0]
    assert "acceptance length" in rest


def test_a_question_may_have_several_lines(chatty: Path) -> None:
    expected = answer(chatty, "w1 w5 w6 w2")
    assert talk(chatty, "w5 \\", "w6", "/reset", '"""', "w5", "w6", '"""', "/reset", "w5 \\")[0] == [
        expected,
        expected,
        answer(chatty, "w1 w5 w2"),
    ]


def test_a_saved_conversation_resumes(chatty: Path, tmp_path: Path) -> None:
    file, wrong = tmp_path / "talk.json", tmp_path / "wrong.json"
    both = talk(chatty, "/system w7", "w5", f"/save {file}", "w6")[0]
    said = json.loads(file.read_text())
    assert said["system"] == "w7" and [turn["role"] for turn in said["messages"]] == ["user", "assistant"]
    for text in ("{", "[]", '{"system": 1, "messages": []}', '{"system": null, "messages": [{"role": "user"}]}'):
        wrong.write_text(text)
        again, rest = talk(chatty, f"/load {file}", f"/load {wrong}", "w6")
        assert again == both[1:] and f"error: /load: expected a file of /save, got {wrong}" in rest
    assert "error: " in talk(chatty, f"/save {file / 'below a file'}")[1]


def test_a_race_answers_the_last_question_again_with_each_draft(chatty: Path) -> None:
    answers, rest = talk(chatty, "/race", "w5", "/race ngram suffix", "/race", "w6", options=("--draft", "ngram"))
    first = answer(chatty, "w1 w5 w2")
    assert answers == [first, answer(chatty, f"w1 w5 w1 {first} w1 w6 w2")], "it leaves the conversation as it is"
    assert "error: /race: expected a question before it" in rest
    assert rest.count("the same") == 5 and "another" not in rest
    assert "race: suffix" in rest and "race: the current draft" in rest


def test_a_drafter_of_a_choice_is_taken_from_it(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made a second time, and no token changes."""
    made = list[object]()
    monkeypatch.setattr(decode, "load_draft", lambda *given: made.append(given) or load_draft(*given))
    choice = 'choice:drafts=["ngram","suffix"]'
    lines = ("/draft suffix", "w5", "/race ngram suffix", "/reset", "/draft plain", "w5")
    answers, rest = talk(chatty, *lines, options=("--draft", choice))
    assert len(made) == 2, "the choice, and plain decoding"
    assert answers == [answer(chatty, "w1 w5 w2")] * 2 and "error" not in rest and rest.count("the same") == 3


def test_the_history_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    file = tmp_path / "new" / "history"
    readline.clear_history()
    with history(file):
        readline.add_history("a question")
    assert file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with history(file):
        assert readline.get_history_item(1) == "a question"
    readline.clear_history()
    with history(tmp_path / "new" / "history" / "no folder"):
        pass


def test_a_system_message_comes_first(chatty: Path) -> None:
    expected = answer(chatty, "w1 w7 w1 w5 w2")
    assert talk(chatty, "w5", options=("--system", "w7"))[0] == [expected]
    assert talk(chatty, "/system w7", "w5")[0] == [expected]


def test_errors_are_shown_and_the_conversation_continues(chatty: Path) -> None:
    answers, rest = talk(chatty, "/mode nobody", " ".join(["w3"] * 200), "/what", "", "w5", "/quit", "w6")
    assert answers == [answer(chatty, "w1 w5 w2")]
    assert "nobody" in rest
    assert "at most 90 tokens" in rest
    assert "/draft DRAFT" in rest


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli import console

    show, seen = console.TextView.show, [0]

    def interrupted(view: console.TextView, event: RequestOutput) -> str:
        seen[0] += 1
        if seen[0] == 3:
            raise KeyboardInterrupt
        return show(view, event)

    monkeypatch.setattr(console.TextView, "show", interrupted)
    whole = answer(chatty, "w1 w5 w2").split()
    answers, rest = talk(chatty, "w5", "w6")
    assert "stopped" in rest
    said = answers[0].split()
    assert said == whole[: len(said)] and len(said) < len(whole)
    assert answers[1] == answer(chatty, f"w1 w5 w1 {' '.join(said)} w1 w6 w2")


def test_a_mode_accepts_only_its_options(chatty: Path) -> None:
    """Options of draft models work with folders only, and those of drafts with none if nothing is drafted."""
    options = ("--draft", chatty, "--vocabulary", "intersection", "--confidence-threshold", 0.1, "--k", 2)
    lines = ("w5", "/reset", "/mode ngram", "w5", "/reset", "/mode plain", "w5", "/reset", f"/mode {chatty}:k=3", "w5")
    answers, rest = talk(chatty, *lines, options=options)
    assert answers == [answer(chatty, "w1 w5 w2")] * 4 and "error" not in rest


def test_a_lossy_rule_is_labelled_and_an_error_is_shown(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = talk(chatty, "w5", options=("--draft", chatty, "--acceptor", "typical"))[1]
    assert "LOSSY" in rest
    failing = RequestOutput(0, (), 0, "error", error=RequestError("that went wrong"))
    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeGenerator, "stream", lambda *_, **__: (one for one in (failing,)))
        answers, rest = talk(chatty, "w5", "/seed \u00b2")
    assert "error: that went wrong" in rest and "/draft DRAFT" in rest and answers == []


def test_ctrl_c_while_a_mode_is_loaded_keeps_the_conversation(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = Modes.use

    def interrupted(modes: Modes, draft: str | None) -> None:
        if draft == "suffix":
            raise KeyboardInterrupt
        use(modes, draft)

    monkeypatch.setattr(Modes, "use", interrupted)
    answers, rest = talk(chatty, "/mode suffix", "w5")
    assert "stopped" in rest and answers == [answer(chatty, "w1 w5 w2")]


def test_chat_without_a_template_is_rejected(target: Path) -> None:
    said = "expected a model with a chat template, got one without"
    refused(said, "generate", "--target", target, *SHORT, "--chat", "--prompt", "w5")


def test_the_oldest_turns_are_dropped_if_the_context_is_full(chatty: Path) -> None:
    tokenizer = load_tokenizer(chatty)
    talk_ = ChatSession(tokenizer, room=12)
    assert talk_.ask("w5 w5")[1] == 0
    talk_.answer("w8 w8 w8")
    ids, forgotten = talk_.ask("w6")
    assert (ids, forgotten) == (chat_ids(tokenizer, talk_.turns), 0)
    talk_.answer("w9 w9")
    ids, forgotten = talk_.ask("w7")
    assert forgotten == 2
    assert tokenizer.decode(ids) == "w1 w6 w1 w9 w9 w1 w7 w2"
    talk_.answer("w4")
    before = list(talk_.turns)
    with pytest.raises(PromptError, match="at most 12 tokens"):
        talk_.ask(" ".join(["w3"] * 20))
    assert talk_.turns == before
    with pytest.raises(PromptError, match="no tools"):
        chat_ids(tokenizer, [{"role": "tool", "content": "w1"}])
