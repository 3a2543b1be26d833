"""The program of a tool's child process: isolates itself, then runs the job from its first line of stdin.

Run as a script by `sandbox.py` with an isolated interpreter. It imports only the standard library, because it
is started for every piece of code. It is one file, because that interpreter has no path to a second one, and the job
must not find one either. With `isolation = "namespaces"` the job sees the interpreter, the system
libraries, the folders it was given (all read-only) and an empty /tmp: no network, no other process, no home,
no environment.

    A  started by us; writes B's id maps, watches   ─┐ one process group: killing it kills C,
    └─ B  new user, mount, net, pid, ipc namespaces  │ and with C everything in its pid namespace
       └─ C  process 1 of the pid namespace         ─┘
          └─ D  no privileges, resource limits: runs the job

With `isolation = "none"` there are only A and D. Both are sub-reapers (Linux): orphaned processes of the job,
in any session, are reparented to them. D kills those of each call; A kills the rest when D or the trainer's
side ends.

A also bounds the memory of all processes of the job together: a limit of the kernel counts each process alone.
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
import struct
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
LOOK_SECONDS = 0.1
"""How often the memory of a job is looked at."""
NEW_ANY = NEW_NAMESPACES | NEW_USER | 0x2000000  # and cgroup
DENIED = {
    # memfd_create, memfd_secret, shmget: memory that no process has to map; unshare, setns, mount, umount2, pivot_root,
    # open_tree, move_mount, fsopen, fsmount: namespaces; keyctl, add_key, request_key; ptrace, bpf, perf_event_open,
    # userfaultfd, io_uring_setup
    "x86_64": (319, 447, 29, 272, 308, 165, 166, 155, 428, 429, 430, 432, 250, 248, 249, 101, 321, 298, 323, 425),
    "aarch64": (279, 447, 194, 97, 268, 40, 39, 41, 428, 429, 430, 432, 219, 217, 218, 117, 280, 241, 282, 425),
}  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
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


def enter_namespaces(visible: list[str], *, trusted: bool, memory: int) -> None:
    """Returns in process D; the processes above it never return."""
    unshared, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(unshared[1])
        if os.read(unshared[0], 1):
            write_id_maps(child)
            os.write(mapped[1], b"!")
        os._exit(exit_code_within(memory, child, tells=not trusted))
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


def supervise(memory: int, *, tells: bool) -> None:
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
        code = exit_code_within(memory, child, tells=tells)
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


def exit_code_within(most: int, child: int, *, tells: bool) -> int:
    """The same, and kills the job when all its processes together use more than `most` bytes; 0: no bound.

    `tells`: the reason is written to the job's output."""
    if not most or sys.platform != "linux":
        return exit_code_of(child)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status) % 256
        if (
            pid == 0
            and signal.sigtimedwait([signal.SIGCHLD], LOOK_SECONDS) is None
            and memory_used(most) > most
        ):
            if tells:
                os.write(
                    1,
                    f"\nall processes of the code together used more than {most >> 20} MB of memory".encode(),
                )
            os.kill(child, signal.SIGKILL)


def memory_used(most: int) -> int:
    """Bytes of all descendants together. Pages that they share count once, if that decides about `most`."""
    family = descendants_by_children(os.getpid())
    resident = 0
    for pid in family:
        with suppress(OSError), open(f"/proc/{pid}/statm") as file:
            resident += int(file.read().split()[1]) * resource.getpagesize()
    if resident <= most:
        return resident
    shared_once = 0
    for pid in family:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
            shared_once += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return shared_once or resident


def descendants_by_children(pid: int) -> list[int]:
    """As `descendants`, without a look at every process of the machine."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):  # gone meanwhile
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                waiting += children
    return found


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
    deny_calls()
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


def deny_calls() -> None:
    """Denies, for this process and all it starts, calls that a job does not need and that reach beyond its limits
    (`DENIED`), with a seccomp filter; new namespaces by `clone` too. Needs `no new privileges`."""
    machine = platform.machine()
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, ARCHITECTURE[machine]), (answer, 0, 0, refuse),  # another architecture's calls
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse),
        (equal, 0, 1, CLONE3), (answer, 0, 0, unknown),  # its flags are in memory; libc then uses clone
        (equal, 0, 4, CLONE[machine]), (load, 0, 0, 16), (any_bit, 0, 1, NEW_ANY), (answer, 0, 0, refuse), (answer, 0, 0, allow),
    ]  # fmt: skip
    for number in DENIED[machine]:
        steps += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    steps.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    try:
        call("prctl", 22, 2, ctypes.byref(program), 0, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):  # a kernel without seccomp filters
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
    trusted, memory = job["kind"] == "serve", request.get("memory", 0)
    if request["isolation"] == "namespaces":
        enter_namespaces(request["visible"], trusted=trusted, memory=memory)
    else:
        supervise(memory, tells=not trusted)
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
