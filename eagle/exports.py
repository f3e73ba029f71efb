"""What the readers of a written head can run: heads that they cannot are refused, and not written for nothing.

Read of their code: EAGLE cb7e084 (eagle/model/cnets.py and cnets1.py), SGLang and vLLM (models/llama_eagle3.py),
NxD Inference 4bcdc54 (models/model_base.py, models/llama/modeling_llama.py) and speculators c05b95b. Not here: names of
tensors and keys (`paceline.eagle.formats`).
"""

from __future__ import annotations

from paceline.core.errors import ConfigurationError
from paceline.eagle.config import EagleConfig


def check_export(config: EagleConfig, layout: str, *, num_layers: int | None = None) -> None:
    """Raise unless the readers of a layout can run this head. ``num_layers``: of the target, which "nxd" asks for.

    Raises:
        ConfigurationError: they cannot, and why; or the target is not given.
    """
    if layout == "paceline":
        return
    reason = _reason(config, layout, num_layers)
    if reason:
        raise ConfigurationError(f"layout {layout!r} cannot hold this head: {reason}; keep it in layout 'paceline'")


def _reason(config: EagleConfig, layout: str, num_layers: int | None) -> str:
    if config.norm_before_residual and layout != "speculators":
        return "it has norm_before_residual, which only speculators' readers know"
    if config.input_norm and layout != "nxd":
        return "its layer normalises what it reads, which in version 1 only NxD Inference does"
    if layout == "eagle" and (config.attention_bias or config.mlp_bias):
        return "its layer has biases, which EAGLE's own code and SGLang leave out"
    if config.version == 1:
        return ""
    if layout in ("eagle", "speculators") and config.layers[0] == 1:
        return (
            f"it reads residual streams {list(config.layers)}, and SGLang takes ids that begin with 1 for the outputs "
            "of these layers, vLLM does not"
        )
    if layout in ("eagle", "nxd") and len(config.layers) != 3:
        return f"it reads {len(config.layers)} residual streams of the target, and readers of this layout three"
    return _nxd_reason(config, num_layers) if layout == "nxd" else ""


def _nxd_reason(config: EagleConfig, num_layers: int | None) -> str:
    """NxD Inference reads no d2t, and the outputs of layers 1, L/2 - 1 and L - 4: the streams before those after."""
    if config.draft_vocab_size != config.vocab_size:
        return (
            f"NxD Inference does not read d2t, and this head drafts {config.draft_vocab_size} of {config.vocab_size} "
            "ids; train one with the whole vocabulary"
        )
    if config.target_hidden_size != config.hidden_size:
        return "NxD Inference takes the width of the head for that of the target"
    if num_layers is None:
        raise ConfigurationError("layout 'nxd' depends on how many layers the target has: give the target")
    expected = (2, num_layers // 2, num_layers - 3)
    if config.layers != expected:
        return (
            f"NxD Inference reads residual streams {list(expected)} of a target with {num_layers} layers, and this "
            f"head reads {list(config.layers)}"
        )
    return ""
