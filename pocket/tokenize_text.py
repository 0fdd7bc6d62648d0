"""Turns the corpus into token streams for training; runs where training runs, on all cores.

In: `train.jsonl.xz`, `held.jsonl.xz`, `tokenizer.json`, and permissive packages installed on the machine (by name).
Out: `<stream>.bin` (uint16), `sizes.json` (bytes per token), `installed.json` (versions and licences of the packages).
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import random
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import chat
from corpus import INSTALLED, Seen, Source, permitted_licence
from corpus import read_documents as select_documents
from fetch import normal_name, read_sources
from tokenizer import read_documents

SMALL_TALK = 60_000
_worker: dict = {}


def installed_documents(held: set[str], sources: list[Source]):
    """Python files of the packages installed here whose metadata states a permitted licence."""
    seen = Seen()
    for name in INSTALLED:
        if normal_name(name) in held:
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        licence = permitted_licence(package.read_text("METADATA") or "")
        if licence is None:
            print(f"{name}: left out, licence not on the list", flush=True)
            continue
        files = []
        for entry in package.files or []:
            path = Path(entry.locate())
            if entry.suffix == ".py" and ".." not in entry.parts and path.exists() and path.stat().st_size < 300_000:
                files.append((str(entry), path.read_bytes()))
        source = Source(normal_name(name), package.version, licence, "Installed on the training machine", False)
        sources.append(source)
        yield from select_documents(files, source, seen, {"code"})


def _start(tokenizer_path: str, seed: int) -> None:
    _worker["tokenizer"] = Tokenizer.from_file(tokenizer_path)
    _worker["render"] = chat.renderer()
    _worker["seed"] = seed


def _encode(texts: list[str], special: bool) -> np.ndarray:
    """Token ids of texts, each closed by <|endoftext|>; marks of the template are tokens only in conversations."""
    tokenizer, parts = _worker["tokenizer"], []
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.encode_special_tokens = not special
    for text in texts:
        parts += [np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16), np.array([end], np.uint16)]
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def _process(documents: list[dict]) -> dict[str, tuple[np.ndarray, int]]:
    """Streams of one batch of documents: ids and bytes of text."""
    texts: dict[str, list[str]] = {"code": [], "docs": [], "chat": []}
    for d in documents:
        texts[d["kind"]].append(d["text"])
        for conversation in chat.conversations(d["kind"], d["source"], d["path"], d["text"], _worker["seed"]):
            texts["chat"].append(_worker["render"](conversation))
    return {k: (_encode(t, k == "chat"), sum(len(x.encode()) for x in t)) for k, t in texts.items()}


def _talk(job: tuple[int, int]) -> tuple[np.ndarray, int]:
    texts = [_worker["render"](c) for c in chat.small_talk(*job)]
    return _encode(texts, True), sum(len(t.encode()) for t in texts)


def _batches(documents, size: int = 64):
    batch = []
    for d in documents:
        batch.append(d)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def build(documents, pool, prefix: str, out: Path, seed: int, talk: int, sizes: dict) -> None:
    """Writes <prefix>code, <prefix>docs and <prefix>chat."""
    parts: dict[str, list] = {"code": [], "docs": [], "chat": []}
    for result in pool.imap(_process, _batches(documents)):
        for name, item in result.items():
            parts[name].append(item)
    jobs = [(talk // 60, seed + i) for i in range(60)] if talk else []
    parts["chat"] += pool.map(_talk, jobs)
    random.Random(seed).shuffle(parts["chat"])  # windows of 4096 tokens should mix kinds of conversations
    for name, items in parts.items():
        ids = np.concatenate([ids for ids, _ in items] or [np.empty(0, np.uint16)])
        ids.tofile(out / f"{prefix}{name}.bin")
        size = sum(size for _, size in items)
        sizes[prefix + name] = {"tokens": len(ids), "bytes": size, "bytes_per_token": size / max(1, len(ids))}
        print(prefix + name, sizes[prefix + name], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help="train parts")
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--talk", type=int, default=SMALL_TALK)
    parser.add_argument("--limit", type=int, default=0, help="documents to read, 0: all")
    parser.add_argument("--no-installed", action="store_true")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    start, sizes, sources = time.monotonic(), {}, []
    args.out.mkdir(parents=True, exist_ok=True)
    held = {normal_name(name) for name in read_sources()[1]}
    documents = []
    for path in args.corpus:
        for i, d in enumerate(read_documents(path)):
            if args.limit and i >= args.limit:
                break
            documents.append(d)
    print(f"{len(documents)} documents read, {time.monotonic() - start:.0f} s", flush=True)
    if not args.no_installed:
        documents += [asdict(d) for d in installed_documents(held, sources)]
        print(f"{len(documents)} with installed packages, {time.monotonic() - start:.0f} s", flush=True)
    random.Random(args.seed).shuffle(documents)
    context = multiprocessing.get_context("fork")
    with context.Pool(args.processes, _start, (str(args.tokenizer), args.seed)) as pool:
        build(read_documents(args.held), pool, "held_", args.out, args.seed, 0, sizes)
        build(documents, pool, "", args.out, args.seed, args.talk, sizes)
    (args.out / "sizes.json").write_text(json.dumps(sizes))
    (args.out / "installed.json").write_text(json.dumps([asdict(s) for s in sources], indent=0))
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
