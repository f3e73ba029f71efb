"""Attention for context encoding: softmax(scale * Q @ K^T) @ V in float32, with the page's layouts and constraints."""

from __future__ import annotations

from types import SimpleNamespace

import nki
import torch


def _need(holds, what) -> None:
    if not holds:
        raise AssertionError(f"attention_cte: {what}")


ABSENT = ("sink", "cache_softmax", "cp_offset", "global_cp_deg", "bound_min", "bound_max")
OPTIONS = {
    **dict.fromkeys(
        ("k_prior", "v_prior", "prior_used_len", "sliding_window", "softmax_dtype", "mm_out_dtype", *ABSENT)
    ),
    **dict.fromkeys(("tp_k", "tp_out", "cache_softmax", "cp_strided_q_slicing"), False),
    "tp_q": True,
}
"""What may be given by name in release 2.29, with its defaults."""


@nki.jit
def attention_cte(q, k, v, scale=1.0, causal_mask=True, **given):
    if unknown := set(given) - set(OPTIONS):
        raise TypeError(f"attention_cte() got an unexpected keyword argument {sorted(unknown)}")
    asked = SimpleNamespace(**{**OPTIONS, **given})
    k_prior, v_prior, prior_used_len = asked.k_prior, asked.v_prior, asked.prior_used_len
    sliding_window, tp_q, tp_k, tp_out = asked.sliding_window, asked.tp_q, asked.tp_k, asked.tp_out
    _need(not any(getattr(asked, name) is not OPTIONS[name] for name in ABSENT), "not in this stand-in")
    behind = k_prior is not None
    _need(
        behind == (v_prior is not None) == (prior_used_len is not None),
        "k_prior, v_prior and prior_used_len go together",
    )
    _need(scale == 1.0 or not (behind or sliding_window), "scale must be 1.0 with prior rows or a sliding window")
    _need(causal_mask or not sliding_window, "a sliding window is causal")
    given = [x for x in (q, k, v, k_prior, v_prior) if x is not None]
    _need({x.dtype for x in given} <= {torch.bfloat16}, f"products are of bfloat16, not {[x.dtype for x in given]}")
    heads, length, width = q.shape if tp_q else (q.shape[0], q.shape[2], q.shape[1])
    groups = k.shape[0]
    _need(width <= 128, f"head dim {width}")
    _need(heads <= 512 and heads % groups == 0, f"{heads} heads, {groups} key-value heads")
    for keys, values, name in ((k, v, "active"), (k_prior, v_prior, "prior"))[: 1 + behind]:
        rows = keys.shape[1 if tp_k else 2]
        laid = (groups, rows, width) if tp_k else (groups, width, rows)
        _need(tuple(keys.shape) == laid, f"{name} keys {tuple(keys.shape)}, not {laid}")
        _need(tuple(values.shape) == (groups, rows, width), f"{name} values {tuple(values.shape)}")
    if behind:
        _need(tuple(prior_used_len.shape) == (1,), f"prior_used_len {tuple(prior_used_len.shape)}, not (1,)")
        _need(prior_used_len.dtype == torch.int32, "prior_used_len is int32")
    query = q.float() if tp_q else q.float().transpose(1, 2)
    parts = [(k, v, torch.arange(length))]
    if behind:
        columns = torch.arange(k_prior.shape[1 if tp_k else 2])
        parts.insert(0, (k_prior, v_prior, columns - prior_used_len))
    keys = torch.cat([x.float() if tp_k else x.float().transpose(1, 2) for x, _, _ in parts], 1)
    values = torch.cat([x.float() for _, x, _ in parts], 1)
    place = torch.cat([where for _, _, where in parts])  # of a row in the text, from the chunk's first row on
    used = torch.ones(len(place), dtype=torch.bool)
    if behind:
        used = torch.cat([parts[0][2] < 0, used[: k.shape[1 if tp_k else 2]]])
    distance = torch.arange(length).unsqueeze(1) - place
    seen = used & (distance >= 0) if causal_mask else used.expand(length, -1)
    if sliding_window:
        seen = seen & (distance < sliding_window)
    repeated = [x.repeat_interleave(heads // groups, 0) for x in (keys, values)]
    scores = scale * torch.matmul(query, repeated[0].transpose(1, 2))
    weights = torch.softmax(scores.masked_fill(~seen, torch.finfo(torch.float32).min), -1)
    mixed = torch.matmul(weights, repeated[1]).to(q.dtype)
    return mixed.transpose(1, 2) if tp_out else mixed
