"""Request bodies: what is refused, which field is named, and what is quietly fine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from superfluidd.config import Settings
from superfluidd.errors import ClientError, InvalidValue, UnsupportedParameter
from superfluidd.http import sampling, schema

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> schema.ChatBody:
    return schema.decode_chat(json.dumps({"messages": HELLO, **fields}).encode())


def completion(prompt: Any, **fields: Any) -> schema.CompletionBody:
    return schema.decode_completion(json.dumps({"prompt": prompt, **fields}).encode())


def checked(**fields: Any) -> Any:
    """Everything that is checked before a prompt is rendered."""
    body = chat(**fields)
    sampling.max_tokens(body, Settings())
    sampling.stops(body)
    sampling.alternatives("top_logprobs", body.top_logprobs)
    return sampling.sampling(body, Settings(), logprobs=None, vocabulary=100)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", [1]),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", "7"),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "16"),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", "2"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x"] * 17),
        ("stop", 3),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", True),
        ("ignore_eos", "yes"),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", {"100": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"١": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [1]),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("model", 5),
        ("messages", []),
        ("messages", None),
        ("messages", "Hello"),
        ("chat_template_kwargs", "x"),
    ],
)
def test_a_wrong_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        checked(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"max_tokens": -1, "max_completion_tokens": 5}, "max_tokens"),
    ],
)
def test_a_wrong_value_deeper_down_is_named_with_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        checked(**fields)
    assert caught.value.param == param


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidValue, match="messages is required") as caught:
        schema.decode_chat(b"{}")
    assert caught.value.param == "messages"
    with pytest.raises(InvalidValue, match="prompt is required"):
        schema.decode_completion(b"{}")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{'messages': []}",
        b'{"messages": [}',
        b'{"messages": []} trailing',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"x": ' + b"[" * 100_000 + b"}",
        b'{"tools": ' + b"[" * 100_000 + b"}",
    ],
)
def test_what_is_not_json_is_called_so(data: bytes) -> None:
    with pytest.raises(schema.MalformedJson) as caught:
        schema.decode_chat(data)
    assert "JSON" in caught.value.message or "nested" in caught.value.message


@pytest.mark.parametrize("data", [b"[]", b"null", b'"x"', b"3"])
def test_a_body_has_to_be_an_object(data: bytes) -> None:
    with pytest.raises(ClientError, match="the request body: expected object") as caught:
        schema.decode_chat(data)
    assert caught.value.param is None


@pytest.mark.parametrize(
    "field, value",
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("grammar", "root ::= x"),
        ("json_schema", {}),
        ("suffix", "x"),
        ("echo", True),
        ("echo", 0),
        ("best_of", 2),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("store", True),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {name: value} for name, values in schema.HARMLESS.items() for value in (None, *values)
    ]
    + [
        {"best_of": 1},
        {"best_of": 3, "n": 3},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"user": "x", "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "made_up": [1]},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).messages[0].content == "Hello"


def test_other_content_parts_are_refused_by_type() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(UnsupportedParameter, match="image_url") as caught:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}])
    assert caught.value.param == "messages[0].content[1].type"


def test_messages_reach_the_template_as_plain_texts() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    body = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        ],
        chat_template_kwargs={"style": "x"},
        enable_thinking=False,
    )
    assert schema.template_messages(body) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert schema.template_extra(body) == {"style": "x", "enable_thinking": False}


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, expected: Any) -> None:
    assert schema.prompts(completion(prompt)) == expected


@pytest.mark.parametrize(
    "prompt, param",
    [
        ([], "prompt"),
        (5, "prompt"),
        (None, "prompt"),
        ([1, "a"], "prompt"),
        (["a", [1]], "prompt"),
        ([[1], []], "prompt[1]"),
        ([[1], [1.5]], "prompt[1][0]"),
        ([True], "prompt[0]"),
        (["a"] * 65, "prompt"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        completion(prompt, n=2)
    assert caught.value.param == param


def test_sampling_defaults_are_the_operators() -> None:
    settings = Settings(temperature=0.3, top_k=7, top_p=0.8, min_p=0.1, max_tokens=99)
    body = chat()
    drawn = sampling.sampling(body, settings, logprobs=None, vocabulary=10)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.3, 7, 0.8, 0.1)
    assert sampling.max_tokens(body, settings) == 99
    other = sampling.sampling(body, settings, logprobs=None, vocabulary=10)
    assert drawn.seed != other.seed


def test_a_request_beats_the_operator() -> None:
    body = chat(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        seed=-1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"7": -100, "3": 2.5},
        max_tokens=5,
        max_completion_tokens=6,
        ignore_eos=True,
        stop="END",
    )
    drawn = sampling.sampling(body, Settings(), logprobs=4, vocabulary=10)
    assert (drawn.temperature, drawn.top_k, drawn.repeat_penalty, drawn.logprobs) == (0.0, 0, 1.2, 4)
    assert (drawn.presence_penalty, drawn.frequency_penalty, drawn.ignore_eos) == (-1.0, 0.5, True)
    assert drawn.logit_bias == ((3, 2.5), (7, -100.0))
    assert drawn.seed == (1 << 64) - 1
    assert sampling.for_choice(drawn, 2).seed == 1
    assert sampling.max_tokens(body, Settings()) == 6
    assert sampling.stops(body) == ("END",)


def test_repeat_penalty_beats_its_alias() -> None:
    body = chat(repeat_penalty=1.5, repetition_penalty=1.1)
    assert sampling.sampling(body, Settings(), logprobs=None, vocabulary=10).repeat_penalty == 1.5
