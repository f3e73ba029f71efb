"""The kernel interface: what `jit` makes of a function is launched over a grid, or without one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Kernel:
    """``kernel[grid](...)`` or ``kernel(...)``, of tensors by their place and flags by their names."""

    func: object
    grid: int = 1
    calls: list[dict[str, object]] = field(default_factory=list)

    def __getitem__(self, grid: int) -> Kernel:
        if not isinstance(grid, int) or grid not in (1, 2):
            raise TypeError(f"a grid of one dimension over the cores of a logical core, not {grid!r}")
        return replace(self, grid=grid)

    def __call__(self, *tensors, **flags):
        self.calls.append(
            {"shapes": [tuple(x.shape) for x in tensors if hasattr(x, "shape")], "grid": self.grid, **flags}
        )
        return self.func(*tensors, **flags)


def jit(func=None, mode="auto", **_options):
    if mode not in ("auto", "torchxla", "jax"):
        raise ValueError(mode)
    return func if isinstance(func, Kernel) else Kernel(func)
