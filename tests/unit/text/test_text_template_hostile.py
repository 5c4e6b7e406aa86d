"""Hostile chat templates: each ends soon, in little memory, with one InputError.

Two machines of the language make this hard: one operation may be huge (a million characters searched for half a
million, backwards), and small ones may be kept. Each template here was run alone in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MAX_SECONDS = 3.0  # of a core that others use, too; without limits some would take for ever
MAX_MEGABYTES = 64

NEST = (
    "{% set n=namespace(x=['a'], y=['a']) %}{% for a in range(40) %}{% set n.x=[n.x,n.x] %}{% set n.y=[n.y,n.y] %}"
    "{% endfor %}"
)
TUPLE = "{% set n=namespace(x=('a',)) %}{% for a in range(14) %}{% set n.x=(n.x,n.x) %}{% endfor %}"
KEEP = (
    "{%% set n=namespace(l=[]) %%}{%% set s='a'*500000 %%}{%% for i in range(9999) %%}{%% set n.l = [n.l, %s] %%}"
    "{%% endfor %%}"
)
HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless filter": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "endless select": "{% for a in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    "endless sort": "{% for i in range(9999) %}{{ range(99999)|groupby('real')|list|length }}{% endfor %}",
    "endless search": "{% set s='a'*16000000 %}{% for i in range(99999) %}{{ 'aab' in s }}{% endfor %}",
    "endless find": "{% set s='a'*16000000 %}{% for i in range(99999) %}{{ s.find('aab') }}{% endfor %}",
    "endless body": "{% for i in range(99999) %}{% for j in range(9999) %}" + "{% set a = 1 %}" * 8000
                    + "{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(10**9) %}{% endfor %}",
    "1 GiB at once": "{{ 'a' * 2**30 }}",
    "1 GiB in parts": "{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
    "1 GiB of template text": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "1 GiB into a variable": "{% set y %}{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "1 GiB by doubling": "{% set n=namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "1 GiB by joining": "{% set n=namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "1 GiB of copies": "{% set n=namespace(l=[]) %}{% set s='a'*9000000 %}{% for i in range(9999) %}"
                       "{% set n.l = n.l + [s + 'x'] %}{% endfor %}",
    "nested lists": "{% set n=namespace(x=['a']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
                    "{{ n.x }}",
    "nested dicts": "{% set n=namespace(x=1) %}{% for a in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}"
                    "{{ n.x }}",
    "shared strings": "{% set s = 'a'*16000000 %}{% set l = [s]*99999 %}{{ l|join }}",
    "shared strings in JSON": "{% set s = 'a'*16000000 %}{% set l = [s]*9999 %}{{ l|tojson }}",
    "shared strings printed": "{% set s = 'a'*16000000 %}{% set l = [s]*9999 %}{{ l }}",
    "huge number": "{{ 10**1000000000 }}",
    "huge product": "{% set n=namespace(x=3) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "wide str.format": "{{ '{:1000000000}'.format(1) }}",
    "wide format at run time": "{{ '{:{}}'.format(1, 1000000000) }}",
    "wide format filter": "{{ '%*d'|format(1000000000, 1) }}",
    "padding": "{{ 'a'.center(10**9) }}",
    "padding of marked text": "{{ ('a'|safe).ljust(10**9) }}",
    "replacing": "{{ ('a'*1000000).replace('a', 'b'*1000000) }}",
    "replacing nothing": "{{ ('a'*1000000)|replace('', 'b'*1000000) }}",
    "indenting": "{{ ('\\n'*1000000)|indent('x'*10000, true, true) }}",
    "indented JSON": "{{ ['x']|tojson(indent=10**9) }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "call blocks": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro g(n) %}{% if n %}{% call f() %}"
                   "{{ g(n-1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(50) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [[],[]] recursive %}{{ loop([[],[]]) }}{% endfor %}",
    "deep template": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "long template": "x" * 200_000,
    "dunder": "{{ ''.__class__.__mro__ }}",
    "dunder by item": "{{ messages['__class__'].x }}",
    "dunder of a function": "{{ cycler.__init__.__globals__.os }}",
    "dunder of the namespace": "{{ namespace.__init__.__globals__ }}",
    "file": "{% include '/etc/passwd' %}",
    "module": "{% import 'os' as os %}",
    "unknown name": "{{ a.b }}",
    "syntax": "{% if %}",
    "rfind": "{{ ('a'*1000000).rfind('ab' + 'a'*500000) }}",
    "rsplit": "{{ ('a'*1000000).rsplit('ab' + 'a'*500000)|length }}",
    "rpartition": "{{ ('a'*1000000).rpartition('ab' + 'a'*500000)|length }}",
    "rindex": "{{ ('a'*1000000).rindex('ab' + 'a'*500000) }}",
    "strip chars": "{{ ('a'*1000000).strip('b'*500000 + 'a')|length }}",
    "trim chars": "{{ ('a'*1000000)|trim('b'*500000 + 'a')|length }}",
    "startswith tuple": "{{ ('a'*1000000).startswith(('a'*999999 + 'b',)*99999) }}",
    "select in list": "{{ range(99999)|map('string')|select('in', ['x']*99999)|list|length }}",
    "reject in text": "{{ range(99999)|map('string')|reject('in', 'a'*1000000)|list|length }}",
    "namespace cycle": "{% set n=namespace() %}{% set n.x=[n]*9 %}{{ n }}",
    "star args": "{% for i in range(99999) %}{{ dict(*[[['a',1]]*99999]) }}{% endfor %}",
    "one astral text": "{{ '😀'*16000000 }}",
    "widen": "{% set s='a'*16000000 %}{{ s ~ '😀' }}",
    "output widened": "{% set s='a'*1000000 %}{% for i in range(15) %}{{ s }}{% endfor %}😀",
    "retain dict": "{% set n=namespace(l=[]) %}{% set d=dict(range(9)|map('string')|zip) %}",
    "filter block": "{% for i in range(99999) %}{% filter upper %}" + "x"*1000 + "{% endfilter %}{% endfor %}",
    "long expression": "{{ " + "+".join(["1"]*50000) + " }}",
    "many outputs": "{{ a }}" * 18000,
    "many outputs in loop": "{% for i in range(99999) %}" + "{{ i }}" * 17000 + "{% endfor %}",
    "many ifs": "{% if a %}" * 500 + "{% endif %}" * 500,
    "many fors": "{% for i in range(9) %}" * 18 + "{% endfor %}" * 18,
    "many macros": "{% macro f() %}a{% endmacro %}" * 4000,
    "long elif": "{% if a %}" + "{% elif a %}" * 10000 + "{% endif %}",
    "deep lists": "{{ " + "["*5000 + "]"*5000 + " }}",
    "deep not": "{{ " + "not "*20000 + "1 }}",
    "deep minus": "{{ " + "-"*60000 + "1 }}",
    "deep filters": "{{ 1" + "|int"*30000 + " }}",
    "deep getattr": "{{ messages" + ".a"*60000 + " }}",
    "deep calls": "{{ messages" + "()"*40000 + " }}",
    "deep tilde": "{{ 1" + "~1"*60000 + " }}",
    "deep pow": "{{ 2" + "**2"*30000 + " }}",
    "long number": "{{ " + "9"*100000 + " }}",
    "float power": "{{ 10.0**400 }}",
    "complex": "{{ (-1)**0.5 * 10**300 ** 2 }}",
    "big product": "{{ (10**1200)*(10**1200) }}",
    "big sum": "{% set n=namespace(x=2) %}{% for i in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "big print": "{{ 10**1200 * 10**1000 * 10**1000 * 10**1000 *10**1000}}",
    "int base": "{{ ('f'*6000000)|int(0, 16) > 1 }}",
    "int base loop": "{% for i in range(99999) %}{{ ('f'*100000)|int(0, 32) > 1 }}{% endfor %}",
    "mod huge": "{{ '%.1000000000f' % 1.0 }}",
    "mod star": "{{ '%*s' % (1000000000, 'a') }}",
    "mod dict": "{{ '%(a)1000000000s' % {'a': 1} }}",
    "many pads": "{{ ('%9999d'*10000) % ((1,)*10000) }}",
    "many str.format pads": "{{ ('{:9999}'*10000).format(*range(10000)) }}",
    "repeat pads": "{% for i in range(99999) %}{{ '%9999d' % 1 }}{% endfor %}",
    "format repeat index": "{{ ('{0}'*100000).format('a'*100000) }}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
    "format attr": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "translate": "{{ 'a'.translate({97: 'b'*1000000}) }}",
    "encode": "{{ 'a'.encode().__class__ }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "center kw": "{{ 'a'.center(width=10**9) }}",
    "center many": "{% for i in range(99999) %}{{ 'a'.center(9999) }}{% endfor %}",
    "wordwrap": "{{ ('a'*1000000)|wordwrap(1, wrapstring='b'*10000) }}",
    "filter center": "{{ 'a'|center(10**9) }}",
    "batch fill": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice fill": "{{ [1]|slice(10**9)|list }}",
    "pprint": "{{ messages|pprint }}",
    "random": "{{ messages|random }}",
    "xmlattr": "{{ {'a':1}|xmlattr }}",
    "urlize": "{{ ('http://a.b '*100000)|urlize }}",
    "striptags": "{{ ('<'*1000000)|striptags }}",
    "filesizeformat": "{{ 10**300|filesizeformat }}",
    "urlencode wide": "{% for i in range(99999) %}{{ ('日'*1000000)|urlencode|length }}{% endfor %}",
    "title loop": "{% set s='a b '*1000000 %}{% for i in range(99999) %}{{ s|title|length }}{% endfor %}",
    "wordcount loop": "{% set s='a b '*1000000 %}{% for i in range(99999) %}{{ s|wordcount }}{% endfor %}",
    "escape loop": "{% set s='<'*1000000 %}{% for i in range(99999) %}{{ s|e|length }}{% endfor %}",
    "truncate end": "{{ ('a'*100)|truncate(10, true, 'x'*1000000)|length }}{{ 10**10**8 }}",
    "count overlap": "{% set s='ab'*1000000 %}{% for i in range(99999) %}{{ s.count('b'*90 ~ 'a') }}{% endfor %}",
    "find medium": "{% set s='a'*1000000 %}{% for i in range(99999) %}{{ s.find('a'*98 ~ 'b') }}{% endfor %}",
    "find reversed": "{% set s='a'*2000000 %}{% for i in range(99999) %}{{ s.find('b' ~ 'a'*98) }}{% endfor %}",
    "in reversed": "{% set s='a'*2000000 %}{% for i in range(99999) %}{{ ('b' ~ 'a'*98) in s }}{% endfor %}",
    "isalpha loop": "{% set s='a'*2000000 %}{% for i in range(99999) %}{{ s.isalpha() }}{% endfor %}",
    "tojson wide": "{{ ('\\u0001'*4000000)|tojson }}",
    "tojson loop": "{% set s='a'*1000000 %}{% for i in range(99999) %}{{ s|tojson|length }}{% endfor %}",
    "tojson separators": "{{ range(99999)|list|tojson(separators=('x'*1000000, ':')) }}",
    "tojson indent text": "{{ [1]|tojson(indent='x'*1000000) }}",
    "repr escapes": "{{ ['\\u0001'*4000000] }}",
    "loop cycle": "{% for i in range(99999) %}{{ loop.cycle(*range(99999)) }}{% endfor %}",
    "in generator": "{% for i in range(99999) %}{{ 'x' in range(99999)|map('string') }}{% endfor %}",
    "in range": "{% for i in range(99999) %}{{ 'x' in range(99999) }}{% endfor %}",
    "in range many": "{% for i in range(99999) %}{{ 1.5 in range(99999) }}{% endfor %}",
    "min generator": "{% for i in range(99999) %}{{ range(99999)|min }}{% endfor %}",
    "sum generator": "{% for i in range(99999) %}{{ range(99999)|select|sum }}{% endfor %}",
    "join generator": "{% for i in range(99999) %}{{ range(99999)|select|join|length }}{% endfor %}",
    "dict generator": "{{ dict(range(99999)|map('list')) }}",
    "join str method gen": "{% for i in range(99999) %}{{ ''.join(range(99999)|map('string'))|length }}{% endfor %}",
    "list + gen": "{% for i in range(99999) %}{{ (range(99999)|list + range(99999)|list)|length }}{% endfor %}",
    "unpack": "{% for i in range(99999) %}{% set a, b = range(99999)|list %}{% endfor %}",
    "undefined": "{{ x.y }}",
    "undefined math": "{{ x + 1 }}",
    "division by zero": "{{ 1/0 }}",
    "attr filter dunder": "{{ (messages|attr('__class__')).x }}",
    "map attr dunder": "{{ [messages]|map(attribute='__class__')|map(attribute='__mro__')|first|length / 0 }}",
    "groupby dunder": "{{ [messages]|groupby('__class__.__mro__')|length / 0 }}",
    "globals of macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__.x }}",
    "self": "{{ self._TemplateReference__context.environment.x }}",
    "loop internals": "{% for i in [1] %}{{ loop._iterable.x }}{% endfor %}",
    "generator frame": "{{ (messages|select).gi_frame.f_globals }}",
    "mutate list": "{{ messages.append(1) }}",
    "mutate dict": "{{ messages[0].update(a=1) }}",
    "mutate clear": "{{ messages.clear() }}",
    "extends": "{% extends 'a' %}",
    "import": "{% from 'a' import b %}",
    "trans": "{% trans %}a{% endtrans %}",
    "do": "{% do 1 %}",
    "debug": "{% debug %}",
    "namespace underscore": "{% set n=namespace(_x=1) %}",
    "strftime wide": "{{ strftime_now('%1000000000Y') }}",
    "strftime long": "{{ strftime_now('%c'*100000) }}",
    "raise long": "{{ raise_exception('x'*10000000) }}",
    "raise nothing": "{{ raise_exception() }}",
    "surrogate": "{{ '\ud800' }}{{ raise_exception('\ud800') }}",
    "block loop": "{% block a %}{{ self.a() }}{% endblock %}",
    "caller": "{% macro f() %}{{ caller() }}{% endmacro %}{{ f() }}",
    "call recursion": "{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}",
    "autoescape": "{% autoescape true %}{{ '<'*16000000 }}{% endautoescape %}",
    "markup mod": "{{ ('%s'*100000)|safe % (('<'*1000,)*100000) }}",
    "markup join": "{{ (('<'*1000)|safe).join(['a']*99999)|length }}",
    "markup mul": "{{ (('<'*1000)|safe) * 10**7 }}",
    "markup format": "{{ ('{:1000000000}'|safe).format(1) }}",
    "markup replace": "{{ (('a'*1000000)|safe).replace('a', '<'*1000) }}",
    "markup striptags": "{{ (('<a'*1000000)|safe).striptags()|length }}",
    "markup unescape": "{{ ('&lt;'*1000000)|safe|string }}{{ (('&lt;')|safe).unescape() }}",
    "markup strip": "{{ (('a'*1000000)|safe).strip('b'*500000 + 'a')|length }}",
    "list count loop": "{% set l=range(99999)|list %}{% for i in range(99999) %}{{ l.count('x') }}{% endfor %}",
    "list index loop": "{% set l=range(99999)|list %}{% for i in range(99999) %}{{ l.index(99998) }}{% endfor %}",
    "split millions": "{{ ('é日 '*1000000).split(' ')|length }}",
    "split millions blank": "{{ ('é日 '*1000000).split()|length }}",
    "splitlines millions": "{{ ('日\\n'*1000000).splitlines()|length }}",
    "splitlines odd ends": "{{ ('日\u2028'*1000000).splitlines()|length }}",
    "rsplit millions": "{{ ('日 '*1000000).rsplit()|length }}",
    "rsplit loop": "{% set s = 'a '*99999 %}{% for i in range(99999) %}{{ s.split()|length }}{% endfor %}",
    "star text": "{% macro f() %}{% endmacro %}{{ f(*('日'*4000000)) }}",
    "star text cycler": "{{ cycler(*('日'*4000000)) }}",
    "list of text": "{{ ('日'*4000000)|list|length }}",
    "sort of text": "{{ ('日'*4000000)|sort|length }}",
    "join of text": "{{ ('日'*4000000)|join|length }}",
    "join method of text": "{{ ''.join('日'*4000000)|length }}",
    "sum of text": "{{ ('日'*4000000)|sum }}",
    "map of text": "{{ ('日'*4000000)|map('upper')|list|length }}",
    "unique of text": "{{ ('日'*4000000)|unique|list|length }}",
    "min of text": "{{ ('日'*4000000)|min }}",
    "groupby text": "{{ ('日'*4000000)|groupby('x')|length }}",
    "dict of text": "{{ dict('ab'*4000000) }}",
    "fromkeys text": "{{ dict.fromkeys('日'*4000000)|length }}",
    "loop text": "{% for c in '日'*4000000 %}{% endfor %}",
    "mod named": "{{ ('%(a)s'*10000) % {'a': 'x'*1000000} }}",
    "format named": "{{ ('{a}'*10000).format(a='x'*1000000) }}",
    "format inner": "{{ ('{0[0]}'*10000).format(['x'*1000000]) }}",
    "format repr": "{{ ('{0!a}'*9).format('\U000e0001'*900000) }}",
    "mod repr": "{{ ('%a'*9) % (('\U000e0001'*900000,)*9) }}",
    "format filter named": "{{ ('%(a)s'*10000)|format(a='x'*1000000) }}",
    "hex constants": "{% for i in range(99999) %}{{ 0x" + "f"*20000 + " // 0x" + "e"*10000 + " }}{% endfor %}",
    "hex subtract": "{{ 0x" + "f"*20000 + " - 1 }}",
    "hex negate": "{% for i in range(99999) %}{{ (-0x" + "f"*50000 + ") > 1 }}{% endfor %}",
    "hex compare": "{% for i in range(999999) %}{{ 0x" + "f"*50000 + " > 1 }}{% endfor %}",
    "hex mod": "{{ 0x" + "f"*20000 + " % 7 }}",
    "hex in format": "{{ '%d' % 0x" + "f"*20000 + " }}",
    "hex in format x": "{{ ('%x'*1000) % ((0x" + "f"*60000 + ",)*1000) }}",
    "hex format filter": "{{ '{:x}'.format(0x" + "f"*60000 + ")|length / 0 }}",
    "hex divisible": "{{ 0x" + "f"*60000 + " is divisibleby 0x" + "e"*3000 + " }}{{ 1/0 }}",
    "hex round": "{{ (0x" + "f"*60000 + ")|round }}",
    "hex sum": "{{ [0x" + "f"*60000 + "]|sum }}",
    "hex abs": "{{ (0x" + "f"*60000 + ")|abs > 1 }}{{ 1/0 }}",
    "hex range": "{{ range(0x" + "f"*60000 + ") }}",
    "hex times text": "{{ 'a' * 0x" + "f"*60000 + " }}",
    "hex json": "{{ 0x" + "f"*60000 + "|tojson }}",
    "odd text": "{{ '%1000000000d' is odd }}",
    "even text": "{{ '%1000000000d' is even }}",
    "divisible text": "{{ '%1000000000d' is divisibleby 7 }}",
    "select odd text": "{{ ['%1000000000d']|select('odd')|list }}",
    "negate growth": "{% set n=namespace(x=2) %}{% for i in range(99999) %}{% set n.x = n.x - (-n.x) %}{% endfor %}",
    "int base 16 ops": "{% set x=('f'*1000000)|int(0, 16) %}{% for i in range(99999) %}{{ x // 3 }}{% endfor %}",
    "lex spaces": " "*60000 + "{% for %}",
    "lex newlines": "\n"*60000 + "{% for %}",
    "lex comments": "{#"*30000,
    "lex raw": "{% raw %}"*7000,
    "lex strings": "{{ '" + "a\\'"*20000,
    "lex braces": "{{"*30000,
    "lex dashes": "{%-"*20000,
    "lex spaces blocks": ("   "*10 + "{% if a %}")*1500,
    "lex line": "a"*30000 + " {% x"*5000,
    "lex operators": "{{ " + "("*60000,
    "lex unicode": "{{ '" + "\\u"*29000 + "' }}",
    "lex digits": "{{ " + "1_"*29000 + "x }}",
    "lex dots": "{{ " + "1."*29000 + " }}",
    "reverse in": "{% for i in range(99999) %}{{ 1.5 in range(99999)|reverse }}{% endfor %}",
    "items in": "{% set d=dict.fromkeys(range(99999)) %}{% for i in range(99999) %}{{ 1.5 in d|items }}{% endfor %}",
    "cycler in": "{% for i in range(99999) %}{{ cycler(*range(9999)).next() }}{% endfor %}",
    "filter kwargs": "{{ [1]|join(**{'d': 'x'*1000000, 'b': 1}) }}",
    "title wide": "{{ ('a '*1000000)|title|length }}",
    "title method": "{% set s='ab '*1000000 %}{% for i in range(9999) %}{{ s.title()|length }}{% endfor %}",
    "swapcase wide": "{% set s='日'*1000000 %}{% for i in range(9999) %}{{ s.swapcase()|length }}{% endfor %}",
    "casefold wide": "{% set s='ß'*1000000 %}{% for i in range(9999) %}{{ s.casefold()|length }}{% endfor %}",
    "isupper": "{% set s='日'*1000000 %}{% for i in range(99999) %}{{ s.isupper() }}{{ s is upper }}{% endfor %}",
    "removeprefix": "{% set s='a'*1000000 %}{% for i in range(99999) %}{{ s.removeprefix('a')|length }}{% endfor %}",
    "float text": "{% set s='1'*1000000 %}{% for i in range(99999) %}{{ s|float }}{% endfor %}",
    "int text": "{% set s='1'*1000000 %}{% for i in range(99999) %}{{ s|int }}{% endfor %}",
    "filter arguments": "{{ [1]|map(*('日'*4000000))|list }}",
    # Values nested so that each level doubles what it shows.
    "nested lists compared": NEST + "{{ n.x == n.y }}",
    "nested lists sought": NEST + "{{ n.x in [n.y] }}",
    "nested lists counted": NEST + "{{ [n.y].count(n.x) }}",
    "nested lists selected": NEST + "{{ [n.x]|select('eq', n.y)|list|length }}",
    "nested lists as text": NEST + "{{ n.x|string|length }}",
    "nested lists in capitals": NEST + "{{ n.x|upper|length }}",
    "nested lists formatted": NEST + "{{ '%s' % n.x }}",
    "nested lists in an error": NEST + "{{ raise_exception(n.x) }}",
    "nested namespaces": "{% set n=namespace(x='a'*1000) %}{% for i in range(30) %}"
                         "{% set n.x=namespace(a=n.x,b=n.x) %}{% endfor %}{{ n.x }}",
    "nested tuples as a key": TUPLE + "{% for i in range(99999) %}{{ {}[n.x] }}{% endfor %}",
    "nested tuples looked up": TUPLE + "{% for i in range(99999) %}{{ {}.get(n.x) }}{% endfor %}",
    # Values kept, each small enough on its own.
    "kept texts": KEEP % "s ~ i",
    "kept sums": KEEP % "s + 'x'",
    "kept slices": KEEP % "s[1:]",
    "kept capitals": KEEP % "s.upper()",
    "kept capitals by a filter": KEEP % "s|upper",
    "kept replacements": KEEP % "s.replace('a', 'b')",
    "kept characters": KEEP % "s[:99999]|list",
    "kept numbers": KEEP % "range(99999)|list",
    "kept numbers as text": KEEP % "range(99999)|map('string')|list",
    "kept groups": KEEP % "range(9999)|groupby('real')",
    "kept lists": KEEP % "([1] * 99999).copy()",
    "kept JSON": KEEP % "s|tojson",
    "kept macro output": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}" + KEEP % "f(s)",
    "kept blocks": "{% set n=namespace(l=[]) %}{% set s='a'*500000 %}{% for i in range(9999) %}"
                   "{% set n.x %}{{ s }}{{ s }}{% endset %}{% set n.l = [n.l, n.x] %}{% endfor %}",
    "kept wide texts": "{% set n=namespace(l=[]) %}{% set s='😀'*500000 %}{% for i in range(9999) %}"
                       "{% set n.l = n.l + [s ~ i] %}{% endfor %}",
}  # fmt: skip


WORKER = """
import json, os, resource, signal, sys, time
from penstock.base.errors import InputError
from penstock.text.template import render_chat
for source in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        try:
            outcome = ["rendered", render_chat(source, [{"role": "user", "content": "Hi"}])[:100], None]
        except InputError as error:
            outcome = ["refused", str(error), error.param]
        except BaseException as error:
            outcome = [type(error).__name__, str(error)[:100], None]
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, json.dumps([*outcome, time.process_time() - started, used / 1024]).encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 65536)
    os.close(read)
    os.waitpid(child, 0)
    print(answer.decode() if answer else json.dumps(["killed after 10 s", "", None, 10, 0]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run(
        [sys.executable, "-c", WORKER], input=json.dumps(list(HOSTILE.values())), capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    return dict(zip(HOSTILE, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused_soon_and_in_little_memory(outcomes, name):
    outcome, message, param, seconds, megabytes = outcomes[name]
    assert outcome == "refused", message
    assert param in ("messages", "chat_template")
    assert len(message) < 300
    assert "\n" not in message
    assert seconds < MAX_SECONDS
    assert megabytes < MAX_MEGABYTES
