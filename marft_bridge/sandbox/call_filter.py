"""The system calls that an untrusted program is denied -> a seccomp filter that the kernel applies to this process.

A denied call fails with "not permitted", so that a program sees an ordinary error; a call of another architecture ends
the process. Invariant: the filter is inherited and cannot be removed. Only the standard library is imported, since
`confine` loads this file as a script, without the project.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_EPERM, _ENOSYS = 1, 38

# Call -> its number on x86-64 and on arm64; None where there is no such call. Denied behind every wall:
_DENIED = {
    # the network, and other ways to make sockets
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
# These are allowed or denied by their arguments:
_CLONE, _CLONE3, _FCNTL, _PRLIMIT, _TGKILL = (56, 220), (435, 435), (72, 25), (302, 261), (234, 131)
_OPENAT = (257, 56)
PIVOT_ROOT, CAPSET = _DENIED["pivot_root"], (126, 91)
# Machine -> column in the tables above, and the name of its architecture in a filter (AUDIT_ARCH_...):
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, mount, process, network, IPC and host name."""
_ANY_NAMESPACE = NEW_NAMESPACES | 0x02000000 | 0x00000080  # and cgroup, time
_CLONE_THREAD = 0x00010000
_OPEN_TO_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # make a descriptor signal another process

libc = ctypes.CDLL(None, use_errno=True)


class Refusal(Exception):  # noqa: N818 - an answer of the kernel, not a fault
    """The kernel refuses a wall; the message names the wall."""


def require_success(operation: str, result: int) -> int:
    """The result of a system call. Raises Refusal, which names the operation, where the call failed."""
    if result < 0:
        raise Refusal(f"{operation}: {os.strerror(ctypes.get_errno())}")
    return result


def column_of_machine() -> tuple[int, int]:
    """Which of its two numbers a call has on this machine, and the name of its architecture in a filter."""
    if platform.system() != "Linux" or platform.machine() not in _ARCHITECTURES:
        raise Refusal(f"no filter of system calls is known for {platform.system()} on {platform.machine()}")
    return _ARCHITECTURES[platform.machine()]


def set_no_new_privileges() -> None:
    """No program that this process starts gains privileges; the kernel requires it before Landlock and filters."""
    require_success("no_new_privs", libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS


def filter_calls(*, alone: bool) -> None:
    """Installs the filter. `alone` also denies child processes, signals and changes to any file."""
    set_no_new_privileges()
    column, architecture = column_of_machine()
    # A classic BPF program (linux/filter.h, linux/seccomp.h). An instruction is (operation, how many instructions a
    # jump skips if its test holds, how many if not, constant). Below are SECCOMP_RET_ERRNO, _ALLOW and _KILL_PROCESS,
    # then the operations LD, JEQ, JGE, JSET and RET. A load reads struct seccomp_data: the number of the call at
    # offset 0, the architecture at 4, argument n at 16 + 8 n (its low half).
    fail, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    load, jump_equal, jump_at_least, jump_any_bit, ret = 0x20, 0x15, 0x35, 0x45, 0x06

    def on_call(number: int, *instructions: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(jump_equal, 0, len(instructions), number), *instructions]

    def allow_by_argument(index: int, *tests: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [(load, 0, 0, 16 + 8 * index), *tests, (ret, 0, 0, allow), (ret, 0, 0, fail | _EPERM)]

    instructions = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (ret, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        instructions += [(jump_at_least, 0, 1, 0x40000000), (ret, 0, 0, kill)]  # the x32 calls have other numbers
    for numbers in (_DENIED | (_DENIED_ALONE if alone else {})).values():
        if (number := numbers[column]) is not None:
            instructions += on_call(number, (ret, 0, 0, fail | _EPERM))
    # The flags of clone3 are in memory, out of reach of a filter; where it is missing, libc uses clone.
    instructions += on_call(_CLONE3[column], (ret, 0, 0, fail | _ENOSYS))
    # The test in `allow_by_argument` is followed by "allow" and "refuse": it denies by jumping over the first of them.
    if alone:  # refuse namespaces; then allow a thread only
        instructions += on_call(
            _CLONE[column],
            (load, 0, 0, 16),
            (jump_any_bit, 1, 0, _ANY_NAMESPACE),
            (jump_any_bit, 1, 0, _CLONE_THREAD),
            (ret, 0, 0, fail | _EPERM),
            (ret, 0, 0, allow),
        )
        instructions += on_call(_TGKILL[column], *allow_by_argument(0, (jump_equal, 0, 1, os.getpid())))
        instructions += on_call(_OPENAT[column], *allow_by_argument(2, (jump_any_bit, 1, 0, _OPEN_TO_CHANGE)))
    else:
        instructions += on_call(_CLONE[column], *allow_by_argument(0, (jump_any_bit, 1, 0, _ANY_NAMESPACE)))
    instructions += on_call(
        _FCNTL[column],
        (load, 0, 0, 24),
        (jump_equal, 3, 0, _F_SETOWN),
        (jump_equal, 2, 0, _F_SETSIG),
        (jump_equal, 1, 0, _F_SETOWN_EX),
        (ret, 0, 0, allow),
        (ret, 0, 0, fail | _EPERM),
    )
    instructions += on_call(_PRLIMIT[column], *allow_by_argument(0, (jump_equal, 0, 1, 0)))
    instructions += [(ret, 0, 0, allow)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(packed))
    require_success("a filter of system calls (seccomp)", libc.prctl(22, 2, program, 0, 0))  # PR_SET_SECCOMP
