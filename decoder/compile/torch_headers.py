"""PyTorch's headers for a compiled graph, without what makes a C++ compiler slow.

Every graph that AOTInductor writes includes `aoti_runtime/model_base.h`, which reads the name of a device ("cpu",
"cuda:0") with `std::regex`: its templates are compiled anew in each graph, and take much of the compiler's time,
whatever the graph's size. A copy of that one header, in which the name is taken apart by hand, is put into a folder
that the compiler looks into first. The copy is made only where the function's text is the one known here, which is that
of PyTorch 2.13; where it is another one, PyTorch's own headers are used as they are.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from paceline.decoder import environment
from paceline.decoder.compile import cache

INCLUDE = Path(torch.__file__).parent / "include"
_HEADER = Path("torch/csrc/inductor/aoti_runtime/model_base.h")

_SLOW = """
  std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");
  std::smatch sm;
  bool matched = std::regex_match(device_str, sm, re);
"""
_INCLUDES = "".join(f"#include <{name}>\n" for name in ("functional", "memory", "sstream", "string", "vector"))
"""What `<regex>` brings with it and the header needs."""

# The lines behind these read `sm[1]`, the kind of device, and `sm[3]`, its number; they refuse an unknown kind.
_FAST = """
  struct Part {
    bool matched;
    std::string text;
    const std::string& str() const { return text; }
  };
  const auto colon = device_str.find(':');
  const std::string number = colon == std::string::npos ? "" : device_str.substr(colon + 1);
  const Part sm[4] = {{}, {true, device_str.substr(0, colon)}, {}, {!number.empty(), number}};
  const bool matched =
      colon == std::string::npos || (!number.empty() && number.find_first_not_of("0123456789") == std::string::npos);
"""


def quick(text: str) -> str | None:
    """The header without regular expressions; None if it is not the one known here."""
    if text.count(_SLOW) != 1:
        return None
    made = text.replace(_SLOW, _FAST).replace("#include <regex>\n", _INCLUDES)
    return None if "regex" in made or "smatch" in made else made


def include_folders() -> list[Path]:
    """Where the compiler of a graph looks first: the copy's folder, then PyTorch's; none where no copy is made.

    Raises:
        StorageError: the copy cannot be written.
    """
    path = INCLUDE / _HEADER
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    made = quick(text)
    if made is None:
        return []

    def build(folder: Path) -> None:
        copy = folder / _HEADER
        copy.parent.mkdir(parents=True)
        copy.write_text(made, encoding="utf-8")

    facts = {"kind": "headers", "torch": torch.__version__, "text": hashlib.sha256(made.encode()).hexdigest()}
    return [cache.ensure(environment.cache_root() / "native", facts, build), INCLUDE]


def keep_precompiled(folder: Path) -> None:
    """Let PyTorch keep the headers that it precompiles for graphs in a folder of ours.

    Its own is among the machine's temporary files, where nobody clears it, and every cache of graphs would leave 120 MB
    there, since the copy above has another path in each. PyTorch has no setting for it: where a version of it has other
    names than these, the folder stays what it is.
    """
    from torch._inductor import codecache  # seconds of imports

    for name, path in (("_HEADER_DIR", folder), ("_HEADER_LOCK_DIR", folder / "locks")):
        if hasattr(codecache, name):
            setattr(codecache, name, str(path))
