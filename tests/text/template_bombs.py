"""Chat templates that use much time or memory, by name. As a program, this renders them and reports the cost.

Usage: template_bombs.py SECONDS STEP renders every STEP-th of them, with a limit of SECONDS of CPU time for each.
"""

import json
import resource
import sys
from pathlib import Path


def repeated(body: str) -> str:
    return "{% set ns = namespace(n=10, s='a', l=[0]) %}{% for i in range(99) %}" + body + "{% endfor %}"


LOOP = "{% for i in range(99999) %}"
LONG = "{% set x = 'a' * 9000000 %}"
NESTED = "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
TEXT = "{% set ns = namespace(s='abcd') %}{% for i in range(20) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"

BOMBS = {
    # sizes that one operation computes from a number
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "repetition from the left": "{{ 10 ** 10 * 'a' }}",
    "repeated list": "{{ [0] * 10 ** 10 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of powers": "{{ 10 ** (10 ** 8) % 7 }}",
    "powers in steps": repeated("{% set ns.n = ns.n * ns.n %}"),
    "rounding to many digits": "{{ 1.5 | round(10 ** 8, 'ceil') }}",
    "printf width": "{{ '%1000000000d' % 1 }}",
    "printf width as an argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "printf precision": "{{ '%.1000000000f' % 1 }}",
    "printf filter": "{{ '%1000000000s' | format('x') }}",
    "format width": "{{ '{:>1000000000}'.format('x') }}",
    "format width as an argument": "{{ '{:>{}}'.format('x', 10 ** 9) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "strftime": "{{ strftime_now('%1000000000d' * 100000) }}{{ strftime_now('%A' * 90000000) }}",
    "center": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "rjust": "{{ 'a'.rjust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "center filter": "{{ 'a' | center(10 ** 10) }}",
    "indent": "{{ 'a\\nb' | indent(width=10 ** 10) }}",
    "indented json": "{{ [1] | tojson(indent=10 ** 10) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "a huge range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "slices": "{{ [1] | slice(10 ** 9) | list }}",
    "batches": "{{ [1] | batch(10 ** 9, 'fill') | list }}",
    # products of texts and lists
    "replace": LONG + "{{ x.replace('a', x) }}",
    "replace of nothing": LONG + "{{ x | replace('', 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb') }}",
    "join": LONG + "{{ ([x] * 10000) | join }}",
    "join with a separator": LONG + "{{ x | join('y' * 1000) }}",
    "join method": LONG + "{{ x.join('a' * 1000) }}",
    "translate": LONG + "{{ x.translate({97: x}) }}",
    "urlencode": LONG + "{{ ('\\u1234' * 9000000) | urlencode }}",
    "wordwrap": LONG + "{{ x | wordwrap(1, wrapstring=x) }}",
    "escape": "{{ ('&' * 60000000) | e }}",
    "xmlattr": LONG + "{{ {'a': x, 'b': x, 'c': x, 'd': x} | xmlattr * 9 }}",
    "split": LONG + "{{ x.split('a') }}",
    "list": LONG + "{{ ((x ~ x ~ x ~ x) | list) }}",
    "sum of lists": "{{ ([[0] * 9000] * 9000) | sum(start=[]) }}",
    "map of products": "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "sorting": "{{ (range(99999) | list * 900) | sort }}",
    "grouping": LONG + "{{ (x | list) | groupby('a') }}",
    "pprint": NESTED + "{{ ns.l | pprint }}",
    # growth in steps
    "doubling with +": repeated("{% set ns.s = ns.s + ns.s %}"),
    "doubling with ~": repeated("{% set ns.s = ns.s ~ ns.s %}"),
    "doubling lists": repeated("{% set ns.l = ns.l + ns.l %}"),
    "doubling blocks": repeated("{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
    "kept texts": TEXT + "{% set ns.l = [] %}" + LOOP + "{% set ns.l = ns.l + [ns.s ~ i] %}{% endfor %}",
    "kept slices": LONG + repeated("{% set ns.l = ns.l + [x[i:]] %}"),
    "linked namespaces": TEXT + LOOP + "{% set ns.a = namespace(a=ns.a, s=ns.s ~ i) %}{% endfor %}",
    "texts in every frame": TEXT + "{% macro f(s) %}{{ f(s ~ 1) }}{% endmacro %}{{ f(ns.s) }}",
    "arguments": "{{ dict(*[['a', 1]] * 10 ** 9) }}",
    # a list that holds another many times
    "text of a nested list": NESTED + "{{ ns.l }}",
    "json of a nested list": NESTED + "{{ ns.l | tojson }}",
    "comparison of nested lists": NESTED + "{% set a = ns.l %}" + NESTED + "{{ a == ns.l }}",
    "search in nested lists": NESTED + "{% set a = ns.l %}" + NESTED + "{{ a in [ns.l] }}",
    # time
    "endless output": LOOP + LOOP + "{{ messages }}{% endfor %}{% endfor %}",
    "silent loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "comparisons": LONG + "{% set y = x[1:] ~ 'a' %}" + LOOP + "{% if x == y %}{% endif %}{% endfor %}",
    "searches": LONG + LOOP + "{% if 'ab' in x %}{% endif %}{% endfor %}",
    "copies": LONG + LOOP + "{% if x[1:] %}{% endif %}{% endfor %}",
    "tests": LOOP + "{{ range(99999) | select('divisibleby', 7) | reject('even') | list | length }}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop that recurses": "{% for i in range(2) recursive %}{{ loop(range(2)) }}{% endfor %}",
    "addresses": "{{ ('www.a.' * 900000) | urlize }}",
    # compilation
    "huge source": "{# " + "x" * 2**21 + " #}",
    "deep nesting": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "folded constants": "{{ 'a' * 99999 * 99999 }}",
    "many terms": "{{ " + "+".join(["1"] * 60000) + " }}",
}  # fmt: skip


def cost() -> tuple[float, int]:
    """Returns the CPU time in seconds of this process and its ended children, and the peak memory of one in bytes."""
    ours, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = ours.ru_utime + ours.ru_stime + theirs.ru_utime + theirs.ru_stime
    # This process's own ru_maxrss includes the peak of the process that started it.
    status = Path("/proc/self/status").read_text()
    own_peak = int(status.split("VmHWM:")[1].split()[0])
    return seconds, max(own_peak, theirs.ru_maxrss) * 1024


def main() -> None:
    from ligerzoo.text import chat_template

    chat_template._MAX_SECONDS = float(sys.argv[1])
    results = {}
    for name in list(BOMBS)[:: int(sys.argv[2])]:
        before = cost()[0]
        problem = ""
        try:
            chat_template.ChatTemplate(BOMBS[name], name).render({"messages": ["x" * 1000]})
        except chat_template.TokenizerError as error:
            problem = str(error)
        chat_template._worker.end()
        seconds, memory = cost()
        results[name] = {"problem": problem, "seconds": seconds - before, "memory": memory}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
