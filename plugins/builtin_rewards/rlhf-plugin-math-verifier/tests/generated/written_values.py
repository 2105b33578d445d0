"""Ways to write a value: for each kind a label, other ways to write its value, and near misses that have another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random

Case = tuple[str, list[str], list[str]]
"""Label, ways to write its value, ways to write others."""

COMMAS = [
    "Die Antwort lautet @.",
    "Jede Kiste wiegt gleich viel, also ist das Ergebnis @ kg.",
    "**Antwort:** @ Meter",
    "La réponse est @.",
    "On divise par deux, donc le résultat est $\\boxed{@}$.",
    "La respuesta es @ euros.",
    "Ответ: @",
    "Het antwoord is dus @ liter.",
]
"""Sentences of languages that write decimals with a comma."""

KINDS: dict[str, Callable[[Random], Iterator[Case]]] = {}
ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def kind(name: str) -> Callable[[Callable[[Random], Iterator[Case]]], Callable[[Random], Iterator[Case]]]:
    def add(function: Callable[[Random], Iterator[Case]]) -> Callable[[Random], Iterator[Case]]:
        KINDS[name] = function
        return function

    return add


def _lowest(chance: Random, limit: int = 19) -> tuple[int, int]:
    """Returns numerator and denominator of a fraction that is no integer, in lowest terms, neither of them 1."""
    while True:
        p, q = chance.randint(2, limit), chance.randint(3, limit)
        if math.gcd(p, q) == 1 and p != q:
            return p, q


def _words(n: int) -> str:
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" {_words(n % 100)}" if n % 100 else "")


def _different(chance: Random, low: int, high: int, count: int) -> list[int]:
    return chance.sample(range(low, high), count)


def _signed(n: int) -> str:
    return f"+{n}" if n >= 0 else str(n)


@kind("fractions")
def _fractions(r: Random) -> Iterator[Case]:
    p, q = _lowest(r)
    k = r.randint(2, 5)
    same = [
        rf"\dfrac{{{p}}}{{{q}}}",
        rf"\tfrac{{{p}}}{{{q}}}",
        f"{p}/{q}",
        rf"{{{p} \over {q}}}",
        rf"\frac{{{k * p}}}{{{k * q}}}",
    ]
    same += [rf"\left(\frac{{{p}}}{{{q}}}\right)", rf"{{{p}\over{q}}}", rf"\cfrac{{{p}}}{{{q}}}", rf"{p} \div {q}"]
    other = [rf"\frac{{{q}}}{{{p}}}", rf"\frac{{{p}}}{{{q + 1}}}", rf"-\frac{{{p}}}{{{q}}}", f"{q}/{p}", rf"{{{q} \over {p}}}"]
    yield rf"\frac{{{p}}}{{{q}}}", same, [*other, f"{p}/{q}0", rf"\frac{{{p}}}{{{q}}}x"]


@kind("negative fractions")
def _negative_fractions(r: Random) -> Iterator[Case]:
    p, q = _lowest(r)
    same = [
        rf"\frac{{-{p}}}{{{q}}}",
        f"-{p}/{q}",
        rf"\frac{{{p}}}{{-{q}}}",
        f"−{p}/{q}",
        rf"-\dfrac{{{p}}}{{{q}}}",
        rf"\frac{{-{2 * p}}}{{{2 * q}}}",
    ]
    yield (
        rf"-\frac{{{p}}}{{{q}}}",
        same,
        [f"{p}/{q}", rf"\frac{{-{p}}}{{-{q}}}", rf"-\frac{{{q}}}{{{p}}}", rf"-\left(-\frac{{{p}}}{{{q}}}\right)"],
    )


@kind("characters of fractions")
def _unicode_fractions(r: Random) -> Iterator[Case]:
    sign, p, q = r.choice(
        [("½", 1, 2), ("⅓", 1, 3), ("⅔", 2, 3), ("¼", 1, 4), ("¾", 3, 4), ("⅗", 3, 5), ("⅝", 5, 8), ("⅚", 5, 6)]
    )
    n = r.randint(1, 9)
    yield f"{p}/{q}", [sign, f"{p}⁄{q}", f"{2 * p}/{2 * q}"], [f"{n}{sign}", f"{q}⁄{p}", f"-{sign}"]
    yield str(Fraction(p, q) + n), [f"{n}{sign}", f"{n} {sign}", f"{n} {p}/{q}"], [sign, f"{n + 1}{sign}", f"-{n}{sign}"]


@kind("mixed numbers")
def _mixed(r: Random) -> Iterator[Case]:
    p, q = r.choice([(1, 2), (1, 3), (2, 3), (3, 4), (2, 5), (3, 8), (1, 6)])
    n = r.randint(2, 12)
    whole = n * q + p
    same = [
        f"{n} {p}/{q}",
        rf"{n}\frac{{{p}}}{{{q}}}",
        rf"\frac{{{whole}}}{{{q}}}",
        rf"{n}\tfrac{{{p}}}{{{q}}}",
        f"{whole}/{q}",
        f"{n}+{p}/{q}",
    ]
    same += [f"{n} and {p}/{q}", rf"{n} \, \frac{{{p}}}{{{q}}}", rf"{n}\ \frac {p}{q}"]
    other = [
        f"{n}{p}/{q}",
        rf"\frac{{{n}{p}}}{{{q}}}",
        rf"{n} \cdot \frac{{{p}}}{{{q}}}",
        f"{n} - {p}/{q}",
        f"-{n} {p}/{q}",
        f"{n}.{p}/{q}",
    ]
    yield rf"{n}\frac{{{p}}}{{{q}}}" if r.random() < 0.5 else f"{n} {p}/{q}", same, other
    yield f"{n}{p}/{q}", [rf"\frac{{{n}{p}}}{{{q}}}"], [f"{n} {p}/{q}", rf"{n}\frac{{{p}}}{{{q}}}"]


@kind("blanks between digits")
def _blanks(r: Random) -> Iterator[Case]:
    a, b = r.randint(1, 9), r.randint(10, 99)
    yield (
        f"{a}{b}",
        [f"{a * 100 + b}", rf"\mathbf{{{a}{b}}}"],
        [f"{a} {b}", f"{a}, {b}", f"({a}, {b})", rf"{a} \cdot {b}", f"{a}.{b}"],
    )


@kind("decimals that end")
def _decimals(r: Random) -> Iterator[Case]:
    value = Fraction(r.randint(11, 99999), r.choice([10, 100, 1000]))
    if value.denominator == 1:
        value += Fraction(1, 4)
    text = f"{float(value):.6f}".rstrip("0")
    p, q = value.numerator, value.denominator
    same = [text + "0", rf"\frac{{{p}}}{{{q}}}", f"{p}/{q}", text + "000", f"+{text}", rf"\text{{{text}}}"]
    other = [
        text[:-1],
        f"-{text}",
        f"{float(value * 10):.5f}".rstrip("0"),
        text + "1",
        f"{float(value / 10):.8f}".rstrip("0"),
        text.replace(".", ""),
    ]
    yield text, same, other


@kind("decimals that are cut")
def _cut(r: Random) -> Iterator[Case]:
    p, q = r.choice([(1, 3), (2, 3), (1, 7), (5, 6), (4, 9), (3, 11), (7, 12)])
    digits = f"{p / q:.12f}"
    yield (
        rf"\frac{{{p}}}{{{q}}}",
        [f"{2 * p}/{2 * q}", rf"\dfrac{{{p}}}{{{q}}}"],
        [digits[:4], digits[:5], digits[:3], f"{p / q:.2f}"],
    )
    name, constant = r.choice([(r"\pi", math.pi), ("e", math.e), (r"\sqrt{2}", math.sqrt(2)), (r"\sqrt{3}", math.sqrt(3))])
    yield name, [rf"1 \cdot {name}", rf"{{{name}}}"], [f"{constant:.2f}", f"{constant:.3f}", f"{constant:.1f}", f"-{name}"]


@kind("decimals that repeat")
def _repeating(r: Random) -> Iterator[Case]:
    d = r.choice([1, 2, 4, 5, 7, 8])
    yield (
        str(Fraction(d, 9)),
        [rf"0.\overline{{{d}}}", rf"0.\dot{{{d}}}", rf"0.{d}{d}{d}\ldots", f"0.({d})", rf"0.\bar{{{d}}}"],
        [f"0.{d}", f"0.{d}{d}", rf"0.0\overline{{{d}}}", rf"{d}.\overline{{{d}}}"],
    )
    e = r.choice([12, 45, 63, 81, 27])
    yield (
        str(Fraction(e, 99)),
        [rf"0.\overline{{{e}}}", rf"0.{e}\overline{{{e}}}"],
        [f"0.{e}", rf"0.{e // 10}\overline{{{e % 10}}}"],
    )


@kind("groups of digits")
def _groups(r: Random) -> Iterator[Case]:
    v = r.randint(1_000_000, 98_000_000)
    plain = f"{v:,}"
    same = [
        plain,
        plain.replace(",", "{,}"),
        plain.replace(",", r"\,"),
        plain.replace(",", " "),
        plain.replace(",", r"\ "),
    ]
    same += [plain.replace(",", "\u202f"), plain.replace(",", "'"), plain.replace(",", r",\!"), f"{plain}.00"]
    yield str(v), same, [f"{v // 1000:,}", f"{v * 10:,}", plain[:-4], f"{v + 1000:,}", plain[:-1]]


@kind("groups as in India and in Europe")
def _indian(r: Random) -> Iterator[Case]:
    lakh, thousand, rest = r.randint(1, 98), r.randint(10, 99), r.randint(100, 999)
    v = lakh * 100_000 + thousand * 1000 + rest
    yield (
        str(v),
        [f"{lakh},{thousand},{rest}", f"₹{lakh},{thousand},{rest}", f"Rs. {lakh},{thousand},{rest}"],
        [f"{lakh},{thousand}", f"{thousand},{rest}"],
    )
    big = r.randint(1_000_000, 9_000_000)
    dots = f"{big:,}".replace(",", ".")
    yield str(big), [f"{dots} Euro", dots], [dots[:-4], f"{big}0"]


@kind("decimal commas")
def _commas(r: Random) -> Iterator[Case]:
    a, b, n = r.randint(2, 99), r.randint(1, 8), r.randint(2, 9)
    number = f"{a},{b}"
    same = [f"={form.replace('@', number)}" for form in COMMAS] + [rf"{a}{{,}}{b}"]
    near = [f"{a},{b + 1}", f"{a}{b}", f"{b},{a}", f"-{number}", f"{number}{n}"]
    yield f"{a}.{b}", same, [f"={form.replace('@', r.choice(near))}" for form in COMMAS] + [f"{a}; {b}", f"({a}, {b})"]


@kind("money")
def _money(r: Random) -> Iterator[Case]:
    d, c = r.randint(2, 480), r.choice([0, 50, 25, 5])
    amount = f"{d}.{c:02}"
    same = [
        rf"\${amount}",
        f"${amount}",
        rf"US\$ {amount}",
        f"{amount} dollars",
        f"USD {amount}",
        f"{amount} USD",
        rf"\text{{\${amount}}}",
        f"$ {amount}",
    ]
    yield (
        rf"\${amount}",
        same,
        [rf"-\${amount}", rf"\${d}{c:02}", f"{amount} cents", rf"\${d + 1}.{c:02}", f"{amount} million dollars"],
    )
    e = r.randint(3, 900)
    yield f"{e} euros", [f"€{e}", f"{e} €", f"{e} EUR", rf"\text{{€}}{e}"], [f"{e} cents", f"€{e}0", f"€-{e}"]


@kind("percent")
def _percent(r: Random) -> Iterator[Case]:
    tenths = r.choice([n for n in range(13, 985) if n % 10])
    p = f"{tenths / 10}"
    same = [rf"{p}\%", f"{p}%", f"{p} %", f"{p} percent", rf"{p}\,\%", f"{p} per cent", f"{tenths / 1000:.6f}".rstrip("0")]
    yield rf"{p}\%", same, [rf"{tenths}\%", rf"0.{tenths:03}\%", rf"-{p}\%", rf"{tenths / 100}\%", f"{100 - tenths / 10:.1f}%"]


@kind("lengths in two units")
def _lengths(r: Random) -> Iterator[Case]:
    m, cm = r.randint(1, 9), r.randint(11, 95)
    same = [f"{m} m {cm} cm", f"{m} m and {cm} cm", f"{m}.{cm} m", rf"{m}\text{{ m }}{cm}\text{{ cm}}", f"{m * 100 + cm} cm"]
    yield rf"{m * 100 + cm}\text{{ cm}}", same, [f"{m} m {cm + 1} cm", f"{cm} cm", f"{m} cm", f"{m}{cm} m", f"{m} m {cm} mm"]
    f, i = r.randint(4, 9), r.choice([1, 2, 3, 10, 11])
    yield (
        rf"{f * 12 + i} inches",
        [f"{f} feet {i} inches", f"{f} ft {i} in", rf"{f}\text{{ ft }}{i}\text{{ in}}"],
        [f"{f} feet", f"{f * 10 + i} inches", f"{f} inches {i} feet"],
    )


@kind("units of one quantity")
def _units(r: Random) -> Iterator[Case]:
    n = r.randint(2, 97)
    yield (
        rf"{n * 1000}\text{{ m}}",
        [f"{n} km", rf"{n}\text{{ km}}", rf"{n}\,\mathrm{{km}}", f"{n} kilometers"],
        [f"{n} m", f"{n} miles", f"{n * 10} km", rf"{n}\text{{ km}}^2"],
    )
    yield (
        f"{n} kg",
        [rf"{n}\,\text{{kg}}", f"{n} kilograms", f"{n}kg", rf"{n} \mathrm{{~kg}}", f"{n * 1000} g"],
        [f"{n} g", f"{n} mg", f"{n * 1000} kg", f"{n} pounds"],
    )


@kind("areas, volumes, speeds")
def _areas(r: Random) -> Iterator[Case]:
    n = r.randint(2, 97)
    yield (
        rf"{n}\text{{ cm}}^2",
        [f"{n} cm²", rf"{n}\,\mathrm{{cm}}^{{2}}", f"{n} square centimeters", rf"{n} \text{{ cm}}^2"],
        [f"{n} cm", rf"{n}\text{{ cm}}^3", rf"{n}\text{{ m}}^2"],
    )
    yield (
        rf"{n}\text{{ km/h}}",
        [f"{n} km/h", f"{n} kilometers per hour", rf"{n}\,\frac{{\text{{km}}}}{{\text{{h}}}}", f"{n} kmh"],
        [f"{n} m/s", f"{n} mph", f"{n} km/min"],
    )


@kind("durations")
def _durations(r: Random) -> Iterator[Case]:
    h, m = r.randint(1, 9), r.choice([15, 20, 30, 45, 50])
    same = [
        f"{h} hours {m} minutes",
        f"{h} h {m} min",
        f"{h} hours and {m} minutes",
        rf"{h}\text{{ hours }}{m}\text{{ minutes}}",
        f"{h * 60 + m} min",
    ]
    yield (
        f"{h * 60 + m} minutes",
        same,
        [f"{h} hours", f"{h}.{m} hours", f"{h} minutes {m} seconds", f"{h + 1} hours {m} minutes"],
    )


@kind("angles")
def _angles(r: Random) -> Iterator[Case]:
    d = r.choice([30, 45, 60, 72, 105, 120, 135, 150])
    p, q = Fraction(d, 180).as_integer_ratio()
    top = rf"{p}\pi" if p > 1 else r"\pi"
    yield (
        rf"{d}^\circ",
        [f"{d}°", f"{d} degrees", rf"{d}^{{\circ}}", rf"{d}\degree", rf"\angle A = {d}^\circ", str(d)],
        [f"{180 - d + 1}°", rf"\frac{{1}}{{{d}}}^\circ", f"-{d}°", f"{d} radians"],
    )
    yield (
        rf"\frac{{{top}}}{{{q}}}",
        [rf"\frac{{{p}}}{{{q}}}\pi", rf"{top}/{q}", rf"\pi \cdot \frac{{{p}}}{{{q}}}"],
        [rf"\frac{{{q}\pi}}{{{p}}}", rf"\frac{{{p}}}{{{q}\pi}}", rf"-\frac{{{p}\pi}}{{{q}}}"],
    )


@kind("scientific notation")
def _scientific(r: Random) -> Iterator[Case]:
    a, b, e = r.randint(1, 9), r.randint(1, 9), r.randint(4, 11)
    up = str(e).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    same = [
        rf"{a}.{b} \times 10^{{{e}}}",
        f"{a}.{b}e{e}",
        f"{a}.{b} × 10^{e}",
        f"{a}.{b}·10{up}",
        rf"{a}.{b}\cdot 10^{{{e}}}",
        f"{a}.{b}E+{e:02}",
        f"{a}{b}" + "0" * (e - 1),
        f"{a}.{b} × 10{up}",
    ]
    other = [
        rf"{a}.{b} \times 10^{{{e + 1}}}",
        rf"{a}.{b} \times 10^{{-{e}}}",
        f"{a}.{b}",
        rf"{a}{b} \times 10^{{{e}}}",
        f"{a}.{b} × 10{e}",
    ]
    yield rf"{a}.{b}\times 10^{{{e}}}", same, other


@kind("powers and roots of numbers")
def _powers(r: Random) -> Iterator[Case]:
    b, e = r.choice([(2, 10), (3, 5), (2, 8), (5, 4), (7, 3), (2, 12), (6, 4)])
    up = str(e).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    yield (
        str(b**e),
        [f"{b}^{{{e}}}", f"{b}{up}", f"{b}**{e}", rf"{b} \cdot {b}^{{{e - 1}}}", rf"\sqrt{{{b ** (2 * e)}}}"],
        [f"{e}^{{{b}}}" if e**b != b**e else "1", f"{b}{e}", f"{b}^{{{e + 1}}}", f"{b}^{{-{e}}}", rf"{b}\cdot {e}"],
    )


@kind("surds")
def _surds(r: Random) -> Iterator[Case]:
    k, n = r.randint(2, 9), r.choice([2, 3, 5, 6, 7, 10, 11])
    same = [
        rf"\sqrt{{{k * k * n}}}",
        rf"{k} \sqrt {{{n}}}",
        f"{k}√{n}",
        rf"{k}\cdot\sqrt{{{n}}}",
        rf"{k}*sqrt({n})",
        rf"\frac{{{k * n}}}{{\sqrt{{{n}}}}}",
        rf"{k}{{\sqrt{{{n}}}}}",
        rf"{k}({n})^{{1/2}}",
    ]
    yield (
        rf"{k}\sqrt{{{n}}}",
        same,
        [
            rf"-{k}\sqrt{{{n}}}",
            rf"{n}\sqrt{{{k}}}" if n * n * k != k * k * n else r"\sqrt{0}",
            rf"\sqrt{{{k * n}}}",
            rf"\sqrt[{k}]{{{n}}}",
            rf"\pm {k}\sqrt{{{n}}}",
        ],
    )


@kind("binomials and factorials")
def _binomials(r: Random) -> Iterator[Case]:
    n, k = r.randint(8, 12), r.randint(2, 4)
    v = math.comb(n, k)
    yield (
        str(v),
        [
            rf"\binom{{{n}}}{{{k}}}",
            rf"\binom{{{n}}}{{{k}}} = {v}",
            rf"\frac{{{n}!}}{{{k}!\,{n - k}!}}",
            rf"\dbinom{{{n}}}{{{k}}}",
            rf"{{{n} \choose {k}}}",
        ],
        [rf"\frac{{{n}!}}{{{n - k}!}}", rf"\binom{{{n}}}{{{k - 1}}}", f"({v})!", f"{n}/{k}"],
    )


@kind("polynomials")
def _polynomials(r: Random) -> Iterator[Case]:
    a, b = _different(r, 2, 12, 2)
    label = f"x^2{_signed(a + b)}x{_signed(a * b)}"
    same = [
        f"(x+{a})(x+{b})",
        f"(x+{b})(x+{a})",
        f"{a * b}+{a + b}x+x^2",
        rf"x^{{2}} + {a + b} x + {a * b}",
        rf"\left(x+{a}\right)\left(x+{b}\right)",
        f"x^2+{a}x+{b}x+{a * b}",
    ]
    other = [
        f"(x-{a})(x-{b})",
        f"x^2{_signed(a + b)}x-{a * b}",
        f"x^2{_signed(a * b)}x{_signed(a + b)}" if a + b != a * b else "x",
        f"(t+{a})(t+{b})",
        f"x^3{_signed(a + b)}x{_signed(a * b)}",
    ]
    yield label, same, other


@kind("rational expressions")
def _rational(r: Random) -> Iterator[Case]:
    a, b = _different(r, 2, 9, 2)
    yield (
        rf"\frac{{x+{a}}}{{x-{b}}}",
        [rf"\dfrac{{{a}+x}}{{x-{b}}}", rf"1+\frac{{{a + b}}}{{x-{b}}}", f"(x+{a})/(x-{b})", rf"-\frac{{x+{a}}}{{{b}-x}}"],
        [rf"\frac{{x+{a}}}{{x+{b}}}", rf"\frac{{x-{b}}}{{x+{a}}}", f"x+{a}/x-{b}", rf"\frac{{x+{a}}}{{{b}-x}}"],
    )


@kind("lines")
def _lines(r: Random) -> Iterator[Case]:
    m, b = _different(r, 2, 12, 2)
    same = [
        f"{m}x+{b}=y",
        f"y-{b}={m}x",
        f"{m}x-y+{b}=0",
        f"y = {m} x + {b}",
        rf"y={m}\left(x+\frac{{{b}}}{{{m}}}\right)",
        f"2y={2 * m}x+{2 * b}",
    ]
    yield f"y={m}x+{b}", same, [f"y={m}x-{b}", f"y={b}x+{m}", f"x={m}y+{b}", f"y=-{m}x+{b}", f"y={m}x"]


@kind("assignments")
def _assignments(r: Random) -> Iterator[Case]:
    a, b = _different(r, 3, 90, 2)
    yield f"x = {a}", [str(a), f"x={a}", f"{a}=x", f"x = {a}.0"], [f"y={a}", f"x={b}", f"x=-{a}", rf"x \ne {a}", f"x={a}y"]
    yield str(a), [f"n = {a}", f"x={a}", rf"f(2) = {a}", rf"\angle ABC = {a}"], [f"n={b}", rf"n > {a}", f"n={a}, m={b}"]


@kind("sets of solutions")
def _sets(r: Random) -> Iterator[Case]:
    a, b, c = sorted(_different(r, -9, 15, 3))
    same = [
        rf"\{{{c}, {a}, {b}\}}",
        f"{a}, {b}, {c}",
        rf"x = {a}, {b}, {c}",
        rf"{a}, {b}, \text{{ and }} {c}",
        f"{b}, {a} and {c}",
        rf"x \in \{{{a},{b},{c}\}}",
        rf"x={a} \text{{ or }} x={b} \text{{ or }} x={c}",
    ]
    yield (
        rf"\{{{a},{b},{c}\}}",
        same,
        [rf"\{{{a},{b}\}}", f"{a}, {c}", rf"\{{{a},{b},{c + 1}\}}", rf"\{{{a},{b},{c},{c + 2}\}}", str(b)],
    )


@kind("plus or minus")
def _plus_minus(r: Random) -> Iterator[Case]:
    a = r.randint(2, 30)
    yield (
        rf"\pm {a}",
        [rf"\{{{a}, -{a}\}}", f"-{a}, {a}", f"±{a}", rf"x = \pm {a}", f"{a} and -{a}", rf"x={a} \text{{ or }} x=-{a}"],
        [str(a), f"-{a}", rf"\pm {a + 1}", rf"\{{{a}, 0\}}", rf"{a}, {a}"],
    )
    b, n = r.randint(1, 9), r.choice([2, 3, 5, 7])
    yield (
        rf"{b} \pm \sqrt{{{n}}}",
        [rf"{b}+\sqrt{{{n}}}, {b}-\sqrt{{{n}}}", rf"\{{{b}-\sqrt{{{n}}}, {b}+\sqrt{{{n}}}\}}", rf"x={b}\pm\sqrt{{{n}}}"],
        [rf"{b}+\sqrt{{{n}}}", rf"-{b}\pm\sqrt{{{n}}}"],
    )


@kind("points")
def _points(r: Random) -> Iterator[Case]:
    a, b = _different(r, -9, 20, 2)
    same = [
        f"({a}, {b})",
        rf"\left({a},{b}\right)",
        f"({a},{b})",
        rf"({a},\,{b})",
        rf"(x,y)=({a},{b})",
        rf"\left( {a}, {b} \right)",
        rf"x={a}, y={b}",
        rf"P = ({a}, {b})",
    ]
    yield (
        f"({a},{b})",
        same,
        [
            f"({b},{a})",
            f"({a},{b + 1})",
            f"({a},{b},{a})",
            str(a),
            f"({-a if a else 1},{b})",
            f"({a}{b})" if b >= 0 else f"({b})",
        ],
    )


@kind("several named values")
def _named(r: Random) -> Iterator[Case]:
    a, b, c = _different(r, 2, 40, 3)
    same = [
        f"x={a}, y={b}",
        rf"x = {a}, \quad y = {b}",
        rf"x={a} \text{{ and }} y={b}",
        f"y={b}, x={a}",
        f"x = {a} and y = {b}",
    ]
    yield f"x={a}, y={b}", same, [f"x={b}, y={a}", f"x={a}", f"x={a}, z={b}", f"x={a}, y={c}"]
    yield (
        f"({a}, {b}, {c})",
        [f"a={a}, b={b}, c={c}", rf"(a,b,c) = ({a},{b},{c})", rf"\left({a},{b},{c}\right)"],
        [f"({a}, {c}, {b})", f"({a}, {b})", f"a={a}, b={c}, c={b}"],
    )


@kind("intervals")
def _intervals(r: Random) -> Iterator[Case]:
    a, b = sorted(_different(r, -9, 15, 2))
    same = [
        rf"\left[{a},{b}\right)",
        rf"{a} \le x < {b}",
        rf"x \in [{a}, {b})",
        rf"[{a},\,{b})",
        rf"{b} > x \ge {a}",
        rf"{a}\leq x<{b}",
        rf"\{{x \mid {a} \le x < {b}\}}",
        rf"{a} \leqslant x < {b}",
    ]
    yield f"[{a},{b})", same, [f"[{a},{b}]", f"({a},{b})", f"({a},{b}]", rf"{a} < x \le {b}", f"[{a},{b + 1})", rf"x \ge {a}"]


@kind("inequalities and unions")
def _unions(r: Random) -> Iterator[Case]:
    a, b = sorted(_different(r, -9, 15, 2))
    same = [
        rf"x < {a} \text{{ or }} x > {b}",
        rf"(-\infty, {a}) \cup ({b}, +\infty)",
        rf"x \in (-\infty,{a})\cup({b},\infty)",
        rf"\left(-\infty, {a}\right) \cup \left({b}, \infty\right)",
        rf"({b},\infty)\cup(-\infty,{a})",
    ]
    yield (
        rf"(-\infty,{a})\cup({b},\infty)",
        same,
        [rf"(-\infty,{a}]\cup[{b},\infty)", rf"({a},{b})", rf"(-\infty,{a})", rf"(-\infty,{b})\cup({a},\infty)"],
    )
    yield (
        f"x > {a}",
        [rf"{a} < x", rf"({a}, \infty)", rf"x \in ({a}, +\infty)"],
        [f"x < {a}", rf"x \ge {a}", f"x = {a}", str(a)],
    )


@kind("matrices")
def _matrices(r: Random) -> Iterator[Case]:
    a, b, c, d = _different(r, -5, 12, 4)

    def matrix(open_: str, close: str, w: int, x: int, y: int, z: int) -> str:
        return rf"{open_} {w} & {x} \\ {y} & {z} {close}"

    array = r"\left[\begin{array}{cc}", r"\end{array}\right]"
    bracket, plain = (r"\begin{bmatrix}", r"\end{bmatrix}"), (r"\begin{pmatrix}", r"\end{pmatrix}")
    same = [
        matrix(*bracket, a, b, c, d),
        matrix(*array, a, b, c, d),
        f"[[{a}, {b}], [{c}, {d}]]",
        rf"\left(\begin{{matrix}}{a}&{b}\\{c}&{d}\end{{matrix}}\right)",
        rf"A = {matrix(*plain, a, b, c, d)}",
    ]
    yield (
        matrix(*plain, a, b, c, d),
        same,
        [
            matrix(*plain, a, c, b, d),
            matrix(*bracket, d, b, c, a),
            f"[[{a}, {c}], [{b}, {d}]]",
            rf"\begin{{pmatrix}} {a} \\ {b} \\ {c} \\ {d} \end{{pmatrix}}",
        ],
    )


@kind("vectors")
def _vectors(r: Random) -> Iterator[Case]:
    a, b, c = _different(r, -6, 9, 3)
    same = [
        rf"\begin{{bmatrix}}{a}\\{b}\\{c}\end{{bmatrix}}",
        rf"\left(\begin{{array}}{{c}}{a}\\{b}\\{c}\end{{array}}\right)",
        rf"\vec{{v}} = \begin{{pmatrix}} {a} \\ {b} \\ {c} \end{{pmatrix}}",
        rf"\langle {a}, {b}, {c} \rangle",
        f"({a}, {b}, {c})",
    ]
    yield (
        rf"\begin{{pmatrix}}{a}\\{b}\\{c}\end{{pmatrix}}",
        same,
        [
            rf"\begin{{pmatrix}}{a}\\{c}\\{b}\end{{pmatrix}}",
            rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
            rf"\langle {c}, {b}, {a} \rangle",
        ],
    )


@kind("complex numbers")
def _complex(r: Random) -> Iterator[Case]:
    a, b = _different(r, 2, 15, 2)
    same = [
        f"{b}i+{a}",
        rf"{a} + {b}\,i",
        rf"{a}+{b}\mathrm{{i}}",
        f"{a} + {b}i",
        rf"z = {a}+{b}i",
        rf"{a}+i{b}",
        rf"\left({a}+{b}i\right)",
    ]
    yield f"{a}+{b}i", same, [f"{a}-{b}i", f"{b}+{a}i", f"-{a}+{b}i", f"{a}+{b}", f"({a}+{b})i", rf"{a}\pm {b}i"]


@kind("multiples of pi")
def _pi(r: Random) -> Iterator[Case]:
    n = r.randint(2, 60)
    same = [
        rf"{n} \pi",
        f"{n}π",
        rf"\pi \cdot {n}",
        rf"{n}\cdot\pi",
        f"{n} pi",
        rf"{n}\pi \text{{ cm}}^2",
        rf"\frac{{{2 * n}\pi}}{{2}}",
    ]
    yield rf"{n}\pi", same, [str(n), f"{n * 3.14:.2f}", rf"{n + 1}\pi", rf"\pi^{{{n}}}", rf"\frac{{{n}}}{{\pi}}", rf"{n}\pi^2"]


@kind("logarithms and exponentials")
def _logs(r: Random) -> Iterator[Case]:
    k, n = r.randint(2, 5), r.choice([2, 3, 5])
    yield (
        rf"{k}\ln {n}",
        [
            rf"\ln {n**k}",
            rf"\ln({n}^{{{k}}})",
            rf"\ln {{{n**k}}}",
            rf"{k} \ln({n})",
            rf"\ln\left({n**k}\right)",
            rf"-{k}\ln\frac{{1}}{{{n}}}",
        ],
        [rf"\ln {n * k + 1}", rf"-{k}\ln {n}", rf"\ln^{k} {n}", rf"{k}+\ln {n}", rf"{k}\log_{{2}} {n + 1}"],
    )
    yield (
        rf"e^{{{k}}}-1",
        [rf"-1+e^{{{k}}}", rf"\exp({k})-1", rf"e^{k} - 1", rf"\mathrm{{e}}^{{{k}}}-1"],
        [rf"e^{{{k}-1}}", rf"e^{{{k}}}+1", rf"1-e^{{{k}}}", rf"{k}e-1"],
    )


@kind("values of sines and cosines")
def _trig(r: Random) -> Iterator[Case]:
    label, same, other = r.choice(
        [
            (
                r"\frac{\sqrt{3}}{2}",
                [
                    r"\sin 60^\circ",
                    r"\frac{1}{2}\sqrt{3}",
                    r"\cos\frac{\pi}{6}",
                    r"\sqrt{\frac{3}{4}}",
                    r"\frac{3}{2\sqrt{3}}",
                    "√3/2",
                ],
                [r"\frac{\sqrt{2}}{2}", r"-\frac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{3}", r"\frac{3}{2}", "0.87"],
            ),
            (
                r"\frac{1}{2}",
                [r"\sin 30^\circ", r"\cos 60^\circ", r"\sin\frac{\pi}{6}", "0.5", r"\cos\left(\frac{\pi}{3}\right)"],
                [r"\sin 60^\circ", r"\cos 30^\circ", r"-\frac12", "2", r"\frac{\pi}{2}"],
            ),
            (
                r"2\sin x\cos x",
                [r"\sin 2x", r"\sin(2x)", r"2\cos x \sin x", r"\sin{2x}"],
                [r"\cos 2x", r"2\sin x", r"\sin^2 x", r"\sin x\cos x", r"-\sin 2x"],
            ),
        ]
    )
    yield label, same, other


@kind("ratios")
def _ratios(r: Random) -> Iterator[Case]:
    a, b = _lowest(r)
    yield (
        f"{a}:{b}",
        [f"{a} : {b}", f"{a} to {b}", rf"{a}\!:\!{b}", f"{2 * a}:{2 * b}", rf"{a} \colon {b}", rf"\frac{{{a}}}{{{b}}}"],
        [f"{b}:{a}", f"{a}:{b + 1}", f"{a}", f"{a}:{a + b}"],
    )


@kind("times of day")
def _times(r: Random) -> Iterator[Case]:
    h, m = r.randint(1, 11), r.choice([5, 15, 20, 30, 45])
    same = [
        f"{h}:{m:02} PM",
        f"{h}:{m:02} p.m.",
        f"{h}:{m:02}pm",
        f"{h + 12}:{m:02}",
        rf"{h}:{m:02}\text{{ p.m.}}",
        rf"{h}:{m:02} \text{{ PM}}",
    ]
    yield f"{h}:{m:02} p.m.", same, [f"{h}:{m:02} a.m.", f"{h + 1}:{m:02} p.m.", f"{h}:{m + 1:02} PM"]


@kind("dates and weekdays")
def _dates(r: Random) -> Iterator[Case]:
    day, year = r.randint(13, 28), r.randint(1990, 2030)
    name, number = r.choice([("March", 3), ("May", 5), ("June", 6), ("October", 10)])
    yield (
        f"{name} {day}, {year}",
        [f"{day} {name} {year}", f"{name} {day}, {year}", f"{year}-{number:02}-{day}", f"{name} {day}th, {year}"],
        [f"{name} {day - 1}, {year}", f"{name} {day}, {year + 1}", str(day), str(year)],
    )
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
    today, another = r.sample(days, 2)
    yield (
        today,
        [today.lower(), f"a {today}", rf"\text{{{today}}}", f"on {today}"],
        [another, f"the day after {today}", f"{today} or {another}", f"not {today}"],
    )


@kind("number systems")
def _bases(r: Random) -> Iterator[Case]:
    n, base = r.randint(20, 200), r.choice([2, 3, 5, 7])
    digits, rest = "", n
    while rest:
        digits, rest = str(rest % base) + digits, rest // base
    yield (
        f"{digits}_{{{base}}}",
        [f"{digits}_{base}", rf"{digits}_{{\text{{{base}}}}}", rf"({digits})_{{{base}}}"],
        [f"{digits}_{base + 1}", f"{digits[:-1]}_{base}", f"{digits}0_{{{base}}}"],
    )


@kind("number words")
def _number_words(r: Random) -> Iterator[Case]:
    n = r.randint(13, 480)
    yield (
        str(n),
        [_words(n), _words(n).capitalize(), f"{_words(n)} ({n})", f"{n} ({_words(n)})", rf"\text{{{_words(n)}}}"],
        [_words(n + 1), f"minus {_words(n)}", f"{_words(n)} thousand", f"not {_words(n)}", f"{_words(n)} or {_words(n + 1)}"],
    )


@kind("yes, no, true, false")
def _yes(r: Random) -> Iterator[Case]:
    for one, two in (("Yes", "No"), ("True", "False")):
        label, rival = r.sample([one, two], 2)
        yield (
            label,
            [label.lower(), rf"\text{{{label}}}", label.upper(), f"{label}.", f'"{label}"'],
            [rival, rival.lower(), f"not {label.lower()}", f"{label} and {rival}", rf"\text{{{rival}}}"],
        )


@kind("names")
def _names(r: Random) -> Iterator[Case]:
    one, two = r.sample(["Alice", "Bernhard", "the square", "circle", "parabola", "Team A", "Evelyn", "hyperbola"], 2)
    yield (
        one,
        [rf"\text{{{one}}}", one.lower(), f"{one}.", rf"\textbf{{{one}}}", f"'{one}'"],
        [two, f"{one} and {two}", f"not {one}", f"{two}, not {one}"],
    )


@kind("letters of choices")
def _letters(r: Random) -> Iterator[Case]:
    one, two = r.sample("ABCDE", 2)
    same = [
        f"({one})",
        one,
        f"{one}.",
        rf"\text{{{one}}}",
        rf"\textbf{{({one})}}",
        f"Option {one}",
        rf"\mathrm{{{one}}}",
        f"choice {one}",
        f"{one})",
    ]
    yield (
        one,
        same,
        [two, f"({two})", f"{one} or {two}", f"{one} and {two}", f"not {one}", f"{two}, not {one}", f"Option {two}"],
    )


@kind("choices with their text")
def _choices(r: Random) -> Iterator[Case]:
    one, two = r.sample("ABCDE", 2)
    n, m = _different(r, 11, 90, 2)
    same = [
        f"({one}) {n}",
        one,
        rf"\textbf{{({one})}}\ {n}",
        f"{one}. {n}",
        f"{one}: {n}",
        str(n),
        rf"({one})\ {n}",
        f"Option {one}: {n}",
    ]
    yield rf"\textbf{{({one})}}\ {n}", same, [f"({two}) {m}", two, str(m), rf"\textbf{{({two})}}\ {n}", f"{one} or {two}"]


@kind("functions")
def _functions(r: Random) -> Iterator[Case]:
    a, b = _different(r, 2, 12, 2)
    yield (
        f"f(x) = {a}x+{b}",
        [
            f"{a}x+{b}",
            f"f(x)={b}+{a}x",
            rf"f(x) = {a} x + {b}",
            f"y = {a}x+{b}",
            rf"f(x)={a}\left(x+\frac{{{b}}}{{{a}}}\right)",
        ],
        [f"{b}x+{a}", f"f(x)={a}x-{b}", f"f(x)={a}x", f"{a}x^2+{b}", f"f({a})={b}"],
    )


@kind("remainders")
def _remainders(r: Random) -> Iterator[Case]:
    m = r.choice([7, 11, 13, 17])
    a = r.randint(2, m - 2)
    yield (
        str(a),
        [rf"{a} \pmod{{{m}}}", rf"x \equiv {a} \pmod{{{m}}}", rf"{a}\ (\mathrm{{mod}}\ {m})", f"a remainder of {a}"],
        [rf"{a + 1} \pmod{{{m}}}", rf"x \equiv -{a} \pmod{{{m}}}", str(m)],
    )


@kind("infinity, none, empty")
def _none(r: Random) -> Iterator[Case]:
    yield r"\infty", [r"+\infty", "∞", r"{\infty}", "infinity"], [r"-\infty", "0", r"\frac{1}{\infty}", "1000000"]
    yield r"\emptyset", [r"\varnothing", r"\{\}", "∅"], [r"\{0\}", "0", r"\{\emptyset\}"]
    yield (
        "no solution",
        [r"\text{no solution}", "No solution", "no solution.", r"\text{No solution}"],
        ["0", "one solution", "infinitely many solutions", r"\infty"],
    )


@kind("negative numbers")
def _negative(r: Random) -> Iterator[Case]:
    n = r.randint(3, 400)
    yield (
        f"-{n}",
        [f"−{n}", f"–{n}", f"(-{n})", f"minus {n}", rf"-\,{n}", rf"{{-{n}}}", rf"-({n})", rf"\text{{-}}{n}", f"negative {n}"],
        [str(n), rf"|-{n}|", f"-(-{n})", f"+{n}"],
    )


@kind("zeros in front and behind")
def _zeros(r: Random) -> Iterator[Case]:
    n = r.randint(3, 99)
    yield f"{n:03}", [f"{n:03}", f"{n:04}", rf"\text{{{n:03}}}", f"{n}"], [f"{n}0", f"{n}00", f"1{n:03}", f"0.{n:02}"]
    yield str(n), [f"{n}.0", f"{n}.000", f"{n:03}", f"+{n}", rf"\phantom{{0}}{n}"], [f"{n}0", f"0.{n}", f"{n}.01", f".{n}"]


@kind("very large integers")
def _large(r: Random) -> Iterator[Case]:
    v = r.randint(10**24, 10**25)
    yield (
        str(v),
        [f"{v:,}", f"{v:,}".replace(",", " "), rf"\mathbf{{{v}}}", f"{v}."],
        [str(v + 1), str(v)[:-1], f"{v:.4e}", str(v * 10), f"-{v}"],
    )


@kind("sums and products not worked out")
def _open_sums(r: Random) -> Iterator[Case]:
    a, b, c = _different(r, 3, 30, 3)
    yield (
        str(a * b + c),
        [
            rf"{a} \cdot {b} + {c}",
            rf"{a} \times {b} + {c} = {a * b + c}",
            f"{a}*{b}+{c}",
            rf"({a})({b})+{c}",
            rf"{a * b} + {c}",
        ],
        [rf"{a} \cdot ({b} + {c})", f"{a}+{b}+{c}", rf"{a} \times {b} - {c}", rf"{a} \times {b} = {a * b}"],
    )


@kind("approximately equal")
def _approximately(r: Random) -> Iterator[Case]:
    n = r.choice([2, 3, 5, 6, 7, 10])
    root = math.sqrt(n)
    yield (
        rf"\sqrt{{{n}}}",
        [rf"\sqrt{{{n}}} \approx {root:.3f}", rf"\sqrt{{{n}}}\ (\approx {root:.2f})", rf"x=\sqrt{{{n}}}\approx {root:.4f}"],
        [rf"\approx {root:.2f}", f"{root:.2f}", rf"\sqrt{{{n + 1}}} \approx {math.sqrt(n + 1):.3f}"],
    )


@kind("derivatives and integrals")
def _integrals(r: Random) -> Iterator[Case]:
    a, n = r.randint(2, 9), r.randint(2, 6)
    yield (
        rf"\frac{{{a}x^{{{n + 1}}}}}{{{n + 1}}}+C",
        [
            rf"\frac{{{a}}}{{{n + 1}}}x^{{{n + 1}}}+C",
            rf"C+\frac{{{a}x^{{{n + 1}}}}}{{{n + 1}}}",
            rf"\dfrac{{{a}}}{{{n + 1}}} x^{{{n + 1}}} + C",
        ],
        [rf"{a * n}x^{{{n - 1}}}", rf"\frac{{{a}x^{{{n}}}}}{{{n}}}+C", rf"-\frac{{{a}x^{{{n + 1}}}}}{{{n + 1}}}+C"],
    )
    yield (
        rf"{a * n}x^{{{n - 1}}}",
        [rf"{a * n} x^{{{n - 1}}}", rf"{a}\cdot {n}x^{{{n - 1}}}", rf"f'(x) = {a * n}x^{{{n - 1}}}"],
        [rf"{a}x^{{{n}}}", rf"{a * n}x^{{{n}}}", rf"{a * n}y^{{{n - 1}}}"],
    )
