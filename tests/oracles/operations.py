"""What a template can do with text: one expression a line, each to be followed exactly for every row, or refused."""

OPERATIONS = r"""
{'yes': 'Y', 'no': 'N'}.get(text, '?')
{'yes': 'Y', 'no': 'N'}[text]
'in' if text in ['yes', 'no'] else 'out'
'in' if text in {'yes': 1} else 'out'
'in' if text is in ['yes'] else 'out'
messages | map(attribute='content') | unique | list | length
[text, 'yes'] | unique | join(',')
{text: 1, 'yes': 2} | length
{text: 1} | tojson
text | int + 1
text | float
text.count('e')
text.find('e')
text.rfind('e')
text.index('e')
text.isdigit()
text.isupper()
text.isspace()
text.startswith(('y', 'n'))
text.endswith('o')
text[0]
text[0] == 'y'
text[-1:]
text[::-1]
text[::2]
text | first
text | last
text | reverse
text | map('upper') | length
text | map('upper') | tojson
[text] | select | last
[text] | map('trim') | sort | join
[text, 'm'] | map('upper') | unique | list | length
text.split() | length
text.split(',') | length
text.split('e')[0]
text.rsplit('e', 1)[-1]
text | list | length
'x' * (text | length)
range(text | length) | join
text | wordcount
text | truncate(3)
text | indent
text | batch(2) | list | length
text | slice(2) | list | length
[text, 'm'] | min
[text, 'm'] | sort | join('-')
text | sort | first
text is upper
text is string
text is number
text is iterable
text is mapping
text | default('d', true)
text or 'empty'
not text
'T' if text else 'F'
text == 'yes'
'yes' == text
text > 'm'
'm' < text
text | replace('e', 'E')
text.replace('', '-')
text | upper | lower
text | capitalize
text | title
text.title()
text.swapcase()
text.casefold()
text | trim
text.strip('yn')
text.lstrip('y')
text.partition('e')[1]
text.rpartition('e')[2]
text.splitlines() | length
text.splitlines()[0]
text.removeprefix('y')
text.removesuffix('o')
text.zfill(6)
text.encode('utf-8')
text.join(['a', 'b'])
'-'.join(text)
'%s' % text
'%d' % (text | length)
text ~ 1
text + 'x'
text * 2
2 * text
text | map('upper') | join
text | select('equalto', 'e') | list | length
text | reject('in', 'aeiou') | join
text | groupby(0) | list | length
text | tojson
text | tojson | length
[text] | tojson(indent=2)
{'a': text} | tojson(sort_keys=true)
message | tojson
message | length
message | dictsort | length
message.get(text, 'none')
message[text] is defined
message | attr(text) is defined
loop.changed(text)
loop.cycle('a', 'b') ~ text
text is eq 'yes'
text is gt 'm'
text is divisibleby 2
text | random
text | urlize
text | striptags
text | escape
text | safe
text | wordwrap(3)
text | center(20)
text | xmlattr
text | format
text.format()
text | abs
text | round
messages | selectattr('content', 'equalto', 'yes') | list | length
messages | selectattr('content', 'in', ['yes']) | list | length
messages | map(attribute='content') | map('length') | join(',')
messages | map(attribute='content') | select | list | length
messages | groupby('content') | list | length
messages | sort(attribute='content') | map(attribute='content') | join(',')
messages | sum(attribute='content', start='')
(messages | map(attribute='content') | list).index(text)
(messages | map(attribute='content') | list).count('yes')
'yes' in messages | map(attribute='content') | list
messages | join(',', attribute='content')
namespace(a=text).a
dict(a=text).a
dict.fromkeys([text, 'yes']) | length
[1, 2, 3][text | length - 2]
(text | length) % 3
(text | length) is odd
'yesno'.find(text)
'yesno'.count(text)
'yesno'.startswith(text)
'yesno'.endswith(text)
'yesno'.strip(text)
'yesno'.replace(text, 'X')
'yesno'.replace('e', text)
'yesno'.split(text) | length
'yesno'.partition(text)[1]
'yesno'.rpartition(text)[0]
text < messages[0].content
text in messages[0].content
messages[0].content.startswith(text)
messages[0].content.replace(text, '<>')
strftime_now(text)
cycler('a', 'b').next() ~ text
(text | lower) in ['yes', 'no']
(text | trim) == 'yes'
text | trim | length
text[1:] in ['es', 'o']
text.lower().startswith('y')
text | replace(' ', '') | length
""".strip().splitlines()
