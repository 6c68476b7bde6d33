"""The languages that Whisper knows, in the order of their tokens.

Source: openai/whisper, `tokenizer.py`. Cantonese came last, with large-v3.
"""

from __future__ import annotations

import difflib

from zoo.errors import UsageError

_IN_ORDER = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese,
pt portuguese, tr turkish, pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian,
id indonesian, hi hindi, fi finnish, vi vietnamese, he hebrew, uk ukrainian, el greek, ms malay,
cs czech, ro romanian, da danish, hu hungarian, ta tamil, no norwegian, th thai, ur urdu,
hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh, sk slovak,
te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani, sl slovenian,
kn kannada, et estonian, mk macedonian, br breton, eu basque, is icelandic, hy armenian,
ne nepali, mn mongolian, bs bosnian, kk kazakh, sq albanian, sw swahili, gl galician, mr marathi,
pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali, af afrikaans, oc occitan,
ka georgian, be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao,
uz uzbek, fo faroese, ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese,
sa sanskrit, lb luxembourgish, my myanmar, bo tibetan, tl tagalog, mg malagasy, as assamese,
tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir, jw javanese, su sundanese, yue cantonese
"""
LANGUAGES: dict[str, str] = dict(item.split(maxsplit=1) for item in _IN_ORDER.strip().split(","))
_ALSO = {
    "burmese": "my", "valencian": "ca", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb",
    "pushto": "ps", "panjabi": "pa", "moldavian": "ro", "moldovan": "ro", "sinhalese": "si",
    "castilian": "es", "mandarin": "zh",
}  # fmt: skip
# Words in these are not divided by spaces.
UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))


def code_of(language: str) -> str:
    """The code of a language given by code or English name; UsageError with what is near."""
    names = {name: code for code, name in LANGUAGES.items()} | _ALSO
    known = names | {code: code for code in LANGUAGES}
    wanted = language.strip().lower()
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"Whisper knows no language called '{language}'{hint}")
