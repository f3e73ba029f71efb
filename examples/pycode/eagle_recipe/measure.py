"""Measure a trained head on text that it was not trained on, and write its acceptance.json.

    python examples/pycode/eagle_recipe/measure.py --target examples/pycode/target --head eagle3 --data held_out.bin

What `paceline train eagle` does at its end, for an existing head: the target continues greedily from prompts
of the data, and chains of 1, 2, ... drafts from every place of that are compared with it, teacher-forced.
"""

import argparse
import json
from pathlib import Path

import torch

from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import read_tokens
from paceline.eagle import checkpoint
from paceline.eagle.network import TrainableHead
from paceline.eagle.train import MEASURED, acceptance
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import FeatureCache
from paceline.heads.frozen_model import FrozenTarget
from paceline.heads.options import CachedTextOptions

DEPTH = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True, help="folder of the head; acceptance.json is written there")
    parser.add_argument("--data", type=Path, required=True, help="token ids that nothing was trained on")
    parser.add_argument("--texts", type=int, default=32)
    options = parser.parse_args()
    found = checkpoint.load(options.head, ModelConfig.from_pretrained(options.target))
    config = found.config
    target = FrozenTarget(options.target, config.layers)
    weights = {name: x.float() for name, x in found.weights.items()}
    ids = weights.pop("ids", torch.arange(config.vocab_size)).long()
    network = TrainableHead(config, target.embedding, target.output.detach() if config.version == 1 else None)
    network.load_state_dict(weights)
    how = CachedTextOptions(eval_samples=options.texts, feature_cache_gb=0)
    stream = read_tokens(options.data, config.vocab_size)
    texts = FeatureCache(target, stream, how, folder=options.head / "work").eval_texts()
    shares = acceptance(
        network,
        texts,
        depth=DEPTH,
        head=target.output.detach(),
        vocabulary=DraftVocab(ids, config.vocab_size),
        skip=how.prompt_length,
    )
    written = json.dumps({"greedy chains": [round(share, 4) for share in shares]})
    (options.head / MEASURED).write_text(written + "\n", encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
