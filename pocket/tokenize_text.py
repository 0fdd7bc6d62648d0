"""Turns the corpus into token streams for training; runs where training runs, on all cores.

In: `train.jsonl.xz`, `held.jsonl.xz`, `tokenizer.json`, and permissive packages installed on the machine (by name).
Out: `<stream>.bin` (uint16) of code, docs, chat and func (documented functions one by one), `installed.json` (versions
and licences of the packages) and, last, `sizes.json` (bytes per token): when it is there, the streams are whole.
"""

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing
import random
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import chat
import exercises
from corpus import INSTALLED, MAX_PACKAGE_BYTES, Seen, Source, is_test, permitted_licence
from corpus import read_documents as select_documents
from fetch import normal_name, read_sources
from tokenizer import read_documents

PRACTICE = 120_000
INSTALLED_BYTES = 1_700_000
JOBS = 240  # parts of the practice, spread among the workers
STREAMS = ("code", "docs", "chat", "func")
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
    texts: dict[str, list[str]] = {name: [] for name in STREAMS}
    for d in documents:
        texts[d["kind"]].append(d["text"])
        if d["kind"] == "code" and not is_test(d["path"]):
            texts["func"] += chat.bare_functions(d["text"])
        for conversation in chat.conversations(d["kind"], d["source"], d["path"], d["text"], _worker["seed"]):
            texts["chat"].append(_worker["render"](conversation))
    return {k: (_encode(t, k == "chat"), sum(len(x.encode()) for x in t)) for k, t in texts.items()}


def _practice(job: tuple[int, int]) -> dict[str, tuple[np.ndarray, int]]:
    count, seed = job
    rng = random.Random(f"{seed}:functions")
    texts = {"chat": [_worker["render"](c) for c in chat.practice(count, seed)]}
    texts["func"] = [exercises.sample(rng).code() + "\n" for _ in range(count // 5)]
    return {k: (_encode(t, k == "chat"), sum(len(x.encode()) for x in t)) for k, t in texts.items()}


def _batches(documents, size: int = 64):
    batch = []
    for d in documents:
        batch.append(d)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def build(documents, pool, prefix: str, out: Path, seed: int, practice: int, sizes: dict) -> None:
    """Writes <prefix>code, <prefix>docs, <prefix>chat and <prefix>func."""
    parts: dict[str, list] = {name: [] for name in STREAMS}
    jobs = [(practice // JOBS, seed + i) for i in range(JOBS)] if practice else []
    for result in itertools.chain(pool.imap(_process, _batches(documents)), pool.imap(_practice, jobs)):
        for name, item in result.items():
            parts[name].append(item)
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
    parser.add_argument("--practice", type=int, default=PRACTICE, help="conversations from our own frames")
    parser.add_argument("--installed-bytes", type=int, default=INSTALLED_BYTES, help="of one installed package")
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
    MAX_PACKAGE_BYTES["code"] = args.installed_bytes
    if not args.no_installed:
        documents += [asdict(d) for d in installed_documents(held, sources)]
        print(f"{len(documents)} with installed packages, {time.monotonic() - start:.0f} s", flush=True)
    random.Random(args.seed).shuffle(documents)
    context = multiprocessing.get_context("fork")
    with context.Pool(args.processes, _start, (str(args.tokenizer), args.seed)) as pool:
        build(read_documents(args.held), pool, "held_", args.out, args.seed, 0, sizes)
        build(documents, pool, "", args.out, args.seed, args.practice, sizes)
    (args.out / "installed.json").write_text(json.dumps([asdict(s) for s in sources], indent=0))
    part = args.out / "sizes.part"
    part.write_text(json.dumps(sizes))
    part.rename(args.out / "sizes.json")
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
