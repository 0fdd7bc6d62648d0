"""Chat templates in the manner of the model families, written for the tests, and conversations that exercise them."""

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Tools as XML with typed arguments, thinking that is dropped before the last question, a switch for thinking.
THINKING = """{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}
            {%- else %}{{- raise_exception('Unexpected part ' ~ part.type) }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
    {%- else %}{{- raise_exception('Unexpected content') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('No messages provided.') }}{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and not (message.content is string
           and message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- if tools and tools is iterable %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>' }}
    {%- if messages[0].role == 'system' %}{{- '\\n\\n' + text_of(messages[0].content) | trim }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text_of(messages[0].content) | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text_of(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last_query %}{{- '<think>\\n' + thoughts | trim + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function if tool_call.function is defined else tool_call %}
            {{- ('\\n\\n' if content | trim and loop.first else ('' if loop.first else '\\n'))
                + '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in (call.arguments or {}) | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- raise_exception('Unexpected message role ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = (messages[0]['content'] if messages[0]['content'] is string
                      else messages[0]['content'][0]['text']) + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {{ '<start_of_image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- set plain = message.content is not mapping and message.content is not iterable %}
        {{- message.content if plain else message.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Indentation that only trim_blocks and lstrip_blocks remove, loop controls, filters and tests of every kind.
ODDITIES = """{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 6 %}
        {% break %}
    {% endif %}
    {% set label %}{{ message.role | upper }}{% endset %}
{{ label }}: {{ message.content | default('', true) | string | replace('\\n', ' ') | truncate(40) }}
{% endfor %}
{{ messages | map(attribute='role') | unique | join(',') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ {'a': 1, 'ü': [true, none, 1.5, '<&>"\\'']} | tojson }} {{ [3, 1, 2] | sort | reverse | list }}
{{ eos_token }}{{ missing }}{{ tools is none }}{{ documents is none }} {{ '%05.1f' | format(3.14159) }}
{{ "x" ~ 1 ~ none ~ true }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ -7 % 3 }} {{ 'ab' in 'cabd' }} {{ 'a-b'.split('-') }}
{{ 'straße'.title() }} {{ '  x '.strip() }} {{ 'abc'[::-1] }} {{ range(3) | list }} {{ dict(a=1).get('b', 2) }}
"""

ALL = {"chatml": CHATML, "thinking": THINKING, "gemma": GEMMA, "llama3": LLAMA3, "oddities": ODDITIES}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a <place> & time, \"now\" or später",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def call(name: str, arguments: object) -> dict[str, object]:
    """An assistant's tool call as clients of chat APIs send it."""
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "Will it rain in Zürich?\n"}
CONVERSATIONS: dict[str, tuple[list[dict[str, object]], dict[str, object]]] = {
    "one question": ([{"role": "user", "content": "  Hi there \n"}], {}),
    "system": ([{"role": "system", "content": "Be brief."}, ASKED], {}),
    "no prompt": ([ASKED, {"role": "assistant", "content": "No."}], {"add_generation_prompt": False}),
    "several turns": (
        [
            {"role": "system", "content": "Be brief. 日本 <b>&amp;</b>"},
            ASKED,
            {"role": "assistant", "content": "<think>\nclouds?\n</think>\n\nYes.", "reasoning_content": None},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."},
            {"role": "user", "content": "Thanks {{ 'not' }} {% a template %} 👍🏽"},
        ],
        {"enable_thinking": False},
    ),
    "tools": (
        [
            {"role": "system", "content": "Use tools."},
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call("get_weather", {"city": "Zürich", "days": 2})]},
            {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"rain": true}'},
        ],
        {"tools": [WEATHER]},
    ),
    "thinking with tools": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Which city?\n",
                "tool_calls": [call("a", {"x": "1 < 2", "y": [1, None]}), call("b", {})],
            },
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        {"tools": [WEATHER, WEATHER], "enable_thinking": True},
    ),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": text} for text in ("What is ", "it?")]}], {}),
    "wrong order": ([{"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}], {}),
    "empty": ([], {}),
}
