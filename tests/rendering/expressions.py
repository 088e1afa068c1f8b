"""Template expressions: a list of what might lose track of a row's text, and a generator of compositions.

In each of them ``text`` is the content of a message, ``args`` the arguments of its tool call (or others of the same
shape), ``messages`` and ``tools`` are what the template is given, ``ns`` is a namespace, ``mac`` a macro.
"""

from __future__ import annotations

import random

HOSTILE = r"""
args.l | string
args.l | trim
args.l | lower
args.l | upper
args.l | capitalize
args.l | title
args.l | replace('a', 'b')
args.l | e
args.l | urlencode
args.l | pprint
args.l | join
args.l | join(', ')
args.l | list
args.l | first
args.l | last
args.l | sort
args.l | unique | list
args.l | reverse | list
args.l | batch(1) | list
args.l | slice(2) | list
args.l | map('string') | list
args.l | map('upper') | join
args.l | map('trim') | list | string
args.l | select('string') | list
args.l | reject('none') | list | tojson
args.l | min
args.l | max
args.l | sum(start='')
args.l | random
args.l | length
args.l | tojson
args.l | tojson(indent=2)
args.l | tojson | indent(4)
args.l | format
args.l | xmlattr
args.l | wordcount
args.l | center(40)
args.l | truncate(5)
args.l ~ ''
'' ~ args.l
args.l + args.l
args.l * 2
args.l[0]
args.l[::-1]
args.l[:1] | string
args.l == ['x']
'x' in args.l
args
args | string
args | upper
args | items | list
args | dictsort
args | dictsort | map('first') | join
args | list
args | tojson(sort_keys=true)
args | tojson(separators=(',', ':'))
args | xmlattr
args | length
args.items()
args.items() | list
args.keys()
args.values()
args.values() | list | string
args.keys() | join(', ')
args.copy()
args.get('l')
args.get('nothing', text)
args.d
args.d.k
args.d | string | trim
args.n
args.n | string
args.n ~ args.f
args.f
args.b
args.z
args.n + 1
args.e
args.e | string
[args.n, args.b, args.z]
text | urlencode
text | escape
text | forceescape
text | e | string
text | safe
(text | safe) + '<'
'<' | safe + text
text | xmlattr
text | striptags
text | urlize
text | wordwrap(3)
text | center(30)
text | truncate(4)
text | indent(2)
text | indent(2, true)
text | indent('> ', true, true)
text | title
text | pprint
text | filesizeformat
text | format
'%s' | format(text)
'%s' % text
'%(a)s' % {'a': text}
'%s' % [text]
'{}'.format(text)
'{}'.format([text])
'{a}'.format(a=text)
'{0[0]}'.format([text])
'{}'.format_map({'a': text})
'{a}'.format_map({'a': text})
text.format()
text.encode().decode()
text.encode()
text.encode()[0]
'%c' % text.encode()[0]
text.translate({101: 'X'})
'e'.translate('e'.maketrans('e', text[:1]))
'aXb'.translate('X'.maketrans({'X': text}))
text.expandtabs(2)
text.zfill(30)
text.ljust(30)
text.rjust(30, '.')
text.center(30)
text.casefold()
text.swapcase()
text.join(['a', 'b'])
', '.join([text, text])
'aXb'.replace('X', text)
'aXb' | replace('X', text)
text.replace('<', text)
text.partition('|')
text.rpartition('|') | string
text.split('|')
text.split('|') | string
text.splitlines()
text[:4] ~ text[4:]
text | list
text | list | join
text | reverse
text | map('upper') | join
text | batch(2) | map('join') | join
[text] | map('replace', 'e', 'E') | list
[text] | map('string') | join
[text, 'x'] | string
{'k': text}
{text: 'k'}
{text: text} | tojson
(text, 1)
(text,)
[text, [text, {'k': [text]}]]
[text] | groupby(0) | list
messages
messages | string
messages | tojson
messages | map(attribute='content') | list
messages | map(attribute='content') | map('string') | join
messages | groupby('role') | list
messages | groupby('content')
messages | selectattr('content') | list
messages | sum(attribute='content', start='')
messages | join(',', attribute='content')
message
message | string
message.items()
message.values() | list
tools
tools | string
tools | tojson
tools[0].function.parameters.properties | list
tools[0].function.parameters.properties.keys() | join
namespace(a=text)
namespace(a=text).a
namespace({'a': text}).a
dict(a=text)
dict([[text, 1]])
dict(a=text) | string
cycler(text, 'b')
cycler(text, 'b').next()
cycler(text, 'b').current
joiner(text)
loop
loop.cycle(text, 'b')
loop.previtem
loop.changed(text)
mac(text)
mac([text])
mac
lipsum(1)
range(text | length) | list
strftime_now(text)
strftime_now('%Y') ~ text
text is string
text is sameas text
text is filter
text | attr('upper')
'upper' | attr(text)
text | default(text, true)
undefined_variable
undefined_variable | default([text])
(text ~ '') is upper
(text, 1) is lower
namespace(a=text) | wordcount
namespace(a=text) is upper
[namespace(a=text)] | wordcount
args.values() | wordcount
args.items() is upper
[text] | map('upper') | wordcount
loop is lower
[text] is upper
args is lower
{text: 1} is upper
text or [text]
[text] if text else [text]
text | int
text | float
text | abs
text | round
-args.n
text.__class__
text | attr('__class__')
""".strip().splitlines()

ATOMS = """text|text|text|args|args.a
|args.l|args.d|args.n|args.b|args.z|message|messages|msgs[0].content|[text]|[text, 'x']
|{'k': text}|{text: 1}|(text, 1)|'a%sb'|'a{}b'|'aXb'|'lit'|5|none|true|ns|namespace(a=text)|dict(a=text)|joiner(text)
|cycler(text, 'b')|cycler(text, 'b').next()|loop.index|loop|range(3)|tools|[args]|args.keys()|mac(text)|nothing
|loop.cycle(text, 'b')|lipsum|strftime_now(text)|message.role|[text, args.l]""".replace("\n", "").split("|")
FILTERS = """abs;attr('x');batch(2);capitalize;center(20);default('d');dictsort;e;escape;filesizeformat;first;float
;forceescape;format('a');format;groupby(0);indent;indent(2, true);int;items;join;join('-');last;length;list;lower;max
;map('upper');map('string');map(attribute='content');min;pprint;random;reject('none');rejectattr('x');replace('e', 'E')
;replace('X', text);reverse;round;safe;select;selectattr('x');slice(2);sort;string;striptags;sum(start='');title;tojson
;tojson(indent=2);trim;truncate(5);unique;upper;urlencode;urlize;wordcount;wordwrap(5);xmlattr""".replace("\n", "")
METHODS = """upper()
;lower();strip();title();split();split('e');split('e')[0];rsplit('e', 1)[-1];encode().decode();format()
;format(text);format_map({'a': text});join(['a', text]);join(text);translate({101: 'X'});expandtabs(3);zfill(20)
;ljust(9);rjust(20);center(20);casefold();swapcase();capitalize();partition('e');partition('e')[2];rpartition('e')[0]
;splitlines();replace('e', 'E');replace('X', text);removeprefix('<');removesuffix('>');items();values();keys();get('a')
;copy();encode();count('e');find('e');index('e');maketrans('a', 'b');isupper();startswith('<');endswith(('>', 'x'));a
;content;n;__class__
""".replace("\n", "")
OPERATORS = """X ~ X;X + X;X % X;X * X;X == X;X in X;X < X;X if X else 'n';X or X;X and X;[X, X];{'k': X, 'j': X};(X)[X]
;(X) | replace('e', X);(X) | join(X);(X).join(X);(X) | default(X);'{} {}'.format(X, X);'%s %s' % (X, X);(X).get(X)
;'%s %s' | format(X, X);cycler(X, X).next();(X) | attr(X);namespace(x=X, y=X).x;mac(X) ~ mac(X);(X) | trim(X)
;(X) | map(X) | list;(X)[0];(X)[-1];(X)[1:];(X)[::-1];(X)['a'];not X;-X""".replace("\n", "").split(";")
TESTS = ("string", "mapping", "number", "iterable", "sequence", "defined", "none", "upper", "lower", "odd", "escaped")
PLACES = """[{{ X }}];[{{ X }}];[{{ X }}];{% set v = X %}[{{ v }}];{% set v %}{{ X }}{% endset %}[{{ v }}]
;{% for x in X %}<{{ x }}>{% endfor %};{% filter upper %}{{ X }}{% endfilter %};{% filter e %}{{ X }}{% endfilter %}
;{% filter replace('a', text) %}{{ X }}{% endfilter %};{% call mac(X) %}{{ X }}{% endcall %}
;{% set ns.v = X %}[{{ ns.v }}]
;{% if X %}yes{% endif %};{% autoescape true %}{{ X }}{% endautoescape %}
;{% set v | upper %}{{ X }}{% endset %}{{ v }};{% filter format(text) %}%s {{ X }}{% endfilter %}
;{% call(x) mac(X) %}{{ x }}{% endcall %};{% for k, v in X %}{{ k }}={{ v }}{% endfor %}
;{% with x = X %}{{ x ~ x }}{% endwith %}""".replace("\n", "").split(";")


def composed(rng: random.Random, depth: int) -> str:
    """A random expression of at most so many operations, one around the other."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(ATOMS)
    match rng.choices(("filter", "method", "operator", "test"), (40, 30, 25, 5))[0]:
        case "filter":
            return f"({composed(rng, depth - 1)}) | {rng.choice(FILTERS.split(';'))}"
        case "method":
            return f"({composed(rng, depth - 1)}).{rng.choice(METHODS.split(';'))}"
        case "test":
            return f"({composed(rng, depth - 1)}) is {rng.choice(TESTS)}"
        case _:
            head, *rest = rng.choice(OPERATORS).split("X")
            return head + "".join(f"({composed(rng, depth - 1)}){after}" for after in rest)


def template_of(expression: str, place: str = "[{{ X }}]") -> str:
    """A chat template with an expression beside the content of every message."""
    return (
        "{% macro mac(x) %}{{ x }}{% if caller %}{{ caller() }}{% endif %}{% endmacro %}{% set ns = namespace(v='') %}"
        "{% set msgs = messages %}{% for message in messages %}{% set text = message.content %}"
        "{% set args = message.tool_calls[0].function.arguments if message.tool_calls else "
        "{'a': 'q', 'l': ['q'], 'd': {'k': 'q'}, 'n': 1, 'f': 1.5, 'b': true, 'z': none, 'e': []} %}"
        "<|im_start|>{{ message.role }}\n{{ text }}{{ message.tool_calls | tojson if message.tool_calls }}"
        "\n" + place.replace("X", f"({expression})") + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
