"""Answers as models write them, in every format of tool calls, and what must be read from them."""

from dataclasses import dataclass


def function(name: str, properties: dict, required: list[str] | None = None, **extra) -> dict:
    """A tool as chat completions send it."""
    parameters = {"type": "object", "properties": properties, "required": required or []}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **extra}}


TOOLS = [
    function("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"]),
    function(
        "edit",
        {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "options": {"type": "object"},
            "force": {"type": "boolean"},
            "mode": {"enum": ["fast", "safe"]},
            "note": {"type": ["string", "null"]},
        },
    ),
    function("now", {}),
]


@dataclass(frozen=True)
class Answer:
    """One fixture. calls: (name, arguments); flags: of the content, in order."""

    format: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple = ()
    flags: tuple = ()
    prompt_end: str = "none"


def qwen(name: str, **arguments: str) -> str:
    """A call as the Qwen templates write it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    """A call as the GLM-4.7 template writes it."""
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


WEATHER = ("get_weather", {"city": "Zürich"})
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
Q = '<|"|>'
GEMMA = f"<|tool_call>call:get_weather{{city:{Q}Zürich{Q}}}<tool_call|>"

ANSWERS: dict[str, Answer] = {
    # Qwen XML: where calls stand
    "plain text": Answer("qwen-xml", "Hello\n\nworld  ", "Hello\n\nworld  "),
    "text of a thinking model": Answer(
        "qwen-xml", "Let me see.\n</think>\n\nHello.", "Hello.", "Let me see.", prompt_end="open"
    ),
    "empty reasoning": Answer("qwen-xml", "\n</think>\n\nHello.", "Hello.", prompt_end="open"),
    "reasoning without end": Answer("qwen-xml", "Let me see.", "", "Let me see.", prompt_end="open"),
    "reasoning that opens itself": Answer("qwen-xml", "<think>\nHm\n</think>\n\nYes", "Yes", "Hm"),
    "reasoning opened twice": Answer("qwen-xml", "<think>\nHm\n</think>\n\nYes", "Yes", "Hm", prompt_end="open"),
    "reasoning where it was switched off": Answer("qwen-xml", "<think>Hm</think>Yes", "Yes", "Hm", prompt_end="closed"),
    "text about the tags": Answer(
        "qwen-xml", "Tags like </think> or <function=x> stay.", "Tags like </think> or <function=x> stay."
    ),
    "call alone": Answer("qwen-xml", qwen("get_weather", city="Zürich"), calls=(WEATHER,)),
    "call after text": Answer(
        "qwen-xml", "I look.\n\n" + qwen("get_weather", city="Zürich"), "I look.", calls=(WEATHER,)
    ),
    "call after reasoning": Answer(
        "qwen-xml", "Hm\n</think>\n\n" + qwen("get_weather", city="Zürich"), "", "Hm", (WEATHER,), prompt_end="open"
    ),
    "call inside reasoning": Answer(
        "qwen-xml", "Hm, so:\n" + qwen("get_weather", city="Zürich"), "", "Hm, so:", (WEATHER,), prompt_end="open"
    ),
    "call inside reasoning that ends later": Answer(
        "qwen-xml",
        "Hm\n" + qwen("get_weather", city="Zürich") + "\n</think>\n\nDone.",
        "Done.",
        "Hm",
        (WEATHER,),
        prompt_end="open",
    ),
    "call before reasoning": Answer(
        "qwen-xml", qwen("get_weather", city="Zürich") + "\n<think>Hm</think>Yes", "Yes", "Hm", (WEATHER,)
    ),
    "call mentioned in reasoning": Answer(
        "qwen-xml",
        "I could write <tool_call> or not.\n</think>\n\nNo.",
        "No.",
        "I could write <tool_call> or not.",
        prompt_end="open",
    ),
    "two calls": Answer(
        "qwen-xml",
        qwen("get_weather", city="Zürich") + "\n" + qwen("now"),
        calls=(WEATHER, ("now", {})),
    ),
    "text between calls": Answer(
        "qwen-xml",
        qwen("get_weather", city="Zürich") + "\nThen:\n" + qwen("now"),
        "Then:",
        calls=(WEATHER, ("now", {})),
    ),
    # Qwen XML: values
    "newlines of a value": Answer(
        "qwen-xml",
        "<tool_call>\n<function=edit>\n<parameter=text>\n\n\na\r\n\n\n</parameter>\n</function>\n</tool_call>",
        calls=(("edit", {"text": "\n\na\r\n\n"}),),
    ),
    "empty and one-line values": Answer(
        "qwen-xml",
        "<tool_call><function=edit><parameter=text>\n</parameter><parameter=path>a b</parameter></function>"
        "</tool_call>",
        calls=(("edit", {"text": "", "path": "a b"}),),
    ),
    "look-alikes in a value": Answer(
        "qwen-xml",
        qwen(
            "edit", text="x </parameter> y\n</parameter>z\n<function=now>\n</think>\n<tool_call>\n</function>", path="p"
        ),
        calls=(
            (
                "edit",
                {
                    "text": "x </parameter> y\n</parameter>z\n<function=now>\n</think>\n<tool_call>\n</function>",
                    "path": "p",
                },
            ),
        ),
    ),
    "a value that shows an argument of the same name": Answer(
        "qwen-xml",
        qwen("edit", path="p", text="</parameter>\n<parameter=text>\nx"),
        calls=(("edit", {"path": "p", "text": "</parameter>\n<parameter=text>\nx"}),),
    ),
    "typed values": Answer(
        "qwen-xml",
        qwen("edit", lines="[1,  2]", options='{"a": {"b": null}}', force="True", mode="fast", note="null", text="5"),
        calls=(
            (
                "edit",
                {
                    "lines": [1, 2],
                    "options": {"a": {"b": None}},
                    "force": True,
                    "mode": "fast",
                    "note": None,
                    "text": "5",
                },
            ),
        ),
    ),
    "an argument that no schema knows": Answer(
        "qwen-xml", qwen("now", zone="CET", n="1"), calls=(("now", {"zone": "CET", "n": 1}),)
    ),
    "a function that was not offered": Answer("qwen-xml", qwen("other", a="x"), calls=(("other", {"a": "x"}),)),
    # Qwen XML: damage
    "missing opening tag": Answer(
        "qwen-xml",
        "Now:\n" + qwen("get_weather", city="Zürich").removeprefix("<tool_call>\n"),
        "Now:",
        calls=(WEATHER,),
    ),
    "missing all call tags": Answer(
        "qwen-xml", "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>", calls=(WEATHER,)
    ),
    "missing end of the function": Answer(
        "qwen-xml", qwen("get_weather", city="Zürich").replace("</function>\n", ""), calls=(WEATHER,)
    ),
    "missing end of the value": Answer(
        "qwen-xml", qwen("get_weather", city="Zürich").replace("</parameter>\n", ""), calls=(WEATHER,)
    ),
    "missing end of the call": Answer(
        "qwen-xml",
        qwen("get_weather", city="Zürich").removesuffix("\n</tool_call>") + "\n" + qwen("now"),
        calls=(WEATHER, ("now", {})),
    ),
    "JSON where XML was asked": Answer("qwen-xml", HERMES, calls=(WEATHER,)),
    "JSON in a function": Answer(
        "qwen-xml",
        '<tool_call>\n<function=get_weather>\n{"city": "Zürich"}\n</function>\n</tool_call>',
        calls=(WEATHER,),
    ),
    "no call in the tags": Answer(
        "qwen-xml",
        "<tool_call>\nweather please\n</tool_call>",
        "<tool_call>\nweather please\n</tool_call>",
        flags=("malformed_tool_call",),
    ),
    "nothing behind the tag": Answer("qwen-xml", "So: <tool_call>", "So: <tool_call>", flags=("partial_tool_call",)),
    # Hermes
    "hermes call": Answer("hermes", "I look.\n" + HERMES, "I look.", calls=(WEATHER,)),
    "hermes with reasoning": Answer("hermes", "<think>\nHm\n</think>\n\n" + HERMES, "", "Hm", (WEATHER,)),
    "hermes in reasoning": Answer("hermes", "Hm\n" + HERMES, "", "Hm", (WEATHER,), prompt_end="open"),
    "hermes without arguments": Answer("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", {}),)),
    "hermes look-alikes": Answer(
        "hermes",
        '<tool_call>\n{"name": "edit", "arguments": {"text": "</tool_call> }\\"{ <tool_call>"}}\n</tool_call>',
        calls=(("edit", {"text": '</tool_call> }"{ <tool_call>'}),),
    ),
    "hermes arguments as text": Answer(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Zürich\\"}"}</tool_call>',
        calls=(WEATHER,),
    ),
    "hermes two in one": Answer(
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_call>',
        calls=(("now", {}), ("now", {})),
    ),
    "hermes list": Answer(
        "hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', calls=(("now", {}), ("now", {}))
    ),
    "hermes missing brace": Answer(
        "hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}\n</tool_call>', calls=(WEATHER,)
    ),
    "hermes extra brace": Answer("hermes", HERMES.replace("}}", "}}}"), calls=(WEATHER,)),
    "hermes Python literal": Answer(
        "hermes",
        "<tool_call>{'name': 'edit', 'arguments': {'force': True}}</tool_call>",
        calls=(("edit", {"force": True}),),
    ),
    "hermes line break in a string": Answer(
        "hermes",
        '<tool_call>{"name": "edit", "arguments": {"text": "a\nb"}}</tool_call>',
        calls=(("edit", {"text": "a\nb"}),),
    ),
    "hermes number as text": Answer(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "5", "days": "5"}}</tool_call>',
        calls=(("get_weather", {"city": "5", "days": 5}),),
    ),
    "hermes without tags": Answer(
        "hermes", '{"name": "get_weather", "arguments": {"city": "Zürich"}}', calls=(WEATHER,)
    ),
    "hermes bare object of something else": Answer("hermes", '{"name": "Bob"}', '{"name": "Bob"}'),
    "hermes bare object of other keys": Answer("hermes", '{"answer": 5}\nok', '{"answer": 5}\nok'),
    "hermes open string": Answer(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "x}}</tool_call>\n' + HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": "x}}</tool_call>',
        calls=(WEATHER,),
        flags=("malformed_tool_call",),
    ),
    # Gemma 4
    "gemma call": Answer("gemma", "I look." + GEMMA, "I look.", calls=(WEATHER,)),
    "gemma reasoning": Answer("gemma", "<|channel>thought\nHm\n<channel|>" + GEMMA, "", "Hm", (WEATHER,)),
    "gemma values": Answer(
        "gemma",
        f"<|tool_call>call:edit{{force:true,lines:[1,2],options:{{a:{{b:null}},c:{Q},}}{Q}}},"
        f"text:{Q}<tool_call|>, x:1{Q}}}"
        "<tool_call|>",
        calls=(
            (
                "edit",
                {"force": True, "lines": [1, 2], "options": {"a": {"b": None}, "c": ",}"}, "text": "<tool_call|>, x:1"},
            ),
        ),
    ),
    "gemma two calls": Answer("gemma", GEMMA + "<|tool_call>call:now{}<tool_call|>", calls=(WEATHER, ("now", {}))),
    "gemma without tags": Answer("gemma", f"call:get_weather{{city:{Q}Zürich{Q}}}", calls=(WEATHER,)),
    "gemma plain quotes": Answer("gemma", '<|tool_call>call:get_weather{city:"Zürich"}<tool_call|>', calls=(WEATHER,)),
    "gemma backticks": Answer("gemma", "<|tool_call>call:get_weather{city:`Zürich`}<tool_call|>", calls=(WEATHER,)),
    "gemma open string": Answer(
        "gemma",
        f"<|tool_call>call:now{{a:{Q}x}}<tool_call|>" + GEMMA,
        f"<|tool_call>call:now{{a:{Q}x}}<tool_call|>",
        calls=(WEATHER,),
        flags=("malformed_tool_call",),
    ),
    "gemma broken": Answer(
        "gemma",
        "<|tool_call>call:now{a b}<tool_call|> x",
        "<|tool_call>call:now{a b}<tool_call|> x",
        flags=("malformed_tool_call",),
    ),
    # Llama 3
    "llama call": Answer("llama3", '{"name": "get_weather", "parameters": {"city": "Zürich"}}', calls=(WEATHER,)),
    "llama two calls": Answer(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Zürich"}}; {"name": "now", "parameters": {}}',
        calls=(WEATHER, ("now", {})),
    ),
    "llama call behind the tag": Answer(
        "llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich"}}', calls=(WEATHER,)
    ),
    "llama builtin call": Answer("llama3", '<|python_tag|>get_weather.call(city="Zürich")', calls=(WEATHER,)),
    "llama function tag": Answer("llama3", '<function=get_weather>{"city": "Zürich"}</function>', calls=(WEATHER,)),
    "llama call after a line": Answer(
        "llama3", 'Sure:\n{"name": "now", "parameters": {}}', "Sure:", calls=(("now", {}),)
    ),
    "llama JSON as answer": Answer("llama3", '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}'),
    "llama code": Answer("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", flags=("malformed_tool_call",)),
    # GLM
    "glm call": Answer("glm", "I look." + glm("get_weather", city="Zürich"), "I look.", calls=(WEATHER,)),
    "glm with line breaks": Answer(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        calls=(WEATHER,),
    ),
    "glm reasoning": Answer(
        "glm",
        "Hm</think>" + glm("now") + glm("get_weather", city="Zürich", days="5"),
        "",
        "Hm",
        (("now", {}), ("get_weather", {"city": "Zürich", "days": 5})),
        prompt_end="open",
    ),
    "glm values": Answer(
        "glm",
        glm("edit", text=" a</arg_value>b\n</tool_call>", lines="[1]", force="false"),
        calls=(("edit", {"text": " a</arg_value>b\n</tool_call>", "lines": [1], "force": False}),),
    ),
    "glm no-argument damage": Answer("glm", "<tool_call>now</arg_value></tool_call>", calls=(("now", {}),)),
    "glm missing key tag": Answer(
        "glm", "<tool_call>get_weathercity</arg_key><arg_value>Zürich</arg_value></tool_call>", calls=(WEATHER,)
    ),
    "glm missing value tag": Answer(
        "glm", "<tool_call>get_weather<arg_key>city</arg_key>Zürich</arg_value></tool_call>", calls=(WEATHER,)
    ),
    "glm missing end of the value": Answer(
        "glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</tool_call>", calls=(WEATHER,)
    ),
    "glm JSON": Answer("glm", HERMES, calls=(WEATHER,)),
    "glm text in the tags": Answer(
        "glm", "<tool_call>{a}<b></tool_call>", "<tool_call>{a}<b></tool_call>", flags=("malformed_tool_call",)
    ),
    # Harmony
    "harmony answer": Answer(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.",
        "Hm",
    ),
    "harmony call": Answer(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Zürich"}<|call|>',
        "",
        "Hm",
        (WEATHER,),
    ),
    "harmony recipient in the role": Answer(
        "harmony",
        ' to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>{"city": "Zürich"}<|call|>',
        calls=(WEATHER,),
    ),
    "harmony preamble": Answer(
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
        "<|message|>{}<|call|>",
        "I look.",
        calls=(("now", {}),),
    ),
    "harmony broken call": Answer(
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>{a<|call|>",
        "<|channel|>commentary to=functions.now<|message|>{a<|call|>",
        flags=("malformed_tool_call",),
    ),
    "harmony without messages": Answer("harmony", "Just text.", "Just text."),
    # No tools known
    "none": Answer("none", "Hm</think>\n\n" + HERMES, HERMES, "Hm", prompt_end="open"),
}
