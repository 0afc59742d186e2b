"""What a worker does to itself before it looks at a student's file: it locks the doors behind it.

Everything here runs in the child, through the standard library and ctypes. Each lock is tried, and
the ones that hold are reported by name, because a grade must say how it was isolated:

    pidns+netns  own process and network namespaces (as root, or through a user namespace)
    uid          another user: `nobody` (as root only)
    landlock     no file can be opened but the standard library's, to read; no TCP, no signals out
    seccomp      no socket, no new program, no change of a file's mode or owner, no tracing
    rlimits      CPU, memory, file size, open files, processes
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct

NOBODY = 65534
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (1 << n for n in (27, 28, 29, 30))
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LL_CREATE, _LL_ADD, _LL_RESTRICT = 444, 445, 446  # the same numbers on every architecture
_LL_READ_FILE, _LL_READ_DIR = 1 << 2, 1 << 3
_LL_PATH_BENEATH = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _long(value: object) -> object:
    """ctypes passes a bare int as 32 bits; these calls take long ones."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def _syscall(number: int, *arguments: object) -> int:
    return _libc.syscall(ctypes.c_long(number), *map(_long, arguments))


def _prctl(*arguments: int) -> int:
    return _libc.prctl(ctypes.c_int(arguments[0]), *map(_long, arguments[1:]))


def enter_namespaces() -> list[str]:
    """New pid, network and ipc namespaces for the *children* of this process; the locks that hold.

    An ordinary user gets them inside a new user namespace. Nothing changes if the kernel refuses.
    """
    wanted = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    if os.geteuid() != 0:
        wanted |= _CLONE_NEWUSER
    if _libc.unshare(wanted) != 0:
        return []
    return ["pidns", "netns"]


def drop_privileges() -> list[str]:
    """Become `nobody`, give up every capability, and never gain one again; the locks that hold."""
    held = []
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            held.append("uid")
        except OSError:
            pass  # a container that maps no `nobody`; the report then lacks "uid"
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    return held


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent goes. Dropping the uid clears that: call this after it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_rlimits(limits: dict[str, int]) -> list[str]:
    """Hard limits. `processes` binds a worker that is not root: 0 means no fork and no thread."""
    mib = 1 << 20
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib),
        (resource.RLIMIT_FSIZE, limits["output_kib"] * 1024),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
    ):
        resource.setrlimit(kind, (value, value))
    return ["rlimits"]


# ---------------------------------------------------------------------------------- Landlock

def landlock() -> list[str]:
    """Forbid opening any file but those of the standard library, for reading; the locks that hold.

    Where the kernel knows how, also TCP, abstract sockets and signals to outside. site-packages
    stays closed: an installed wheel of this repository has the solutions in it.
    """
    abi = _syscall(_LL_CREATE, None, 0, 1)
    if abi < 1:
        return []
    files = (1 << 13) - 1
    for bit, since in ((13, 2), (14, 3), (15, 5)):
        files |= 1 << bit if abi >= since else 0
    attributes = struct.pack("=QQQ", files, 3, 3)[:8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _syscall(_LL_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return []
    for path in _readable_paths():
        _allow_reading(ruleset, path)
    refused = _syscall(_LL_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return [] if refused else ["landlock"]


def _readable_paths() -> list[str]:
    """The standard library, entry by entry, without site-packages."""
    library = os.path.dirname(os.__file__)
    try:
        names = sorted(os.listdir(library))
    except OSError:
        return []
    return [os.path.join(library, name) for name in names if name != "site-packages"]


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    is_dir = stat.S_ISDIR(os.fstat(handle).st_mode)
    rights = _LL_READ_FILE | (_LL_READ_DIR if is_dir else 0)
    _syscall(_LL_ADD, ruleset, _LL_PATH_BENEATH, struct.pack("=Qi", rights, handle), 0)
    os.close(handle)


# ----------------------------------------------------------------------------------- seccomp

# System calls that student code never needs, by architecture: the audit number, the first number of
# another calling convention (x32), and the calls themselves. Numbers are the kernel's unistd.h.
_FILTERED: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 0x40000000, (
        41, 42, 49,  # socket, connect, bind
        59, 322, 101, 310, 311, 312,  # execve, execveat, ptrace, process_vm_readv/writev, kcmp
        90, 91, 268, 452, 92, 93, 94, 260,  # chmod and chown in all their forms
        132, 235, 261, 280, 188, 189, 190, 197, 198, 199,  # utime…, setxattr…, removexattr…
        272, 308, 165, 166, 155, 161,  # unshare, setns, mount, umount2, pivot_root, chroot
        321, 298, 425, 323, 248, 249, 250,  # bpf, perf, io_uring, userfaultfd, keys
        434, 438, 303, 304, 135)),  # pidfd_open, pidfd_getfd, file handles, personality
    "aarch64": (0xC00000B7, 0xFFFFFFFF, (
        198, 203, 200, 221, 281, 117, 270, 271, 272, 52, 53, 452, 55, 54, 88, 5, 6, 7, 14, 15, 16,
        97, 268, 40, 39, 41, 51, 280, 241, 425, 282, 217, 218, 219, 434, 438, 264, 265, 92)),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF opcodes
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def seccomp() -> list[str]:
    """Let the calls of _FILTERED fail with EPERM from now on; the locks that hold.

    Needs no_new_privs. Nothing changes on an architecture or kernel that it does not know.
    """
    known = _FILTERED.get(platform.machine())
    if known is None:
        return []
    architecture, foreign, calls = known
    refuse = len(calls) + 5  # index of the last instruction; a jump counts from the one after it
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 0, refuse - 2, architecture),  # seccomp_data.arch
            (_LOAD, 0, 0, 0), (_AT_LEAST, refuse - 4, 0, foreign),  # seccomp_data.nr
            *((_EQUAL, refuse - 5 - index, 0, call) for index, call in enumerate(calls)),
            (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    filters = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    program = _Program(len(code), filters)
    refused = _libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(2), ctypes.byref(program))
    return [] if refused else ["seccomp"]
