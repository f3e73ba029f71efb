"""scripts/structure.py, which `make check` runs over the repository: each rule catches a small tree that breaks it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import script

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "structure.py"


structure = script(SCRIPT, "structure")


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write files below root; modules get a docstring unless they start with one."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if path.suffix != ".py" or text.startswith('"""') else f'"""Made up."""\n{text}')
    return root


def import_messages(root: Path, file: str, text: str) -> list[str]:
    plant(root, {"orchestrator/stopping.py": "", "orchestrator/build.py": "", file: text})
    return [str(violation) for violation in structure.check_imports(root)]


def size_messages(root: Path, file: str, text: str) -> list[str]:
    return [str(violation) for violation in structure.check_sizes(plant(root, {file: text}))]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("core/a.py", "import numpy as np", "core/ may import torch and the standard library only"),
        ("core/a.py", "def f():\n    import numpy", "core/ may import torch and the standard library only"),
        ("core/a.py", "from paceline.decoder.config import X", "core/ may not import paceline.decoder.config.X"),
        ("core/a.py", "from paceline import decoder", "core/ may not import paceline.decoder"),
        ("core/a.py", "import paceline", "core/ may not import paceline (orchestrator/)"),
        ("core/a.py", "from paceline.engine.engine import X",
         "core/ may not import paceline.engine.engine.X (orchestrator/)"),
        ("core/a.py", "from . import types", "relative import"),
        ("core/a.py", "from core.types import Commit", "import it as `paceline`"),
        ("tests/core/test_a.py", "from core.types import Commit", "a second copy of core/; import it as"),
        ("decoder/a.py", "from paceline.target.verify import X", "decoder/ may not import"),
        ("decoder/a.py", "def f():\n    import paceline.draft", "decoder/ may not import paceline.draft"),
        ("neuron/a.py", "import torch_neuronx", "torch_neuronx only inside a function"),
        ("decoder/a.py", "try:\n    import triton\nexcept ImportError:\n    pass", "only inside a function"),
        ("draft/a.py", "from paceline.target import X", "draft/ may not import paceline.target.X"),
        ("draft/a.py", "from paceline.medusa import X", "draft/ may not import paceline.medusa.X"),
        ("target/a.py", "from paceline.draft import X", "target/ may not import paceline.draft.X"),
        ("medusa/a.py", "from paceline.eagle import X", "medusa/ may not import paceline.eagle.X"),
        ("eagle/a.py", "from paceline.medusa import X", "eagle/ may not import paceline.medusa.X"),
        ("eagle/a.py", 'import_module("paceline.draft.ngram")', "eagle/ may not import paceline.draft.ngram"),
        ("placement/a.py", "from paceline.target import X", "placement/ may not import paceline.target.X"),
        ("draft/a.py", "def f():\n    import ray", "`ray` may be imported only in placement/cluster/"),
        ("orchestrator/a.py", "from ray import serve", "`ray` may be imported only in placement/cluster/"),
        ("placement/planning/a.py", "import ray", "`ray` may be imported only in placement/cluster/"),
        ("placement/planning/a.py", "from paceline.placement.cluster import X", "placement/planning/ may not import"),
        ("placement/lookahead.py", "from paceline.placement.remote import X", "placement/lookahead.py may not import"),
        ("placement/host/a.py", "import paceline.decoder", "placement/host/ may not import paceline.decoder"),
        ("orchestrator/build.py", "from paceline.cli.options import X", "is imported by orchestrator/cli/ only"),
        ("decoder/a.py", "def f():\n    import paceline.neuron.sdk",
         "paceline.neuron.sdk is imported by orchestrator/cli/"),
        ("orchestrator/cli/a.py", "import paceline.neuron.sdk", "orchestrator/checks/ only, inside functions"),
        ("neuron/a.py", "from paceline.target import X", "neuron/ may not import paceline.target.X"),
        ("orchestrator/text/a.py", "from paceline.engine.batch import X", "orchestrator/text/ may not import"),
        ("orchestrator/engine/engine.py", "from paceline.draft import X", "orchestrator/engine/ may not import"),
        ("orchestrator/engine/batch.py", "from paceline.build import X", "orchestrator/engine/ may not import"),
        ("orchestrator/engine/rounds.py", "from paceline import build", "orchestrator/engine/ may not import"),
        ("orchestrator/engine/rounds.py", "from paceline import X", "orchestrator/engine/ may not import"),
        ("orchestrator/engine/engine.py", "from paceline.serving.ray_app import X",
         "orchestrator/engine/ may not import"),
        ("orchestrator/warmup.py", "from paceline.draft import X", "orchestrator/warmup.py may not"),
        ("tests/core/test_a.py", "from .fakes import X", "relative import"),
        ("target/a.py", 'MAKER = "paceline.draft.ngram:NgramDrafter"', "target/ may not import paceline.draft.ngram"),
        ("decoder/a.py", 'MAKER = "paceline.neuron.backend:X"', "paceline.neuron.backend.X is imported by"),
    ],
)  # fmt: skip
def test_a_wrong_import_is_found(tmp_path: Path, file: str, text: str, words: str) -> None:
    messages = import_messages(tmp_path, file, text)
    assert len(messages) == 1, messages
    assert messages[0].startswith(f"{file}:")
    assert words in messages[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/a.py", "import math\nimport torch.nn.functional as F\nfrom paceline.core.types import Commit"),
        ("decoder/a.py", "import torch\nfrom safetensors import safe_open\nfrom paceline.core import types"),
        ("neuron/a.py", "def f():\n    import torch_neuronx"),
        ("decoder/a.py", "if TYPE_CHECKING:\n    import torch_neuronx"),
        ("draft/a.py", "from paceline.decoder.config import X"),
        ("neuron/a.py", "from paceline.decoder.steps import X\nfrom paceline.neuron.sdk import Y"),
        ("orchestrator/cli/a.py", "def f():\n    from paceline.neuron.sdk import X"),
        ("placement/cluster/nodes.py", "import ray"),
        ("placement/planning/a.py", "from paceline.decoder.models.config import X\nfrom paceline.config import Y"),
        ("orchestrator/cli/a.py", "from paceline.cli.options import X\nfrom paceline.placement import Y"),
        ("orchestrator/warmup.py", "from paceline.decoder.decoder import X"),
        ("orchestrator/serving/app.py", "from ray import serve"),
        ("orchestrator/build.py", "from paceline.draft.ngram import X\nfrom paceline.eagle import Y"),
        ("orchestrator/engine/engine.py", "from paceline.core.types import X\nfrom paceline.engine.batch import Y"),
        ("orchestrator/engine/engine.py", "from paceline.outputs import RequestOutput"),
        ("tests/core/test_a.py", "import numpy\nfrom orchestrator import X"),
        ("examples/heads.py", "import heads"),
        ("decoder/backends/registry.py", 'MAKER = "paceline.neuron.backend:X"'),
        ("eagle/a.py", 'WORDS = "see paceline.draft.ngram"'),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, text: str) -> None:
    assert import_messages(tmp_path, file, text) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_circle_of_imports_is_found(tmp_path: Path, late: bool) -> None:
    """Also one that a function closes; an import for the type checker closes none."""
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from paceline.core.a import A"
    files = {"core/a.py": "from paceline.core import b", "core/b.py": "import paceline.core.c", "core/c.py": typing}
    assert structure.check_circles(plant(tmp_path, files)) == []
    closing = "def f():\n    from paceline.core.a import A" if late else "from paceline.core.a import A"
    found = structure.check_circles(plant(tmp_path, {"core/c.py": closing}))
    assert [one.file for one in sorted(found)] == ["core/a.py", "core/b.py", "core/c.py"]
    assert "core/b.py comes back to this file" in found[0].message


def test_the_message_names_the_line(tmp_path: Path) -> None:
    messages = import_messages(tmp_path, "core/a.py", "import math\nimport numpy")
    assert [message.split(": ")[0] for message in messages] == ["core/a.py:3"]


@pytest.mark.parametrize("folder", structure.SIZED_FOLDERS)
def test_a_long_file_is_found(tmp_path: Path, folder: str) -> None:
    assert size_messages(tmp_path, f"{folder}/a.py", "x = 1\n" * 599) == []
    messages = size_messages(tmp_path, f"{folder}/a.py", "x = 1\n" * 600)
    assert messages == [f"{folder}/a.py:601: 601 lines; a file has at most 600"]


def test_a_long_function_is_found(tmp_path: Path) -> None:
    assert size_messages(tmp_path, "tests/test_a.py", "def f():\n" + "    x = 1\n" * 59) == []
    messages = size_messages(tmp_path, "tests/test_a.py", "def f():\n" + "    x = 1\n" * 66)
    assert messages == ["tests/test_a.py:2: f has 67 lines; a function has at most 66"]


def test_a_missing_docstring_is_found(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("x = 1\n")
    assert ["docstring" in str(found) for found in structure.check_sizes(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(a, b, c, d): ...", "f takes 4 by position"),
        ("async def f(a, b, c, d=0): ...", "f takes 4 by position"),
        ("def f(a, b, c, *, d, e, f, g, h, i): ...", "f has 9 parameters"),
        ("def f(a, b, c, *d, e, f, g, h, **i): ...", "f has 9 parameters"),
        ("class A:\n    def f(self, a, b, c, d): ...", "f takes 4 by position"),
        ("class A:\n    @staticmethod\n    def f(a, b, c, d): ...", "f takes 4 by position"),
        ("class A:\n    def __init__(self, a, b, c, d): ...", "__init__ takes 4 by position"),
        ("def g():\n    def f(a, b, c, d): ...", "f takes 4 by position"),
        ("def sample(a, b, c, d): ...", "sample takes 4 by position"),
        ("def test_f(a, b, c, d): ...", "test_f takes 4 by position"),
        ("@app.command()\ndef bench(a, b, *, c, d, e, f, g, h, i): ...", "bench has 9 parameters"),
    ],
)
def test_too_many_parameters_are_found(tmp_path: Path, text: str, words: str) -> None:
    messages = size_messages(tmp_path, "core/a.py", text)
    assert len(messages) == 1, messages
    assert words in messages[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/a.py", "def f(a, b, c, *, d, e, f, g, h): ..."),
        ("core/a.py", "class A:\n    def f(self, a, b, c): ..."),
        ("core/a.py", "class A:\n    def __call__(self, commit, proposal, sampling, noise): ..."),
        ("tests/test_a.py", "def test_f(a, b, c, d, e, f, g, h, i): ..."),
    ],
)
def test_few_or_exempt_parameters_pass(tmp_path: Path, file: str, text: str) -> None:
    assert size_messages(tmp_path, file, text) == []


def test_too_much_state_is_found(tmp_path: Path) -> None:
    def kept(number: int) -> str:
        lines = "".join(f"        self.a{index} = 1\n" for index in range(number))
        return f"class A:\n    def __init__(self):\n        self.x = 1\n    def f(self):\n{lines}"

    assert size_messages(tmp_path, "core/a.py", kept(8)) == []
    messages = size_messages(tmp_path, "core/a.py", kept(9))
    assert messages == ["core/a.py:2: A assigns 9 attributes after its constructor; at most 8"]


@pytest.mark.parametrize("text", ["import os\nx = os.environ['A']", "import os\ndef f():\n    return os.getenv('A')"])
def test_environment_variables_are_read_in_their_files(tmp_path: Path, text: str) -> None:
    plant(tmp_path, {"decoder/environment.py": text, "decoder/a.py": text})
    assert [violation.file for violation in structure.check_environment(tmp_path)] == ["decoder/a.py"]


def test_the_script_prints_violations_and_exits_1(tmp_path: Path) -> None:
    plant(tmp_path, {"core/__init__.py": "", "scripts/structure.py": SCRIPT.read_text()})
    script = [sys.executable, str(tmp_path / "scripts" / "structure.py")]
    good = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, "")
    plant(tmp_path, {"core/a.py": "import numpy"})
    bad = subprocess.run(script, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert bad.stdout.startswith("core/a.py:2: ")
