"""A small library that calls the socket functions as a communication library does, through slots of its own."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cerrno>
#include <algorithm>
extern "C" {
ssize_t x_read(int fd, void* p, size_t n) { return read(fd, p, n); }
ssize_t x_write(int fd, const void* p, size_t n) { return write(fd, p, n); }
ssize_t x_send(int fd, const void* p, size_t n, int f) { return send(fd, p, n, f); }
ssize_t x_recv(int fd, void* p, size_t n, int f) { return recv(fd, p, n, f); }
ssize_t x_sendto(int fd, const void* p, size_t n, int f) { return sendto(fd, p, n, f, nullptr, 0); }
ssize_t x_recvfrom(int fd, void* p, size_t n, int f) { return recvfrom(fd, p, n, f, nullptr, nullptr); }
static int halves(void* p, size_t n, iovec* v) { v[0] = {p, n / 2}; v[1] = {(char*)p + n / 2, n - n / 2}; return 2; }
ssize_t x_readv(int fd, void* p, size_t n) { iovec v[2]; return readv(fd, v, halves(p, n, v)); }
ssize_t x_writev(int fd, void* p, size_t n) { iovec v[2]; return writev(fd, v, halves(p, n, v)); }
ssize_t x_sendmsg(int fd, void* p, size_t n, int f) {
    iovec v[2]; msghdr m{}; m.msg_iovlen = halves(p, n, v); m.msg_iov = v; return sendmsg(fd, &m, f);
}
ssize_t x_recvmsg(int fd, void* p, size_t n, int f) {
    iovec v[2]; msghdr m{}; m.msg_iovlen = halves(p, n, v); m.msg_iov = v; return recvmsg(fd, &m, f);
}
int x_close(int fd) { return close(fd); }
// errno as the call left it, whatever it was before
int x_errno_of_recv(int fd, void* p, size_t n) { errno = 0; return recv(fd, p, n, MSG_DONTWAIT) < 0 ? errno : 0; }
int x_errno_of_write(int fd, const void* p, size_t n) { errno = 0; return write(fd, p, n) < 0 ? errno : 0; }
// errno before a call that succeeds is errno after it
int x_errno_kept(int fd, const void* p, size_t n) { errno = 77; return write(fd, p, n) < 0 ? -1 : errno; }
// n bytes in calls of at most `most` bytes; how many calls were made, -1 on failure
long x_pour(int fd, long n, long most) {
    static char block[1 << 16];
    long calls = 0;
    for (long left = n; left > 0; ++calls) {
        ssize_t k = send(fd, block, std::min(left, most), MSG_NOSIGNAL);
        if (k <= 0) return -1;
        left -= k;
    }
    return calls;
}
// n bytes, a multiple of 8, of which every eight say how many eights came before them
long x_count(int fd, long n) {
    static thread_local unsigned long words[4001];
    long calls = 0, next = 0;
    for (long left = n; left > 0; ++calls) {
        long size = std::min<long>(left, sizeof words);
        for (long k = 0; k < size / 8; ++k) words[k] = next++;
        if (send(fd, words, size, MSG_NOSIGNAL) != size) return -1;
        left -= size;
    }
    return calls;
}
long x_drain(int fd, long n) {
    static thread_local char block[1 << 16];
    long calls = 0;
    for (long left = n; left > 0; ++calls) {
        ssize_t k = recv(fd, block, std::min<long>(left, sizeof block), 0);
        if (k <= 0) return -1;
        left -= k;
    }
    return calls;
}
}
"""

#: How libraries are linked: lazily bound, bound at load and locked (full RELRO), without a PLT.
KINDS = {
    "lazy": ["-Wl,-z,lazy", "-Wl,-z,norelro"],
    "relro": ["-Wl,-z,relro", "-Wl,-z,now"],
    "noplt": ["-fno-plt", "-Wl,-z,relro", "-Wl,-z,now"],
}


def build(folder: Path, kind: str, name: str = "") -> ctypes.CDLL:
    """Compile and load ``libwiretest_<kind>.so`` (or ``name``); skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the library whose calls are traced")
    source, target = folder / "wiretest.cpp", folder / (name or f"libwiretest_{kind}.so")
    source.write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", *KINDS[kind], str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target), use_errno=True)
    for name in ("read", "write", "send", "recv", "sendto", "recvfrom", "readv", "writev", "sendmsg", "recvmsg"):
        function = getattr(library, f"x_{name}")
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        if name not in ("read", "write", "readv", "writev"):
            function.argtypes += [ctypes.c_int]
    for name in ("errno_of_recv", "errno_of_write", "errno_kept"):
        getattr(library, f"x_{name}").argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    for name in ("pour", "count", "drain"):
        function = getattr(library, f"x_{name}")
        function.restype = ctypes.c_long
        function.argtypes = [ctypes.c_int, ctypes.c_long] + [ctypes.c_long] * (name == "pour")
    return library
