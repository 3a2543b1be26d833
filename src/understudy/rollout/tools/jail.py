"""The program of a tool's child process: isolates itself, then runs the job from its first line of stdin.

Run as a script by `sandbox.py` with an isolated interpreter. It imports only the standard library, because it
is started for every piece of code. With `isolation = "namespaces"` the job sees the interpreter, the system
libraries, the folders it was given (all read-only) and an empty /tmp: no network, no other process, no home,
no environment.

    A  started by us; writes B's id maps, waits     ─┐ one process group: killing it kills C,
    └─ B  new user, mount, net, pid, ipc namespaces  │ and with C everything in its pid namespace
       └─ C  process 1 of the pid namespace         ─┘
          └─ D  no privileges, resource limits: runs the job

With `isolation = "none"` there are only A and D. Both are sub-reapers (Linux): orphaned processes of the job,
in any session, are reparented to them. D kills those of each call; A kills the rest when D or the trainer's
side ends.
"""

import ast
import ctypes
import errno
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
"""Mount flags that an unprivileged remount must keep: statvfs value → mount value."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
KEYCTL = {"x86_64": 250, "aarch64": 219}
JOIN_SESSION_KEYRING = 1
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
    """Calls a C function that returns −1 on failure; raises `OSError`."""
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
    """Returns in process D; A kills what D leaves behind. Does nothing outside Linux."""
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
    """All descendants of this process: pid → whether it is alive; False for zombies."""
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
    """Kills all descendants except `kept`, also those started meanwhile, for at most END_SECONDS."""
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
                # A process that ended during the scan may have started another that the scan missed.
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
    """Maps our own id, and the unprivileged id 65534 if we are root: resource limits do not apply to real
    root."""
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
    """Waits for `child`, reaping all other children that end meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) % 256


def build_root(visible: list[str]) -> None:
    """Builds a new root in memory with read-only mounts of what the job may see, and a writable /tmp."""
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
    """Drops capabilities and the user id. A trusted function keeps the user id: its module may be readable to
    it only."""
    call("prctl", 38, 1, 0, 0, 0)  # no new privileges by exec
    leave_keyring()
    if not trusted:
        with suppress(OSError):  # id 65534 is not mapped: keep our id, without capabilities
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def leave_keyring() -> None:
    """Replaces the launcher's session keyring, which may hold Kerberos tickets, by an empty one."""
    try:
        call("syscall", KEYCTL[platform.machine()], JOIN_SESSION_KEYRING, None)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # no keyrings here, or none that we may read
            raise


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


_VALUE = "value of the last expression"
"""The variable that holds it; no code can use a name with blanks."""


def run_python(code: str, paths: list[str]) -> None:
    """Runs code like a notebook cell: the value of a final expression is printed."""
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
    """Serves one function: a line of JSON arguments in, a line of JSON answer out, until stdin closes. With
    `reaps`, processes that a call left running are killed before its answer is sent."""
    answers = os.fdopen(os.dup(1), "w")
    for noisy in (1, 2):  # the function's own prints are discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), noisy)
    try:
        function = load_function(name, paths)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=answers, flush=True)
        raise SystemExit(1) from None
    own = frozenset(descendants()) if reaps else frozenset()  # started by the module's import
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
    """The traceback lines in the job's own code, and the error; no frames of this file."""
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
