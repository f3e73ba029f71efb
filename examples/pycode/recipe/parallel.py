"""Workers that train one target and one draft together, each a process with one or more threads.

Weights, optimizer states and the sum of the gradients lie in shared memory. A worker adds the gradients
of its batch to the sum; whoever completes a step's batches takes the step, and nobody waits for it. So a
worker whose core is wanted by other programs slows only itself down. Gradients may be one step old.
"""

from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from recipe.optim import Trainee


def share_state(trainee: Trainee) -> None:
    """Move weights and optimizer states to shared memory; creates missing states."""
    trainee.model.share_memory()
    for optimizer in trainee.optimizers:
        fresh = not optimizer.state
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if fresh:
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        for p in params:
            for value in optimizer.state[p].values():
                value.share_memory_()


class Shared:
    """The gradient sum of the target, the counts of the run, and the lock for both."""

    def __init__(self, target: Trainee, draft: Trainee, workers: int) -> None:
        """Everything that is common to the workers; for one worker nothing needs sharing."""
        self.target, self.draft, self.workers = target, draft, workers
        # target steps, tokens, batches in the gradient sum, draft steps
        self.counts = torch.tensor([target.steps, 0, 0, draft.steps])
        self.lock = mp.get_context("fork").Lock()
        self.sums: list[torch.Tensor] = []
        if workers > 1:
            self.counts.share_memory_()
            share_state(draft)
            if any(p.requires_grad for p in target.model.parameters()):
                share_state(target)
                self.sums = [torch.zeros_like(p).share_memory_() for p in target.model.parameters()]

    @property
    def steps(self) -> int:
        return int(self.counts[0])

    @property
    def tokens(self) -> int:
        return int(self.counts[1])

    def step_draft(self, scale: float, tokens: int = 0) -> None:
        """A step of the draft from this worker's gradients; counts tokens that the target does not."""
        with self.lock:
            self.counts[1] += tokens
            self.draft.steps = int(self.counts[3])
            self.draft.step(scale)
            self.counts[3] += 1

    def add_target(self, tokens: int, accumulate: int, scale: float) -> None:
        """Count this worker's gradients; the last ones of a step make it happen."""
        with self.lock:
            self.counts[1] += tokens
            self.counts[2] += 1
            params = list(self.target.model.parameters())
            if self.sums:
                for p, total in zip(params, self.sums, strict=True):
                    total.add_(p.grad)
                    p.grad = None
            if self.counts[2] < accumulate:
                return
            for p, total in zip(params, self.sums, strict=bool(self.sums)):
                p.grad = total.clone()
                total.zero_()
            self.target.steps = self.steps
            self.target.step(scale)
            self.counts[0] += 1
            self.counts[2] = 0


def run_workers(work: Callable[..., None], workers: int, *args: object) -> None:
    """Run all workers to their end: the first one in this process."""
    context = mp.get_context("fork")
    helpers = [context.Process(target=work, args=(r, *args), daemon=True) for r in range(1, workers)]
    for helper in helpers:
        helper.start()
    work(0, *args)
    for helper in helpers:
        helper.join()
