"""Drafters and acceptance rules that can be selected by name, each a literal row with its capabilities.

Python, the command line, YAML, HTTP, the documents and the contract suite read these rows. A row names its class by a
dotted path, so that reading the table imports nothing. Options of a row are the keyword-only parameters of its
constructor (`options_of`). Model families and backends have their rows in `paceline.decoder`. `paceline.auto_drafter`
makes drafters.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Needs = Literal["choices", "probs", "both"]


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """A drafter.

    name       in the grammar of `paceline.draft_spec`, or a name of its kind if it is not in the grammar
    path       its constructor, "module:Class" or "module:Class.method", whose keyword-only parameters are the options
    summary    one line for tables
    given_as   name: by its name; target: by its name, and made of the target; folder: by a folder, whose kind is
               detected; vocabulary: by the option of a draft model; list: by several drafters; object: a Python object;
               process: a separate model with ``draft_of``
    trees      can propose trees
    draws      can report the probabilities its tokens were sampled from (acceptor="reject")
    fused      can share a graph with the target
    masks      drafts under the mask of a grammar; others' drafts are cut at the first forbidden token, so that every
               drafter supports structured output
    adaptive_k     which of its drafts have several lengths (k="auto")
    listable   can be in a list
    check      checks the options of a drafter that is made for a target, and its folder, before anything is loaded:
               (the target's `ModelConfig`, `Wanted`, the folder if it has one, the options) -> its `DraftShape`, or
               None where tensors say it
    options    callable that its options are read from, if that is neither ``check`` nor ``path``
    marks      keys of the config.json by which its folder is recognised, with their values; None: a number above 0
    """

    name: str
    path: str
    summary: str
    given_as: Literal["name", "target", "folder", "vocabulary", "list", "object", "process"]
    trees: bool = False
    draws: bool = False
    fused: bool = False
    masks: bool = False
    adaptive_k: Literal["all", "chains", "none"] = "all"
    listable: bool = True
    check: str = ""
    options: str = ""
    marks: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class RuleRow:
    """An acceptance rule.

    needs        inputs: the target's sampled tokens, its probabilities, or both
    draft_probs  reads the distribution that drafted tokens were sampled from
    lossless     the output follows the target's distribution
    trees        can verify trees
    on_host      can run on the host, for logits processors and scores
    warning      shown with every output that it gave
    """

    name: str
    path: str
    summary: str
    needs: Needs
    draft_probs: bool = False
    lossless: bool = True
    trees: bool = True
    on_host: bool = True
    warning: str = ""


_ModelRow = partial(
    DrafterRow,
    given_as="folder",
    trees=True,
    draws=True,
    fused=True,
    masks=True,
    adaptive_k="chains",
    options="paceline.draft.options:ModelOptions",
)
_HeadsRow = partial(DrafterRow, given_as="folder", trees=True, fused=True, adaptive_k="chains", listable=False)

DRAFTERS: dict[str, DrafterRow] = {
    row.name: row
    for row in (
        DrafterRow("none", "paceline.draft.base:NoDrafter", "plain decoding", given_as="name", adaptive_k="none"),
        DrafterRow("ngram", "paceline.draft.ngram:NgramDrafter", "prompt lookup by n-grams", given_as="name"),
        DrafterRow(
            "suffix", "paceline.draft.suffix:SuffixDrafter", "longest repetition of the text's end", given_as="name"
        ),
        _ModelRow(
            "model",
            "paceline.draft.model:ModelDrafter",
            "a smaller model with the target's tokenizer",
        ),
        _ModelRow(
            "pard",
            "paceline.draft.pard:PardDrafter",
            "a PARD model, which drafts all tokens in one pass",
        ),
        _HeadsRow(
            "medusa",
            "paceline.medusa.drafter:MedusaDrafter.from_pretrained",
            "Medusa heads",
            check="paceline.medusa.tree:draft_shape",
        ),
        _HeadsRow(
            "eagle",
            "paceline.eagle.drafter:EagleDrafter.from_pretrained",
            "an EAGLE head: 1, 2, 3, 3.1 or P-EAGLE",
            draws=True,
            check="paceline.eagle.formats:draft_shape",
        ),
        _HeadsRow(
            "dflash",
            "paceline.draft.dflash.drafter:DFlashDrafter.from_pretrained",
            "a DFlash, DFlash 2 or DSpark head",
            draws=True,
            check="paceline.draft.dflash.config:draft_shape",
        ),
        _HeadsRow(
            "mtp",
            "paceline.draft.mtp:MtpDrafter.from_pretrained",
            "an MTP layer, of the target's own checkpoint or of speculators",
            check="paceline.draft.mtp:draft_shape",
            options="paceline.draft.options:TreeOptions",
            marks=(("speculators_model_type", "mtp"), ("num_nextn_predict_layers", None), ("num_mtp_layers", None)),
        ),
        _HeadsRow(
            "mlp_speculator",
            "paceline.draft.mlp_speculator:MlpSpeculatorDrafter.from_pretrained",
            "IBM's MLP speculator",
            check="paceline.draft.mlp_speculator:draft_shape",
            options="paceline.draft.options:TreeOptions",
            marks=(("model_type", "mlp_speculator"),),
        ),
        _HeadsRow(
            "gemma4_assistant",
            "paceline.draft.gemma4_assistant:AssistantDrafter.from_pretrained",
            "Gemma 4's assistant, which reads the target's cache",
            check="paceline.draft.gemma4_assistant:draft_shape",
            options="paceline.draft.options:TreeOptions",
            marks=(("model_type", "gemma4_assistant"), ("model_type", "gemma4_unified_assistant")),
        ),
        DrafterRow(
            "layerskip",
            "paceline.draft.layerskip:LayerSkipDrafter",
            "the target's first layers, with its weights and cache",
            given_as="target",
            trees=True,
            fused=True,
            adaptive_k="chains",
            check="paceline.draft.options:layerskip_shape",
        ),
        DrafterRow(
            "retokenizing",
            "paceline.draft.retokenizing:RetokenizingDrafter",
            "a model with another tokenizer (vocabulary=retokenize)",
            given_as="vocabulary",
        ),
        DrafterRow(
            "fallback",
            "paceline.draft.choice:FallbackDrafter",
            "a list: the first that has a proposal drafts",
            given_as="list",
        ),
        DrafterRow(
            "choice",
            "paceline.draft.choice:ChoiceDrafter",
            "several (drafts=[...]): the one that guesses the text best drafts",
            given_as="list",
        ),
        DrafterRow("function", "paceline.draft.base:FunctionDrafter", "a function from ids to ids", given_as="object"),
        DrafterRow(
            "remote",
            "paceline.placement.remote.drafter:RemoteDrafter",
            "a draft model in another process (draft_of)",
            given_as="process",
            adaptive_k="none",
            listable=False,
        ),
    )
}

ACCEPTANCE_RULES: dict[str, RuleRow] = {
    row.name: row
    for row in (
        RuleRow(
            "match",
            "paceline.core.acceptance.match:Match",
            "the target's own choice must be the drafted token",
            needs="choices",
        ),
        RuleRow(
            "reject",
            "paceline.core.acceptance.rejection:Reject",
            "rejection sampling (Leviathan et al.)",
            needs="probs",
            draft_probs=True,
            trees=False,
        ),
        RuleRow(
            "typical",
            "paceline.core.acceptance.typical:Typical",
            "keeps what the target finds plausible (Medusa)",
            needs="both",
            lossless=False,
            on_host=False,
            warning="LOSSY: above temperature 0 the text does not follow the target's distribution",
        ),
        RuleRow(
            "synthetic",
            "paceline.core.acceptance.synthetic:SyntheticAcceptance",
            "at random with a given probability, to measure speed",
            needs="choices",
            lossless=False,
            on_host=False,
            warning="NOT REAL TEXT: drafted tokens were accepted at random, to measure speed",
        ),
    )
}

_GIVEN = frozenset({
    "batch_size", "confidence", "confidence_threshold", "drawn", "eos", "k", "mask", "progress", "tokenizers",
    "vocabulary",
})  # fmt: skip
"""Keyword-only parameters that the target and the generator's options set."""


def resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    return value


def options_path(row: DrafterRow | RuleRow) -> str:
    """Return the path of the callable whose parameters are a row's options."""
    return (row.options or row.check or row.path) if isinstance(row, DrafterRow) else row.path


def options_of(row: DrafterRow | RuleRow) -> dict[str, inspect.Parameter]:
    """The options that a draft or a rule of this row may have, by name, ``k`` not counted."""
    parameters = inspect.signature(resolve(options_path(row))).parameters.values()
    of_rule = isinstance(row, RuleRow)
    return {
        parameter.name: parameter
        for parameter in parameters
        if (of_rule or parameter.kind is parameter.KEYWORD_ONLY) and parameter.name not in _GIVEN
    }
