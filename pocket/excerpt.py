"""A smaller corpus out of a large one, for a machine to which little text can be carried.

In: `train.jsonl.xz`. Out: the same lines, fewer: no tests, code rich in docstrings first, at most so many bytes a package.
`python pocket/excerpt.py --corpus pocket/data/train.jsonl.xz --out pocket/data/excerpt.jsonl.xz`
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

from corpus import Document, Writer, is_test
from tokenizer import read_documents

MIN_DOCSTRINGS_PER_KB = 0.25


def docstring_density(text: str) -> float:
    """Docstrings in 1000 characters."""
    return text.count('"""') / 2 / max(1, len(text)) * 1000


def chosen(documents, code_bytes: int, docs_bytes: int):
    """The documents to keep, package by package; of code the ones with most docstrings."""
    packages: dict[str, list[dict]] = defaultdict(list)
    for d in documents:
        if d["kind"] == "docs" or not is_test(d["path"]):
            packages[d["source"]].append(d)
    for found in packages.values():
        taken: Counter[str] = Counter()
        limits = {"code": code_bytes, "docs": docs_bytes}
        for d in sorted(found, key=lambda d: (d["kind"], -docstring_density(d["text"]), d["path"])):
            if taken[d["kind"]] + len(d["text"]) > limits[d["kind"]]:
                continue
            taken[d["kind"]] += len(d["text"])
            yield d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--code-bytes", type=int, default=600_000, help="of one package")
    parser.add_argument("--docs-bytes", type=int, default=1_500_000, help="of one package")
    parser.add_argument("--preset", type=int, default=6)
    args = parser.parse_args()
    writer = Writer(args.out, args.preset)
    for d in chosen(read_documents(args.corpus), args.code_bytes, args.docs_bytes):
        writer.write(Document(**d))
    writer.file.close()
    print(json.dumps({"file": str(args.out), "bytes": args.out.stat().st_size, "text": writer.bytes}))


if __name__ == "__main__":
    main()
