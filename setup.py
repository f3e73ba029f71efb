"""What pyproject.toml cannot say: which folders are the package, and that a wheel for Linux carries native libraries.

The top-level folders with an `__init__.py` are the parts; they are installed as one package, `paceline`, whose root is
orchestrator/. What lies in them is installed, Python or not.

The native libraries are for x86-64. Where there is no C++ compiler, or it fails, the wheel has none, and builds them on
first use, as a checkout does.
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

ROOT = Path(__file__).parent
sys.modules["paceline"] = package = types.ModuleType("paceline")  # without what orchestrator/__init__.py imports
package.__path__ = [str(ROOT)]

from paceline.core.errors import BackendError  # noqa: E402
from paceline.decoder.native import compiler  # noqa: E402

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
CXX = shutil.which(os.environ.get("CXX") or "g++") if SUPPORTED else None


def package_folders() -> dict[str, str]:
    """Every package of ours, with its folder: paceline.core is core/, paceline.serving is orchestrator/serving/."""
    files = (file for part in ROOT.glob("*/__init__.py") for file in part.parent.rglob("*.py"))
    folders = sorted({file.parent.relative_to(ROOT) for file in files})
    inner = {folder: folder.parts[folder.parts[0] == "orchestrator" :] for folder in folders}
    return {".".join(("paceline", *inner[folder])): folder.as_posix() for folder in folders}


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


FOLDERS = package_folders()
setup(
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"": ["*"]},
    distclass=Package,
    cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel},
)
