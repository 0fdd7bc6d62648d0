"""Strings that tokenizers get wrong: a fixed list, and seeded random mixtures of pieces of every kind."""

import random

FIXED = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n\r\n",
    "\t\t\tx",
    "Hello, zebra world!",
    " leading and trailing ",
    "runs   of    spaces          here",
    "line\n\n\n  indented\n\ttabbed\r\nwindows \n \n end\n",
    "0 12 123 1234 12345.678 1,000,000 ½ ² ³ Ⅷ ٣٤٥ १२३ 𝟘𝟙",
    "don't I'LL they'Ve we're it's 'S ’s o'clock ''d",
    "café cafe\u0301 Å A\u030a \u1e9b\u0323 q\u0323\u0307 q\u0307\u0323 ﬁ ﬀ Ω Ω",
    "\u0301leading mark, two\u0301\u0323\u0301 marks, \u200b\u200d\ufeffzero width",
    "👍 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ☺️ ❤ 1️⃣ 🫠",
    "日本語のテキスト。中文，标点！한국어 텍스트 ㄱㄴㄷ",
    "أهلاً بالعالم ١٢٣ مَرْحَبًا עברית",
    "สวัสดีชาวโลก ก็ได้ นมัสเต नमस्ते दुनिया क्षत्रिय தமிழ் తెలుగు ភាសាខ្មែរ བོད་ཡིག",
    "def f(x: int) -> str:\n    return f\"{x!r:>10}\"  # done\n\n\nif __name__ == '__main__':\n\tf(0x1F)\n",
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", a->b[i++] << 2 && !c); }",
    "SELECT * FROM t WHERE a <> 'b''c'; -- ok",
    "https://example.org/a?b=c&d=%20#e user@example.com C:\\dir\\file",
    "$a^2 + b_{ij} \\le \\frac{1}{2}$ ~~x~~ **bold** `code` <b>x</b> </s> &amp;",
    "bell\x07 esc\x1b[0m nul\x00 del\x7f nel\x85 nbsp\xa0 ls\u2028 ps\u2029 em\u2003 ideographic\u3000",
    "private \ue000 \U000f0000 noncharacter \ufdd0 replacement \ufffd 𐍈 𒀀 𝔘𝔫𝔦",
    "<|im_start|>system\nobey<|im_end|><|endoftext|><|eot_id|><start_of_turn>user<end_of_turn><s></s><bos><eos>",
    "<think>\nx\n</think><tool_call>{\"name\": \"f\"}</tool_call> <|fim_prefix|> <|im_start |> <|im_start|",
    "<0x0A> <0x41> ▁ ▁▁ Ġ Ċ [PAD248100] <unused7> <unk> <pad>",
    "MixedCase camelCase snake_case SCREAMING ÉCOLE straße İstanbul ǅ",
    "....!!!???---___===>>><<<///\\\\\\|||",
]
_PIECES = [
    *"abcXYZ 019 .,;'\"()[]{}<>/\\|_-+=*&^%$#@!~`",
    *["the", "ing", " and", "tion", "naïve", "'s", "'LL", " \n", "\n\n", "\r\n", "\t", "   ", "        "],
    *["\u0301", "\u0323", "é", "ß", "ﬁ", "Ω", "İ", "²", "½", "٣", "१", "日本", "。", "한", "ﷺ", "مَ", "ส็", "क्ष", "ི"],
    *["👍🏽", "👩‍👧", "🇩🇪", "\u200d", "\ufe0f", "\u200b", "\ufeff", "\xa0", "\u2028", "\u3000", "\x7f", "\x1b"],
    *["𝔘", "▁", "Ġ"],
    *["<|im_end|>", "<|im_", "start|>", "<think>", "</think>", "<s>", "</s>", "<0x0A>", "<b>", "</b>", "<unused1>"],
]


def mixtures(count: int, seed: int, longest: int = 24) -> list[str]:
    """`count` random strings of 1 to `longest` pieces."""
    rng = random.Random(seed)
    return ["".join(rng.choices(_PIECES, k=rng.randint(1, longest))) for _ in range(count)]


def any_characters(count: int, seed: int) -> list[str]:
    """`count` random strings over all of Unicode except surrogates, favouring the low planes."""
    rng = random.Random(seed)
    tops = [0x7F, 0x7F, 0x24F, 0x2FFF, 0xFFFF, 0x1FFFF, 0x10FFFF]

    def one() -> str:
        code = rng.randint(0, rng.choice(tops))
        return " " if 0xD800 <= code < 0xE000 else chr(code)

    return ["".join(one() for _ in range(rng.randint(1, 30))) for _ in range(count)]


def every_character(per_string: int = 64) -> list[str]:
    """Every Unicode character once, as strings of `per_string` neighbours separated by letters."""
    chars = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    return ["a".join(chars[start : start + per_string]) for start in range(0, len(chars), per_string)]
