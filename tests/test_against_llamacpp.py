"""The same file, the same tokens, teacher-forced: our distribution over the next token beside llama.cpp's.

Skips when the `xllamacpp` wheel or a model file is missing (`bench/fetch_models.py` fetches the real ones). The peer
runs in a process of its own, since it aborts on files it dislikes. `exact` is llama.cpp on an unquantized copy of the
same weights: there no activation is rounded to 8 bits, and llama.cpp and we agree to 1e-5 nats and better.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny

import tandem
from tandem.default_model import default_model
from tandem.gguf import read_gguf, write_gguf
from tandem.models import ARCHS
from tandem.quant import format_by_name, unpack_tensor

WORKER = Path(__file__).parents[1] / "bench" / "peer_engines.py"
MODELS = Path(os.environ.get("TANDEM_TEST_MODELS") or Path.home() / ".cache" / "tandem-test-models")
REAL = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m": "gemma-3-270m-q4_k_m.gguf"}
TOKENS = 512
# Mean Kullback-Leibler divergence in nats, and share of positions with the same best token.
BOUND_F16, BOUND_QUANTIZED, BOUND_AGREEMENT = 1e-3, 5e-3, 0.98
# llama.cpp fed 128 tokens at a time and fed 8 prefers the same token in 95 % (Gemma) and 96 % (SmolLM2) of all
# positions: where the two best tokens are this close in probability, its choice is rounding.
DECIDED = 0.05

TEXT = '''The ferry to the island leaves at seven in the morning, and anyone who has lived here for more than a winter
knows that it does not wait. Martha, who has sold tickets from the green hut for thirty-one years, says that the
captain once left the mayor standing on the pier with a suitcase in each hand. The mayor took the next boat, two
hours later, and never complained. "You learn the timetable," she told me, "or you learn to enjoy the coffee."

I had come to write about the lighthouse. It was built in 1874 from granite that was cut on the mainland and
shipped across in pieces, each of them numbered with white paint. The keeper's notebooks are still on a shelf in
the kitchen: wind, visibility, the names of ships, and on some days a remark about the garden. On 3 March 1911
he wrote that the potatoes had frozen again; on 4 March he wrote nothing at all. There are 212 steps to the
lamp, and the view from the gallery reaches forty kilometres when the air is clear, which in spring happens
about one day in five.

Since 1988 the light has been automatic. A small computer under the stairs switches it on when the sensor
outside reads less than 400 lux, and reports its state every ten minutes. The program is short enough to be
printed on the wall:

```python
import time

THRESHOLD_LUX = 400
INTERVAL_SECONDS = 600


def should_shine(lux, was_on):
    """Keep the lamp on until the day is clearly bright, so that it does not flicker at dusk."""
    if was_on:
        return lux < 1.25 * THRESHOLD_LUX
    return lux < THRESHOLD_LUX


def watch(sensor, lamp, radio):
    on = False
    while True:
        lux = sensor.read()
        on = should_shine(lux, on)
        lamp.set(on)
        radio.send({"lux": lux, "on": on, "time": time.time()})
        time.sleep(INTERVAL_SECONDS)
```

The engineer who wrote it told me that the only bug in thirty years was found by a gull, which had decided to
sit on the sensor. From the program's point of view night fell at noon and ended at three. They solved the
problem with a piece of bent wire, and then they solved it properly: the lamp now also asks a calendar whether
the sun is supposed to be up.

People ask whether the island still needs a lighthouse when every boat carries a receiver that knows its
position to within a few metres. Martha thinks the question is wrong. A receiver tells you where you are, she
says, but a light tells you that someone expected you to come. In the evening I walked back along the shore, and
at 6:42 the beam passed over the water for the first time, slowly, as if it were looking for something it had
put down the day before. Then the second ferry came in, with eleven passengers, a crate of oranges, and a letter
for me that had been sent to the wrong address twice.
'''


@dataclass(frozen=True)
class Agreement:
    """Mean divergence KL(first || second) in nats; share of positions with the same best token, of all and of the
    `decided` ones, where the first's best token leads by more than DECIDED."""

    divergence: float
    same_best: float
    same_decided: float
    decided: int


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def agreement(first: np.ndarray, second: np.ndarray) -> Agreement:
    """Of two arrays float32 [T, vocab_size] of logits."""
    assert first.shape == second.shape
    divergences, decided = [], []
    for a, b in zip(first, second, strict=True):
        p, q = log_softmax(a), log_softmax(b)
        divergences.append(np.sum(np.exp(p) * (p - q)))
        runner_up, best = np.exp(np.partition(p, -2)[-2:])
        decided.append(best - runner_up > DECIDED)
    same = first.argmax(-1) == second.argmax(-1)
    return Agreement(float(np.mean(divergences)), float(same.mean()), float(same[decided].mean()), sum(decided))


def peer_logits(path: Path, ids: list[int], folder: Path, batch_tokens: int = 128) -> np.ndarray:
    """llama.cpp's logits after each token, float32 [T, vocab_size], fed so many tokens at a time."""
    ids_path, out_path = folder / "ids.npy", folder / f"{path.stem}-{batch_tokens}.npy"
    np.save(ids_path, np.array(ids, np.int32))
    command = [sys.executable, str(WORKER), "llama.cpp", str(path), str(TOKENS), "2"]
    question = {"do": "logits", "ids": str(ids_path), "out": str(out_path), "batch_tokens": batch_tokens}
    # Idle OpenMP threads that spin slow the peer a hundredfold on a busy machine.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    run = subprocess.run(command, input=json.dumps(question) + "\n", env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"llama.cpp failed on {path.name}: {run.stderr[-800:]}"
    return np.load(out_path, mmap_mode="r")


def our_logits(path: Path, ids: list[int]) -> np.ndarray:
    with tandem.load(path, ctx=TOKENS, threads=2) as engine:
        return engine.logits(ids)


def unquantized_copy(path: Path, out: Path, format_name: str) -> Path:
    """The same model with every matrix unpacked to F32 or F16."""
    form = format_by_name(format_name)

    def unpacked(file):
        for name, tensor in file.tensors.items():
            blocks, ggml_type = file.blocks(name), tensor.ggml_type
            if ggml_type != format_by_name("F32").ggml_type:
                values = unpack_tensor(blocks, ggml_type, tensor.shape)
                blocks, ggml_type = form.pack(values.reshape(-1, form.block_values)).reshape(-1), form.ggml_type
            yield name, tensor.shape, ggml_type, blocks

    with read_gguf(path) as file:
        write_gguf(out, file.metadata, unpacked(file))
    return out


@dataclass(frozen=True)
class Case:
    """A real file with its copy in F16 and the logits that several tests need."""

    path: Path
    copy: Path
    folder: Path
    ids: list[int]
    ours: np.ndarray
    peer: np.ndarray
    exact: np.ndarray


@pytest.fixture(scope="module", params=REAL)
def real(request, tmp_path_factory):
    path, folder = MODELS / REAL[request.param], tmp_path_factory.mktemp(request.param)
    if not path.is_file():
        pytest.skip(f"{path} is missing; python bench/fetch_models.py fetches it")
    copy = unquantized_copy(path, folder / "f16.gguf", "F16")
    with tandem.load(path, ctx=TOKENS, threads=2) as engine:
        ids = engine.tokenizer.encode(TEXT, add_special=True)[:TOKENS]
        assert len(ids) == TOKENS
        ours = engine.logits(ids)
    yield Case(path, copy, folder, ids, ours, peer_logits(path, ids, folder), peer_logits(copy, ids, folder))
    copy.unlink()


@pytest.fixture(scope="module", autouse=True)
def needs_llamacpp():
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the xllamacpp wheel is not installed")


def test_f16_weights_of_real_models_give_llamacpps_distribution(real):
    result = agreement(real.exact, our_logits(real.copy, real.ids))
    assert result.divergence < BOUND_F16 and result.same_best > BOUND_AGREEMENT, result


def test_quantized_real_models_stay_near_their_exact_distribution(real):
    result = agreement(real.exact, real.ours)
    assert result.divergence < BOUND_QUANTIZED and result.same_decided > BOUND_AGREEMENT, result
    assert result.decided > 0.7 * TOKENS, result


def test_quantized_real_models_are_no_further_from_llamacpp_than_it_is_from_itself(real):
    result = agreement(real.peer, real.ours)
    assert result.same_decided > BOUND_AGREEMENT, result
    if result.divergence >= BOUND_QUANTIZED:
        itself = agreement(real.peer, peer_logits(real.path, real.ids, real.folder, batch_tokens=8))
        assert result.divergence < itself.divergence, (result, itself)


def test_real_text_gets_llamacpps_tokens(real):
    question = json.dumps({"do": "tokenize", "text": TEXT}) + "\n"
    command = [sys.executable, str(WORKER), "llama.cpp", str(real.path), str(TOKENS), "2"]
    run = subprocess.run(command, input=question, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1])["ids"][:TOKENS] == real.ids


TINY_IDS = np.random.default_rng(5).integers(0, 256, TOKENS).tolist()


@pytest.mark.parametrize("format_name", ["F32", "F16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_tiny_models_of_every_architecture_give_llamacpps_distribution(arch, format_name, tmp_path):
    path = write_tiny(arch, tmp_path / "tiny.gguf", format_name)
    result = agreement(peer_logits(path, TINY_IDS, tmp_path), our_logits(path, TINY_IDS))
    bound = 1e-6 if format_name == "F32" else BOUND_F16
    assert result.divergence < bound and result.same_best > BOUND_AGREEMENT, result


@pytest.mark.parametrize("format_name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("arch", ARCHS)
def test_tiny_quantized_models_are_as_exact_as_llamacpps(arch, format_name, tmp_path):
    # Random weights magnify rounding, and a router's near-ties more so: the bound is what llama.cpp loses on the file.
    path = write_tiny(arch, tmp_path / "tiny.gguf", format_name)
    exact = peer_logits(unquantized_copy(path, tmp_path / "exact.gguf", "F32"), TINY_IDS, tmp_path)
    ours, peer = agreement(exact, our_logits(path, TINY_IDS)), agreement(exact, peer_logits(path, TINY_IDS, tmp_path))
    assert ours.divergence < 1.25 * peer.divergence, (ours, peer)


def test_the_packaged_model_loads_in_llamacpp_and_agrees(tmp_path):
    path = default_model()
    with tandem.load(path, ctx=TOKENS, threads=2) as engine:
        ids = engine.tokenize(TEXT)[:TOKENS]
        ours = engine.logits(ids)
    result = agreement(peer_logits(path, ids, tmp_path), ours)
    assert result.divergence < BOUND_QUANTIZED and result.same_decided > BOUND_AGREEMENT, result
