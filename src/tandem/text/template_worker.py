"""The program that renders chat templates, run as a child with limits: a template comes from strangers.

In: limits and import folders as arguments; on stdin one request a line, JSON. Out, on stdout: one line of JSON each,
`text` or `error`. It imports nothing of Tandem and ends with its stdin; the kernel kills it when it runs too long.
"""

import json
import resource
import signal
import sys
from datetime import datetime

# The parent hands over where Jinja2 lives; everything else that this process could import stays out of reach.
sys.path[1:1] = sys.argv[4:]

from jinja2 import TemplateError, nodes  # noqa: E402
from jinja2.exceptions import SecurityError  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402
from jinja2.utils import Namespace  # noqa: E402

MOST_TEMPLATES = 32  # compiled ones to keep


class OutputLimit(Exception):
    """The template wrote more characters than it may."""


class GenerationTag(Extension):
    """{% generation %} marks what an assistant wrote, for training; here only its content counts."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """namespace() that refuses names with a leading underscore, so that nothing internal can be reached through it."""

    def __init__(*args, **values):
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            PlainNamespace.check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        PlainNamespace.check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r}: names that begin with an underscore are not allowed")


def raise_exception(message):
    raise TemplateError(message)


def strftime_now(pattern):
    return datetime.now().strftime(pattern)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes <, > and & for HTML; models are trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=PlainNamespace)
    return environment


def render(template, values, output_limit):
    parts, length = [], 0
    for part in template.generate(values):
        length += len(part)
        if length > output_limit:
            raise OutputLimit(f"the template wrote more than {output_limit} characters")
        parts.append(part)
    return "".join(parts)


def answer(environment, templates, request, output_limit):
    """One reply: the text, or the error and whether a limit is the cause."""
    try:
        source = request["source"]
        if source not in templates:
            if len(templates) >= MOST_TEMPLATES:
                templates.clear()
            templates[source] = environment.from_string(source)
        return {"text": render(templates[source], request["values"], output_limit)}
    except MemoryError:
        return {"error": "the template needs more memory than it may use", "limit": True}
    except OutputLimit as error:
        return {"error": str(error), "limit": True}
    except RecursionError:
        return {"error": "the template nests too deeply", "limit": True}
    except Exception as error:  # whatever a template does wrong is its own; the parent turns this into TemplateError
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        return {"error": f"{type(error).__name__}: {error}{place}"[:2000]}


def write(reply):
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


def main(time_s, memory_bytes, output_limit):
    # Ctrl-C in the terminal is meant for the program that asked, not for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    environment, templates = make_environment(), {}
    write({"ready": True})
    for line in sys.stdin.buffer:
        # The default action of this timer's signal ends the process, even in the middle of one long operation.
        signal.setitimer(signal.ITIMER_PROF, time_s)
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        write(answer(environment, templates, request, output_limit))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
