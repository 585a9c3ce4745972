"""Chat templates: what real ones use, and what hostile ones try."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from superfluidd.engine.gguf import read_header
from superfluidd.errors import ClientError, InvalidValue, UnsupportedParameter
from superfluidd.text import template
from superfluidd.text.template import ChatTemplate

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    made = ChatTemplate(source, bos="<s>", eos="</s>", now=lambda: datetime(2024, 2, 29, 12, 30))
    assert made.compile_error == ""
    return made.render(messages, **options)


def refusal(source: str, messages: list[dict[str, Any]] = HELLO) -> str:
    with pytest.raises(InvalidValue) as caught:
        render(source, messages)
    assert caught.value.param == "messages"
    return caught.value.message


def test_the_bundled_models_template(bundled_model: Path) -> None:
    made = ChatTemplate(read_header(bundled_model).chat_template, bos="<|im_start|>", eos="<|im_end|>")
    turns = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert made.render(turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert made.render(turns, add_generation_prompt=False).endswith("hello<|im_end|>\n")


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hello</s>"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% for m in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"),
        ("{% for m in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for m in [3, 1] if m > 1 %}{{ loop.first }}{{ m }}{% endfor %}", "True3"),
        ("{{ {'b': '<é>&', 'a': None} | tojson }}", '{"b": "<é>&", "a": null}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        ("{{ 'a' + 'b' * 2 }}{{ 7 % 4 + 2 ** 3 }}", "abb11"),
        ("{{ nothing }}|{{ tools is none }}|{{ documents is none }}", "|True|True"),
        ("{% generation %}{{ messages[0].content | trim }}{% endgeneration %}", "hello"),
        ("{% macro turn(m) %}[{{ m.role }}]{% endmacro %}{{ turn(messages[0]) }}", "[user]"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% set x %}<{{ messages[0].role.upper() }}>{% endset %}{{ x }}", "<USER>"),
        ("{% for n in [[1], [2]] recursive %}{{ n if n is number else loop(n) }}{% endfor %}", "12"),
        ("{{ messages[0].content.split('l') | join('-') }}", "he--o"),
        ("{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format(1) }}{{ [].__class__ }}", ""),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_reach_the_template_and_cannot_replace_its_own() -> None:
    source = "{{ thinking }}{{ messages | length }}{{ bos_token }}{{ tools[0].name }}{{ add_generation_prompt }}"
    extra = {"thinking": False, "messages": [], "bos_token": "!"}
    assert render(source, extra=extra, tools=[{"name": "f"}]) == "False1<s>fTrue"


def test_html_in_messages_is_left_alone() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<b>&"}]) == "<b>&"


def test_the_templates_own_refusal_is_handed_on() -> None:
    message = refusal("{{ raise_exception('roles must alternate') }}")
    assert message == "the model's chat template refuses these messages: roles must alternate"


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + none }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ missing | tojson }}", "Undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{{ messages[0].update(role='x') }}", "sandbox forbids"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_failures_are_the_requests_and_say_why(source: str, words: str) -> None:
    assert words in refusal(source)


@pytest.mark.parametrize(
    "source, words",
    [
        ("{% for a in range(100000000) %}{% endfor %}", "Range too big"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{{ 'x' * 100000000 }}", "characters"),
        ("{{ 100000000 * ['x'] }}", "characters"),
        ("{% set x = messages[0].content %}" + "{% set x = x + x %}" * 60 + "{{ x }}", "characters"),
        ("{% set x = messages[0].content %}" + "{% set x = x ~ x %}" * 60 + "{{ x }}", "characters"),
        ("{% set x = 'y' * 100000 %}{% for a in range(9999) %}{{ x }}{% endfor %}", "characters"),
        (
            "{% set x = 'y' * 100000 %}{% set z %}{% for a in range(9999) %}{{ x }}{% endfor %}{% endset %}",
            "characters",
        ),
        ("{{ 10 ** 1000000000 }}", "huge numbers"),
        ("{{ 'x'.ljust(1000000000) }}", "unsafe"),
    ],
)
def test_a_template_that_would_never_end_fails_soon(source: str, words: str) -> None:
    started = time.monotonic()
    assert words in refusal(source)
    assert time.monotonic() - started < 20


def test_the_budget_is_per_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_STEPS", 10)
    made = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", bos="", eos="")
    for _ in range(5):
        assert made.render(HELLO * 10) == "hello" * 10
    with pytest.raises(InvalidValue, match="10 steps"):
        made.render(HELLO * 11)
    assert made.render(HELLO) == "hello"


@pytest.mark.parametrize("source", ["", " \n"])
def test_a_model_without_template_says_where_to_go(source: str) -> None:
    made = ChatTemplate(source, bos="", eos="")
    assert made.missing
    assert made.compile_error == ""
    with pytest.raises(UnsupportedParameter, match=r"no chat template.*/v1/completions") as caught:
        made.render(HELLO)
    assert isinstance(caught.value, ClientError)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source, words",
    [
        ("line\n{% if %}", "line 2"),
        ("{% for m in messages %}", "endfor"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, ""),
    ],
)
def test_a_template_that_does_not_compile_is_known_at_load_and_refused_per_request(source: str, words: str) -> None:
    made = ChatTemplate(source, bos="", eos="")
    assert not made.missing
    assert made.compile_error
    assert words in made.compile_error
    with pytest.raises(UnsupportedParameter, match="does not compile") as caught:
        made.render(HELLO)
    assert made.compile_error in caught.value.message
