r"""Removes what surrounds an answer and has no value: Markdown, HTML, tokens of models, quotes, and LaTeX that only looks.

``plain_text`` is applied once to a model's text, before a place is looked for; ``plain_latex`` once to an answer or a label.
Every pattern is linear in the text.
"""

from __future__ import annotations

import html
import re

from rlhf_plugin_math_verifier.characters import fold

_BOX_TOKENS = re.compile(
    r"<\|begin_of_box\|>((?:(?!<\|(?:begin|end)_of_box\|>).)*)(?:<\|end_of_box\|>|\Z)|\\answer\s*(?=\{)", re.DOTALL
)
_OPENED_TURN = re.compile(
    r"<(?:\|im_start\||\|start_header_id\||start_of_turn|\|turn)>?\s*(?:user|assistant|system|model|human)\b[^A-Za-z0-9]{0,40}$"
)
"""The next turn's opening, at the end of a text whose model did not stop."""
_TOKENS = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>|<(?:eos|bos|pad|end_of_turn|start_of_turn)>|\[/?INST\]")
_BLOCKS = re.compile(r"<\s*/?\s*(?:br|p|div|li|ul|ol|tr|table|h[1-6]|hr|pre|blockquote|center)\b[^<>]{0,100}>", re.IGNORECASE)
_INLINE = re.compile(
    r"<\s*/?\s*(?:b|i|u|em|strong|span|code|mark|font|big|small|td|th|tt|kbd|ins)\b[^<>]{0,100}>", re.IGNORECASE
)
_TAGS = re.compile(
    r"</?(?!(?:answer|final_answer|solution|del|s|strike)>)[a-z][\w:|-]{1,30}(?:\s[^<>]{0,100})?/?>", re.IGNORECASE
)
_POWERS = re.compile(r"<sup>([^<>]{1,20})</sup>", re.IGNORECASE)
_ENTITIES = re.compile(r"&(?:[a-z]{2,8}|#[0-9]{2,5});", re.IGNORECASE)
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~|<(?P<tag>del|s|strike)>[^<>\n]{1,200}</(?P=tag)>", re.IGNORECASE)
_CROSSES = re.compile("[❌✗✘✖]")
_PICTURES = re.compile("[\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff\ufe0f\u25a0-\u25b2\u25b6-\u25f5]")
_ARROWS = re.compile(r"(?:(?<![^\s:])-{1,3}|(?<![<=])={1,3})>[ \t]*(?=[-$\\*`\d(])", re.MULTILINE)
_ABBREVIATED = re.compile(r"\b(Eqs?|Figs?|Thm|Ch|Sec|No|pp?|[Aa]pprox)\. ?(?=[(#]?[0-9])")
_FENCES = re.compile(r"^[ \t]*(?:```|~~~)[\w+-]*[ \t]*$", re.MULTILINE)
_RULES = re.compile(r"^(?:[ \t]*(?:-{3,}|\*{3,}|_{3,}|={3,})[ \t]*|(?=[^\n]*\|)(?=[^\n]*-)[|: \t-]+)$", re.MULTILINE)
_LINE_STARTS = re.compile(
    r"^[ \t]*(?:>[ \t]?(?![=<>]))*[ \t]*(?:[-*+•‣◦–—][ \t]+(?=\S)|(?:#{1,3}|#{5,6})[ \t]+)?(?:\[[ xX]\][ \t]+)?", re.MULTILINE
)
_ROWS = re.compile(r"^[ \t]*\|([^\n]*)\|[ \t]*$", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]*([0-9]{1,2})[.)][ \t]+(?=\S)", re.MULTILINE)
_LETTERED_LINES = re.compile(r"^[ \t]*\(?(?:[a-h]|i{1,3}|iv|v)[.)][ \t]+(?=\S)", re.MULTILINE)
_STARS = re.compile(r"(?<![A-Za-z0-9*)}\]\\])(\*{1,3})(?=[^\s*])([^*\n]{1,400})(?<![\s*])\1(?![A-Za-z0-9*(])")
_HALF_STARS = re.compile(r"(?<![A-Za-z0-9)}\s*])\*\*(?=[^\s*])|(?:(?<=\s)|^)\*\*(?=[^\s*])|(?<=[^\s*])\*\*(?![A-Za-z0-9({\\\s*])"
                         r"|(?<=[^\s*])\*\*(?=\s|$)", re.MULTILINE)  # fmt: skip
_LOW_LINES = re.compile(r"(?<![A-Za-z0-9_\\})\]])(_{1,3})(?=[^\s_{])([^_\n]{1,400})(?<![\s_])\1(?![A-Za-z0-9_])")
_HIGHLIGHTS = re.compile(r"(?<![=<!A-Za-z0-9_])==(?=[^\s=])([^=\n]{1,200})(?<!\s)==(?!=)")
_QUOTED = re.compile(r"\"\s*([-+$€£¥₹]{0,2}[0-9][0-9.,/%\\]{0,40})\s*\"")
_DOUBLED = re.compile(r"(?:<<|\[\[)\s*([-+]?\$?[0-9][0-9.,/]{0,40}%?)\s*(?:>>|\]\])(?!\s*[0-9])")
_DISPLAYS = re.compile(r"\$\$(?:(?!\$\$).){1,2000}\$\$|\\\[(?:(?!\\\]|\\\[).){1,2000}\\\]", re.DOTALL)
_ASKED = re.compile(r"[.!;,…]{0,8}[?？⁇⁈⁉‽][.!?;,…？]*(\]*)[.!?;,…]*(?![0-9A-Za-z])")
"""A question mark among other ends, or before a bracket: "?!", "!?" and "?;" ask as "?" does."""
_SOURCE = re.compile(r"[ \t]*\((?=[^()\n]{0,60}\b(?:19|20)[0-9]{2}\b)[A-Z]{3,8}(?:[ ,]+(?:[A-Z]\w*|#?[0-9]+[A-Z]?)){2,6}\)")
"""The source of a problem, behind its answer: "(AMC 10A 2015 #22)"."""


def plain_text(text: str) -> str:
    """Returns a folded text without decoration. ``####`` and boxes stay; a box in tokens becomes ``\\boxed{}``."""
    if "<" in text or "&" in text or "\\answer" in text:
        text = _BOX_TOKENS.sub(lambda match: r"\boxed" if match[1] is None else rf"\boxed{{{match[1].strip()}}}", text)
        text = _STRUCK.sub(" ", _TOKENS.sub("\n", _OPENED_TURN.sub("", text)))
        text = _INLINE.sub("", _BLOCKS.sub("\n", _POWERS.sub(r"^{\1}", text)))
        text = _TAGS.sub("\n\n", text)
        text = _ENTITIES.sub(lambda match: html.unescape(match.group()).replace("\u00a0", " "), text)
    text = _STRUCK.sub(" ", text) if "~~" in text else text
    if not text.isascii():
        text = _PICTURES.sub("", _CROSSES.sub(" is wrong ", text))
    if ">" in text:
        text = _ARROWS.sub("→ ", text)
    text = _ABBREVIATED.sub(r"\1 ", text)
    text = _ASKED.sub(r"\1?", text)
    if "(" in text:
        text = _SOURCE.sub("", text)
    if "`" in text or "~~~" in text:
        text = _FENCES.sub("", text).replace("``", '"').replace("`", "")
    text = _CURRENCIES.sub(_currency, _LINE_STARTS.sub("", _RULES.sub("", text)))
    if "|" in text:
        text = _ROWS.sub(lambda match: match[1].replace("|", " ; ") if "\\" not in match[1] else match.group(), text)
    text = _without_numbers_of_lists(text)
    if len(_LETTERED_LINES.findall(text)) > 1:
        text = _LETTERED_LINES.sub("", text)
    if "*" in text:
        text = _HALF_STARS.sub("", _STARS.sub(r"\2", _STARS.sub(r"\2", text)))
    if "<<" in text or "[[" in text:
        text = _DOUBLED.sub(r"\1", text)
    if '"' in text:
        text = _QUOTED.sub(r"\1", text)
    if "_" in text:
        text = _LOW_LINES.sub(r"\2", text)
    if "==" in text:
        text = _HIGHLIGHTS.sub(r"\1", text)
    return _DISPLAYS.sub(lambda match: match.group().replace("\n", " "), text)


def _without_numbers_of_lists(text: str) -> str:
    """Removes ``1.``, ``2.``, ... at the start of lines, if they count from 1."""
    expected = 1

    def number(match: re.Match[str]) -> str:
        nonlocal expected
        if int(match[1]) not in (1, expected):
            return match.group()
        expected = int(match[1]) + 1
        return ""

    return _NUMBERED.sub(number, text)


_DROPPED = re.compile(
    r"\\(?:color|textcolor|colorbox)\s*(?:\[[^\[\]{}]*\])?\s*\{[^{}]*\}|\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}"
    r"|\\(?:tag\*?|label|[hv]?phantom|[hv]space\*?|vskip|hskip|footnote\w*|ref|cite)\s*\{[^{}]*\}"
    r"|\\(?:underline|uline|underbar|emph|ensuremath|boxed|fbox|framebox|mathstrut|mathord|mathop|mathclose|mathopen|mathrel"
    r"|smash|textup|textnormal|[tT]iny|[lL]arge|LARGE|[hH]uge|small|normalsize|scriptsize|footnotesize|bfseries|itshape|sffamily"
    r"|scriptstyle|scriptscriptstyle|displaystyle|textstyle|displaylimits|limits|nolimits|strut|rm|bf|it|sf|tt|mathbin"
    r"|checkmark|black(?:square|lozenge)|square|Box|Diamond|bigstar|star|qed|qedsymbol|therefore|nonumber|notag|hfill|centering"
    r"|noindent|par|newline|null|relax|allowbreak|nobreak|enspace|quad|qquad|thinspace|medspace|thickspace|negthinspace"
    r"|left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?=\s*\S|\s*$)"
    r"|\\(?:begin|end)\s*\{(?:equation|center|displaymath|math|multline)\*?\}"
)
_SPACES = re.compile(
    r"(?P<double>\\\\(?!\s*\Z))|(?P<none>(?<=[0-9]),?\\!\s*(?=,?[0-9]{3}(?![0-9]))|(?<=[0-9]),\\[,;: ]\s*(?=[0-9]{3}(?![0-9]))|\\!)"
    r"|\\[,;:>\s]|~|\\{1,2}\s*\Z"
)
_EVEN = re.compile(r"\\(?:left|right)\s*\.")
_OVER = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*?)\\(over|choose)(?![A-Za-z])((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTIONS = {"over": r"\frac", "choose": r"\binom"}
_BARE_OVER = re.compile(r"([^{}\\$=,]{1,40})\\over(?![A-Za-z])([^{}\\$=,]{1,40})")
_UNIT_VECTOR = re.compile(
    r"\\(?:hat|widehat|vec|mathbf|boldsymbol|bm)\s*\{\s*(?:\\(?:mathbf|hat)\s*\{)?\s*\\?([ijk])(?:math)?\s*\}?\s*\}"
)
_ENDS = re.compile(r"^\s*(?:→|⇒|\\(?:to|[Rr]ightarrow|implies|Longrightarrow)(?![A-Za-z])|=>|∴)\s*|(?:Q\.E\.D\.?|∎)\s*$")
_THOUSANDS = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?:(?:\.[0-9]{3}){2,20}(?:,[0-9]{1,9})?"  # 1.200.000
    r"|(?:\.[0-9]{3}){1,20},[0-9]{1,2})(?![0-9.,])"  # 1.234,50
    r"|(?<![0-9.,(\[{])[0-9]{1,2}(?:,[0-9]{2}){1,9},[0-9]{3}(?![0-9,])"  # 1,20,000
    r"|(?<![0-9.,'])[0-9]{1,3}(?:'[0-9]{3}){1,20}(?![0-9'])"  # 1'234
    r"|(?<=[0-9])\{[,:]\}(?=[0-9])|(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3}){1,9},[0-9]{1,2}(?![0-9.,])"
)
_FRENCH = re.compile(r"((?:^|\\cup|\\in|∪|=)\s*)\]([^\[\]()]{1,60}[;,][^\[\]()]{1,60})(?=[\[\]])")
_FRENCH_END = re.compile(r"([\[(][^\[\]()]{1,60}[;,][^\[\]()]{1,60})\[")
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]+)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]+)\}\s*\}"
)
_THREE = re.compile(r"[0-9]{3}(?![0-9])")
_CURRENCIES = re.compile(
    r"(?<![A-Za-z])(?:US|AU?|CA?|HK|NT|R|S|NZ|MX)\s?\\?\$(?=\s?\.?[0-9])|(?<![A-Za-z])(?P<rupees>Rs\.?|INR)(?=[\s}]{0,5}[0-9])"
)
_CHOSEN_OF = re.compile(
    r"(?:\{\s*\})?[_^]\s*\{?\s*([0-9]{1,9}|n)\s*\}?\s*\{?\s*(?:\\(?:mathrm|text|rm)\s*)?\{?([CP])\}?\s*_\s*\{?\s*([0-9]{1,9}|[kr])\s*\}?"
)
_PER_CENT = re.compile(r"\bper\s+cent\b|(?<=\d)\s?\bpct\b|(?<=\d )pct\b")
_LETTERED = re.compile(r"(?:^|(?<=[,;]))\s*\((?:[a-h]|i{1,3}|iv|vi{0,2}|[1-9])\)\s*(?=[^\s,;])")
_ARRAY = re.compile(r"\\begin\s*\{array\}\s*\{[^{}]*\}|\\end\s*\{array\}")
_QUOTES = (
    ('"', '"'),
    ("'", "'"),
    ("«", "»"),
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("`", "`"),
)


_PUNCTUATION = re.compile(r"(?:(?<![\\.。])[.。]|(?<!\\)[,;:，；：])\s*\Z")


_BARS = re.compile(r"\|\s*\\begin\s*\{matrix\}((?:(?!\\begin|\\end).)*)\\end\s*\{matrix\}\s*\|", re.DOTALL)
_LINES = re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align|alignat|gather|gathered|split|cases)\*?\}")
_LINE_MARKS = re.compile(r"\\\\|&")
_ORDINAL = re.compile(r"(?<=[0-9])\s*\^\s*\{?\s*\\(?:text|mathrm|rm)\s*\{?\s*(st|nd|rd|th)\s*\}?\s*\}?")
_MICRO = re.compile(r"\\mu\s*\\(?:text|mathrm)\s*\{\s*")
_OHM = re.compile(r"(?<=[0-9])\s*(?:\\(?:text|mathrm)\s*\{\s*)?\\Omega\s*\}?\s*\Z")
_RENAMED = {
    "sfrac": r"\frac",
    "nicefrac": r"\frac",
    "pounds": "£",
    "euro": "€",
    "yen": "¥",
    "lg": r"\log_{10} ",
    "bmod": r"\mod ",
    "mod": r"\mod ",
    "limit": r"\lim ",
    "degree": r"^\circ ",
}
_COMMANDS = re.compile(rf"\\({'|'.join(_RENAMED)})(?![A-Za-z])")


def plain_latex(text: str) -> str:
    r"""Returns an answer without LaTeX that has no value, with old TeX (``{1\over2}``) and arrays in today's form."""
    text = _SPACES.sub(_blank, text)
    text = _CURRENCIES.sub(_currency, _THOUSANDS.sub(_ungrouped, text))
    if "_" in text:
        text = _CHOSEN_OF.sub(_selection, text)
    text = _PER_CENT.sub(" percent", text)
    if len(_LETTERED.findall(text)) > 1:
        text = _LETTERED.sub(" ", text)
    if "]" in text or "[" in text:
        text = _FRENCH_END.sub(r"\1)", _FRENCH.sub(r"\1(\2", text))
    if "\\" not in text and not _ENDS.search(text):
        return text
    text = _COMMANDS.sub(lambda match: _RENAMED[match[1]], _ENDS.sub("", _ARRAY.sub(_as_matrix, text)))
    if _LINES.search(text) and "matrix" not in text:
        text = _LINE_MARKS.sub(lambda match: " " if match.group() == "&" else " , ", _LINES.sub(" ", text))
    text = _OHM.sub(r"\\text{ ohm}", _MICRO.sub(r"\\text{ micro", _ORDINAL.sub(r"\1", text)))
    text = _UNIT_FRACTION.sub(r"\\text{ \1/\2}", text)
    text = _UNIT_VECTOR.sub(r"\\hat{\1}", text)
    text = _BARS.sub(r"\\begin{vmatrix}\1\\end{vmatrix}", _DROPPED.sub(" ", _EVEN.sub(" ", text)))
    if "\\over" in text or "\\choose" in text:
        text = _OVER.sub(lambda match: rf"{_FRACTIONS[match[2]]}{{{match[1]}}}{{{match[3]}}}", text)
        text = _BARE_OVER.sub(r"\\frac{\1}{\2}", text)
    return text


def _blank(match: re.Match[str]) -> str:
    return match["double"] or ("" if match["none"] else " ")


def _currency(match: re.Match[str]) -> str:
    return "₹" if match["rupees"] else r"\$"


def _ungrouped(match: re.Match[str]) -> str:
    """Returns a number without marks between its thousands, and with a point before its decimals."""
    found = match.group()
    if found == "{:}":
        return ":"
    if found == "{,}":
        return "" if _THREE.match(match.string, match.end()) else "."
    if " " in found:
        return found.replace(" ", "").replace(",", ".")
    if "." not in found:
        return found.replace(",", "").replace("'", "")
    return found.replace(".", "").replace(",", ".")


def _selection(match: re.Match[str]) -> str:
    if match[2] == "C":
        return rf"\binom{{{match[1]}}}{{{match[3]}}}"
    return rf"\frac{{{match[1]}!}}{{({match[1]}-{match[3]})!}}"


def _as_matrix(match: re.Match[str]) -> str:
    return r"\begin{matrix}" if match.group().startswith(r"\begin") else r"\end{matrix}"


def unquoted(text: str) -> str:
    """Returns the text without quotes, marks of mathematics and punctuation around all of it."""
    previous = None
    while text != previous:
        previous = text
        text = _PUNCTUATION.sub("", text.strip()).strip()
        for left, right in _QUOTES:
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
                inside = text[len(left) : -len(right)]
                if left not in inside and right not in inside:  # not so in "$3$ and $4$"
                    text = inside
    return text


def tidy(text: str) -> str:
    """Returns an answer or a label without decoration around it and without LaTeX that has no value."""
    return unquoted(plain_latex(unquoted(fold(text))))
