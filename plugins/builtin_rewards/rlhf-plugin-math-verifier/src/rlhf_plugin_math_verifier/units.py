"""Units: known ones have a dimension and a factor, so that 1 m is 100 cm; any other noun counts itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlhf_plugin_math_verifier.vocabulary import is_script

_TABLE = """
length m 1 meter metre
length cm 1/100 centimeter centimetre
length mm 1/1000 millimeter millimetre
length dm 1/10 decimeter decimetre
length km 1000 kilometer kilometre
length in 127/5000 inch inche
length ft 381/1250 foot feet
length yd 1143/1250 yard
length mi 201168/125 mile
mass g 1 gram gramme
mass kg 1000 kilogram kilo
mass mg 1/1000 milligram
mass lb 45359237/100000 pound
mass oz 45359237/1600000 ounce
mass t 1000000 ton tonne
time s 1 second sec
time min 60 minute
time ms 1/1000 millisecond
time h 3600 hour hr
time day 86400
time week 604800
time year 31557600 yr
time month 2629800
volume L 1 l liter litre
volume mL 1/1000 ml milliliter millilitre
volume gal 473176473/125000000 gallon
dollar $ 1 dollar usd buck
dollar ¢ 1/100 cent
euro € 1 euro eur
pound £ 1 gbp quid
yen ¥ 1 yen 円 元 人民币
rupee ₹ 1 rupee rs inr
won ₩ 1 won 원
ruble ₽ 1 ruble rub руб рублей
franc CHF 1 franc
peso MXN 1 peso
yuan CNY 1 yuan rmb
real BRL 1 reais real
zloty PLN 1 złoty zł
energy J 1 joule
energy kJ 1000 kilojoule
energy kWh 3600000
energy eV 1/6241509074460762607 electronvolt
energy cal 523/125 calorie
energy kcal 4184 kilocalorie
power W 1 watt
power kW 1000 kilowatt
power MW 1000000 megawatt
force N 1 newton
force kN 1000
pressure Pa 1 pascal
pressure kPa 1000
frequency Hz 1 hertz
frequency kHz 1000
frequency MHz 1000000
voltage V 1 volt
current A 1 amp ampere
resistance ohm 1 Ω ohms
amount mol 1 mole
kelvin K 1
area ha 1 hectare
area acre 1
angle degree 1 deg 度
radian rad 1 radian
square unit 1
percent % 1
people person 1 people 人 名 명
byte GB 1000000000 gb
byte MB 1000000 mb
byte KB 1000 kb
byte TB 1000000000000 tb
disc CD 1 cd dvd
television TV 1 tv
item 个 1 個 個 つ 개
length 米 1
length 厘米 1/100
length 千米 1000 公里
mass 克 1
mass 千克 1000 公斤
time 小时 3600 時間 시간
time 分钟 60 分鐘
time 秒 1 초
time 天 86400 日
"""
_KNOWN = {
    name: (dimension, Fraction(factor))
    for dimension, symbol, factor, *names in map(str.split, _TABLE.strip().splitlines())
    for name in (symbol, *names)
}
_RATES = {"mph": "mi / h", "kmh": "km / h", "kph": "km / h", "mps": "m / s", "cc": "cm ^3"}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_NOUN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*\.?")
_DROPPED = frozenset(str.split("of the a an in for each old long tall high wide deep total units"))
LETTERS = frozenset("mgshLltAVWNJKFC")
SINGLE_LETTERS = frozenset("mgshLlt")
r"""Letters that are a unit if white space or ``\text`` separates them."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit. ``dimensions``: names with exponents, such as length 1 and time -1. ``words``: nouns that are not a known unit."""

    dimensions: tuple[tuple[str, int], ...] = ()
    factor: Fraction = Fraction(1)
    words: frozenset[str] = frozenset()


PERCENT = Unit((("percent", 1),))
DEGREE = Unit((("angle", 1),))
RADIAN = Unit((("radian", 1),))


def known(word: str) -> bool:
    """Returns True for a unit of the table, in the singular or the plural, as symbol or word."""
    return _name(word) is not None or word.casefold() in _RATES


def _name(word: str) -> str | None:
    folded = word.casefold()
    for name in (word, folded, folded.removesuffix("s")):
        if name in _KNOWN:
            return name
    return None


def unit(texts: Sequence[str]) -> Unit | None:
    """Returns the unit in words and signs: ``km / h``, ``square feet``, ``red apples``; None if there is something else."""
    dimensions: Counter[str] = Counter()
    factor, nouns = Fraction(1), set()
    side, power, last = 1, 1, ""
    pieces = [
        piece for text in texts for piece in _RATES.get(text.casefold(), text).split() if text not in ("(", ")", r"\cdot")
    ]
    for index, piece in enumerate(pieces):
        folded = piece.casefold()
        raised = int(piece[1:]) if piece in ("^2", "^3", "^-1", "^-2", "^-3") else POWERS.get(folded, 0)
        name = None if folded == "in" and (last or pieces[index + 1 :][:1] not in ([], ["/"], ["^2"], ["^3"])) else _name(piece)
        if folded in ("/", "per"):
            side = -1
        elif raised and not last:
            power = raised
        elif raised or name:
            # "m ^2" counts m once more; what has no known name is only a noun
            name, exponent = (name, side * power) if name else (_name(last), side * (raised - 1))
            if name:
                dimension, size = _KNOWN[name]
                dimensions[dimension] += exponent
                factor *= size**exponent
            last, power = name or last, 1
        elif (_NOUN.fullmatch(piece) or is_script(piece)) and (len(piece) > 1 or piece in "aA" or not piece.isascii()):
            if folded not in _DROPPED:
                nouns.add(folded.removesuffix("s"))
                last = last or piece
        else:
            return None
    return Unit(tuple(sorted((name, count) for name, count in dimensions.items() if count)), factor, frozenset(nouns))
