"""What a process does to itself before it runs model-written code: namespaces, limits, rights, filters (Linux).

`rlcore.sandbox.child` runs as a script and imports this file from its own folder, so it imports only the standard
library, and little of it: each run pays for the imports. Every function raises OSError when the kernel refuses; its
message begins with the name of the layer ("seccomp: ...") that `rlcore.sandbox.isolation` may then leave out.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

LAYERS = ("namespaces", "own user", "landlock", "seccomp")
MACHINES = ("x86_64", "aarch64")
NOBODY = 65534
_UIDS = 0x60000000  # the first of 2**28 user ids for runs: all processes of such a user belong to one run
_NEWUSER = 0x10000000
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, pid, net
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_ATTR_RDONLY, _ATTR_NOSUID = 0x1, 0x2
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK = 442, 444
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, layer: str, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{layer}: {call}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int, layer: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), layer, f"prctl {option}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends. A change of user undoes it."""
    _prctl(_PR_SET_PDEATHSIG, 9, "processes")


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends."""
    _prctl(_PR_SET_SUBREAPER, 1, "processes")


def set_dumpable(value: bool) -> None:
    """Let other processes of the same user trace this one and open its memory, or not."""
    _prctl(_PR_SET_DUMPABLE, int(value), "processes")


# Namespaces


def enter_namespaces(with_user: bool) -> None:
    """Leave the host's mounts, network, IPC, host name and, for children, process ids; `with_user` needs no root."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_NAMESPACES | (_NEWUSER if with_user else 0)), "namespaces", "unshare")
    if with_user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {uid} 1"),
            ("gid_map", f"{NOBODY} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(result, "namespaces", f"mount {target}")


def _make_read_only(path: str) -> None:
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _check(result, "namespaces", f"mount_setattr {path}")


def enter_root(root: str, read_only: list[str], hidden: list[str], file_mb: int, uid: int) -> None:
    """Replace the file system by an empty one with `read_only` from the host and an own /tmp of `file_mb` MiB.

    `root` is any folder that holds none of the paths. Folders in `hidden`, below those in `read_only`, are empty.
    There is no /proc and no /sys. /tmp belongs to `uid`; nothing else can be written.
    """
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    _mount("sandbox", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in [*read_only, *(f"/dev/{name}" for name in _DEVICES)]:
        inside = root + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.close(os.open(inside, os.O_CREAT | os.O_RDONLY, 0o444))
        _mount(path, inside, "none", _MS_BIND | _MS_REC)
        if not path.startswith("/dev/"):
            _make_read_only(inside)
    for path in hidden:
        _mount("sandbox", root + path, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4k,mode=755")
        _make_read_only(root + path)
    os.mkdir(f"{root}/tmp")
    own = f"size={file_mb}m,nr_inodes=4096,mode=700,uid={uid},gid={uid}"
    _mount("sandbox", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, own)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "namespaces", "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "namespaces", "umount the host's files")
    attributes = struct.pack("QQQQ", _ATTR_RDONLY, 0, 0, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", 0, attributes, ctypes.c_size_t(32)), "namespaces", "close /")
    os.chdir("/tmp")


# Rights


def own_uid() -> int:
    """Return a random user id for one run, above those that systems give to users."""
    return _UIDS + int.from_bytes(os.urandom(4), "big") % 2**28


def become(uid: int) -> None:
    """Become that user, in a group of its number and no other. Only root can."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise OSError(error.errno, f"own user: {error.strerror}") from error


def give(folder: str, uid: int) -> None:
    """Make that user the owner of a folder. Only root can."""
    try:
        os.chown(folder, uid, uid)
    except OSError as error:
        raise OSError(error.errno, f"own user: {error.strerror}") from error


def drop_rights() -> None:
    """Give up all capabilities, now and for programs that are started."""
    for number in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break  # not root, or past the last one: nothing that the next two lines would not hold
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "rights")
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, nothing), "rights", "capset")


def limit(memory_mb: int, file_mb: int, cpu_seconds: int, processes: int | None) -> None:
    """Set the limits of this process and of those that it starts; `processes` are all of its user's, with threads."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_FSIZE: file_mb * 2**20,
        resource.RLIMIT_CPU: cpu_seconds,
    }
    if sys.platform == "linux":  # macOS refuses or ignores it
        wanted[resource.RLIMIT_AS] = memory_mb * 2**20
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        above = lowest + 1 if kind == resource.RLIMIT_CPU and lowest == value else lowest  # first SIGXCPU, then SIGKILL
        resource.setrlimit(kind, (lowest, above))


# Landlock: files without namespaces


def restrict_files(read_only: list[str], writable: list[str]) -> None:
    """Refuse all files but those under these paths, TCP, and signals to processes outside (as the kernel supports)."""
    abi = _check(_libc.syscall(_LANDLOCK, None, ctypes.c_size_t(0), 1), "landlock", "not supported")
    if abi < 3:
        raise OSError(f"landlock: version {abi} does not stop truncating a file; 3 (Linux 6.2) does")
    everything = 0x7FFF | (0x8000 if abi >= 5 else 0)
    of_files = 0b111 | (everything & 0xC000)
    rules = struct.pack("QQQ", everything, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _check(_libc.syscall(_LANDLOCK, rules, ctypes.c_size_t(size), 0), "landlock", "create")
    readable, devices = 0b1101, [f"/dev/{name}" for name in _DEVICES]
    for paths, rights in ((read_only, readable), (devices, 0b0110), (writable, everything)):
        for path in paths:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & of_files
            rule = struct.pack("=Qi", allowed, beneath)
            _check(_libc.syscall(_LANDLOCK + 1, ruleset, 1, rule, 0), "landlock", f"add {path}")
            os.close(beneath)
    _check(_libc.syscall(_LANDLOCK + 2, ruleset, 0), "landlock", "restrict")
    os.close(ruleset)


# Seccomp: system calls that Python code does not need

_REFUSED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "io_uring_setup": (425, 425),  # would open sockets past this filter
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "memfd_create": (319, 279),  # files that no limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # these three outlive their process
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_CLONE, _CLONE3, _PRLIMIT, _PIDFD_SIGNAL = (56, 220), (435, 435), (302, 261), (424, 424)
_ARCHITECTURE = (0xC000003E, 0xC00000B7)
_LOAD, _EQUAL, _ATLEAST, _ANYBIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16


def filter_calls(only_own_signals: bool) -> None:
    """Refuse sockets, tracing, namespaces and other system calls, here and in all descendants.

    `only_own_signals`: this process can signal itself and nobody else; for runs with the user's own rights, whose
    `kill(-1)` would reach every process of the user.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"seccomp: no system call numbers for {machine}; there are some for {', '.join(MACHINES)}")
    column = MACHINES.index(machine)
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[column]),
        (_RETURN, 0, 0, _EPERM),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NUMBER_AT),
        (_ATLEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _EPERM),  # x32 calls too
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _ENOSYS),  # its flags are behind a pointer; the C library then uses clone
    ]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    conditions = [(_CLONE[column], _ANYBIT, _NEWUSER, False), (_PRLIMIT[column], _EQUAL, 0, True)]
    if only_own_signals:
        refused.append(_PIDFD_SIGNAL[column])
        conditions += [(numbers[column], _EQUAL, os.getpid(), True) for numbers in _SIGNALS.values()]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    for number, comparison, value, allowed_if in conditions:
        verdicts = (_ALLOW, _EPERM) if allowed_if else (_EPERM, _ALLOW)
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENT_AT),
            (comparison, 0, 1, value),
            (_RETURN, 0, 0, verdicts[0]),
            (_RETURN, 0, 0, verdicts[1]),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "seccomp", "filter")
