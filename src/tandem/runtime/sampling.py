"""Settings of one generation: how a token is chosen and when the text ends.

In: a request's overrides, the file's `general.sampling.*`, the model's name. Out: one frozen `Sampling` that is
complete and valid; nothing after this module guesses a default. `sampler.py` does the arithmetic.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tandem.errors import SettingError, nearest

_log = logging.getLogger("tandem")

# field: (lowest, highest); the bounds themselves are valid
_FLOAT_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
}
_INT_MAX = 2**31 - 1
_INT_RANGES = {
    "top_k": (0, _INT_MAX),
    "repetition_window": (-1, _INT_MAX),
    "dry_allowed_length": (1, _INT_MAX),
    "dry_window": (-1, _INT_MAX),
}
_OPTIONAL_INT_RANGES = {"seed": (0, 2**64 - 1), "max_tokens": (0, _INT_MAX)}


@dataclass(frozen=True)
class Sampling:
    """All settings of one generation. The defaults are neutral: the model's own distribution, unchanged.

    temperature       0 takes the most likely token (after biases and penalties; no filter runs)
    top_k             keep the k most likely tokens; 0 keeps all
    typical_p         keep the tokens whose surprise is closest to the entropy, up to this mass; 1 keeps all
    top_p             keep the smallest set of most likely tokens with at least this mass; 1 keeps all
    min_p             drop tokens less likely than min_p times the most likely one; 0 keeps all
    presence_penalty, frequency_penalty
                      subtracted once, and once per occurrence, for tokens generated so far (not the prompt's:
                      the meaning of the OpenAI API and of vLLM, for which vendors publish their values)
    repetition_penalty, repetition_window
                      divides a positive logit and multiplies a negative one, for tokens among the last
                      `repetition_window` of prompt and output; -1 is all of them, 0 none
    dry_*             a token that would extend a repeat of n >= allowed_length tokens loses
                      multiplier * base ** (n - allowed_length); repeats are looked for in the last `dry_window`
                      tokens (-1: all) and never reach over a token of `dry_breakers`; multiplier 0 is off
    logit_bias        (token id, bias) pairs, or a mapping; -inf forbids a token
    seed              None: a new one is drawn and recorded in `Sampler.seed`
    max_tokens        None: until the model ends or the context is full
    stop              strings that end the text; they are not part of it
    loop_guard        stop when the output has begun to repeat itself in cycles

    Raises SettingError naming the field, the value and the valid range.
    """

    temperature: float = 1.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 256
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = 4096
    dry_breakers: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    loop_guard: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, bounds in _FLOAT_RANGES.items():
            put(name, _checked_float(name, getattr(self, name), *bounds))
        for name, bounds in _INT_RANGES.items():
            put(name, _checked_int(name, getattr(self, name), *bounds))
        for name, bounds in _OPTIONAL_INT_RANGES.items():
            if getattr(self, name) is not None:
                put(name, _checked_int(name, getattr(self, name), *bounds))
        put("dry_breakers", tuple(_checked_int("dry_breakers", t, 0, _INT_MAX)
                                  for t in _sequence("dry_breakers", self.dry_breakers)))
        put("logit_bias", _checked_bias(self.logit_bias))
        put("stop", _checked_stop(self.stop))
        if not isinstance(self.loop_guard, bool):
            raise SettingError(f"loop_guard: got {self.loop_guard!r}, expected true or false")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Sampling":
        """Settings by field name over the neutral defaults; raises SettingError for a name that is not a field."""
        _refuse_unknown(settings)
        return cls(**settings)


FIELDS = tuple(f.name for f in fields(Sampling))

_QWEN_THINKING = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
_QWEN_CODING = {**_QWEN_THINKING, "temperature": 0.6}
_QWEN_NONTHINKING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "presence_penalty": 1.5}

# Vendors' model cards; a family's modes share its prefix. Presence penalty is left out of coding, since it breaks
# the exact repeats that code and tool arguments need.
PROFILES: dict[str, dict[str, Any]] = {
    "neutral": {},
    "greedy": {"temperature": 0.0},
    "qwen3-thinking": _QWEN_CODING,
    "qwen3-nonthinking": {**_QWEN_NONTHINKING, "presence_penalty": 0.0},
    "qwen3.5-thinking": {**_QWEN_THINKING, "presence_penalty": 1.5},
    "qwen3.5-coding": _QWEN_CODING,
    "qwen3.5-nonthinking": _QWEN_NONTHINKING,
    "qwen3.5-reasoning": {**_QWEN_THINKING, "presence_penalty": 1.5},
    "qwen3.6-thinking": _QWEN_THINKING,
    "qwen3.6-coding": _QWEN_CODING,
    "qwen3.6-nonthinking": _QWEN_NONTHINKING,
    "gemma": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    "gpt-oss": {"temperature": 1.0, "top_p": 1.0},
    "glm-4.7-flash": {"temperature": 1.0, "top_p": 0.95},
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
}
MODES = ("thinking", "nonthinking", "coding", "reasoning")

# first match wins; 3.8's card repeats 3.6's values. The architecture names of Qwen3.5 and 3.6 are the same, so a file
# without a name gets 3.6's profile, the one without a presence penalty.
_FAMILIES = (
    (r"qwen[-_ ]?3\.[68]", "qwen3.6"),
    (r"qwen[-_ ]?3\.5", "qwen3.5"),
    (r"qwen3?5(moe)?$|qwen3next$", "qwen3.6"),
    (r"qwen[-_ ]?3", "qwen3"),
    (r"gemma", "gemma"),
    (r"gpt[-_ ]?oss", "gpt-oss"),
    (r"glm[-_ ]?4\.7[-_ ]?flash", "glm-4.7-flash"),
    (r"smollm[-_ ]?2", "smollm2"),
)

_FILE_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_window",
}
# keys of samplers that we do not have: the value that turns each off, and the keys that matter only when it is on
_FOREIGN_OFF = {"xtc_probability": 0, "mirostat": 0}
_FOREIGN_DETAILS = ("xtc_threshold", "mirostat_tau", "mirostat_eta")


def resolve(
    metadata: Mapping[str, Any],
    name: str | None = None,
    thinking: bool = False,
    overrides: Mapping[str, Any] | None = None,
    profile: str | None = None,
) -> Sampling:
    """The settings of a request: overrides > file's `general.sampling.*` > profile of the model's family > neutral.

    metadata: a GGUF file's; name: the model's, if the file's own names should not decide; overrides: by field name,
    None means not given; profile: a key of PROFILES, or one of MODES for that mode of the model's family: it takes
    the place of the file's settings and of the family's profile.
    Raises SettingError for an unknown field or profile and for a value out of range.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    _refuse_unknown(given)
    names = [name] if name else _names(metadata)
    settings: dict[str, Any] = dict(PROFILES[default_profile(names, thinking)])
    settings.update(_file_settings(metadata))
    if profile is not None:
        settings = dict(PROFILES[_named_profile(profile, names)])
    settings.update(given)
    return Sampling(**settings)


def default_profile(names: Iterable[str], thinking: bool) -> str:
    """The key of PROFILES for a model with these names (most telling first); `neutral` if none is known."""
    family = _family(names)
    if family is None:
        return "neutral"
    return family if family in PROFILES else f"{family}-{'thinking' if thinking else 'nonthinking'}"


def _named_profile(profile: str, names: Iterable[str]) -> str:
    if profile in PROFILES:
        return profile
    family = _family(names)
    in_family = f"{family}-{profile}"
    if in_family in PROFILES:
        return in_family
    if profile in MODES:
        modes = [key for key in PROFILES if family and key.startswith(family)]
        known = f"its profiles: {', '.join(modes)}" if modes else "no profile is known for this model"
        raise SettingError(f"profile {profile!r}: not a mode of {family or 'this model'}; {known}; "
                           f"all profiles: {', '.join(PROFILES)}")
    raise SettingError(f"profile {profile!r} is unknown{nearest(profile, [*PROFILES, *MODES])}")


def _family(names: Iterable[str]) -> str | None:
    for name in names:
        for pattern, family in _FAMILIES:
            if re.search(pattern, name, re.IGNORECASE):
                return family
    return None


def _names(metadata: Mapping[str, Any]) -> list[str]:
    keys = ("general.name", "general.basename", "general.base_model.0.name", "general.architecture")
    return [metadata[key] for key in keys if isinstance(metadata.get(key), str)]


def _file_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    prefix = "general.sampling."
    for key in metadata:
        if not key.startswith(prefix):
            continue
        short, value = key[len(prefix):], metadata[key]
        if short in _FILE_KEYS:
            field_name = _FILE_KEYS[short]
            # converters copy -1 for "all tokens"
            found[field_name] = 0 if field_name == "top_k" and value == -1 else value
        elif short not in _FOREIGN_DETAILS and (short not in _FOREIGN_OFF or value != _FOREIGN_OFF[short]):
            _log.warning("%s = %r in the file is not supported and has no effect", key, value)
    try:
        Sampling(**found)
    except SettingError as error:
        raise SettingError(f"the file's {prefix}* has a value out of range: {error}") from error
    return found


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    for key in settings:
        if key not in FIELDS:
            raise SettingError(f"sampling setting {key!r} is unknown{nearest(str(key), FIELDS)}")


def _checked_float(name: str, value: object, low: float, high: float) -> float:
    number = _number(value)
    if number is None or not low <= number <= high:
        raise SettingError(f"{name}: got {value!r}, expected a number from {low:g} to {high:g}")
    return number


def _checked_int(name: str, value: object, low: int, high: int) -> int:
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else value.__index__()
    if number is None or not low <= number <= high:
        raise SettingError(f"{name}: got {value!r}, expected an integer from {low} to {high}")
    return number


def _number(value: object) -> float | None:
    """A Python or numpy real number as float; None for anything else, booleans, strings and NaN too."""
    if isinstance(value, (bool, str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _sequence(name: str, value: object) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise SettingError(f"{name}: got {value!r}, expected a list")
    return list(value)


def _checked_bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else _sequence("logit_bias", value)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise SettingError(f"logit_bias: got {pair!r}, expected (token id, bias)")
        token, bias = pair
        if isinstance(token, str) and token.isascii() and token.isdecimal():  # JSON has only string keys
            token = int(token)
        token, number = _checked_int("logit_bias token id", token, 0, _INT_MAX), _number(bias)
        if number is None or abs(number) > 1e30 and number != -math.inf:
            raise SettingError(f"logit_bias of token {token}: got {bias!r}, expected -inf or a number from -1e30 to 1e30")
        if token in biases:
            raise SettingError(f"logit_bias: token {token} is given twice")
        biases[token] = number
    return tuple(sorted(biases.items()))


def _checked_stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else _sequence("stop", value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SettingError(f"stop: got {text!r}, expected strings that are not empty")
    return tuple(texts)
