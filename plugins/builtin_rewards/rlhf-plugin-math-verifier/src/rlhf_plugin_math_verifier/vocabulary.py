"""Words beside a number, by their effect on it. Every other word is a noun or an adjective, and does not change it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DENIALS = _words(
    "not never no neither nor none cannot cant isnt arent wasnt werent dont doesnt didnt wont wouldnt couldnt shouldnt hardly"
    " impossible untrue unequal refuted disproved"
)
"""Words that take back the thing beside them."""
FALSEHOODS = _words("wrong incorrect false")
"""Words that are denials if no noun follows: "72 is wrong", but "72 wrong answers"."""
CHANGES = _words(
    "least most minimum maximum between above below under over beyond within exceeds exceeding underneath up"
    " about around almost nearly circa barely close somewhere roughly approximately approx approximate guess"
    " guessing guessed estimate estimated"
    " likely presumably unsure sure ish"
    " plus minus divided multiplied squared cubed factorial half halves double twice triple thrice quadruple root"
    " mod modulo modulus remainder power powers inverse reciprocal negative opposite sum difference product quotient ratio"
    " and or but versus vs to till until out through except excluding without unless other otherwise instead rather"
    " ago past before after maybe perhaps possibly probably might may could unknown unclear undefined if whether"
    " pair pairs couple couples trio trios log ln sin cos tan exp sqrt short shy off fold base quarter quarters score gross grand"
    " oder ou und et y och og millones millón millionen milliarden mille mil mila tausend hundert cento cien milioni miliardi"
    " milhões milhão miljoen tys milyon milyar ribu juta nghìn triệu tỷ nicht pas ne nie ikke inte niet não"
    " nowhere near far beyond save saves choose increased decreased reduced raised point thou myriad googol repeating recurring"
    " question anything something everything nothing both either approximates approaching actually wait oops sorry"
)
"""Words that change the number, make it a bound or a guess, or lead to another one."""
BOUNDS = _words("square cube different less more fewer greater larger smaller bigger higher lower than")
"""Words that make a bound of a number after them; "5 more apples" is a number."""
GUESSES = _words(
    "about around almost nearly circa close somewhere roughly approximately approx likely"
    " presumably guess maybe perhaps possibly probably might may could"
)

MULTIPLIERS = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
    "quintillion": 10**18,
    "lakh": 10**5,
    "lac": 10**5,
    "crore": 10**7,
    "dozen": 12,
    "score": 20,
    "gross": 144,
    "grand": 1000,
    "mn": 10**6,
    "mln": 10**6,
    "bn": 10**9,
    "十": 10,
    "百": 100,
    "千": 1000,
    "万": 10**4,
    "萬": 10**4,
    "亿": 10**8,
    "億": 10**8,
    "兆": 10**12,
    "백": 100,
    "천": 1000,
    "만": 10**4,
    "억": 10**8,
}
OPERATORS = {
    "plus": "+",
    "minus": "-",
    "times": r"\times",
    "over": "/",
    "squared": "^2",
    "cubed": "^3",
    "factorial": "!",
    "negative": "-",
    "percent": "%",
    "pct": "%",
}
"""Words for a sign. The sign itself decides what must be beside them."""

_SMALL = str.split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
    " nineteen"
)
_TENS = str.split("twenty thirty forty fifty sixty seventy eighty ninety")
_COUNTED = {word: value for value, word in enumerate(_SMALL)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_COUNTED |= {digit: value for value, digit in enumerate("零一二三四五六七八九")} | {"两": 2, "兩": 2, "〇": 0}
_NUMBER_WORDS = "|".join(sorted((*_SMALL, *_TENS, "hundred", "thousand", "million", "billion", "dozen"), key=len, reverse=True))
_HALF_OF = "(hours?|days?|weeks?|months?|years?|minutes?|miles?|dozen|foot|inch|met(?:er|re)s?|lit(?:er|re)s?|pounds?)"
_HALVES = re.compile(rf"\bhalf\s+an?\s+{_HALF_OF}\b|\ban?\s+{_HALF_OF}\s+and\s+a\s+half\b", re.IGNORECASE)
_SPELLED = re.compile(rf"\b(?:{_NUMBER_WORDS})(?:(?:[\s-]{{1,3}}|\s{{1,3}}and\s{{1,3}})(?:{_NUMBER_WORDS}))*\b", re.IGNORECASE)
_ORDINALS = str.split("third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
_PARTS = {word: 3 + i for i, word in enumerate(_ORDINALS)}
_PARTS |= {"twentieth": 20, "hundredth": 100, "thousandth": 1000, "millionth": 10**6, "halve": 2, "half": 2}
_NUMBER_LIKE = re.compile(r"[a-z]*(?:illion|teen|[^s]ieth|teenth|illionth)s?")

LEADS = _words(
    "the a an is are was be equal equals equal to of it this that there exactly just simply only precisely therefore so"
    " thus hence answer result value total number amount sum solution final my our we get have has which namely i e option choice"
    " letter statement correct right usd rs inr eur gbp us would will should must in all altogether area length probability"
    " also donc alors quindi portanto jadi así por lo tanto es ist est è é entonces deshalb daher somit"
    " actually really rather dus course obviously clearly surely certainly indeed definitely then now finally ultimately"
)
"""Words that may stand before an answer and do not change it."""
CLAUSE_LEADS = _words(
    "he she they you i has have had gets got get receives received earns earned makes made needs needed takes took costs cost"
    " pays paid sold sells bought buys spends spent saves saved eats ate uses used drinks walks walked runs ran reads collected"
    " picked left were can will"
)
"""Words of a clause before its number: "the answer is that she has 5 apples"."""

_SCRIPT_CHANGES = re.compile(
    "不|非|没|沒|未|否|无|無|ない|ませ|なく|아니|아닙|않|없|以上|以下|以内|以內|未満|以外|左右|或|和|与|與|及|又は|または|もしくは|또는|이상|이하|미만|초과"
    "|分之|分の|分의|倍|半|负|負|减|減|错|錯|誤|误|違|余|多[个個人元]"
)
_SCRIPT_KNOWN = re.compile(
    "(?:个|個|人|名|元|円|块|岁|歳|年|月|日|天|周|小时|時間|分钟|分間|秒|平方|立方|厘米|毫米|分米|米|千米|公里|克|千克|公斤|吨|升|毫升|度"
    "|页|頁|本|只|隻|支|张|張|件|次|种|種|道|棵|辆|条|條|位|回|番|組|组|つ|枚|匹|台|头|頭|颗|束|袋|盒|箱|瓶|杯|题|題|套|双|岁|层|排|行|列|桶|根|朵|把|名"
    "|개|명|원|살|권|마리|시간|분|초|년|미터|도|입니다|이다|이에요|예요|です|だ|である|でした|になります|となります|บาท|คน|ชิ้น|ตัว|है"
    "|通り|通|冊|本书|共|总共|總共|一共|等于|等於|为|為|是|答案)"
)
"""Counters, units and copulas. A word of these scripts with another beginning may mean anything."""
_CYRILLIC = re.compile("[\u0400-\u04ff]+")
_CYRILLIC_CHANGES = re.compile(
    "не|нет|ни|больше|меньше|более|менее|от|до|или|и|минус|плюс|около|примерно|почти|пол.*|тысяч.*|миллион.*|миллиард.*|сот.*|процент.*"
)


_SCRIPT_DENIALS = re.compile("不是|不等|不对|不對|非|没有|沒有|ではな|ではあり|でな|じゃな|아니|아닙|ไม่ใช่|ليس|नहीं")


def script_changes(word: str) -> bool:
    """Returns True for a word of these scripts that denies or bounds the following, or changes the number."""
    return bool(_SCRIPT_CHANGES.search(word) or _SCRIPT_DENIALS.search(word)) or any(part in MULTIPLIERS for part in word)


def is_script(word: str) -> bool:
    """Returns True for a word of a script without spaces, or without Latin letters."""
    return not word.isascii() and not any("\u00c0" <= character <= "\u024f" for character in word)


def changes(word: str) -> bool:
    """Returns True for a word that changes the number beside it, or may do so."""
    if _CYRILLIC.fullmatch(word):
        return bool(_CYRILLIC_CHANGES.fullmatch(word.casefold()))
    if is_script(word):
        return bool(_SCRIPT_CHANGES.search(word)) or not _SCRIPT_KNOWN.match(word)
    folded = word.casefold().replace("'", "")
    if folded in CHANGES or folded in DENIALS or multiplier(folded) or part(folded):
        return True
    return folded in _COUNTED or bool(_NUMBER_LIKE.fullmatch(folded))


def denies(words: Sequence[str]) -> bool:
    """Returns True if the words take back the thing beside them."""
    folded = [word.casefold().replace("'", "") for word in words]
    if any(is_script(word) and _SCRIPT_DENIALS.search(word) for word in words):
        return True
    return any(word in DENIALS or (word in FALSEHOODS and folded[i + 1 :] in ([], ["answer"])) for i, word in enumerate(folded))


def multiplier(word: str) -> int | None:
    """Returns the factor of ``million``: 1,000,000."""
    folded = word.casefold()
    return MULTIPLIERS.get(folded) or MULTIPLIERS.get(folded.removesuffix("s"))


def part(word: str) -> int | None:
    """Returns the divisor of ``tenths``: 10."""
    folded = word.casefold()
    return _PARTS.get(folded) or _PARTS.get(folded.removesuffix("s")) or (2 if folded == "halves" else None)


def in_digits(text: str) -> str:
    """Returns the text with digits for numbers that it spells: "three hundred and five students" → "305 students"."""

    def digits(match: re.Match[str]) -> str:
        value = counted(re.split(r"[\s-]+", match.group().casefold()))
        return match.group() if value is None or match.group().casefold() == "one" else str(value)

    text = _HALVES.sub(lambda match: f"0.5 {match[1]}" if match[1] else f"1.5 {match[2]}", text)
    return _SPELLED.sub(digits, text)


def fraction(words: Sequence[str]) -> Fraction | None:
    """Returns what "three quarters", "two and a half" and "one half" spell; None for other words."""
    folded = [word.casefold() for word in words]
    if folded[-3:] == ["and", "a", "half"] and (whole := counted(folded[:-3])) is not None:
        return whole + Fraction(1, 2)
    divisor = 4 if folded[-1:] in (["quarter"], ["quarters"]) else part(folded[-1]) if folded else None
    count = Fraction(1) if folded[:-1] in (["a"], ["one"], []) else counted(folded[:-1])
    return count / divisor if divisor and count is not None and "and" not in folded else None


def counted(words: Sequence[str]) -> Fraction | None:
    """Returns the number that the words spell: "seventy-two", "two million", 十八; None if any of them is not such a word."""
    total, current, seen = 0, 0, False
    for word in (piece.casefold() for each in words for piece in (each if is_script(each) else each.split("-"))):
        if word == "and" and seen:
            continue
        factor = multiplier(word)
        if factor is None and word not in _COUNTED:
            return None
        if factor is None:
            current += _COUNTED[word]
        elif factor >= 1000:
            total, current = total + (current or 1) * factor, 0
        else:
            current = current // 10 * 10 + (current % 10 or 1) * factor if factor == 10 else (current or 1) * factor
        seen = True
    return Fraction(total + current) if seen else None
