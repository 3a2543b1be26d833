"""The program a tool's child process runs: lock the door, then do the job given on the first line of stdin.

Run as a script by `sandbox.py` with an isolated interpreter; it imports nothing but the standard library, because it
starts anew for every piece of code. With `isolation = "namespaces"` the job sees the interpreter, the system libraries, the
folders it was given (all read-only) and an empty /tmp: no network, no other process, no home, no environment.

    A  started by us; writes B's id maps, waits     ─┐ one process group: killing it kills C,
    └─ B  new user, mount, net, pid, ipc namespaces  │ and with C everything in its pid namespace
       └─ C  process 1 of the pid namespace         ─┘
          └─ D  no privileges, resource limits: runs the job

With `isolation = "none"` there are A and D alone. Both are sub-reapers (Linux): processes that the job started and left are
their children again, in whatever session they are. D ends those of each call, and A all that is left when D or our side ends.
"""

import ast
import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import cast

NEW_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, pid, net
NEW_USER = 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
KEPT_MOUNT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mount that only its owner may take away, as statvfs and as mount spell them."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534
CHILD_SUBREAPER = 36
END_SECONDS = 2.0
SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
)

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """A C function that answers −1 on failure."""
    if getattr(libc, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def enter_namespaces(visible: list[str], *, trusted: bool) -> None:
    """Returns in process D; the processes above it never return."""
    unshared, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(unshared[1])
        if os.read(unshared[0], 1):
            write_id_maps(child)
            os.write(mapped[1], b"!")
        os._exit(exit_code_of(child))
    die_with_parent()
    os.close(mapped[1])
    call("unshare", NEW_USER)
    os.write(unshared[1], b"!")
    if not os.read(mapped[0], 1):
        os._exit(70)
    for end in (unshared[0], unshared[1], mapped[0]):
        os.close(end)
    call("unshare", NEW_NAMESPACES)
    build_root(visible)
    for _ in range(2):  # C, then D
        child = os.fork()
        if child:
            os._exit(exit_code_of(child))
        die_with_parent()
    drop_privileges(trusted=trusted)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    call("prctl", 1, number, 0, 0, 0)


def supervise() -> None:
    """Returns in process D; A ends what D leaves behind. Nothing of it is there outside Linux."""
    if sys.platform != "linux":
        return

    def end(*_: object) -> None:
        end_descendants()
        os._exit(128 + signal.SIGTERM)

    call("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    child = os.fork()
    if child:
        code = exit_code_of(child)
        end_descendants()
        os._exit(code)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    call("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, bool]:
    """Everything this process started and what those started in turn; False for what only waits to be buried."""
    parents: dict[int, list[tuple[int, bool]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # gone meanwhile
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            parents.setdefault(int(parent), []).append((int(name), state != "Z"))
    found: dict[int, bool] = {}
    waiting = [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += [pid for pid, _ in children]
    return found


def end_descendants(kept: frozenset[int] = frozenset()) -> None:
    """Kills all of them but `kept`, and what they start meanwhile, for at most END_SECONDS."""
    if sys.platform != "linux" or not has_children():
        return
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        left = {pid: alive for pid, alive in descendants().items() if pid not in kept}
        again = any(left.values())
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                # One that ends while we look may have started another that we did not see.
                again |= os.waitpid(pid, os.WNOHANG)[0] == pid
        if not again:
            return
        time.sleep(0.002)


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def write_id_maps(pid: int) -> None:
    """Our own id, and nobody beside it where we may: limits do not bind the real root, they bind nobody."""
    own = f"{os.getuid()} {os.getuid()} 1", f"{os.getgid()} {os.getgid()} 1"
    both = [f"0 0 1\n{NOBODY} {NOBODY} 1"] * 2 if os.getuid() == 0 else own
    with open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("deny")
    for name, two, one in zip(("uid_map", "gid_map"), both, own, strict=True):
        try:
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(two)
        except PermissionError:
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(one)


def exit_code_of(child: int) -> int:
    """Waits for `child`, burying whatever else dies meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) % 256


def build_root(visible: list[str]) -> None:
    """A new root in memory that holds read-only views of what the job may see, and /tmp to write to."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    wanted: list[tuple[str, str | None, int]] = []
    for path in dict.fromkeys([*SYSTEM, sys.base_prefix, sys.prefix, *visible]):
        if os.path.islink(path) and path in SYSTEM:
            wanted.append((path, os.readlink(path), -1))
        elif os.path.exists(path) and not any(path.startswith(seen + "/") for seen, _, _ in wanted):
            wanted.append((path, None, os.open(path, os.O_PATH)))
    root = "/tmp"
    mount("tmpfs", root, "tmpfs", 0, "size=64m,mode=755")
    for path, link, descriptor in wanted:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if link is not None:
            os.symlink(link, target)
            continue
        source = f"/proc/self/fd/{descriptor}"
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        mount(source, target, "", MS_BIND | MS_REC)
        present = os.statvfs(target).f_flag
        kept = sum(flag for seen, flag in KEPT_MOUNT_FLAGS.items() if present & seen)
        mount("none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | kept)
        os.close(descriptor)
    os.makedirs(root + "/tmp", exist_ok=True)
    os.chmod(root + "/tmp", 0o1777)
    os.chdir(root)
    call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", 2)
    os.chdir("/tmp")


def drop_privileges(*, trusted: bool) -> None:
    """A trusted function keeps our user id, which may be the only one that can read its module."""
    call("prctl", 38, 1, 0, 0, 0)  # no new privileges by exec
    if not trusted:
        with suppress(OSError):  # nobody is not mapped: we stay who we are, without capabilities
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


_VALUE = "value of the last expression"
"""Its name among the code's own; no code can say a name with blanks."""


def run_python(code: str, paths: list[str]) -> None:
    """Like a notebook cell: the value of a last expression is printed."""
    tree = ast.parse(code, "<code>")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        kept = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([kept], last.value), last)
    sys.path[:0] = paths
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(tree, "<code>", "exec"), names)
    value = names.get(_VALUE) if isinstance(last, ast.Expr) else None
    if value is not None:
        print(repr(value))


def load_function(name: str, paths: list[str]) -> Callable[..., object]:
    sys.path[:0] = paths
    module, _, attribute = name.partition(":")
    function: object = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    return cast(Callable[..., object], function)


def serve(name: str, paths: list[str], *, reaps: bool) -> None:
    """Calls one function again and again: a line of arguments in, a line of answer out, until the line is cut. With `reaps`, what
    a call started and left running is ended before it is answered."""
    answers = os.fdopen(os.dup(1), "w")
    for noisy in (1, 2):  # what the function itself prints is not an answer
        os.dup2(os.open(os.devnull, os.O_WRONLY), noisy)
    try:
        function = load_function(name, paths)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=answers, flush=True)
        raise SystemExit(1) from None
    own = frozenset(descendants()) if reaps else frozenset()  # what the module started when it was imported
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            result = function(**json.loads(line))
            text = result if isinstance(result, str) else json.dumps(result, default=repr)
            answer = {"ok": True, "text": text}
        except Exception as error:
            answer = {"ok": False, "text": f"{type(error).__name__}: {error}"}
        if reaps:
            end_descendants(own)
        print(json.dumps(answer), file=answers, flush=True)


def error_text(error: BaseException) -> str:
    """The lines of the job's own code that led there, and the error; nothing of this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
    return (
        "".join(f"  line {frame.lineno}\n" for frame in frames)
        + "".join(traceback.format_exception_only(error)).strip()
    )


def main() -> None:
    request = json.loads(sys.stdin.readline())
    job = request["job"]
    if request["isolation"] == "namespaces":
        enter_namespaces(request["visible"], trusted=job["kind"] == "serve")
    else:
        supervise()
    set_limits(request["limits"])
    code = 0
    try:
        if job["kind"] == "python":
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run_python(job["code"], job["paths"])
        elif job["kind"] == "serve":
            reaps = sys.platform == "linux" and request["isolation"] == "none"
            serve(job["name"], job["paths"], reaps=reaps)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        print(error_text(error))
        code = 1
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
