"""The system calls of a contained program: which are allowed, which do nothing, which are counted, by name and by machine.

All others are refused. Landlock covers only opening, making and removing of files. So a call that reaches a path or another
process in another way is not on these lists, or does nothing.
"""

import errno
import os

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINE = os.uname().machine
NEWEST = 424
"""Number from which on both machines have the same numbers, and libraries know that a kernel may lack a call."""

# name:number on x86_64:number on aarch64
ALLOWED = """
read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286
pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439
getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 readlink:89:- readlinkat:267:78 statfs:137:43
fstatfs:138:44 umask:95:166 ftruncate:77:46 fadvise64:221:223 readahead:187:213 fsync:74:82 fdatasync:75:83
sendfile:40:71 copy_file_range:326:285

brk:12:214 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 msync:26:227 futex:202:98 getrandom:318:278

execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 getpid:39:172 getppid:110:173 gettid:186:178
getpgrp:111:- getpgid:121:155 setpgid:109:154 getsid:124:156 setsid:112:157 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getrlimit:97:163 setrlimit:160:164 getrusage:98:165
times:100:153 uname:63:160 sysinfo:99:179 getcpu:309:168 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 getpriority:140:141 arch_prctl:158:-
set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 capget:125:90

gettimeofday:96:169 time:201:- clock_gettime:228:113 clock_getres:229:114 nanosleep:35:101 clock_nanosleep:230:115 alarm:37:-
getitimer:36:102 setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87

rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 signalfd:282:- signalfd4:289:74 pause:34:- restart_syscall:219:128

poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
epoll_pwait:281:22 eventfd:284:- eventfd2:290:19

sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockname:51:204 getpeername:52:205
getsockopt:55:209
"""
SIGNALS = "kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240"
"""Calls that are allowed if namespaces or Landlock keep signals inside."""

MODES, MODES_AT = " chmod:90:- fchmod:91:52 ", " fchmodat:268:53 fchmodat2:452:452 "
TIMES = " utime:132:- utimes:235:- utimensat:280:88 futimesat:261:- "
LOCKS = " flock:73:32 sync:162:81 syncfs:306:267 "
"""Calls that report success and change nothing: honest programs copy files with them, and no filter can check a path. A shell
whose user owns nothing else may change modes, and times where it sees nothing else that it could write.
"""

UNSUPPORTED = """
fallocate:285:47
getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 setxattr:188:5
lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
"""
"""Calls that a file system need not support: attributes, or space that is kept beyond the end of a file, which no limit counts."""

FORKS = "fork:57:- vfork:58:-"
MAKES = """
creat:85:- mkdir:83:- mkdirat:258:34 mknod:133:- mknodat:259:33 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36
"""
REMOVES = "unlink:87:- unlinkat:263:35 rmdir:84:- rename:82:- renameat:264:38 renameat2:316:276"
"""Calls that are counted."""

USERS = ("setuid:105:146 setgid:106:144", "setreuid:113:145 setregid:114:143", "setresuid:117:147 setresgid:119:149")
"""Calls that choose a user or group, by one to three arguments: ``make`` chooses its own."""
SOCKETS = "bind:49:200 connect:42:203 listen:50:201 accept:43:202 accept4:288:242"
"""Calls for sockets with paths, where the file system has none of others."""
CLONE, MMAP, OPEN, OPENAT = "clone:56:220", "mmap:9:222", "open:2:-", "openat:257:56"
SOCKET, SETSOCKOPT, SOCKETPAIR, PRLIMIT, FCNTL, IOCTL, PRCTL = (
    *("socket:41:198", "setsockopt:54:208"),
    "socketpair:53:199",
    "prlimit64:302:261",
    "fcntl:72:25",
    "ioctl:16:29",
    "prctl:157:167",
)
"""Calls that are judged by an argument."""

FCNTL_ALLOWED = (0, 1, 2, 3, 4, 5, 36, 1030, 1032)
"""Copies of a descriptor, its flags, the owner of a lock, the size of a pipe."""
FCNTL_NOTHING = (6, 7, 37, 38)
"""Locks of files."""
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""Queries: is it a terminal, its size, readable bytes; and flags of a descriptor."""
PRCTL_ALLOWED = (15, 16, 0x53564D41)
"""Names of threads and of memory."""

NOT_SUPPORTED, NO_TERMINAL = errno.EOPNOTSUPP, errno.ENOTTY


def numbers(text: str, machine: str = MACHINE) -> list[int]:
    """Returns the numbers of named calls on a machine, as far as it has them."""
    if machine not in ARCHITECTURES:
        return []
    place = 1 + list(ARCHITECTURES).index(machine)
    return [int(each.split(":")[place]) for each in text.split() if each.split(":")[place] != "-"]
