"""The system calls that an untrusted program goes without -> a filter (seccomp) that the kernel keeps on this process.

The filter refuses with "not permitted", so that a program sees an ordinary error; a call of another architecture ends
it. Invariant: it is inherited and cannot be taken off. It imports the standard library only, since `confine` loads it
where there is nothing else; it does not know what the process is for.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_EPERM, _ENOSYS = 1, 38

# Call -> its number on x86-64 and on arm64; None where there is no such call. Denied under every wall:
_DENIED = {
    # the network, and whatever makes sockets by other means
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "process_madvise": (440, 440), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # large and rarely needed parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "fanotify_init": (300, 262), "personality": (135, 92),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "quotactl": (179, 60), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "syslog": (103, 116),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}  # fmt: skip
# Without namespaces the user's processes and files are in sight: no signals, no child, no change to any file.
_DENIED_ALONE = {
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setsid": (112, 157), "setpgid": (109, 154), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "fork": (57, None), "vfork": (58, None),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "truncate": (76, 45), "flock": (73, 32),
    "file_setattr": (469, 469), "inotify_add_watch": (254, 27), "open": (2, None), "creat": (85, None),
    "openat2": (437, 437), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None),
    "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "execve": (59, 221), "execveat": (322, 281),
}  # fmt: skip
_CLONE, _CLONE3, _FCNTL, _PRLIMIT, _TGKILL = (56, 220), (435, 435), (72, 25), (302, 261), (234, 131)
_OPENAT = (257, 56)
PIVOT_ROOT, CAPSET = _DENIED["pivot_root"], (126, 91)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, name in the filter

NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, mount, process, network, IPC and host name."""
_ANY_NAMESPACE = NEW_NAMESPACES | 0x02000000 | 0x00000080  # and cgroup, time
_CLONE_THREAD = 0x00010000
_OPEN_TO_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # a descriptor that signals another process

libc = ctypes.CDLL(None, use_errno=True)


class Refusal(Exception):  # noqa: N818 - an answer of the kernel, not a fault
    """The kernel does not give a wall; the message says which."""


def asked(what: str, answer: int) -> int:
    """What the kernel answered. Raises Refusal when that is an error."""
    if answer < 0:
        raise Refusal(f"{what}: {os.strerror(ctypes.get_errno())}")
    return answer


def column_of_machine() -> tuple[int, int]:
    """Which of two numbers a call has here, and this architecture's name in a filter."""
    if platform.system() != "Linux" or platform.machine() not in _ARCHITECTURES:
        raise Refusal(f"no filter of system calls is known for {platform.system()} on {platform.machine()}")
    return _ARCHITECTURES[platform.machine()]


def no_new_privileges() -> None:
    """No program that this process starts gains rights; the kernel asks for it before Landlock and filters."""
    asked("no_new_privs", libc.prctl(38, 1, 0, 0, 0))


def filter_calls(*, alone: bool) -> None:
    """Installs the filter; `alone`: also no child processes, no signals, no change to any file."""
    no_new_privileges()
    column, architecture = column_of_machine()
    fail, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06

    def when(number: int, *then: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(equal, 0, len(then), number), *then]

    def argument(index: int, *then: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(load, 0, 0, 16 + 8 * index), *then, (give, 0, 0, allow), (give, 0, 0, fail | _EPERM)]

    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 calls have other numbers
    for numbers in (_DENIED | (_DENIED_ALONE if alone else {})).values():
        if (number := numbers[column]) is not None:
            code += when(number, (give, 0, 0, fail | _EPERM))
    code += when(_CLONE3[column], (give, 0, 0, fail | _ENOSYS))  # its flags are in memory; libc then uses clone
    # In `argument`, what follows the load jumps over the next line (allow) to the one after it (refuse), or not.
    if alone:  # refuse namespaces; then allow a thread only
        code += when(
            _CLONE[column],
            *[(load, 0, 0, 16), (has, 1, 0, _ANY_NAMESPACE), (has, 1, 0, _CLONE_THREAD)],
            *[(give, 0, 0, fail | _EPERM), (give, 0, 0, allow)],
        )
        code += when(_TGKILL[column], *argument(0, (equal, 0, 1, os.getpid())))
        code += when(_OPENAT[column], *argument(2, (has, 1, 0, _OPEN_TO_CHANGE)))
    else:
        code += when(_CLONE[column], *argument(0, (has, 1, 0, _ANY_NAMESPACE)))
    code += when(
        _FCNTL[column],
        *[(load, 0, 0, 24), (equal, 3, 0, _F_SETOWN), (equal, 2, 0, _F_SETSIG), (equal, 1, 0, _F_SETOWN_EX)],
        *[(give, 0, 0, allow), (give, 0, 0, fail | _EPERM)],
    )
    code += when(_PRLIMIT[column], *argument(0, (equal, 0, 1, 0)))
    code += [(give, 0, 0, allow)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(packed))
    asked("a filter of system calls (seccomp)", libc.prctl(22, 2, program, 0, 0))
