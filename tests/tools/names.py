"""Names that others may give to columns, files, clients, metrics and samplers."""

import re

NAMES = [
    *("temp[/C]", "[bold]x", "[link=http://x]y[/link]", "[", "]", ":smile:"),
    *("{}", "{0}", "{x!r}", "%s%d", "$HOME", "*?", "~", "#x", "a;b", "a,b", "a  b", "C:x"),
    *("<script>alert(1)</script>", "</script><b id=evil>", "&amp;", "'\"`", "{{ 7 * 7 }}"),
    *("$x$", "$\\frac{", "a_$b^", "$$x$$", "\\input{x}", "\\(x\\)", "a\\b", "_x", "a & b % c"),
    *("a\nb", "a\tb", "a\rb", "\x1b[2J\x1b]0;p\x07", "\x9b31m", "\x00", "\x7f"),
    *("\u202egnp.exe", "\u2066x", "x\u2028y", "\ufeffx", "\u00a0", "a\u200db"),
    *("😀👩\u200d🚀", "ナメ", "z" + 50 * "\u0301", "-rf", "--help", "..", ".", "a/b", "../x"),
    *("=cmd|' /C calc'!A1", "@SUM(1)", "+1", "-2+3", " =1", "＝1", " ", "None", "nan"),
    *(10_000 * "x", 5000 * "$", 1000 * "a "),
]

#: What a terminal, or a reader, would take for something else than text; styles of Rich aside.
RAW = re.compile(
    "(?!\x1b\\[[0-9;]*m)[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def is_plain(text: str) -> bool:
    """Whether a text does nothing but to be read."""
    return RAW.search(text) is None
