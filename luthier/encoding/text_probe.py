"""Short hostile texts: two encoders that agree on all of these split, normalise and merge by the same rules."""

from __future__ import annotations

import random
from collections.abc import Sequence

MIXED = 200  # texts made of several atoms, because rules meet at the seams
TOKENS_PROBED = 48  # of a tokenizer's own added tokens, evenly spread: Gemma has 6,415
CODE_POINTS_APART = 53  # every 53rd code point is in a probe: each block of Unicode has some

ATOMS = (
    "", " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n\n", " \n", "\n ", " \t \n\n  x", "x  ", "  x",
    "\u00a0", "\u2003", "\u3000", "\u2028", "\u2029", "\u0085", "\x0b\x0c", "\x00", "\x1b[0m", "\x7f",
    "a\x00b", " " * 33, "\n" * 17,
    # words, capitals, contractions with both apostrophes
    "hello", " hello", "Hello World", "HELLO", "camelCaseWord", "snake_case_word", "I'm", "we'LL",
    "they’ve", "'s", "'S", "don't've", "rock'n'roll", "o'clock's", "x'", "''", "'tis", "ſ", "I'ſ",
    "antidisestablishmentarianism",
    # digits of several scripts, and what stands between them
    "1", "12", "123", "1234", "12345678901234567890", "3.14159", "1,000,000", "-1e-9", "0x7fFF", "٣٤٥٦",
    "१२३४", "１２３４", "²³¹", "½¾", "Ⅻ", "2026-11-21T10:30:00Z", "v1.2.3-rc4", "+49 (0)30 1234",
    "$1,234.56", "100%",
    # punctuation alone and in runs
    ".", "...", "…", "!?", "?!?!?!?!", "--", "—", "-" * 40, "=" * 37, "*" * 9, "#" * 6, "(", ")", "()",
    "[]{}<>", "<", ">", "</", "/>", "|", "||", "<|", "|>", "«»", "“quoted”", "¿¡", "@#$%^&*", "\\", "\\n",
    "\\u0041", "`", "```", "~~", "§¶", "_", "__init__", "▁", "▁▁x", "Ġ", "ĊĠ", "##x", "</w>",
    # code, markup, addresses
    "def f(x):\n    return x ** 2\n", "\tif (a && b) { c[i]++; }", "for(;;){}", "#include <stdio.h>\r\n",
    "SELECT * FROM t WHERE a='b';", '{"a": [1, 2.5, null], "b": "c\\"d"}', "<div class='x'>&amp;</div>",
    "https://example.org/a/b?c=d&e=%20#f", "user.name+tag@example.co.uk", "C:\\Users\\x\\y.txt",
    "../../etc", "$\\frac{1}{2}$", "| a | b |\n|---|---|", "- [ ] x\n- [x] y", "a=b;c==d!=e<=f>=g->h=>i::j",
    # scripts
    "naïve café Ærø straße", "İıŞğ", "Привет, мир", "Ελληνικά", "שלום עולם", "مرحبا بالعالم",
    "فارسی\u200cها", "नमस्ते दुनिया", "বাংলা", "தமிழ்", "ภาษาไทย", "ລາວ", "မြန်မာ", "ქართული", "Հայերեն",
    "አማርኛ", "한국어", "한국", "日本語のテキスト", "カタカナ", "ｶﾀｶﾅ", "中文字符，标点。", "漢字", "𠀀𪜶",
    "𝒜𝔅ℭ", "𐍈𐌰", "𓀀", "ꓘ", "mixЖ漢ش",
    # normalisation: composed, decomposed, compatibility, order of marks
    "é", "e\u0301", "A\u030a", "\u212b", "\u00c5", "ﬁ", "ﷺ", "\u1e9b\u0323", "a\u0323\u0307",
    "a\u0307\u0323", "\u0344", "\u0958", "q\u0301\u0323" * 5, "\u0301", " \u0301", "\u1100\u1161\u11a8",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A", "ﾊﾞ", "㎏", "①",
    # emoji, joiners, flags, skin tones; invisible, private and unassigned
    "😀", "😀😃", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "1️⃣", "❤️", "☺", "a😀b", "\u200b", "a\u200bb",
    "\u200d", "\ufeff", "\ufeffx", "\u200e\u200f", "\u202eabc\u202c", "\u2066x\u2069", "\u00ad", "\ufe0f",
    "\ue000", "\U000f0000", "\U0010ffff", "\ufffd", "\ufffe", "\u0378", "\ufdd0", "\U000e0041",
    # bytes that were read wrongly, and things that only look like tokens
    "Ã©Â\xa0", "\x80\x81\xfe\xff", "<0x0A>", "<0xE2><0x96>", "<s>", "</s>", "<unk>", "<pad>", "[INST]",
    "[UNK]", "[CLS]", "<|endoftext|>", "<|im_start|>system", "<think>", "<tool_call>",
    "<start_of_turn>user\n", "<|eot_id|>", "<|reserved_special_token_7|>", "<｜begin▁of▁sentence｜>",
    "{{ x }}", "{% if %}",
    # long words, runs and periods
    "a" * 300, "ab" * 150, "abc def " * 20, "é" * 99, "漢" * 120, "9" * 75, "!" * 70, "😀" * 30,
    "a\u0301" * 60, "\r\n" * 21, " \n" * 22, "\t" * 19, "x y" * 50, "aA" * 60,
)  # fmt: skip


def probe_texts(*added: Sequence[str]) -> list[str]:
    """The probes for a tokenizer with these groups of added tokens. The same ones every time."""
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ATOMS, k=rng.randint(2, 5))) for _ in range(MIXED)]
    return [*ATOMS, *mixed, *_all_over_unicode(), *(text for tokens in added for text in _around(tokens))]


def _around(tokens: Sequence[str]) -> list[str]:
    probed = tokens[:: max(1, len(tokens) // TOKENS_PROBED)]
    return [
        text
        for token in probed
        for text in (token, f"x{token}y", f" {token} ", f"\n{token}\n{token}", token[:-1], token[1:], token.upper())
    ]


def _all_over_unicode() -> list[str]:
    # Letter or number or mark is what splits words, and libraries differ in the version of Unicode that they know.
    codes = [*range(1, 0xD800, CODE_POINTS_APART), *range(0xE000, 0x32000, CODE_POINTS_APART)]
    return [
        "".join(f"a{chr(code)}1{chr(code)} " for code in codes[start : start + 32])
        for start in range(0, len(codes), 32)
    ]
