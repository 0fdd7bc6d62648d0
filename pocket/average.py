"""The average of two trainings of the same model: weights between what it was and what further training made of it.

In: `weights.*` of the first training and the GGUF file of the second, which started from it. Out: a GGUF file.
Further training on less text learns its tasks and forgets some of the rest; halfway between, most of both is there.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

import weights_io
from export import export, read_gguf
from model import Tensors


def between(first: Tensors, second: Tensors, share: float) -> Tensors:
    """first + share * (second - first), tensor by tensor."""
    if first.keys() != second.keys():
        raise ValueError("the two models do not have the same tensors")
    return {name: t.lerp(second[name], share) for name, t in first.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the first training")
    parser.add_argument("--more", type=Path, required=True, help="GGUF file of the second")
    parser.add_argument("--share", type=float, default=0.5, help="of the second")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--f32", action="store_true")
    args = parser.parse_args()
    first, config = weights_io.load(args.weights)
    weights = between(first, read_gguf(args.more, config), args.share)
    export(weights, config, Tokenizer.from_file(str(args.tokenizer)), args.out, not args.f32)
    print(json.dumps({"file": str(args.out), "bytes": args.out.stat().st_size}))


if __name__ == "__main__":
    main()
