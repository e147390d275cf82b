"""Renders chat templates, which are untrusted programs, in a process with limited time and memory.

Jinja's sandbox keeps a template from files and modules, but not from endless loops or texts of many gigabytes. This
file is therefore also a program, `python rendering.py`, which answers each line of JSON on stdin by a line on stdout.
The kernel ends it if a template exceeds its seconds of CPU time, and refuses it more than MEMORY_BYTES.
"""

import atexit
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import meta, nodes
from jinja2.environment import Template
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode's noncharacters "for internal use", around the text of `{% generation %}`
TODAY = datetime(2026, 1, 1)  # for `strftime_now`, so that a batch depends only on the seed and the step
SECONDS = 10.0  # CPU time to compile and render a template once; real templates take milliseconds
MEMORY_BYTES = 1 << 30
MOST_CHARACTERS = 1 << 24  # length of a rendered conversation


class Renderer:
    """Renders in a child process. It starts with the first template, and again after a template has ended it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id, because a forked process must not share the pipes of its parent

    def undeclared(self, source: str) -> set[str]:
        """Returns the variables that a template expects. ValueError if it is not a template."""
        return set(self._ask(source, None))

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Returns the rendered template. ValueError if it fails or exceeds a limit."""
        return self._ask(source, variables)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process and self._owner == os.getpid():
            process.communicate()

    def _ask(self, source: str, variables: Mapping[str, Any] | None) -> Any:
        request = {"source": source, "variables": variables, "seconds": self._seconds}
        with self._lock:
            process = self._running()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            if not line.endswith(b"\n"):
                self._process = None
                process.kill()
                process.communicate()
                is_late = process.returncode == -signal.SIGPROF
                why = f"takes more than {self._seconds:g} s" if is_late else f"ends Python ({process.returncode})"
                raise ValueError(f"it {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the child process, and starts it if it is not running."""
        if self._process is None or self._owner != os.getpid():
            # -P: modules in this folder, such as `tokenizers`, have the same names as packages
            command = [sys.executable, "-P", __file__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._owner = os.getpid()
            atexit.register(self.close)
        return self._process


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: puts marks around the rendered text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that transformers gives to a template, with TODAY as the date."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """Returns JSON without HTML escapes, unlike Jinja's filter of the same name."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _answer(source: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the result or the error of a request."""
    try:
        template = _compiled(source)
        if variables is None:
            return {"result": sorted(meta.find_undeclared_variables(_environment().parse(source)))}
        text = template.render(variables)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # a template can raise any exception
        return {"error": str(error)[:1000] or type(error).__name__}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it makes a text of {len(text)} characters"}
    return {"result": text}


def _serve() -> None:
    """Answers requests until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF then ends the process, even inside C code
        answer = json.dumps(_answer(request["source"], request["variables"])).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
