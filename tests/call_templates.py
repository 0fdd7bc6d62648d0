"""Chat templates that write calls in the formats which the templates of `chat_templates` do not have."""

_TURNS = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ASSISTANT_START }}
        {%- if message.reasoning_content %}{{- THINK_START + message.reasoning_content + THINK_END }}{%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set name, arguments = call.function.name, call.function.arguments %}
            CALL
        {%- endfor %}
        {{- ASSISTANT_END }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '' }}{%- endif %}
{%- if add_generation_prompt %}{{- ASSISTANT_START }}{%- endif %}"""


def _turns(
    call: str, think: tuple[str, str], start: str = "<|im_start|>assistant\\n", end: str = "<|im_end|>\\n"
) -> str:
    parts = {"ASSISTANT_START": start, "ASSISTANT_END": end, "THINK_START": think[0], "THINK_END": think[1]}
    text = _TURNS.replace("CALL", call)
    for key, value in parts.items():
        text = text.replace(key, f"'{value}'")
    return text


HERMES = _turns(
    """{{- ('' if loop.first and not message.content else '\\n') + '<tool_call>\\n{"name": ' + name | tojson
        + ', "arguments": ' + arguments | tojson + '}\\n</tool_call>' }}""",
    ("<think>\\n", "\\n</think>\\n\\n"),
)
GLM = _turns(
    """{{- '<tool_call>' + name }}
    {%- for key, value in arguments | items %}
        {{- '<arg_key>' + key + '</arg_key><arg_value>' }}{{- value if value is string else value | tojson }}
        {{- '</arg_value>' }}
    {%- endfor %}{{- '</tool_call>' }}""",
    ("<think>", "</think>"),
)
GEMMA = """{%- macro literal(value) %}
    {%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping %}{{- '{' }}
        {%- for key, item in value | dictsort %}
            {{- ('' if loop.first else ',') + key + ':' }}{{- literal(item) }}
        {%- endfor %}{{- '}' }}
    {%- elif value is iterable %}{{- '[' }}
        {%- for item in value %}{{- '' if loop.first else ',' }}{{- literal(item) }}{%- endfor %}{{- ']' }}
    {%- else %}{{- value | tojson }}
    {%- endif %}
{%- endmacro %}""" + _turns(
    """{{- '<|tool_call>call:' + name }}{{- literal(arguments) }}{{- '<tool_call|>' }}""",
    ("<|channel>thought\\n", "\\n<channel|>"),
)
HARMONY = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name
                + '<|channel|>commentary<|constrain|>json<|message|>' + call.function.arguments | tojson + '<|call|>' }}
        {%- endfor %}
        {%- if message.content %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
