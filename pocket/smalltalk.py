"""Frames for conversations about the model itself, first steps in Python, and tool calls; all written for this model."""

import random

NAME = "Tandem Pocket"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant for Python.", "You explain code briefly.",
    "You are Tandem Pocket, a small model that knows Python.", "Answer in a few sentences.", "You are a coding assistant.",
    "Be brief.", "You help programmers read and write Python.",
)  # fmt: skip
WRITE_THOUGHTS = ("I write it and show the code.", "The code follows the docstring.", "That is enough to write the code.",
                  "I keep it short.")  # fmt: skip
TALK_THOUGHTS = ("The user says: {question} A short answer is enough.", "This is small talk, I answer directly.",
                 "A simple question: {question} I answer in a sentence or two.")  # fmt: skip

GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Hello there", "Hi!", "Hello!", "Good evening", "Hey there", "hi", "hello")
GREETING_ANSWERS = (
    "Hello! What would you like to know about Python?", "Hi! Show me some Python code and I will explain it.",
    "Hello! I can write small Python functions or explain code. What do you need?",
    "Hi there. Ask me about a Python function or a module.", "Good to see you. How can I help with your Python code?",
)  # fmt: skip
WHO = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Who am I talking to?",
       "Are you a person?", "Are you a robot?", "Introduce yourself.", "What kind of model are you?", "Which model is this?",
       "who are you", "What is Tandem Pocket?")  # fmt: skip
WHO_FIRST = (f"I am {NAME}, a very small language model.", f"My name is {NAME}. I am a small language model, not a person.",
             f"I am {NAME}, the little model that comes with the Tandem engine.",
             f"I am a small mixture-of-experts language model called {NAME}.")  # fmt: skip
WHO_MORE = (
    "I was trained on Python source code and documentation.", "I can complete and explain Python code.",
    "I exist so that Tandem can be tried without a download.", "I know some Python and little else.",
    "I have 32 experts in every layer and use four of them for each token.",
    "I can write short functions, explain code and describe modules.", "I make mistakes, so please check what I write.",
)  # fmt: skip
CAN = ("What can you do?", "How can you help me?", "What are you good at?", "What should I ask you?", "Can you help me?",
       "What are your abilities?", "what can you do", "Help!", "What do you know?", "How should I use you?")  # fmt: skip
CAN_FIRST = ("I can write short Python functions, explain code and say what a module offers.",
             "I know Python: give me a signature and a docstring and I write the function.",
             "Show me a Python function and I explain it, or describe one and I write it.",
             "I complete Python code, explain functions and answer questions about documentation.")  # fmt: skip
CAN_MORE = ("I am small, so keep the tasks small too.", "I work best with short, clear questions.",
            "I can also call tools if you offer me some.", "For anything else, use a larger model.",
            "Please check my answers.", "For example, ask me to write `add(a, b)`.")  # fmt: skip
LIMITS = ("What can you not do?", "What are your limits?", "Are you always right?", "Can I trust your answers?",
          "Do you know the news?", "Do you know everything?", "Can you speak French?", "Can you write a novel?",
          "Do you have access to the internet?", "How large are you?", "How smart are you?")  # fmt: skip
LIMIT_FIRST = ("I am a very small model, so I am often wrong.", "No large model fits in thirty megabytes: I know little.",
               "I only learned from Python code and its documentation, in English.",
               "I cannot look anything up, and I know nothing about the news.")  # fmt: skip
LIMIT_MORE = ("Check my code before you use it.", "Ask me about Python instead.", "For serious work, load a larger model.",
              "Tandem runs much larger models than me.", "I am a demonstration.")  # fmt: skip
TANDEM = ("What is Tandem?", "What does Tandem do?", "Tell me about Tandem.", "What is the Tandem engine?",
          "Which program is running you?", "What runs you?")  # fmt: skip
TANDEM_FIRST = ("Tandem is a program that runs language models on your own computer.",
                "Tandem is a local inference engine for mixture-of-experts models that are larger than the graphics card.",
                "Tandem is the engine that runs me.")  # fmt: skip
TANDEM_MORE = ("It reads GGUF files.", "It can run much larger models than me.", "I come with it as a demonstration.",
               "It uses processor and graphics card together.", "It needs no internet connection once a model is there.")  # fmt: skip
THANKS = ("Thanks!", "Thank you.", "Thank you very much", "Great, thanks.", "Thanks, that helps.", "Perfect.", "thanks")
THANKS_ANSWERS = ("You are welcome.", "You are welcome! Ask again any time.", "Glad that it helped.", "My pleasure.",
                  "You are welcome. Is there anything else?")  # fmt: skip
BYE = ("Goodbye", "Bye", "See you later.", "That is all.", "Good night.", "bye")
BYE_ANSWERS = ("Goodbye!", "Bye! Happy coding.", "See you.", "Goodbye, and good luck with your code.")
HOW = ("How are you?", "How do you do?", "How is it going?", "Are you well?", "How are you today?")
HOW_ANSWERS = ("I am fine, thank you. How can I help?", "All is well. What shall we look at?",
               "I am a program, so I am always the same. What can I do for you?", "Fine, thanks. Do you have some code for me?")  # fmt: skip

# Questions about Python, each with answers in which {} is nothing to fill: short texts and code of our own.
BASICS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("How do I read a file in Python?", "How can I read a text file?", "Show me how to read a file line by line."),
     ("Open it with `with`, then loop over its lines:\n\n```python\nwith open(\"notes.txt\", encoding=\"utf-8\") as f:\n    for line in f:\n        print(line.rstrip())\n```",
      "Use `open` in a `with` block:\n\n```python\nwith open(path, encoding=\"utf-8\") as f:\n    text = f.read()\n```\n\nThe file is closed at the end of the block.")),
    (("How do I write to a file?", "How can I save text to a file in Python?"),
     ("Open the file with mode `\"w\"` and call `write`:\n\n```python\nwith open(\"out.txt\", \"w\", encoding=\"utf-8\") as f:\n    f.write(\"hello\\n\")\n```",)),
    (("What is a list comprehension?", "Explain list comprehensions.", "Show me a list comprehension."),
     ("A list comprehension builds a list from a loop in one expression:\n\n```python\nsquares = [x * x for x in range(10) if x % 2 == 0]\n```\n\nIt keeps the even numbers and squares them.",)),
    (("What is a dictionary?", "Explain dictionaries in Python.", "How do I use a dict?"),
     ("A dictionary maps keys to values:\n\n```python\nages = {\"Ann\": 31, \"Bob\": 27}\nages[\"Cid\"] = 44\nprint(ages[\"Ann\"])\n```\n\nKeys must be hashable. `ages.get(\"Dan\")` returns `None` instead of raising `KeyError`.",)),
    (("What is the difference between a list and a tuple?", "List or tuple?", "When do I use a tuple?"),
     ("A list can be changed after it is made, a tuple cannot. Use a list for many items of one kind and a tuple for a fixed group of values, such as a pair of coordinates. A tuple can also be a key of a dictionary.",)),
    (("How do I sort a list?", "Sort a list of numbers in Python.", "How can I sort a list by a key?"),
     ("`sorted(items)` returns a new sorted list, `items.sort()` sorts in place. Both take `key` and `reverse`:\n\n```python\nwords.sort(key=len, reverse=True)\n```",)),
    (("What is a decorator?", "Explain decorators.", "How do decorators work in Python?"),
     ("A decorator is a function that takes a function and returns a replacement for it:\n\n```python\ndef logged(function):\n    def wrapper(*args, **kwargs):\n        print(\"calling\", function.__name__)\n        return function(*args, **kwargs)\n    return wrapper\n\n@logged\ndef add(a, b):\n    return a + b\n```",)),
    (("What is a generator?", "Explain generators in Python.", "What does yield do?"),
     ("A generator is a function with `yield`. Each `yield` hands out one value and the function goes on from there when the next one is asked for:\n\n```python\ndef count(n):\n    for i in range(n):\n        yield i\n```",)),
    (("How do I catch an exception?", "Explain try and except.", "How does error handling work in Python?"),
     ("Put the code in `try` and name the exception after `except`:\n\n```python\ntry:\n    value = int(text)\nexcept ValueError:\n    value = 0\n```\n\n`finally` runs in any case.",)),
    (("How do I define a class?", "Show me a simple class.", "What is a class in Python?"),
     ("A class bundles data and functions:\n\n```python\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def length(self):\n        return (self.x ** 2 + self.y ** 2) ** 0.5\n```\n\n`Point(3, 4).length()` is 5.0.",)),
    (("How do I reverse a string?", "Reverse a string in Python.", "Write a function that reverses a string."),
     ("A slice with step -1 does it:\n\n```python\ndef reverse(text):\n    return text[::-1]\n```",)),
    (("Write a function that adds two numbers.", "Write add(a, b).", "How do I write a function in Python?"),
     ("```python\ndef add(a, b):\n    \"\"\"Return the sum of a and b.\"\"\"\n    return a + b\n```",)),
    (("Write a function that computes the factorial of n.", "Factorial in Python?", "Write factorial(n)."),
     ("```python\ndef factorial(n):\n    \"\"\"Return n! for n >= 0.\"\"\"\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result\n```",)),
    (("Write a function for the Fibonacci numbers.", "Write fibonacci(n).", "How do I compute Fibonacci numbers?"),
     ("```python\ndef fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n```",)),
    (("Write a function that checks whether a number is prime.", "Write is_prime(n).", "How do I test for primes?"),
     ("```python\ndef is_prime(n):\n    \"\"\"Return whether n is a prime number.\"\"\"\n    if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n            return False\n    return True\n```",)),
    (("How do I count words in a text?", "Write a function that counts words.", "Count how often each word occurs."),
     ("`collections.Counter` counts them:\n\n```python\nfrom collections import Counter\n\ndef count_words(text):\n    return Counter(text.lower().split())\n```",)),
    (("What is a virtual environment?", "Why do I need a virtual environment?", "How do I make a virtual environment?"),
     ("A virtual environment is a folder with its own packages, so that projects do not disturb each other. Make one with `python -m venv .venv` and activate it before you install packages.",)),
    (("How do I install a package?", "How does pip work?", "What is pip?"),
     ("`pip` installs packages from the Python Package Index: `python -m pip install requests`. Use a virtual environment, so that the packages of a project stay together.",)),
    (("What does `self` mean?", "What is self in Python?"),
     ("`self` is the object that a method was called on. Python passes it as the first argument, so `point.length()` calls `Point.length(point)`.",)),
    (("How do I parse JSON?", "Read a JSON file in Python.", "How do I use the json module?"),
     ("Use the `json` module:\n\n```python\nimport json\n\nwith open(\"data.json\", encoding=\"utf-8\") as f:\n    data = json.load(f)\n```\n\n`json.loads` does the same for a string.",)),
    (("How do I write a test?", "How do I test my function?", "What is pytest?"),
     ("`pytest` runs functions whose names start with `test_`:\n\n```python\ndef test_add():\n    assert add(2, 3) == 5\n```\n\nRun it with `pytest` in the folder of the tests.",)),
    (("What is the difference between == and is?", "What does `is` do?"),
     ("`==` compares values, `is` asks whether both are the same object. Use `is` only for `None`, `True` and `False`.",)),
    (("What are *args and **kwargs?", "Explain *args.", "What does **kwargs mean?"),
     ("`*args` collects further positional arguments in a tuple, `**kwargs` collects keyword arguments in a dictionary:\n\n```python\ndef show(*args, **kwargs):\n    print(args, kwargs)\n```",)),
    (("What is recursion?", "Explain recursion."),
     ("A recursive function calls itself on a smaller problem until the answer is plain:\n\n```python\ndef total(items):\n    if not items:\n        return 0\n    return items[0] + total(items[1:])\n```",)),
    (("How do I loop over a dictionary?", "Loop over keys and values."),
     ("Use `items`:\n\n```python\nfor key, value in table.items():\n    print(key, value)\n```",)),
    (("How do I format a string?", "What is an f-string?", "Explain f-strings."),
     ("An f-string evaluates what stands in braces: `f\"{name} is {age} years old\"`. After a colon comes a format, as in `f\"{price:.2f}\"`.",)),
    (("How do I get the length of a list?", "What does len do?"),
     ("`len(items)` returns the number of items. It works for lists, strings, dictionaries and all other containers.",)),
    (("What is a lambda?", "Explain lambda functions."),
     ("A lambda is a small function without a name: `lambda x: x + 1`. It is handy as a `key`, as in `sorted(pairs, key=lambda pair: pair[1])`.",)),
    (("How do I use a set?", "What is a set in Python?", "How do I remove duplicates from a list?"),
     ("A set holds each value once: `set(items)` removes duplicates. `a & b` is what both have, `a | b` what either has. To keep the order, use `list(dict.fromkeys(items))`.",)),
    (("What is a context manager?", "What does `with` do?", "Explain the with statement."),
     ("`with` runs code between a start and an end that always happens, even after an exception. `with open(path) as f:` closes the file at the end. A class becomes a context manager with `__enter__` and `__exit__`.",)),
    (("What is asyncio?", "Explain async and await."),
     ("`asyncio` runs many waiting tasks in one thread. A function with `async def` can `await` others:\n\n```python\nimport asyncio\n\nasync def main():\n    await asyncio.sleep(1)\n    print(\"done\")\n\nasyncio.run(main())\n```",)),
    (("How do I find the maximum of a list?", "Write a function that returns the largest element."),
     ("`max(items)` returns it. Written by hand:\n\n```python\ndef largest(items):\n    best = items[0]\n    for item in items[1:]:\n        if item > best:\n            best = item\n    return best\n```",)),
)  # fmt: skip


def _pair(rng: random.Random, first: tuple[str, ...], more: tuple[str, ...]) -> str:
    return " ".join([rng.choice(first), *rng.sample(more, rng.choice((0, 1, 1, 2)))])


def exchange(rng: random.Random) -> list[tuple[str, str]]:
    """One to three questions with answers."""
    out = []
    if rng.random() < 0.25:
        out.append((rng.choice(GREETINGS), rng.choice(GREETING_ANSWERS)))
    kind = rng.random()
    if kind < 0.16:
        out.append((rng.choice(WHO), _pair(rng, WHO_FIRST, WHO_MORE)))
    elif kind < 0.30:
        out.append((rng.choice(CAN), _pair(rng, CAN_FIRST, CAN_MORE)))
    elif kind < 0.40:
        out.append((rng.choice(LIMITS), _pair(rng, LIMIT_FIRST, LIMIT_MORE)))
    elif kind < 0.48:
        out.append((rng.choice(TANDEM), _pair(rng, TANDEM_FIRST, TANDEM_MORE)))
    elif kind < 0.53:
        out.append((rng.choice(HOW), rng.choice(HOW_ANSWERS)))
    else:
        questions, answers = rng.choice(BASICS)
        out.append((rng.choice(questions), rng.choice(answers)))
    if rng.random() < 0.12:
        out.append((rng.choice(THANKS), rng.choice(THANKS_ANSWERS)))
    if rng.random() < 0.06:
        out.append((rng.choice(BYE), rng.choice(BYE_ANSWERS)))
    return out


def _tool(name: str, description: str, **parameters: str) -> dict:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "read_file": _tool("read_file", "Read a text file.", path="path of the file"),
    "list_files": _tool("list_files", "List the files in a folder.", path="path of the folder"),
    "search": _tool("search", "Search the project for a text.", query="text to look for"),
    "run_tests": _tool("run_tests", "Run the tests of a file.", path="path of the test file"),
    "get_weather": _tool("get_weather", "Get the weather of a city.", city="name of the city"),
    "get_time": _tool("get_time", "Get the current time of a city.", city="name of the city"),
    "calculate": _tool("calculate", "Evaluate an arithmetic expression.", expression="the expression"),
    "run_python": _tool("run_python", "Run Python code and return its output.", code="the code"),
}
CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Vienna", "Tokyo", "Nairobi", "Quito", "Berlin", "Madrid", "Rome", "Delhi")
SKIES = ("sunny", "cloudy", "rainy", "windy", "clear", "foggy")


def _tool_case(rng: random.Random, path: str, name: str, source: str, summary: str) -> tuple[str, str, dict, str, str]:
    """(request, tool, arguments, tool's answer, closing sentence)."""
    city, folder = rng.choice(CITIES), path.rpartition("/")[0] or "."
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    warm, sky = rng.randint(-5, 35), rng.choice(SKIES)
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    passed = rng.randint(1, 30)
    text = source if len(source) < 1500 else source[:1500]
    cases = (
        (rng.choice((f"What is in {path}?", f"Read {path} and tell me what it does.", f"Look at {path}.")), "read_file",
         {"path": path}, text, f"`{path}` holds the function `{name}`. {summary}"),
        (rng.choice((f"Which files are in {folder}?", f"List the files in {folder}.")), "list_files", {"path": folder},
         f"{path}\n{folder}/__init__.py", f"There are two files: `{path}` and `{folder}/__init__.py`."),
        (rng.choice((f"Where is `{name}` defined?", f"Find {name} in the project.", f"Search for {name}.")), "search",
         {"query": name}, f"{path}: def {name}(", f"`{name}` is defined in `{path}`."),
        (rng.choice(("Run the tests.", f"Do the tests of {name} pass?", f"Run the tests in tests/test_{name}.py.")), "run_tests",
         {"path": f"tests/test_{name}.py"}, f"{passed} passed", f"All {passed} tests pass."),
        (rng.choice((f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Is it warm in {city}?")),
         "get_weather", {"city": city}, f'{{"temperature": {warm}, "sky": "{sky}"}}', f"It is {sky} in {city}, {warm} degrees."),
        (rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}.")), "get_time", {"city": city}, clock,
         f"It is {clock} in {city}."),
        (rng.choice((f"What is {a} times {b}?", f"Compute {a} * {b}.", f"How much is {a} * {b}?")), "calculate",
         {"expression": f"{a} * {b}"}, str(a * b), f"{a} times {b} is {a * b}."),
        (rng.choice((f"Run print({a} + {b}).", f"What does `print({a} + {b})` print?")), "run_python",
         {"code": f"print({a} + {b})"}, str(a + b), f"It prints {a + b}."),
    )  # fmt: skip
    return rng.choice(cases)


def tool_conversation(rng: random.Random, path: str, name: str, source: str, summary: str) -> dict:
    """A request with tools offered, the call, the tool's answer, and the reply."""
    request, tool, arguments, result, reply = _tool_case(rng, path, name, source, summary)
    offered = {tool, *rng.sample(sorted(TOOLS), rng.randint(0, 3))}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]}
    if rng.random() < 0.3:
        call["reasoning_content"] = f"I need `{tool}` for this."
    messages = [{"role": "user", "content": request}, call, {"role": "tool", "content": result}, {"role": "assistant", "content": reply}]
    return {"messages": messages, "tools": [TOOLS[key] for key in sorted(offered, key=lambda key: (rng.random(), key))]}
