# ruff: noqa: E501  a template a line
"""Templates that ask for more than any machine has, one for each way that we know of."""

from __future__ import annotations

MESSAGES = "{% for message in messages %}{{ message.content }}{% endfor %}"
DOUBLE = (
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(64) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"
)


def _doubling(expression: str) -> str:
    return DOUBLE.replace("EXPRESSION", expression)


BOMBS: dict[str, str] = {
    "doubling by tilde": _doubling("ns.x ~ ns.x"),
    "doubling by plus": _doubling("ns.x + ns.x"),
    "doubling by join": _doubling("[ns.x, ns.x] | join"),
    "doubling by join of a method": _doubling("''.join([ns.x, ns.x])"),
    "doubling by replace": _doubling("ns.x | replace('a', 'aaaa')"),
    "doubling by replace of a method": _doubling("ns.x.replace('a', 'aaaaaaaa')"),
    "doubling by replace of nothing": _doubling("ns.x.replace('', 'aaaaaaaa')"),
    "doubling by times": _doubling("ns.x * 4"),
    "doubling by format": _doubling("'%s%s' | format(ns.x, ns.x)"),
    "doubling by percent": _doubling("'%s%s%s' % (ns.x, ns.x, ns.x)"),
    "doubling by a format method": _doubling("'{0}{0}'.format(ns.x)"),
    "doubling by a set block": "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}{{ ns.x }}",
    "doubling by a macro": "{% macro m(x, n) %}{% if n %}{{ m(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}"
    "{{ m('ab', 60) }}",
    "doubling by tojson": _doubling("ns.x | tojson | tojson | tojson"),
    "doubling by escape": _doubling("(ns.x ~ ns.x ~ '&<') | escape | forceescape"),
    "doubling by urlencode": _doubling("(ns.x ~ ns.x ~ '%') | urlencode"),
    "doubling a list": "{% set ns = namespace(l=[1, 2]) %}{% for i in range(64) %}{% set ns.l = ns.l + ns.l %}{% endfor %}"
    "{{ ns.l | length }}",
    "doubling a tuple": "{% set ns = namespace(l=(1, 2)) %}{% for i in range(64) %}{% set ns.l = ns.l * 3 %}{% endfor %}",
    "squaring a number": "{% set ns = namespace(n=7) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    "{{ ns.n % 10 }}",
    "nested lists printed": "{% set ns = namespace(l=['ab']) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l }}",
    "nested lists as json": "{% set ns = namespace(l=['ab']) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l | tojson }}",
    "nested lists compared": "{% set ns = namespace(l=['ab'], m=['ab']) %}{% for i in range(64) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
    "nested dicts as text": "{% set ns = namespace(l={}) %}{% for i in range(64) %}"
    "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | string | length }}",
    "nested dicts joined": "{% set ns = namespace(l={}) %}{% for i in range(64) %}"
    "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ 'x' ~ ns.l }}",
    "nested dicts in a format": "{% set ns = namespace(l={}) %}{% for i in range(64) %}"
    "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ '%s' | format(ns.l) }}",
    "nested lists sorted": "{% set ns = namespace(l=['ab'], m=['ab']) %}{% for i in range(64) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ [ns.l, ns.m] | sort | length }}",
    "nested lists looked for": "{% set ns = namespace(l=['ab'], m=['ab']) %}{% for i in range(64) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ [ns.l].index(ns.m) }}",
    "deep tuples hashed": "{% set ns = namespace(t=()) %}{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}"
    "{{ {1: 2}[ns.t] }}",
    "deep tuples by items": "{% set ns = namespace(t=()) %}{% for i in range(99999) %}"
    "{% for p in {'a': ns.t}.items() %}{% set ns.t = p %}{% endfor %}{% endfor %}{{ ns.t in {} }}",
    "width of percent": "{{ '%1000000000d' % 1 }}",
    "precision of percent": "{{ '%.1000000000f' % 1.5 }}",
    "width of percent given": "{{ '%*d' % (1000000000, 1) }}",
    "width of a format filter": "{{ '%1000000000s' | format('a') }}",
    "width of a format method": "{{ '{:>1000000000}'.format('a') }}",
    "width of a format method given": "{{ '{:{}}'.format('a', 1000000000) }}",
    "width of a format method in words": "{{ '{:{w}}'.format('a', w='>1000000000') }}",
    "width of format_map": "{{ '{a:>1000000000}'.format_map({'a': 'b'}) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "center of a method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "rjust": "{{ 'a'.rjust(1000000000, 'x') }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t\t\t'.expandtabs(1000000000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') | length }}",
    "bytes padded": "{{ 'a'.encode().ljust(1000000000) | length }}",
    "indent": "{{ ('a\n' * 1000) | indent(1000000000) }}",
    "indent by a text": "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "wordwrap": "{{ ('ab ' * 100000) | wordwrap(1, True, 'x' * 100000) }}",
    "wordwrap of much": "{{ ('ab ' * 5000000) | wordwrap(1) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "lipsum of long paragraphs": "{{ lipsum(n=1, min=100000000, max=1000000000) }}",
    "lipsum behind a flag": "{{ lipsum(1, false, 99999999, 999999999) | length }}",
    "json between few": "{{ range(9999) | list | tojson(separators=('x' * 9999999, ':')) | length }}",
    "json behind keys": "{{ {'a': 1, 'b': {'c': 2}} | tojson(separators=[',', 'x' * 9999999]) | length }}",
    "json indented": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "json between": "{{ range(99999) | list | tojson(separators=('x' * 100000, ':')) }}",
    "times of a constant": "{{ 'a' * 10**9 }}",
    "times of a list": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "power of powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "round": "{{ 1 | round(1000000000, 'ceil') }}",
    "sum of lists": "{{ (range(99999) | map('list') | list) if false else ([[0] * 999] * 99999) | sum(start=[]) | length }}",
    "sort of long texts": "{% set a = 'a' * 9000000 %}{% set b = a ~ '' %}{{ ([a, b] * 50000) | sort | length }}",
    "unique of long texts": "{% set a = 'a' * 9000000 %}{% set b = a ~ 'b' %}{{ ([a, b] * 50000) | unique | list | length }}",
    "join of a long list": "{{ range(99999) | join('x' * 100000) }}",
    "range of ranges": "{{ range(99999) | map('string') | map('center', 100000) | list | length }}",
    "range joined": "{{ range(99999) | map('string') | map('center', 10000) | join }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "loops that print nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a condition": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that call themselves": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "loops over ranges that call themselves": "{% for i in range(3) recursive %}{% if loop.depth < 40 %}{{ loop(range(3)) }}"
    "{% endif %}{% endfor %}",
    "macros that call themselves": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macros that call themselves twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "blocks that call themselves": "{% block b %}{{ self.b() }}{% endblock %}",
    "a namespace of much": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['a' * 9000000] %}"
    "{% endfor %}",
    "slices kept": "{% set ns = namespace(l=[]) %}{% set a = 'a' * 9000000 %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [a[:-1]] %}{% endfor %}",
    "printed again and again": "{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "printed in a macro": "{% macro m(a) %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endmacro %}"
    "{{ m('a' * 9000000) | length }}",
    "much read again and again": "{% set a = 'a' * 15000000 %}{% for i in range(99999) %}{% if 'b' in a %}{% endif %}"
    "{% endfor %}",
    "much split": "{{ ('a ' * 7000000).split() | length }}",
    "much split at letters": "{{ ('ab' * 7000000).split('b') | length }}",
    "much split in lines": "{{ ('a\n' * 7000000).splitlines() | length }}",
    "much listed": "{{ ('ä€' * 7000000) | list | length }}",
    "much changed in case": "{% set a = 'a' * 15000000 %}{% for i in range(99999) %}{% set b = a | upper %}{% endfor %}",
    "striptags": "{{ ('<!---->' * 1000000) | striptags }}",
    "urlize": "{{ ('www.a.b ' * 1000000) | urlize }}",
    "pprint": "{{ range(99999) | list | pprint | length }}{{ ([range(99999) | list] * 20) | pprint | length }}",
    "an odd encoding": "{{ ('ä€' * 100000).encode('punycode') | length }}",
    "a time of much": "{{ strftime_now('%Y' * 5000000) }}",
    "a filter block": "{% filter center(1000000000) %}a{% endfilter %}",
    "a number of many digits": "{{ ('9' * 9000000) | int }}",
    "cut in many steps": "{% for i in range(99999) %}{% set a = (range(99999) | list)[::-1] %}{% endfor %}",
    "escapes": "{% autoescape true %}{% set ns = namespace(x='&') %}{% for i in range(64) %}{% set ns.x = ns.x ~ '&' ~ ns.x %}"
    "{% endfor %}{{ ns.x }}{% endautoescape %}",
}  # fmt: skip

# What ends by itself, as too deep a recursion does, is the row's refusal.
REFUSED_ROW = {
    "loops that call themselves",
    "macros that call themselves",
    "blocks that call themselves",
}

# What looks like one and is none.
HARMLESS = [
    "ok{{ words | center(200) }}{{ '%5d %-5s' | format(3, words) }}{{ '%05.2f' % 1.5 }}{{ '{:>20}'.format(words) }}",
    "ok{{ words | indent(8) }}{{ words | wordwrap(9) }}{{ words.split() | join(', ') }}{{ words.ljust(99) }}",
    "ok{{ [[1, 2], [3]] | sum(start=[]) }}{{ [1, 2] | sum }}{{ [{'a': 1}] | sum(attribute='a') }}{{ 2 ** 100 }}",
    "ok{{ range(99) | map('string') | join('-') }}{{ {'a': [1, {'b': (1, (2, 3))}]} | tojson(indent=4) }}",
    "ok{% set ns = namespace(x='') %}{% for i in range(999) %}{% set ns.x = ns.x ~ words %}{% endfor %}{{ ns.x }}",
    "ok{{ 'at 123456789012 {} %%' % () }}{{ '99999999999 {0} {0}'.format(words) }}{{ 7.5 | round(1) }}",
    "ok{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 'a,b'.split(',') }}{{ words[::-1] }}",
    "ok{{ (1, 2) == (1, 2) }}{{ [words] == [words] }}{{ words in [words] }}{{ {'a': 1} | dictsort }}{{ strftime_now('%Y') }}",
    "ok{{ 'é'.encode('utf-8') | length }}{{ words | title }}{{ words | pprint }}{{ '5' | int + 3 }}{{ lipsum(n=1) | length }}",
    "ok{% macro m(n) %}{% if n %}{{ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(30) }}{% filter upper %}a{% endfilter %}",
]

PARSE_BOMBS: dict[str, str] = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "a sum of many": "{{ " + " + ".join(["1"] * 20000) + " }}",
    "many not": "{{ " + "not " * 20000 + "x }}",
    "many minus": "{{ " + "-" * 20000 + "1 }}",
    "many filters": "{{ x" + " | upper" * 20000 + " }}",
    "many attributes": "{{ x" + ".a" * 20000 + " }}",
    "many subscripts": "{{ x" + "[0]" * 20000 + " }}",
    "many calls": "{{ x" + "()" * 20000 + " }}",
    "many ifs": "{% if x %}" * 2000 + "{% endif %}" * 2000,
    "many loops": "{% for x in y %}" * 60 + "{% endfor %}" * 60,
    "many elses": "{{ " + "1 if x else " * 10000 + "2 }}",
    "many powers": "{{ " + " ** ".join(["2"] * 10000) + " }}",
    "many comparisons": "{{ " + " and ".join(["a < b"] * 10000) + " }}",
    "a number of many digits": "{{ " + "9" * 100000 + " }}",
    "many outputs": "{{ a }}" * 1_000_000,
    "many small outputs": "{{a}}" * 40_000,
    "a long text": "a" * 50_000_000,
    "many numbers": "{{ [" + "1," * 40_000 + "] }}",
    "many comments that do not end": "{#" * 90_000,
    "many blocks": "".join(f"{{% block b{i} %}}{{% endblock %}}" for i in range(9000)),
    "macros in macros": "{% macro m() %}" * 2000 + "{% endmacro %}" * 2000,
    "many strings": "{{ " + " ".join(["'a'"] * 50000) + " }}",
    "a dict in a dict": "{{ " + "{'a': " * 3000 + "1" + "}" * 3000 + " }}",
    "many tests": "{{ x" + " is defined" * 9000 + " }}",
    "nothing closes": "{{ " + "(" * 100_000,
}
