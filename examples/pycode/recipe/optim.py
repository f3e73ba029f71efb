"""Optimizers: Muon for the matrices of the layers, AdamW for embeddings, output layer and norms."""

import math

import torch
from transformers import LlamaForCausalLM

# Coefficients of a quintic iteration that drives singular values to 1 (the first four of the sequence
# that is optimal for an unknown spectrum).
ITERATIONS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
)


def orthogonalise(stack: torch.Tensor) -> torch.Tensor:
    """The nearest (semi-)orthogonal matrices to a stack of matrices, roughly."""
    x = stack.mT if stack.shape[-2] > stack.shape[-1] else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in ITERATIONS:
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram * b, gram, gram, alpha=c) @ x
    return x.mT if stack.shape[-2] > stack.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised, sized to be like AdamW's at the same learning rate."""

    def __init__(
        self,
        params: list[torch.Tensor],
        lr: float,
        dtype: torch.dtype = torch.float32,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        """`dtype`: what the iterations are done in."""
        self.dtype = dtype
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step; matrices of one shape are worked on together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(state["momentum"], group["momentum"]))
                size = 0.2 * math.sqrt(max(shape))
                for p, update in zip(params, orthogonalise(torch.stack(updates).to(self.dtype)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * size)


class Trainee:
    """A model with its optimizers and its count of steps."""

    def __init__(self, model: LlamaForCausalLM, lr: float, warmup: int, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.lr, self.warmup, self.steps = model, lr, warmup, 0
        named = list(model.named_parameters())
        matrices = [p for n, p in named if p.dim() == 2 and ".layers." in n]
        tables = [p for n, p in named if p.dim() == 2 and ".layers." not in n]
        norms = [p for _, p in named if p.dim() == 1]
        groups = [{"params": tables, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
        self.optimizers = [
            Muon(matrices, lr, dtype),
            torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True),
        ]

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits

    def step(self, scale: float) -> None:
        """One step from the gradients in the model; scale is the schedule's factor."""
        self.steps += 1
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, self.steps / self.warmup) * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"steps": self.steps, "model": self.model.state_dict(), "optimizers": optimizers}

    def restore(self, state: dict) -> None:
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def cosine(progress: float, floor: float = 0.02) -> float:
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
