"""The sampler's distribution equals the textbook definitions, written here a second time without any shortcut."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.errors import EngineError, SettingError, ShapeError
from tandem.runtime.sampler import Sampler, dry_penalties
from tandem.runtime.sampling import PROFILES, Sampling, default_profile, resolve

NEVER = -np.inf


def _softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def _in_order(x):
    """Positions by falling logit, the lowest id first among equals."""
    return sorted(range(len(x)), key=lambda i: (-x[i], i))


def _reference(logits, s, prompt=(), generated=()):
    """{token: probability}, and False if a cut falls so close to a limit that rounding may move it."""
    x = [float(v) for v in logits]
    for token, bias in s.logit_bias:
        x[token] = float(np.float32(x[token]) + np.float32(bias))
    history = [*prompt, *generated]
    window = history if s.repetition_window < 0 else history[max(0, len(history) - s.repetition_window) :]
    for token in set(window):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(generated):
        x[token] -= s.presence_penalty + s.frequency_penalty * generated.count(token)
    for token, penalty in _dry_reference(history, s).items():
        x[token] -= penalty
    order = _in_order(x)
    if s.temperature == 0:
        return {order[0]: 1.0}, True
    kept = order[: s.top_k or len(x)]
    kept = [i for i in kept if x[i] > NEVER]
    clear = True
    if s.typical_p < 1:
        p = _softmax(np.array([x[i] for i in kept]))
        entropy = -(p * np.log(p)).sum()
        far = np.abs(-np.log(p) - entropy)
        by_distance = sorted(range(len(kept)), key=lambda j: (far[j], kept[j]))
        gaps = np.diff(np.sort(far))
        clear &= not np.any((gaps < 1e-9) & (np.diff([p[j] for j in by_distance]) != 0))
        kept, near = _until([kept[j] for j in by_distance], [p[j] for j in by_distance], s.typical_p)
        clear &= near
        kept = sorted(kept, key=lambda i: (-x[i], i))
    if s.top_p < 1:
        kept, near = _until(kept, _softmax(np.array([x[i] for i in kept])), s.top_p)
        clear &= near
    if s.min_p > 0:
        p = _softmax(np.array([x[i] for i in kept]))
        clear &= bool(np.all(np.abs(p / p.max() - s.min_p) > 1e-9))
        kept = [i for i, share in zip(kept, p / p.max(), strict=True) if share >= s.min_p]
    p = _softmax(np.array([x[i] for i in kept]) / s.temperature)
    return dict(zip(kept, p.tolist(), strict=True)), clear


def _until(ids, probs, mass):
    total, taken = 0.0, []
    for token, p in zip(ids, probs, strict=True):
        taken.append(token)
        total += p
        if total >= mass:
            break
    return taken, bool(np.all(np.abs(np.cumsum(probs) - mass) > 1e-9))


def _dry_reference(history, s):
    if s.dry_multiplier == 0 or s.dry_window == 0:
        return {}
    h = history if s.dry_window < 0 else history[-s.dry_window :]
    penalties = {}
    for place in range(1, len(h)):  # the token at `place` followed the tokens before it
        n = 0
        while n < place and h[place - 1 - n] == h[-1 - n] and h[-1 - n] not in s.dry_breakers:
            n += 1
        if n >= s.dry_allowed_length and h[place] not in s.dry_breakers:
            penalty = min(1e30, s.dry_multiplier * s.dry_base ** min(n - s.dry_allowed_length, 1000))
            penalties[h[place]] = max(penalties.get(h[place], 0), penalty)
    return penalties


def _sampler(s, size, prompt=(), generated=()):
    sampler = Sampler(s, size)
    sampler.accept_prompt(list(prompt))
    for token in generated:
        sampler.accept(token)
    return sampler


def _check(logits, s, prompt=(), generated=()):
    expected, clear = _reference(logits, s, prompt, generated)
    ids, probs = _sampler(s, len(logits), prompt, generated).probabilities(logits)
    assert np.all(np.diff(ids) > 0) and ids.dtype == np.int64 and probs.dtype == np.float64
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    if clear:
        assert set(ids.tolist()) == set(expected)
        # penalties are applied in float32, whose rounding moves a probability by about |logit| * 6e-8
        np.testing.assert_allclose(probs, [expected[i] for i in ids.tolist()], atol=1e-6)


def _logits(size, seed, scale=4.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


_CHAINS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"temperature": 1e-3},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.6},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.4},
    {"typical_p": 0.95, "top_p": 0.9},
    {"top_k": 40, "typical_p": 0.8, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    {"temperature": 0.0, "top_k": 5},
]


@pytest.mark.parametrize("chain", _CHAINS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, 65, 1000, 5003])
def test_support_and_probabilities_equal_the_definition(chain, size):
    for seed, scale in ((1, 4.0), (2, 0.05), (3, 30.0)):
        _check(_logits(size, seed, scale), Sampling(**chain), [0] * min(size, 3), [size - 1, 0, size // 2])


@pytest.mark.parametrize("chain", [_CHAINS[1], _CHAINS[5], _CHAINS[9], _CHAINS[11], _CHAINS[16]], ids=str)
def test_a_full_vocabulary_takes_the_same_path_as_the_definition(chain):
    size = 151_937
    _check(_logits(size, 5, 3.0), Sampling(**chain), range(100), [7, 7, size - 1])


_SHARE = st.floats(0.01, 1.0)
_LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=70)
_TOKENS = st.lists(st.integers(0, 7), max_size=25)
_FILTERS = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 5.0)),
    top_k=st.integers(0, 12),
    top_p=_SHARE,
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    typical_p=st.one_of(st.just(1.0), _SHARE),
)
_PENALTIES = st.builds(
    Sampling,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    repetition_window=st.integers(-1, 12),
    dry_multiplier=st.one_of(st.just(0.0), st.floats(0.1, 2)),
    dry_base=st.floats(1.0, 3.0),
    dry_allowed_length=st.integers(1, 4),
    dry_window=st.integers(-1, 30),
    dry_breakers=st.lists(st.integers(0, 7), max_size=2),
    logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-5, 5, width=32), max_size=3),
)


@given(_LOGITS, _FILTERS)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_filters_and_logits_equal_the_definition(values, chain):
    logits = np.array(values, np.float32)
    assume(_reference(logits, chain)[1])
    _check(logits, chain)


@given(_LOGITS, _PENALTIES, _TOKENS, _TOKENS)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_penalties_and_history_equal_the_definition(values, chain, prompt, generated):
    logits = np.array(values, np.float32)
    expected, _ = _reference(logits, chain, prompt, generated)
    ids, probs = _sampler(chain, len(logits), prompt, generated).probabilities(logits)
    # float32 holds a penalised logit of up to 2000 to 1e-4
    np.testing.assert_allclose(np.log(probs.clip(1e-30)), np.log([max(expected[i], 1e-30) for i in ids]), atol=5e-4)


def test_the_filters_run_in_the_documented_order():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # top-k first: 0.4 and 0.3 renormalise to 0.571 and 0.429, so 0.5 of the mass is the first token alone
    assert Sampler(Sampling(top_k=2, top_p=0.5), 4).probabilities(logits)[0].tolist() == [0]
    assert Sampler(Sampling(top_p=0.5), 4).probabilities(logits)[0].tolist() == [0, 1]
    # temperature last: it flattens what is left and lets nothing more in
    hot = Sampler(Sampling(top_p=0.5, temperature=100), 4).probabilities(logits)
    assert hot[0].tolist() == [0, 1] and hot[1][0] == pytest.approx(0.5, abs=1e-3)
    # penalties before the filters: the first token loses its place
    sampler = _sampler(Sampling(top_k=1, presence_penalty=2.0), 4, generated=[0])
    assert sampler.probabilities(logits)[0].tolist() == [1]


@pytest.mark.parametrize("chain", [{"top_k": 20, "top_p": 0.95}, {"temperature": 0.8}, {"min_p": 0.02}], ids=str)
def test_draws_follow_the_distribution(chain):
    size, draws = 1500, 20_000
    logits = _logits(size, 11, 2.0)
    sampler = Sampler(Sampling(**chain, seed=3), size)
    ids, probs = sampler.probabilities(logits)
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=size)
    assert counts.sum() == counts[ids].sum() == draws
    expected = probs * draws
    common = expected >= 5
    seen = np.append(counts[ids][common], counts[ids][~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi_square, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    # Wilson and Hilferty's normal approximation, at 4 standard deviations
    assert (chi_square / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))


def test_equal_seeds_give_equal_tokens_and_the_drawn_seed_is_recorded():
    logits = _logits(1000, 1, 1.0)
    first = Sampler(Sampling(), 1000)
    tokens = [first.sample(logits) for _ in range(50)]
    again = Sampler(Sampling(seed=first.seed), 1000)
    assert tokens == [again.sample(logits) for _ in range(50)]
    other = Sampler(Sampling(), 1000)
    assert other.seed != first.seed
    assert tokens != [other.sample(logits) for _ in range(50)]


@pytest.mark.parametrize("chain", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0, "top_k": 1}])
@pytest.mark.parametrize("size", [4, 1000, 30_000])
def test_ties_go_to_the_lowest_id(chain, size):
    logits = np.zeros(size, np.float32)
    logits[[size - 1, size // 2, 1]] = 3
    assert Sampler(Sampling(**chain), size).sample(logits) == 1


def test_top_k_keeps_exactly_k_among_equals():
    logits = np.zeros(100_000, np.float32)
    logits[70_000:] = 1
    ids, probs = Sampler(Sampling(top_k=5), 100_000).probabilities(logits)
    assert ids.tolist() == list(range(70_000, 70_005)) and probs.tolist() == [0.2] * 5
    ids, _ = Sampler(Sampling(top_k=20), 100_000).probabilities(np.zeros(100_000, np.float32))
    assert ids.tolist() == list(range(20))


@pytest.mark.parametrize("chain", [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize("size", [7, 5003, 150_001])
def test_broken_logits_are_errors(chain, size):
    sampler = Sampler(Sampling(**chain), size)
    sampler.accept(0)
    for place in (0, size // 2, size - 1):
        for bad, word in ((np.nan, "NaN"), (np.inf, r"\+inf")):
            logits = _logits(size, 1)
            logits[place] = bad
            with pytest.raises(EngineError, match=word):
                sampler.sample(logits)
    with pytest.raises(EngineError, match="-inf"):
        sampler.sample(np.full(size, -np.inf, np.float32))


@pytest.mark.parametrize("chain", [{}, {"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 1e-9}], ids=str)
def test_masked_tokens_are_never_in_the_support(chain):
    logits = np.full(9000, -np.inf, np.float32)
    logits[[5, 8999]] = [1.0, 1.0]
    ids, probs = Sampler(Sampling(**chain), 9000).probabilities(logits)
    assert ids.tolist() == [5, 8999] and probs.tolist() == [0.5, 0.5]


def test_a_bias_of_minus_infinity_forbids_and_a_large_one_forces():
    logits = _logits(50, 1)
    best = int(logits.argmax())
    assert best not in Sampler(Sampling(logit_bias={best: -math.inf}), 50).probabilities(logits)[0]
    forced = Sampler(Sampling(logit_bias={"7": 100.0}), 50)
    assert forced.sample(logits) == 7


@pytest.mark.parametrize("bad", [np.zeros(9, np.float32), np.zeros((1, 10), np.float32), np.zeros(10), [0.0] * 10])
def test_logits_of_another_shape_or_type_are_refused(bad):
    with pytest.raises(ShapeError, match=r"float32 \[10\]"):
        Sampler(Sampling(), 10).sample(bad)


def test_the_callers_logits_are_not_changed():
    logits = _logits(3000, 1)
    before = logits.copy()
    logits.setflags(write=False)
    everything = Sampling(temperature=0.5, top_k=50, top_p=0.9, presence_penalty=1, dry_multiplier=1,
                          repetition_penalty=1.2, logit_bias={3: 1.0})
    for chain in (everything, Sampling(), Sampling(temperature=0)):
        sampler = _sampler(chain, 3000, [1, 2, 3, 1, 2], [3, 1, 2])
        sampler.sample(logits)
        sampler.probabilities(logits)
    assert np.array_equal(logits, before)


def test_presence_looks_at_the_output_only_and_repetition_at_its_window():
    logits = np.ones(10, np.float32)
    presence = _sampler(Sampling(presence_penalty=1.0), 10, prompt=[1, 2])
    assert np.ptp(presence.probabilities(logits)[1]) == 0
    repetition = _sampler(Sampling(repetition_penalty=2.0, repetition_window=2), 10, prompt=[1, 2, 3], generated=[3])
    _, probs = repetition.probabilities(logits)
    assert probs[1] == probs[2] > probs[3]
    whole = _sampler(Sampling(repetition_penalty=2.0, repetition_window=-1), 10, prompt=[1, 2, 3], generated=[3] * 999)
    _, probs = whole.probabilities(logits)
    assert probs[0] > probs[1] == probs[2] == probs[3]


def test_dry_penalises_the_token_that_extends_the_longest_repeat():
    s = Sampling(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    none = np.empty(0, np.int64)
    ids, penalties = dry_penalties(np.array([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), none, s)
    assert dict(zip(ids.tolist(), penalties.tolist(), strict=True)) == {4: 1.0, 5: 0.5}
    ids, _ = dry_penalties(np.array([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), np.array([2]), s)
    assert ids.tolist() == []


@pytest.mark.parametrize("period", [1, 2, 7, 100])
def test_dry_on_a_long_loop_stays_finite_and_forbids_it(period):
    s = Sampling(dry_multiplier=0.8, dry_window=-1, temperature=0.0)
    sampler = _sampler(s, 200, generated=[i % period for i in range(3000)])
    logits = np.zeros(200, np.float32)
    logits[3000 % period] = 90
    assert sampler.sample(logits) != 3000 % period
    ids, penalties = dry_penalties(np.arange(3000) % period, np.empty(0, np.int64), s)
    assert ids.tolist() == [3000 % period] and 1e29 < penalties[0] <= np.float32(1e30)


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=1),
    st.integers(1, 4),
    st.sampled_from([1.0, 1.75, 1e20]),
    st.sampled_from([0.5, 1e2]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_dry_equals_the_definition(history, breakers, allowed, base, multiplier):
    base = min(base, 100.0)
    s = Sampling(dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_breakers=breakers,
                 dry_window=-1)
    ids, penalties = dry_penalties(np.array(history, np.int64), np.array(breakers, np.int64), s)
    expected = _dry_reference(history, s)
    assert set(ids.tolist()) == set(expected)
    np.testing.assert_allclose(penalties, [expected[i] for i in ids.tolist()], rtol=1e-5)


@pytest.mark.parametrize("field, value, part", [
    ("temperature", -0.1, "0 to 100"),
    ("temperature", float("nan"), "0 to 100"),
    ("temperature", "hot", "0 to 100"),
    ("temperature", True, "0 to 100"),
    ("top_k", -1, "0 to"),
    ("top_k", 2.5, "integer"),
    ("top_k", True, "integer"),
    ("top_p", 1.01, "0 to 1"),
    ("presence_penalty", 2.5, "-2 to 2"),
    ("repetition_penalty", 0.0, "0.01 to 10"),
    ("repetition_window", -2, "-1 to"),
    ("dry_base", 0.9, "1 to 100"),
    ("dry_breakers", "\n", "list"),
    ("logit_bias", {"a": 1.0}, "integer"),
    ("logit_bias", {1: float("nan")}, "-inf or a number"),
    ("logit_bias", [(1, 1.0), (1, 2.0)], "twice"),
    ("seed", -1, "0 to"),
    ("max_tokens", -5, "0 to"),
    ("stop", [""], "not empty"),
    ("stop", 7, "list"),
    ("loop_guard", 1, "true or false"),
])
def test_a_value_out_of_range_names_field_value_and_range(field, value, part):
    with pytest.raises(SettingError) as error:
        Sampling.from_dict({field: value})
    text = str(error.value)
    assert field in text and part in text


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(SettingError, match="'topk' is unknown; did you mean 'top_k'"):
        Sampling.from_dict({"topk": 3})
    with pytest.raises(SettingError, match="did you mean 'temperature'"):
        resolve({}, overrides={"temprature": 3})


def test_token_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(SettingError, match="logit_bias: token id 10"):
        Sampler(Sampling(logit_bias={10: 1.0}), 10)
    with pytest.raises(SettingError, match="dry_breakers: token id 99"):
        Sampler(Sampling(dry_breakers=[99]), 10)
    with pytest.raises(ShapeError, match="token id 10"):
        Sampler(Sampling(), 10).accept(10)
    with pytest.raises(ShapeError):
        Sampler(Sampling(), 10).accept_prompt([3, -1])


def test_settings_are_normalised_and_equal_when_they_mean_the_same():
    a = Sampling(logit_bias={"5": 1, 2: -math.inf}, stop="END", temperature=np.float32(0.5), top_k=np.int64(3))
    b = Sampling(logit_bias=[(2, -math.inf), (5, 1.0)], stop=("END",), temperature=0.5, top_k=3)
    assert a == b and hash(a) == hash(b) and type(a.top_k) is int


@pytest.mark.parametrize("names, thinking, profile", [
    (["Qwen3.5-35B-A3B"], True, "qwen3.5-thinking"),
    (["Qwen3.5 9B"], False, "qwen3.5-nonthinking"),
    (["Qwen3.6-27B"], True, "qwen3.6-thinking"),
    (["Qwen3.8-27B"], True, "qwen3.6-thinking"),
    (["my-finetune", "qwen35moe"], False, "qwen3.6-nonthinking"),
    (["Qwen3 4B Instruct"], False, "qwen3-nonthinking"),
    (["Qwen3-Next"], True, "qwen3-thinking"),
    (["gemma-3-270m-it"], False, "gemma"),
    (["gpt-oss-20b"], True, "gpt-oss"),
    (["GLM-4.7-Flash"], True, "glm-4.7-flash"),
    (["SmolLM2 135M Instruct"], False, "smollm2"),
    (["something", "llama"], False, "neutral"),
    ([], True, "neutral"),
])
def test_a_models_name_chooses_its_vendors_profile(names, thinking, profile):
    assert default_profile(names, thinking) == profile


def test_every_profile_is_valid():
    for profile in PROFILES.values():
        Sampling.from_dict(profile)


def test_request_goes_before_file_before_profile_before_neutral():
    metadata = {"general.name": "Qwen3.5-35B-A3B", "general.sampling.temp": 0.9, "general.sampling.top_k": 33}
    s = resolve(metadata, thinking=False, overrides={"top_k": 7, "seed": None})
    assert (s.top_k, s.temperature, s.top_p, s.presence_penalty, s.typical_p) == (7, 0.9, 0.8, 1.5, 1.0)
    assert resolve(metadata, name="Qwen3.6-35B", thinking=True).presence_penalty == 0.0
    coding = resolve(metadata, thinking=True, profile="coding")
    assert coding == Sampling(**PROFILES["qwen3.5-coding"])
    assert resolve(metadata, profile="greedy", overrides={"seed": 4}) == Sampling(temperature=0.0, seed=4)
    assert resolve({}) == Sampling()


def test_unknown_profiles_name_what_there_is():
    with pytest.raises(SettingError, match="did you mean 'qwen3.5-coding'"):
        resolve({}, profile="qwen3.5-codin")
    with pytest.raises(SettingError, match="not a mode of gemma"):
        resolve({"general.name": "Gemma 3"}, profile="coding")


def test_the_files_settings_are_checked_and_unsupported_ones_are_said(caplog):
    with pytest.raises(SettingError, match=r"general\.sampling.*top_p: got 3"):
        resolve({"general.sampling.top_p": 3.0})
    assert resolve({"general.sampling.top_k": -1, "general.sampling.mirostat": 0}).top_k == 0
    assert not caplog.records
    resolve({"general.sampling.xtc_probability": 0.5, "general.sampling.xtc_threshold": 0.1})
    assert [r.args[0] for r in caplog.records] == ["general.sampling.xtc_probability"]
