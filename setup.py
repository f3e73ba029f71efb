"""What pyproject.toml cannot say: a wheel for Linux on x86-64 carries the native libraries.

Where there is no C++ compiler, or it fails, the wheel has none, and builds them on first use, as a checkout does.
"""

import os
import platform
import shutil
import sys
import types
from importlib import metadata, util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.modules["paceline"] = package = types.ModuleType("paceline")  # without what orchestrator/__init__.py imports
package.__path__ = [str(Path(__file__).parent)]

from paceline.core.errors import BackendError  # noqa: E402
from paceline.decoder.native import compiler  # noqa: E402

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
CXX = shutil.which(os.environ.get("CXX") or "g++") if SUPPORTED else None


def build_libraries(folder: Path) -> None:
    """Fill the folder of what comes with the package."""
    assert CXX is not None
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {
        folder / f"kernels-{one.name}.so": compiler.KERNELS.with_flags(*one.flags) for one in compiler.PROCESSORS
    }
    if (torch := util.find_spec("torch")) and torch.origin:
        program = compiler.program(Path(torch.origin).parent)
        libraries[folder / f"program-{metadata.version('torch')}.so"] = program
    else:
        print("PyTorch is not here (--no-build-isolation): what runs recorded steps is built on first use")
    for path, library in libraries.items():
        print(f"building {path.name}", flush=True)
        try:
            compiler.compile_libraries(
                {path: library}, CXX, cores=os.cpu_count() or 1, report=lambda _files, _share: None
            )
        except BackendError as error:  # an older compiler that does not know the processor, say
            print(f"{path.name} is left out: {error}")


class BuildPackage(build_py):
    """Also compiles, but for an editable installation."""

    def run(self) -> None:
        super().run()
        if CXX is None:
            print("no C++ compiler for Linux on x86-64: native libraries are left out, and built on first use")
        elif not self.editable_mode:
            build_libraries(Path(self.build_lib) / "paceline" / "decoder" / "native" / compiler.PREBUILT.name)


class Package(Distribution):
    """One with libraries of a platform, where there are any."""

    def has_ext_modules(self) -> bool:
        return CXX is not None


class Wheel(bdist_wheel):
    """For every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=Package, cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
