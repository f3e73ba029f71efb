"""The best Medusa trees of several sizes, from one measurement of the heads on text that the target wrote greedily.

    python -m recipe.trees --states W/medusa_work/states-.../measure --target T --medusa M --nodes 2 4 8

`paceline medusa-tree` makes one and decodes with it; this uses the texts that training kept for measuring.
"""

import argparse
import json
from pathlib import Path

import torch

from paceline.heads.features import read_features
from paceline.heads.frozen_model import FrozenTarget
from paceline.medusa import checkpoint, search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=Path, required=True, help="folder of the states to measure on")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--medusa", type=Path, required=True, help="folder of the heads; the trees go there")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 3, 4, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a text that are not the target's")
    args = parser.parse_args()
    target = FrozenTarget(args.target)
    heads = checkpoint.heads(args.medusa, target.output, torch.float32)
    measured = search.measure(heads, read_features(args.states, prompt=args.prompt), target.output.detach())
    children = search.by_places(measured.ranks, top=search.TOP)
    taus = {}
    for nodes in args.nodes:
        found = search.best(children, nodes)
        found.choices.write(args.medusa / f"tree-{nodes}.json")
        taus[nodes] = round(found.tau, 2)
    print(json.dumps({"places": measured.places, "top": measured.top(), "expected tokens a round": taus}))


if __name__ == "__main__":
    main()
