"""Tools run in sandboxed processes: isolation, deadlines, and no process left behind."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from understudy.errors import ConfigError
from understudy.rollout.tools import sandbox as sandbox_module
from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.rollout.tools.calculator import calculator
from understudy.rollout.tools.library import build_tool, misfit, schema_of
from understudy.rollout.tools.sandbox import Isolation, Sandbox, namespace_problem
from understudy.rollout.tools.workers import FunctionWorkers

needs_namespaces = pytest.mark.skipif(
    bool(namespace_problem()), reason=f"no namespaces here: {namespace_problem()}"
)
ISOLATIONS = [pytest.param(Isolation.NAMESPACES, marks=needs_namespaces), Isolation.NONE]


def run(
    code: str, *, isolation: Isolation = Isolation.NAMESPACES, deadline_s: float = 20.0, **settings: Any
) -> ToolResult:
    return asyncio.run(Sandbox(isolation, **settings).run_code(code, deadline_s=deadline_s))


def jailed_processes() -> list[int]:
    processes = psutil.process_iter(["cmdline"])
    return [
        process.pid
        for process in processes
        if any("jail.py" in part for part in process.info["cmdline"] or ())
    ]


@pytest.fixture(autouse=True)
def assert_no_jailed_process_is_left() -> Any:
    before = set(jailed_processes())
    yield
    deadline = time.monotonic() + 5
    while left := set(jailed_processes()) - before:
        assert time.monotonic() < deadline, f"processes left behind: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_code_runs_like_a_notebook_cell(isolation: Isolation) -> None:
    result = run("x = 20\nprint('so')\nx * 2 + 2", isolation=isolation)
    assert (result.outcome, result.text) == (ToolOutcome.OK, "so\n42")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "line 1\nZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("input()", "EOFError"),
        ("x = 'a' * (1 << 31)", "MemoryError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code"),
    ],
)
def test_code_that_fails_returns_the_error_as_text(code: str, says: str) -> None:
    result = run(code, isolation=Isolation.NONE)
    assert result.outcome is ToolOutcome.ERROR and says in result.text


@needs_namespaces
def test_isolated_code_sees_no_network_files_processes_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("token")
    monkeypatch.setenv("API_TOKEN", "token")
    result = run(
        f"""
import os, socket
found = []
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError as error:
    found.append(error.errno in (101, 111))
try:
    open({str(secret)!r})
except OSError:
    found.append(True)
try:
    open({str(Path(sandbox_module.__file__))!r})
except OSError:
    found.append(True)
try:
    open("/usr/planted", "w")
except OSError:
    found.append(True)
try:
    os.kill({os.getpid()}, 0)
except OSError:
    found.append(True)
found.append("API_TOKEN" not in os.environ)
found.append(not os.path.exists("/proc/1/environ"))
open("/tmp/own", "w").write("ok")
found.append(open("/tmp/own").read() == "ok")
print(found)
"""
    )
    assert result.text == str([True] * 8)


KEYRING = """
import asyncio, ctypes, platform
from understudy.rollout.tools.sandbox import Isolation, Sandbox

ADD, CONTROL = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(CONTROL, 1, None) == -1:  # join a session keyring of our own
    raise SystemExit("no keyrings here")
key = libc.syscall(ADD, b"user", b"ticket", b"top-secret", 10, -3)
if key == -1:
    raise SystemExit("no keyrings here")
code = f'''
import ctypes
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(64)
found = libc.syscall({CONTROL}, 10, -3, b"user", b"ticket", 0)
read = libc.syscall({CONTROL}, 11, {key}, buffer, 64)
print(found, b"top-secret" in buffer.raw)
'''
print(asyncio.run(Sandbox(Isolation.NAMESPACES).run_code(code, deadline_s=20)).text)
"""


@needs_namespaces
def test_isolated_code_cannot_read_the_launchers_kernel_keyring() -> None:
    """Runs in a separate process, because the session keyring of the launcher is replaced."""
    done = subprocess.run(
        [sys.executable, "-c", KEYRING], capture_output=True, text=True, timeout=60, check=False
    )
    if "no keyrings here" in done.stderr:
        pytest.skip("this kernel has no keyrings")
    assert done.stdout.strip() == "-1 False", done.stdout + done.stderr


@needs_namespaces
def test_isolated_code_cannot_reach_a_server_on_the_hosts_loopback() -> None:
    """So it cannot reach the run's own servers on 127.0.0.1, such as a teacher or an engine."""

    async def body() -> ToolResult:
        async def serve(reader: Any, writer: Any) -> None:
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await Sandbox().run_code(
                f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)", deadline_s=20
            )

    result = asyncio.run(body())
    assert result.outcome is ToolOutcome.ERROR and "OSError" in result.text


HANGS = {
    "sleeps": "import time; time.sleep(1000)",
    "spins": "while True: pass",
    "ignores signals": "import signal, time\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\ntime.sleep(1000)",
    "forks away": "import os, time\nos.setsid()\nfor _ in range(3):\n  if os.fork() == 0:\n    os.setsid(); time.sleep(1000)\ntime.sleep(1000)",
}


@needs_namespaces
@pytest.mark.parametrize("name", HANGS)
def test_the_deadline_kills_code_that_sleeps_spins_ignores_signals_or_forks(name: str) -> None:
    start = time.monotonic()
    result = run(HANGS[name], deadline_s=1.0)
    assert result.outcome is ToolOutcome.TIMEOUT and "1 s" in result.text
    assert time.monotonic() - start < 6


@needs_namespaces
def test_a_fork_bomb_fails_at_the_process_limit() -> None:
    result = run(
        "import os\nfor _ in range(200):\n  if os.fork() == 0:\n    import time; time.sleep(1000)",
        deadline_s=10,
    )
    assert result.outcome is ToolOutcome.ERROR and "BlockingIOError" in result.text


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_endless_output_is_truncated_without_filling_memory(isolation: Isolation) -> None:
    before = psutil.Process().memory_info().rss
    result = run("while True: print('x' * 100000)", isolation=isolation, output_bytes=5000)
    assert result.text.endswith("(cut off)") and len(result.text) < 5100
    assert psutil.Process().memory_info().rss - before < 50 << 20


def test_a_cancelled_call_leaves_no_process() -> None:
    async def body() -> None:
        task = asyncio.create_task(
            Sandbox(Isolation.NONE).run_code("import time; time.sleep(1000)", deadline_s=100)
        )
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())


def test_a_sandbox_without_working_namespaces_is_refused_unless_isolation_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_module, "namespace_problem", lambda: "unshare: Operation not permitted")
    with pytest.raises(ConfigError, match=r'unshare: Operation not permitted.*isolation = "none"'):
        Sandbox()
    Sandbox(Isolation.NONE)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12 * (3 + 4)", "84"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("10 ** 30", str(10**30)),
    ],
)
def test_calculator_evaluates_expressions(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "__import__('os')",
        "(1).real",
        "1 +",
        "'a' * 3",
        "1" * 501,
        "[1]",
        "10 ** 2000",
        "True + 1",
        "(-8) ** 0.5",
    ],
)
def test_calculator_refuses_unsafe_or_invalid_expressions(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(expression)


def with_tool(
    name: str, use: Callable[[Any], Awaitable[None]], isolation: Isolation = Isolation.NONE
) -> None:
    async def body() -> None:
        tool = build_tool(name, Sandbox(isolation))
        try:
            await use(tool)
        finally:
            await tool.close()

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_calculator_tool_serves_concurrent_calls_with_a_bounded_number_of_processes(
    isolation: Isolation,
) -> None:
    async def use(tool: Any) -> None:
        results = await asyncio.gather(
            *(tool.call({"expression": f"{i} * 2"}, deadline_s=20) for i in range(20))
        )
        assert [result.text for result in results] == [str(2 * i) for i in range(20)]
        wrong = await tool.call({"expression": "1 / 0"}, deadline_s=20)
        assert wrong.outcome is ToolOutcome.ERROR and "ZeroDivisionError" in wrong.text
        assert len(jailed_processes()) <= 4 * max(2, os.cpu_count() or 2), "calls must share processes"

    with_tool("calculator", use, isolation)


USER_MODULE = '''
import os, time, ctypes
calls = []

def lookup(city: str, days: int = 1) -> dict:
    """Weather of a city."""
    print("noise that is not an answer")
    os.write(1, b"more noise")
    os.write(2, b"and a warning")
    calls.append(city)
    if city == "nowhere":
        raise KeyError(city)
    if city == "slow":
        time.sleep(1000)
    if city == "crash":
        os._exit(1)
    return {"city": city, "days": days, "calls": len(calls)}
'''


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_users_function_becomes_a_tool_with_schema_deadline_and_argument_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: Isolation
) -> None:
    (tmp_path / "weather_tool.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def use(tool: Any) -> None:
        assert tool.schema["function"] == {
            "name": "lookup",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        }
        first = await tool.call({"city": "Ulm", "days": 2}, deadline_s=20)
        assert first.text == '{"city": "Ulm", "days": 2, "calls": 1}'
        raised = await tool.call({"city": "nowhere"}, deadline_s=20)
        assert (raised.outcome, raised.text) == (ToolOutcome.ERROR, "KeyError: 'nowhere'")
        slow = await tool.call({"city": "slow"}, deadline_s=0.5)
        assert slow.outcome is ToolOutcome.TIMEOUT
        crashed = await tool.call({"city": "crash"}, deadline_s=20)
        assert (crashed.outcome, crashed.text) == (ToolOutcome.ERROR, "the tool's process died")
        assert (await tool.call({"city": "Ulm"}, deadline_s=20)).outcome is ToolOutcome.OK
        for arguments, says in (
            ({"town": "Ulm"}, "no argument 'town'"),
            ({}, "needs the argument 'city'"),
            ({"city": 3}, "type string"),
            ({"city": "a", "days": True}, "type integer"),
        ):
            assert says in (await tool.call(arguments, deadline_s=20)).text

    with_tool("weather_tool:lookup", use, isolation)


def test_a_tool_that_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(Isolation.NONE)
    for name, says in (
        ("abacus", "calculator, python"),
        ("math:pi", "float"),
        ("no.such:tool", "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_tool(name, sandbox)
    workers = FunctionWorkers(sandbox, "no_such_module:f", [], 1)
    with pytest.raises(ConfigError, match=r"no_such_module:f.*ModuleNotFoundError"):
        asyncio.run(workers.call({}, deadline_s=20))


def test_tool_worker_processes_end_when_the_process_that_started_them_exits() -> None:
    code = """
import asyncio, os
from understudy.rollout.tools.library import build_tool
from understudy.rollout.tools.sandbox import Sandbox, Isolation
async def main():
    tool = build_tool("calculator", Sandbox(Isolation.NONE))
    print((await tool.call({"expression": "1+1"}, deadline_s=20)).text, flush=True)
    os._exit(9)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("2\n", 9)


def test_schema_of_handles_lists_optionals_and_defaults_and_refuses_variadic_arguments() -> None:
    def search(words: list[str], limit: int | None = None, exact: bool = False, score: float = 0.5) -> str:
        return ""

    schema = schema_of(search)
    parameters = schema["function"]["parameters"]
    assert parameters["properties"]["words"] == {"type": "array", "items": {"type": "string"}}
    assert parameters["properties"]["limit"] == {"type": "integer"} and parameters["required"] == ["words"]
    assert misfit(schema, {"words": ["a"], "score": 1}) == ""

    def variadic(*words: str) -> str:
        return ""

    with pytest.raises(ConfigError, match="words"):
        schema_of(variadic)


LEAVES_A_CHILD = """
import os
def leave(name: str, wait: float = 0.0) -> str:
    "Leaves a process in a session of its own behind."
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", [name, "777"])
        os._exit(0)
    import time
    time.sleep(wait)
    return "left"
"""


def sleepers(name: str) -> list[int]:
    found = psutil.process_iter(["cmdline", "status"])
    alive = [one for one in found if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [one.pid for one in alive if (one.info["cmdline"] or [""])[0] == name]


def none_left(name: str) -> bool:
    deadline = time.monotonic() + 5
    while sleepers(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("wait", ["0", "60"])
def test_a_daemonized_child_of_python_code_is_killed_when_the_code_ends_or_times_out(
    isolation: Isolation, wait: str
) -> None:
    name = f"left-by-code-{os.getpid()}-{wait}"
    deadline_s = 20.0 if wait == "0" else 1.5
    result = run(f"{LEAVES_A_CHILD}\nleave({name!r}, {wait})", isolation=isolation, deadline_s=deadline_s)
    assert result.outcome is (ToolOutcome.OK if wait == "0" else ToolOutcome.TIMEOUT), result.text
    assert none_left(name)


def test_a_daemonized_child_of_a_tool_function_is_killed_when_the_call_ends_or_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving_tool.py").write_text(LEAVES_A_CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"left-by-tool-{os.getpid()}"

    async def use(tool: Any) -> None:
        for _ in range(2):
            result = await tool.call({"name": name}, deadline_s=20.0)
            assert (result.outcome, result.text) == (ToolOutcome.OK, "left")
            assert none_left(name), "the child outlived its call"
        assert jailed_processes()
        result = await tool.call({"name": name, "wait": 60.0}, deadline_s=1.0)
        assert result.outcome is ToolOutcome.TIMEOUT and none_left(name)

    with_tool("leaving_tool:leave", use, Isolation.NONE)


def test_processes_started_by_a_tool_do_not_outlive_a_killed_run() -> None:
    name = f"left-by-a-run-{os.getpid()}"
    program = (
        "import asyncio; from understudy.rollout.tools.sandbox import Isolation, Sandbox\n"
        f"code = {f'{LEAVES_A_CHILD}leave({name!r}, 60)'!r}\n"
        "asyncio.run(Sandbox(Isolation.NONE).run_code(code, deadline_s=60.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 30
    while not sleepers(name):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert none_left(name)
