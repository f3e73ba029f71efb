"""Compiled graphs: reused, shared between checkpoints of a shape, shipped, and over one set of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.core.errors import ArtefactError, BackendError
from paceline.decoder.backends.base import Graph
from paceline.decoder.backends.inductor import InductorBackend
from paceline.decoder.compile import cache
from paceline.decoder.graph_events import GraphEvent
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.native import build
from tests.decoder.tiny import Workshop, fresh
from tests.equality.settings import PROMPTS, plain, run, texts


class Weighing(nn.Module):
    """The smallest step with state worth sharing."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * self.weight[:4].sum(1),)


class Looking(nn.Module):
    """A step that cannot be traced: what it does depends on values."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + 1,) if bool(x.sum() > 0) else (x,)


def graph(module: nn.Module, name: str = "step") -> Graph:
    return Graph(GraphKey(name), module, (torch.ones(4),), {"graph": name, "config": "c"})


def refuse(line: str) -> None:
    raise AssertionError(f"nothing has to be done, but: {line}")


def refuse_compiling(event: GraphEvent) -> None:
    if event.message:
        refuse(event.message)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Points PACELINE_CACHE at a new folder, for what is built from here on."""
    build.library()

    def point(name: str) -> Path:
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / name))
        return tmp_path / name

    return point


def resident() -> int:
    """Bytes of memory this process holds."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_a_package_holds_no_weights_and_its_steps_use_those_they_are_given(
    empty_cache: Callable[[str], Path],
) -> None:
    root, said = empty_cache("cache"), []
    columns = 4 << 20  # 64 MB
    first = Weighing(torch.ones(4, columns))
    step = InductorBackend().compile(graph(first), said.append)
    assert said == ["compiling step"]
    files = [path for path in (root / "inductor").rglob("*") if path.is_file()]  # without the compiler's scratch
    assert sum(path.stat().st_size for path in files) < 4 << 20

    second = Weighing(torch.full((4, columns), 2.0))
    before = resident()
    others = [InductorBackend().compile(graph(second), refuse) for _ in range(3)]
    assert resident() - before < 32 << 20, "a step holds a copy of its weights"
    x = torch.tensor([1.0, 2.0, 0.0, -1.0])
    assert torch.equal(step(x)[0], x * columns)
    for other in others:
        assert torch.equal(other(x)[0], x * 2 * columns)
        assert other.graph.constants["weight"].data_ptr() == second.weight.data_ptr()  # type: ignore[attr-defined]
    second.weight.zero_()
    assert all(torch.equal(other(x)[0], x * 0) for other in others)
    assert torch.equal(step(x)[0], x * columns)


def test_a_failed_compilation_leaves_nothing(empty_cache: Callable[[str], Path]) -> None:
    root = empty_cache("cache")
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(BackendError, match="compiling broken failed"):
            InductorBackend().compile(graph(Looking(), "broken"), said.append)
    assert said == ["compiling broken"] * 2
    assert not list((root / "inductor").rglob(cache.MANIFEST))


def test_the_graphs_of_a_decoder_share_its_weights_and_its_cache(workshop: Workshop) -> None:
    # Decoders of its own: those of other tests may hold graphs with heads in them.
    draft, target = (fresh(workshop.checkpoint(role), backend="inductor", batch_size=4) for role in ("draft", "target"))
    for fused in (None, False):
        run(SpeculativeGenerator(draft, target, k=4, fused=fused), {})
    own = {}
    for side, decoder in {"draft.": draft, "verify.": target}.items():
        named = {*decoder.body.named_parameters(remove_duplicate=False), *decoder.body.named_buffers()}
        own[side] = {f"body.{name}": value.data_ptr() for name, value in named}
    for side, decoder in {"draft.": draft, "verify.": target}.items():
        known = dict(own[side])  # of a step of one model
        known |= {"head." + name: value for name, value in own["draft."].items()}  # of a drafter's step by itself
        known |= {"draft.head." + name: value for name, value in own["draft."].items()}  # of two models in one graph
        known |= {"verify." + name: value for name, value in own["verify."].items()}
        assert len(decoder._steps) > 1
        for step in decoder._steps.values():
            held = step.graph.constants  # type: ignore[attr-defined]
            assert {name: value.data_ptr() for name, value in held.items()} == {name: known[name] for name in held}
            assert any("keys_0" in name for name in held)
            assert any("embedding" in name for name in held)


def test_checkpoints_of_one_shape_share_packages(workshop: Workshop) -> None:
    known = plain(workshop.decoder(backend="inductor"), {})
    other = fresh(workshop.checkpoint("target", seed=1), backend="inductor", batch_size=4)
    other.on_graph = refuse_compiling
    assert plain(other, {}) == plain(workshop.decoder(seed=1), {}) != known


def test_compile_makes_every_graph_ahead_of_its_use(workshop: Workshop) -> None:
    draft, target = (fresh(workshop.checkpoint(role), backend="inductor", batch_size=4) for role in ("draft", "target"))
    SpeculativeGenerator(draft, target, k=4).compile()
    made = [dict(decoder._steps) for decoder in (draft, target)]
    run(SpeculativeGenerator(draft, target, k=4), {"do_sample": True})
    assert [decoder._steps for decoder in (draft, target)] == made


def test_saved_graphs_run_where_nothing_was_compiled(
    workshop: Workshop, tmp_path: Path, empty_cache: Callable[[str], Path]
) -> None:
    source = fresh(workshop.checkpoint(), backend="inductor", batch_size=4)
    known = plain(source, {})
    source.save(tmp_path / "shipped")
    root = empty_cache("elsewhere")
    moved = fresh(workshop.checkpoint(), backend="inductor", batch_size=4)
    moved.load(tmp_path / "shipped")
    moved.on_graph = refuse_compiling
    assert plain(moved, {}) == known
    assert not list(root.rglob("graph.pt2"))
    moved.save(tmp_path / "again")  # what was loaded can be shipped on
    assert {p.name for p in (tmp_path / "again").iterdir()} == {p.name for p in (tmp_path / "shipped").iterdir()}


@pytest.mark.parametrize(
    ("wishes", "named"),
    [({"kind": "biased"}, "config"), ({"amp": "bf16"}, "amp"), ({"batch_size": 2}, "shape")],
)
def test_graphs_of_another_model_or_other_options_are_refused_by_name(
    workshop: Workshop, tmp_path: Path, wishes: dict[str, object], named: str
) -> None:
    source = workshop.decoder(backend="inductor")
    plain(source, {}, prompts=PROMPTS[:1], new=1)
    source.save(tmp_path)
    folder = workshop.checkpoint("target", str(wishes.pop("kind", "grouped")))
    other = fresh(folder, backend="inductor", **{"batch_size": 4, **wishes})  # type: ignore[arg-type]
    with pytest.raises(ArtefactError, match=f"compiled for something else: {named} differ; compile them again"):
        other.load(tmp_path)


def test_nothing_to_load_and_nothing_to_save(workshop: Workshop, tmp_path: Path) -> None:
    compiled = fresh(workshop.checkpoint(), backend="inductor")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArtefactError, match=r"holds no compiled graphs; write them with decoder\.save"):
            compiled.load(folder)
    with pytest.raises(ArtefactError, match="no graph is compiled yet"):
        compiled.save(tmp_path)
    eager = workshop.decoder()
    plain(eager, {}, prompts=PROMPTS[:1], new=1)
    for act in (eager.save, eager.load):
        with pytest.raises(ArtefactError, match=r"eager.*use one that (has|can): inductor"):
            act(tmp_path)


def test_a_damaged_shipment_is_refused_with_a_named_error(workshop: Workshop, tmp_path: Path) -> None:
    source = fresh(workshop.checkpoint(), backend="inductor", batch_size=4)
    plain(source, {})
    source.save(tmp_path)
    other = fresh(workshop.checkpoint(), backend="inductor", batch_size=4)
    for path in tmp_path.rglob("graph.pt2"):
        path.write_bytes(path.read_bytes()[:1000])
    other.load(tmp_path)
    with pytest.raises(ArtefactError, match=r"cannot be loaded \(.+\); delete that folder"):
        plain(other, {})
    for path in tmp_path.rglob(cache.MANIFEST):
        path.write_text("{")
    with pytest.raises(ArtefactError, match="damaged manifest"):
        other.load(tmp_path)


@pytest.mark.parametrize("how", ["CXX", "PATH"])
def test_without_a_compiler_the_remedy_is_named(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "CXX":
        monkeypatch.setenv("CXX", "/nonexistent/g++")
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"g\+\+.*not on PATH; install g\+\+.*apt install.*set CXX.*backend='eager'"):
        AutoDecoder.from_pretrained(workshop.checkpoint())
    assert texts(run(fresh(workshop.checkpoint()), {}, prompts=[[1]], new=2))
