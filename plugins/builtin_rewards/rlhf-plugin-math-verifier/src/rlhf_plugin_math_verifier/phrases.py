"""Phrases around an answer: those that announce it, and those that take it back."""

from __future__ import annotations

import re

_IS = r"(?:is|are|equals|(?:would|will|should|must)\s+be)"
_ENGLISH = (
    rf"\b(?:(?:answers?|ans|final\s+(?:result|value|solution))\b"
    rf"(?:[ \t]+(?:to|for|of)\b[^.\n:=]{{0,80}}?)?[\s*_]{{0,10}}(?:\b{_IS}\b|[:=]|[→⇒]|\n)"
    r"|(?:correct|right)\s+(?:option|choice)\s+is\b)"
)
_OTHERS = (
    r"(?:答案|答|结果|結果)[\s*]{0,4}(?:应该|应当|應該)?(?:是|为|為|等于|等於|[:=])",
    r"(?:故|应|應|所以|正确答案)?[选選](?:择|擇|项|項)?[\s*]{0,4}[:：]?(?=\s*[$(（]?[A-J])",
    r"(?:答え|解答|正解|回答)[\s*]{0,4}(?:は|[:=])、?",
    r"(?:정답|답안|해답|답)[\s*]{0,4}(?:은|는|이|[:=])",
    r"คำตอบ(?:สุดท้าย)?[\s*]{0,4}(?:คือ|เท่ากับ|[:=])",
    r"(?i:\brespuesta(?:\s+(?:final|correcta))?[\s*]{0,4}(?:\bes\b|[:=]))",
    r"(?i:\bréponse(?:\s+(?:finale|correcte))?[\s*]{0,4}(?:\best\b|[:=]))",
    r"(?i:\b(?:antwort|lösung)[\s*]{0,4}(?:\b(?:ist|lautet)\b|[:=]))",
    r"(?i:\b(?:risposta|resposta)(?:\s+(?:finale|final|corretta|correta))?[\s*]{0,4}(?:(?<!\w)[èé](?!\w)|[:=]))",
    r"(?i:ответ[\s*]{0,4}(?:\bравен\b|[-—:=]))",
    r"(?i:\bodpowiedź[\s*]{0,4}(?:\b(?:to|jest)\b|[:=]))",
    r"(?i:\bcevap[\s*]{0,4}[:=])",
    r"(?i:(?:đáp án|câu trả lời)[\s*]{0,4}(?:\blà\b|[:=]))",
    r"(?i:\bjawaban(?:nya)?[\s*]{0,4}(?:\badalah\b|[:=]))",
    r"(?i:\b(?:antwoord|svar(?:et)?|vastaus)[\s*]{0,4}(?:\b(?:is|är|er|on)\b|[:=]))",
    r"(?:الجواب|الإجابة)[\s*]{0,4}(?:هو|هي|[:=])",
    r"उत्तर[\s*]{0,4}(?:है|[:=])",
)
ANNOUNCED = re.compile(rf"(?:(?i:{_ENGLISH})|{'|'.join(_OTHERS)})[\s*_:=]{{0,10}}")
"""Announcement, which ends where the answer begins."""

_ARTICLE = (
    r"(?:\s+(?:be|equal|equals|to|the|a|an|is|answer|actually|really|than|that|just|simply|number|value|only|option|choice))*"
)
_REFUSAL = (
    r"not|never|neither|nor|no|(?:by\s+)?no\s+means|scarcely|cannot|[a-z]+n't|hardly|isnt|less|fewer|more|greater|larger|smaller|bigger|higher|lower|at\s+least|at\s+most"
    r"|up\s+to|upwards?\s+of|(?:north|south|shy|ballpark|in\s+excess)\s+of|as\s+(?:many|few|much|little|high|low)\s+as|over|under|below|above|between|exceeds?|different\s+from|other\s+than|anything\s+but|instead\s+of|rather\s+than|except"
    r"|without|unless|half(?:\s+of)?|twice|double|triple|nowhere\s+near|far\s+from|short\s+of|besides|apart\s+from"
    r"|(?:divisible|bounded|divided|multiplied|followed|preceded)\s+by|congruent\s+to|(?:number|integer|prime|one)\s+(?:before|after)|(?:smaller|less|greater|larger|more|fewer)\s+than\s+or\s+equal\s+to|unlikely\s+to|impossible\s+to|different\s+than|than"
    r"|(?:square|cube|opposite|negative|double|triple|reciprocal|root|multiple|factor)\s+of"
    r"|no\s+es|n'est\s+pas|nicht|kein|non\s+è|não\s+é|не|nie\s+jest|không\s+phải(?:\s+là)?|bukan|niet|inte|ikke|ei\s+ole|mayor\s+que|menor\s+que"
    r"|größer\s+als|kleiner\s+als|больше|меньше|более|менее|свыше"
    r"|al\s+menos|por\s+lo\s+menos|m[áa]s\s+de|menos\s+de|como\s+(?:máximo|mínimo)|a\s+lo\s+sumo|au\s+(?:moins|plus)|plus\s+de|moins\s+de|pas"
    r"|mindestens|höchstens|mehr\s+als|weniger\s+als|keine?|almeno|al\s+massimo|più\s+di|meno\s+di|pelo\s+menos|no\s+máximo|mais\s+de"
    r"|minstens|hoogstens|meer\s+dan|minder\s+dan|co\s+najmniej|co\s+najwyżej|więcej\s+niż|mniej\s+niż|minst|högst|mer\s+än|mindre\s+än"
    r"|en\s+az|en\s+fazla|lebih\s+dari|kurang\s+dari|ít\s+nhất|nhiều\s+nhất"
)
_REFUSAL_SCRIPTS = (
    "比|超|不是|并非|並非|不等于|不等於|不为|不為|非|没有|沒有|不|大于|大於|小于|小於|多于|少于|超过|超過|不足|至少(?:是|为)?|至多(?:是|为)?|最多(?:是|为)?|最少(?:是|为)?"
    "|ไม่ใช่|ليس|नहीं"
)
DENIED_BEFORE = re.compile(
    rf"(?:(?<![\w'])(?:{_REFUSAL}|(?:between|rang\w+\s+from)\s+[-+$\d.,/\\()]{{1,20}}\s+(?:and|to)){_ARTICLE}|(?:{_REFUSAL_SCRIPTS})|(?<![-=])[<>≠≤≥≮≯]=?|\\(?:ne|neq|lt|gt|le|leq|leqslant|ge|geq|geqslant|neg|not)|!=)"
    r"\s*(?:\$\$?|\\\(|\\\[|\*\*|[\"'`(])?\s*\Z",
    re.IGNORECASE,
)
"""Words that end right before something that is not the answer: "is not", "at least", "<", 不是."""
DENIED_AFTER = re.compile(
    r"(?:\s*(?:\$\$?|\\\)|\\\]|\*\*|[\"'`)]))?\s*(?:"
    r"(?:(?:is|was|are|would\s+be|seems|looks)\s+)?(?:not|never|(?:wrong|incorrect|false|impossible)(?!\s+[a-z]{4,})|n't|isn't|wasn't|can't|cannot)\b"
    r"(?!\s+(?:only|just|\d|\$|\\))"
    r"|\?|(?:or|bis|oder|ou|или)\s+(?:more|less|fewer|\d|\$|[a-z]\b)"
    r"|[一-龥ぁ-ん가-힣]{0,6}(?:ではな|ではあり|じゃな|でな|でもな|아니|아닙|以上|以下|以内|以內|未満|より|이상|이하|미만|초과|不是|不对|不對|是错|是錯)"
    r"|(?:değil|नहीं)|<(?![/|A-Za-z])|[>≠≤≥]|\\(?:ne|neq|lt|gt|le|leq|leqslant|ge|geq|geqslant)(?![a-z]))",
    re.IGNORECASE,
)
"""Words that follow something that is not the answer: "is wrong", "?", "or more", ではない."""
RETRACTED = re.compile(
    r"[\s*_)\"'$]*(?:no\b(?!\s+(?:other|need|matter|more|further|one))|nope|wrong\b|incorrect\b|false\b|not\s+(?:true|correct|right|really|quite)"
    r"|(?:that|this|which|it|(?:this|that|the|my)\s+(?:answer|result|value))(?:'s|\s+is|\s+was)\s+(?:not(?!\s+(?:an?|hard|only|just|surprising|needed|necessary|important)\b(?!\s+(?:valid|correct|possible|real)?\s*(?:answer|solution)))|wrong|incorrect|false|a\s+mistake)|(?:that|this|it)\s+(?:isn't|can't|cannot)(?!\s+(?:be\s+)?(?:an?|larger|smaller|more|less|greater|fewer|higher|lower|bigger|hard|hurt|matter|surprising)\b)"
    r"|just\s+kidding|不对|不對|错了|錯了|いいえ|아니)",
    re.IGNORECASE,
)
"""A sentence that takes back the one before it."""
_MUSED = (
    r"(?:(?:hmm+|oh(?:\s+no)?|oops|wait|no|nope|hold\s+on|sorry|apologies|actually|but|however|and|yet|so|though|although|unfortunately|still"
    r"|i\s+(?:now\s+)?(?:realiz|realis|se|notic|think)e?(?:\s+now)?(?:\s+that)?|never\s*mind|(?:up)?on\s+(?:review|reflection|second\s+thoughts?|closer\s+inspection|checking))\b[\s,.:;!…—–-]*)*"
)
_JUDGED = (
    r"(?:(?:this|that|the|my|our)\s+(?:(?:above|last|previous|final|first)\s+)?(?:answer|result|value|solution|number|total)(?:\s+(?:above|here))?"
    r"|this|that|it|which|the\s+above|something)"
)
_FALSE = (
    r"(?:wrong|incorrect|false|invalid|impossible|off|mistaken|absurd"
    r"|not\s+(?:(?:quite|really|the)\s+)?(?:right|correct|true|valid|possible|answer))"
)
WITHDRAWN = re.compile(
    rf"[\s*_)\]\"'$.!—–-]*{_MUSED}(?:{_JUDGED}(?:'s|\s+(?:is|was|are|must\s+be|seems?|looks?))\s+(?:\w+ly\s+)?{_FALSE}\b(?!\s+to\b)"
    rf"|{_JUDGED}\s+(?:can't|cannot|can\s+not|couldn't)\s+be\s+(?:right|correct|true|so|it|the\s+(?:answer|case|solution))\b"
    rf"|{_JUDGED}\s+(?:does\s+not|doesn't|did\s+not|didn't|fails?\s+to)\s+"
    r"(?:satisfy|match|fit|work|check|add\s+up|make\s+sense|agree|hold)\b(?!\s+(?:for|if|when|in|with)\b)"
    rf"|{_JUDGED}\s+(?:contradicts|violates|fails|failed|(?:leads|led)\s+to\s+a\s+contradiction|is\s+a\s+(?:contradiction|mistake))\b"
    r"|i(?:'ve|\s+have|\s+must\s+have)?\s+(?:made|see|found|spotted)\s+an?\s+(?:\w+\s+)?(?:mistake|error|slip)\b|i\s+(?:was|am)\s+(?:wrong|mistaken)\b(?!\s+(?:to|about|that|in)\b)"
    r"|i(?:'ve|\s+have)?\s+(?:miscounted|misread|miscalculated)\b|scratch\s+that\b|(?:please\s+)?(?:disregard|ignore)\s+(?:that|this|it|my|the)\b"
    r"|i\s+(?:hereby\s+)?(?:withdraw|retract|take\s+(?:it|that|this)\s+back|no\s+longer\s+(?:believe|think|trust))\b"
    r"|i\s+(?:don't|do\s+not)\s+(?:know|believe|think\s+(?:this|that|it)\s+is\s+(?:right|correct))\b|i\s+give\s+up\b)",
    re.IGNORECASE,
)
"""A clause that takes back the answer before it."""
REFUSED = re.compile(
    r"\b(?:i(?:'m|\s+am|\s+was)?\s+(?:really\s+)?(?:can't|cannot|can\s+not|unable\s+to|not\s+able\s+to|couldn't|could\s+not)\s+(?:\w+ly\s+)?"
    r"(?:solve|answer|determine|find|compute|calculate|say|tell|view|see|give|provide|finish|complete|work|figure|do\s+this)\b"
    r"|i\s+(?:give|gave)\s+up\b|i\s+(?:do\s+not|don't)\s+know\b|(?:cannot|can't|can\s+not|could\s+not)\s+be\s+(?:determined|found|known|computed|solved|answered|decided)\b"
    r"|(?:not|n't)\s+(?:have\s+|given\s+)?(?:enough|sufficient)\s+(?:information|data|details?)\b|insufficient\s+(?:information|data)\b|no\s+way\s+(?:to|of)\s+(?:know|tell|say)\w*\b"
    r"|need\s+more\s+(?:information|data|details|context)\b|(?:is|are)\s+(?:undetermined|ill-posed|unclear|undecidable|indeterminate)\b|this\s+without\s+success\b"
    r"|\b(?:attempt|try|guess|check)(?:\s+\d+)?\s+failed\b|failed\s+the\s+(?:check|test)\b)",
    re.IGNORECASE,
)
"""Words of a sentence that gives no answer: its numbers, and those after it, are none."""
OFFER = re.compile(
    r"[\s*_(\[>-]*(?:would\s+you|do\s+you|shall\s+(?:i|we)|should\s+i|can\s+i|may\s+i|want\s+(?:me|to|another|more)|could\s+you|let\s+me\s+know|feel\s+free|if\s+you(?:'d|\s+(?:would|have|need|want))\b(?=[^.!?\n]{0,60}\b(?:like|questions?|help|else|explanations?|details?|further|clarif\w+)\b)"
    r"|i\s+hope|hope\s+(?:this|that)|i(?:'d|\s+would)\s+be\s+(?:happy|glad)|i\s+can\s+also|(?:please\s+)?rate\s+(?:this|my|the\s+answer)\b|(?:my\s+)?confidence(?:\s+level)?\s*:|difficulty\s*:|tokens?\s+(?:used|limit|count)\b"
    r"|word\s+count|is\s+there\s+any|good\s+luck|would\s+it|to\s+practi[sc]e|try\s+(?:the|it|this|another)\b|tip:\s+[a-z]|fun\s+fact|keywords?\b|see\s+you|[—–-]*\s*(?:solved|generated|written)\s+(?:in|by|with)\b|p\.?s\.|thanks(?!\s+to)|thank\s+you|\(?source\s*:)",
    re.IGNORECASE,
)
"""Beginning of a sentence that offers, thanks or tells of the text itself: its numbers are no answer."""
REFERENCE = re.compile(
    r"(?:(?<![A-Za-z])(?i:steps?|theorems?|lemmas?|corollary|proposition|definition|figures?|fig\.?|tables?|equations?|eqs?\.?|formulas?|chapters?|sections?|exercises?"
    r"|examples?|appendix|footnotes?|hints?|attempts?|problems?|questions?)|^\W*(?:Page|Version|Try|Note|Line|Part|Question|Problem|Item|Slide))"
    r"\s*(?:no\.?|number|\#)?\s*[(\[*]{0,2}\Z"
)
"""Words before a number that refers to a place, and is no value."""
SUPPOSED = re.compile(r"\b(?:if|had|suppos\w+|without|were|with\s+one)\b[^.!?]{0,200}\b(?:would|could|might)\b", re.IGNORECASE)
"""A sentence about something that is not so."""
CONTRAST = re.compile(
    r"\b(?:first|initially|originally|might|may|could|some|thought|think|guess\w*|put|said|wrote|if|forgotten)\b[^.;]{0,80}\bbut\b",
    re.IGNORECASE,
)
"""A clause about another answer, up to the one that gives the right one: "I first thought 41, but it is 42"."""
UNREAL = re.compile(
    r"\b(?:if|had|were)\b[^.!?]{0,120}\b(?:more|fewer|less|not|forgotten|[a-z]{1,8}n't)\b[^.!?]{0,120}\bwould\b", re.IGNORECASE
)
"""A sentence about something that is not so in the task either."""
_INSTEAD = (
    r"(?:wait|apologies|edit|or\s+rather|make\s+(?:that|it)|let\s+me\s+(?:re\w+|check)(?:\s+(?:that|this|it))?|hmm+|oh|oops|no|nope|sorry|actually|correction|scratch\s+that|on\s+second\s+thoughts?|my\s+(?:mistake|bad)"
    r"|i\s+(?:made|see)\s+an?\s+(?:\w+\s+)?(?:mistake|error)|i\s+was\s+wrong"
    r"|(?:that|this|it)(?:'s|\s+is|\s+was)\s+(?:wrong|incorrect|not\s+right|an?\s+(?:mistake|error)))"
)
_THING = r"(?:it|that|this|(?:the|my)\s+(?:(?:correct|right|real|final)\s+)?(?:answer|result|value|choice|option|one))"
REPLACED = re.compile(
    rf"(?:[\s*_)(\"'$.!\],;…—–-]|\\\]|\\\)|\\ldots\b)*(?:(?:but\s+|however,?\s+)?(?:{_INSTEAD}\b[\s,.:;!—–-]*)+(?:{_THING}(?:'s|\s+(?:is|was|should\s+be|must\s+be))|i\s+meant?\b|rather\b|make\s+(?:that|it)\b"
    rf"|(?=\W{{0,3}}[\d$\\][^\s]*\W*(?:\n|\Z)|[A-HJ]\b\W*(?:is\s+(?:correct|right)|\n|\Z)))"
    rf"|(?:however|but|instead),?\s+{_THING}\s+(?:should|must)\s+be|\(?i\s+meant?\b)\s*(?:actually|really|just)?[\s:*_]*(?=[-−($\\\d]|[A-HJ]\b)",
    re.IGNORECASE,
)
"""A sentence that begins by giving another answer than the one before it; it ends where that begins: "No, it is 43"."""
DOUBTED = re.compile(
    r"\b(?:not|[a-z]+n't|cannot|never|nobody|none|nor|neither|no\s+one|few|hardly|rarely|barely|doubt\w*|den(?:y|ies)|refus\w+|reject\w*"
    r"|false\w*|untrue|wrong\w*|incorrect\w*|mistaken\w*|impossible|unlikely|absurd|if|suppos\w+|assum\w+|unless|whether|pretend\w*"
    r"|allegedly|claim\w*|rul\w+\s+out|mistake|error|wrongly|exclud\w+|contradict\w*|refut\w+|disprov\w+|jok\w+)\b",
    re.IGNORECASE,
)
"""Doubt in the clause before an announcement, which then asserts nothing: "it is not true that the answer is" and "suppose the
...".
"""
NOT_DOUBTED = re.compile(
    r"\b(?:(?:not|n't)\s+(?:hard|difficult|surprising|only)|(?:no|without(?:\s+a)?|beyond)\s+doubt)\b", re.IGNORECASE
)
GUESSED_BEFORE = re.compile(
    r"\b(?:perhaps|maybe|possibly|probably|presumably|likely|(?:my|a|best|educated)\s+guess|i\s+guess|(?:might|may|could)\s+be|not\s+(?:so\s+)?sure|unsure"
    r"|peut-être|quizás|vielleicht|forse|talvez|возможно|наверное)\b[^.!?\n]{0,60}\Z"
    r"|(?:\b(?:about|around|approximately|approx\.?|roughly|nearly|almost|circa|close\s+to|near|somewhere|environ|aproximadamente|alrededor\s+de|approssimativamente|cerca\s+de|około|ungefär|ongeveer|yaklaşık|khoảng|sekitar|ungefähr|etwa|circa"
    r"|около|примерно|estimated\s+at)|[~≈∼]|\\sim\b|大约(?:是|为)?|大約|大概(?:是|为)?|约(?:为|是)?|約|接近|およそ|だいたい|약)"
    rf"{_ARTICLE}\s*(?:\$\$?|\\\(|\\\[|\*\*|[\"'`(])?\s*\Z",
    re.IGNORECASE,
)
"""Words before a value that leave it open, by which it is not taken back."""
GUESSED_AFTER = re.compile(
    r"(?<=\d)\s?-?ish\b|\b(?:or\s+so|give\s+or\s+take|more\s+or\s+less|approx(?:imately|\.)?|roughly|perhaps|maybe|probably|possibly|presumably"
    r"|i\s+(?:guess|suppose)|not\s+(?:so\s+)?(?:sure|certain)|unsure|(?:a|an|my|just|only|educated|wild|best)\s+(?:guess|estimate|approximation))\b"
    r"|\(\s*(?:guess\w*|estimate\w*|approx\w*)\s*\)|左右|くらい|ぐらい|정도",
    re.IGNORECASE,
)
"""Words after a value that leave it open."""
CORRECTED = re.compile(
    r"[^.!?\n]{1,60}?[,;:.]?\s*(?:\bbut\b|\brather\b|\binstead\b|\bit\s+is\b|\bit's\b|而是|是)\s*(?:it\s+is|it's|rather|instead)?\s*",
    re.IGNORECASE,
)
"""Words from a denial to the right answer: "not 41 but 42"."""
_HEDGE = r"(?:at\s+(?:least|most)|or|if|unless|but|give\s+or|plus|maybe|perhaps|possibly|though|although|wait|no|more|less)\b"
_GOES_ON = (
    "rather(?=\\s+than)|instead(?=\\s+of)|for|of|in|on|at(?!\\s+(?:most|least|max|best))|from|with|by|that|who|whose|which|because|since|so|as|than|before|after|until"
    "|while|when|where|between|each|every|left|remaining|altogether|(?<!or )(?:more|fewer|less)"
    "|is|are|was|were|be|been|has|have|had|will"
    "|would|can|could|do|does|did|he|she|it|they|we|during|into|onto|through|among|his|her|its|their|this|these|those|worth|only"
)
PHRASE_END = re.compile(
    rf"[,;(](?!\s*(?:(?:and|or)\s+)?[-$\d\\]|\s*{_HEDGE})|[:!?。，；、)\]\n]|(?<!sq)(?<!cu)\.(?![0-9])"
    r"|(?<!\w)(?:to|and)\s+(?=[^\W\d_]{2})(?!a\b|half\b|negative\b|minus\b)"
    rf"|(?<![\w-])(?!of\s+(?:jan|feb|mar|apr|may|june?|july?|aug|sep|oct|nov|dec)[a-z]*\b)"
    rf"(?!in(?:\s+(?:tall|long|wide|high|deep))?\W*\Z)(?:{_GOES_ON})(?![\w-])(?!\s+(?:or|and)\s+(?:more|less))",
    re.IGNORECASE,
)
"""Place where the words beside a number end and the sentence goes on: "5 apples | for Tom", but "5 or more" and "3, 4"."""
_VERB = r"\s*(?:is|are|was|were|would\s+be|can|could|will)"
_NOT = r"(?:\s*n't|\s+not|\s+never)"
DENIED_CLAUSE = re.compile(
    rf"{_VERB}{_NOT}?\s+(?:wrong|incorrect|false|impossible)\b"
    rf"|{_VERB}{_NOT}\s+(?:be\s+)?(?:(?:the|our|my|an?)\s+)?(?:(?:final|correct|right)\s+)?(?:answer|solution|right|correct|true|possible|valid)\b",
    re.IGNORECASE,
)
"""A sentence goes on to say that the number is wrong."""
BESIDES = re.compile(
    r"\b(?:because|since|as|so|for\s+which)\b.*|[,;(]?\s*(?:and\s+|but\s+)?(?:not|rather\s+than|instead\s+of)\s+[-$(]*(?:[0-9]|[A-J]\b)\S*",
    re.IGNORECASE | re.DOTALL,
)
"""Other contents of a sentence: reasons, and what the answer is not ("42, not 41")."""
DOUBTED_AFTER = re.compile(
    r"\b(?:not|[a-z]+n't|cannot|never|wrong|incorrect|false|if|unless|except|most|least|maximum|minimum|maybe|perhaps|possibly|or|but|half"
    r"|otherwise|instead|actually|wait|no|mistake\w*|doubt\w*|question\w*|twice|double|triple)\b",
    re.IGNORECASE,
)
"""Doubt in the rest of a sentence, after its answer, which may take the answer back."""
REASON = re.compile(r"\b(?:because|since|as|so|for\s+which)\b", re.IGNORECASE)
"""Beginning of a reason."""
CONCLUSION = re.compile(
    r"(?:^|[,;:.—–-]\s*|\b(?:and|which|,)\s+)(?:so|therefore|thus|hence|then|consequently|in\s+total|altogether|overall|finally|for\s+a\s+total\s+of|bringing|(?:which\s+)?means?(?:\s+that)?"
    r"|meaning(?:\s+that)?|giving|leaving|making|which\s+(?:gives|makes|equals))\b(?!\s+(?:far|many|much|that))|[→⇒]|=>|:\s|\b(?:so|then|for\s+a\s+total\s+of)\b(?!\s+(?:far|many|much|long|few|as))"
    r"|因此|所以|故|だから|따라서|поэтому|значит|donc|también|por\s+lo\s+tanto|also\s+|dunque|quindi|portanto",
    re.IGNORECASE,
)
"""Beginning of a clause that concludes."""
_DETERMINERS = (
    r"(?:\s+(?:the|a|an|his|her|its|their|our|my|all|each|every|these|those|only|just|first|last|next|other|exactly|both))*"
)
SIDE_CLAUSE = re.compile(
    r"\s*(?:(?:but|and|now|however),?\s+)?(?:if|when|since|because|as|after|before|while|given|with|in|for|by|at|of|from|to\s+[a-z]+|[a-z]+ing)\b[^,]{0,200},(?![0-9])",
    re.IGNORECASE,
)
"""A side clause at the beginning of a sentence: "In 3 days, ..."."""
ADJUNCT = re.compile(
    r"(?:(?<!\w)(?:in|on|within|after|before|during|per|out\s+of|each\s+of|among|between|than|until|through|across|using|given|if|when|while|where"
    r"|every|for|at|by|with|from|into|over|under|every|(?:[\d%]|half|some|one|each|all|most|none|percent|out|fraction|rest|remainder|any)\s+of)"
    rf"{_DETERMINERS}|\b(?:which|that(?!\s+(?:is|was|makes|leaves|gives|means|equals))|who|whom|whose|because|since|as|if|when|while|where|to\s+[a-z]{{2,}}|including|compared|instead)\b[^.;]{{0,80}}"
    r"|\([^)]*|^\s*(?:of|to)\b(?:\s+the)?|(?:[\d%]|percent)\s+of)\s*[$(\\]*\s*\Z",
    re.IGNORECASE,
)
"""Words by which a value is a circumstance of another one: "42 apples in 7 boxes", "5 hours to fill 3 tanks"."""
UNSAID = frozenset(
    str.split(
        "and or but then than after before between above below over under so up out may might about around almost nearly"
        " to save saves either both y"
    )
)
"""Words that change a value as its part, but not as the word before it, where they have rules of their own."""
SUPERSEDED = re.compile(
    r"\b(?:wait|hmm+|oops|sorry|no|nope|actually|correct(?:ion|ed|ing)?|scratch\s+that|mistake|error|wrong|incorrect|instead|rather|fix(?:ed|ing)?"
    r"|re-?(?:check|comput|calculat|consider|examin)\w*|i\s+meant|let\s+me)\b|不对|不對|错|錯|更正|修正|訂正|정정|아니",
    re.IGNORECASE,
)
"""Words between two answers by which the second one replaces the first."""
REMARK = re.compile(
    r"\s*\(?\s*(?:check(?:ed|ing)?|verif\w+|note|proof|we\s+used|explanation|reason|验证|检验|検算|확인|проверка)\b",
    re.IGNORECASE,
)
"""Beginning of a sentence that does not answer, but tells why."""

CHOSEN = re.compile(
    r"\W{0,4}(?:(?i:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer|statement))\s+\W{0,4})?([A-HJ])(?!\w)(?=\W*(?:\Z|\n|[.!](?:\s|\Z)|is\s+(?:correct|right|true|the\s)))"
)
"""Letter of a choice that its sentence has alone."""
VERB = re.compile(r"(?<!\w)(?:is|are|was|were|be|equals|=|est|es|ist|è|é)(?!\w)\s*:?", re.IGNORECASE)
YES_OR_NO = re.compile(r"\b(yes|no|true|false)\b(?=\s*(?:[,;:.!—–]|-\s|(?:because|since|as)\b|\Z))", re.IGNORECASE)
BEFORE_WORDS = re.compile(r"(?<!\w)(?:at|on|in|to|by)(?!\w)", re.IGNORECASE)
"""Words before an answer of words, if its sentence has no verb of its own for it."""
DECIMAL_COMMA = re.compile(
    r"(?<!\w)(?:el|la|los|las|le|les|une|est|donc|soit|réponse|respuesta|entonces|por|der|die|das|ist|und|also|antwort|beträgt|il|è|della|quindi"
    r"|risposta|são|é|portanto|resposta|ответ|это|так|как|равно|равен|поэтому|значит|jest|więc|wynosi|odpowiedź|là|đáp|adalah|jadi|jawaban|het|dus"
    r"|antwoord|är|och|svaret|og|svar|cevap|ve|olur)(?!\w)",
    re.IGNORECASE,
)
"""Words of languages that write 3.5 as ``3,5``."""
ANSWER_WITH_COMMA = re.compile(
    r"(?<!\w)(?:réponse|respuesta|antwort|lösung|risposta|resposta|ответ"
    r"|odpowiedź|đáp án|jawaban(?:nya)?|antwoord|svaret|cevap)(?!\w)",
    re.IGNORECASE,
)
"""Words for an answer in these languages: one is enough."""
COPULA = re.compile(r"[\s$*]*(?:です|だ|である|でした|になります|となります|입니다|이다|이에요|예요|है|है।)[\s.。।]*")
"""Verb at the end of a sentence, behind its value."""
