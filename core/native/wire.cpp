#include "wire.hpp"

#include <stdexcept>

#include "got.hpp"

#ifdef __linux__

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>

namespace dpro::wire {

namespace {

constexpr std::uint32_t kFds = 1 << 16;      // calls on higher numbers are not traced
constexpr std::uint32_t kStreams = 1 << 12;  // half of them in one session
constexpr std::uint32_t kRing = 1 << 19;     // 48 MiB of address space, touched as far as it is used
constexpr std::uint32_t kIgnored = UINT32_MAX;
// A number unused for so long may name another socket by now: its close is seen only if a traced library did it.
constexpr std::int64_t kTrustNs = 50'000;

union Name {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
};

// One connection as one session saw it. Not re-used in the next session: a late thread may still write to it.
struct Stream {
    std::uint64_t identity;
    Name local, peer;
    std::atomic<std::int64_t> next[2];  // offset of the next byte by direction, -1 not known yet
    std::atomic<bool> opener_unknown;
};

// What a file descriptor was when last looked at: session << 32 | (stream number + 1, kIgnored or 0 not known).
struct Fd {
    std::atomic<std::uint64_t> word;
    std::atomic<std::int64_t> used_ns;
};

Fd fds[kFds];
Stream streams[kStreams];
std::atomic<std::uint32_t> streams_used;  // ever; modulo kStreams is the place
std::uint32_t first_stream;               // of this session
Event* ring;                              // mapped at the first attach, then for ever
std::atomic<std::uint64_t> ring_used;     // ever; modulo kRing is the place
std::uint64_t first_event;                // of this session
std::atomic<std::int64_t> crowded_out;    // calls on connections beyond kStreams
std::atomic<std::uint32_t> recording;     // the session, 0 none
std::uint32_t last_session;
bool attached;

std::int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// The kernel's own number of a socket, which no other socket gets as long as the machine runs.
std::uint64_t identity_of(int fd) {
    std::uint64_t cookie = 0;
    socklen_t size = sizeof cookie;
    if (!getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size)) return cookie;
    struct stat status;
    return fstat(fd, &status) ? 0 : static_cast<std::uint64_t>(status.st_ino);
}

int option(int fd, int which) {
    int value = -1;
    socklen_t size = sizeof value;
    return getsockopt(fd, SOL_SOCKET, which, &value, &size) ? -1 : value;
}

bool is_tcp(int fd) {
    const int domain = option(fd, SO_DOMAIN);
    return (domain == AF_INET || domain == AF_INET6) && option(fd, SO_TYPE) == SOCK_STREAM &&
           option(fd, SO_PROTOCOL) == IPPROTO_TCP;
}

// The stream of `fd`, new to this session; nullptr when there is nothing to trace.
Stream* classify(int fd, std::uint32_t session, std::uint64_t seen) {
    std::uint64_t word = static_cast<std::uint64_t>(session) << 32;
    Stream* stream = nullptr;
    if (!is_tcp(fd)) {
        word |= kIgnored;
    } else {
        Name local, peer;
        socklen_t local_size = sizeof local, peer_size = sizeof peer;
        if (getpeername(fd, &peer.any, &peer_size) || getsockname(fd, &local.any, &local_size)) return nullptr;
        const std::uint32_t number = streams_used.fetch_add(1);
        if (number - first_stream >= kStreams / 2) {
            streams_used.fetch_sub(1);
            crowded_out.fetch_add(1);
            return nullptr;
        }
        stream = &streams[number % kStreams];
        stream->identity = identity_of(fd);
        stream->local = local;
        stream->peer = peer;
        stream->next[kSend] = stream->next[kRecv] = -1;
        stream->opener_unknown = false;
        word |= number % kStreams + 1;
    }
    if (fds[fd].word.compare_exchange_strong(seen, word)) return stream;
    // another thread looked at the same time; seen is what it found
    const auto place = static_cast<std::uint32_t>(seen);
    return seen >> 32 == session && place && place != kIgnored ? &streams[place - 1] : nullptr;
}

Stream* stream_of(int fd, std::uint32_t session, std::int64_t now) {
    if (static_cast<std::uint32_t>(fd) >= kFds) return nullptr;
    Fd& known = fds[fd];
    const std::uint64_t word = known.word.load(std::memory_order_acquire);
    const auto place = static_cast<std::uint32_t>(word);
    Stream* stream = place && place != kIgnored ? &streams[place - 1] : nullptr;
    if (word >> 32 == session && place) {
        if (now - known.used_ns.load(std::memory_order_relaxed) < kTrustNs) return stream;
        if (stream && stream->identity == identity_of(fd)) return stream;
    }
    stream = classify(fd, session, word);
    known.used_ns.store(now, std::memory_order_relaxed);
    return stream;
}

bool tcp_info_of(int fd, tcp_info& info) {
    socklen_t size = sizeof info;
    std::memset(&info, 0, sizeof info);
    return !getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) &&
           size >= offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans;
}

constexpr int kTries = 64;  // bytes may be coming or going while we look

// How many bytes were read from the socket since it was connected, -1 not known.
std::int64_t bytes_read(int fd) {
    tcp_info before, after;
    for (int k = 0; k < kTries; ++k) {
        int queued = 0;
        if (!tcp_info_of(fd, before) || ioctl(fd, SIOCINQ, &queued) || !tcp_info_of(fd, after)) return -1;
        if (before.tcpi_bytes_received != after.tcpi_bytes_received || before.tcpi_state != after.tcpi_state) continue;
        // the kernel counts the peer's FIN as a byte received
        constexpr int kCloseWait = 8, kLastAck = 9, kClosing = 11;
        const int state = after.tcpi_state;
        const bool fin = state == kCloseWait || state == kLastAck || state == kClosing;
        return static_cast<std::int64_t>(after.tcpi_bytes_received) - queued - fin;
    }
    return -1;
}

// How many bytes were written to the socket since it was connected, -1 not known.
//
// Acknowledged + still in the queue is exact but counts the SYN where this end opened the connection. Sent -
// sent again + not yet sent counts data alone, but too much where this host's own queue dropped something. So
// the first is used, and the second tells whether the SYN is in it.
std::int64_t bytes_written(int fd, Stream& stream) {
    tcp_info before, after;
    const auto data = [](const tcp_info& info) {
        return static_cast<std::int64_t>(info.tcpi_bytes_sent - info.tcpi_bytes_retrans) + info.tcpi_notsent_bytes;
    };
    for (int k = 0; k < kTries; ++k) {
        int queued = 0;
        if (!tcp_info_of(fd, before) || ioctl(fd, SIOCOUTQ, &queued) || !tcp_info_of(fd, after)) return -1;
        if (before.tcpi_bytes_acked != after.tcpi_bytes_acked || data(before) != data(after)) continue;
        const std::int64_t with_syn = static_cast<std::int64_t>(after.tcpi_bytes_acked) + queued;
        const std::int64_t excess = with_syn - data(after);
        if (excess != 0 && excess != 1) stream.opener_unknown.store(true);
        return with_syn - (excess == 1);
    }
    return -1;
}

struct Head {
    const void* data;
    std::size_t size;
};

void record(Stream& stream, std::uint32_t session, Direction direction, std::int64_t start, std::int64_t end,
            std::int64_t moved, Head head) {
    const std::int64_t offset =
        stream.next[direction].load() < 0 ? -1 : stream.next[direction].fetch_add(moved, std::memory_order_relaxed);
    const std::uint64_t number = ring_used.fetch_add(1, std::memory_order_relaxed);
    if (number - first_event >= kRing) return;  // counted by detach
    Event& event = ring[number % kRing];
    event.stream = static_cast<std::uint32_t>(&stream - streams);
    event.start = start;
    event.end = end;
    event.offset = offset;
    event.nbytes = moved;
    event.direction = direction;
    event.head_bytes = static_cast<std::uint8_t>(
        std::min({head.size, static_cast<std::size_t>(moved), static_cast<std::size_t>(kHeadBytes)}));
    std::memcpy(event.head, head.data, event.head_bytes);
    __atomic_store_n(&event.session, session, __ATOMIC_RELEASE);  // from here on it can be read
}

// What every wrapper does. `head` is asked only after bytes moved: then the caller's memory is known to be good.
template <typename Call, typename HeadOf>
ssize_t traced(int fd, Direction direction, Call call, HeadOf head) {
    const std::uint32_t session = recording.load(std::memory_order_acquire);
    if (!session) return call();
    const int errno_before = errno;
    std::int64_t start = now_ns();
    Stream* stream = stream_of(fd, session, start);
    if (stream && stream->next[direction].load(std::memory_order_relaxed) < 0) {
        stream->next[direction].store(direction == kSend ? bytes_written(fd, *stream) : bytes_read(fd));
        start = now_ns();
    }
    errno = errno_before;
    const ssize_t moved = call();
    if (moved <= 0 || !stream || recording.load(std::memory_order_relaxed) != session) return moved;
    const int errno_after = errno;
    const std::int64_t end = now_ns();
    record(*stream, session, direction, start, end, moved, head());
    fds[fd].used_ns.store(end, std::memory_order_relaxed);
    errno = errno_after;
    return moved;
}

// -- the wrappers --------------------------------------------------------------------------------

// Addresses of the wrapped functions. Set before a slot is patched, never cleared: a thread may be on its way.
void* original[11];
enum Which { kRead, kWrite, kReadv, kWritev, kSendCall, kRecvCall, kSendto, kRecvfrom, kSendmsg, kRecvmsg, kClose };

template <typename Signature>
Signature* to_original(Which which) {
    return reinterpret_cast<Signature*>(__atomic_load_n(&original[which], __ATOMIC_ACQUIRE));
}

// These look or read beside the stream: no bytes of it move.
constexpr int kBeside = MSG_PEEK | MSG_OOB | MSG_ERRQUEUE;

Head head_of(const iovec* parts, std::size_t count) {
    return count ? Head{parts[0].iov_base, parts[0].iov_len} : Head{nullptr, 0};
}

ssize_t wire_read(int fd, void* data, size_t size) {
    return traced(
        fd, kRecv, [&] { return to_original<ssize_t(int, void*, size_t)>(kRead)(fd, data, size); },
        [&] { return Head{data, size}; });
}

ssize_t wire_write(int fd, const void* data, size_t size) {
    return traced(
        fd, kSend, [&] { return to_original<ssize_t(int, const void*, size_t)>(kWrite)(fd, data, size); },
        [&] { return Head{data, size}; });
}

ssize_t wire_readv(int fd, const iovec* parts, int count) {
    return traced(
        fd, kRecv, [&] { return to_original<ssize_t(int, const iovec*, int)>(kReadv)(fd, parts, count); },
        [&] { return head_of(parts, static_cast<std::size_t>(count)); });
}

ssize_t wire_writev(int fd, const iovec* parts, int count) {
    return traced(
        fd, kSend, [&] { return to_original<ssize_t(int, const iovec*, int)>(kWritev)(fd, parts, count); },
        [&] { return head_of(parts, static_cast<std::size_t>(count)); });
}

ssize_t wire_send(int fd, const void* data, size_t size, int flags) {
    const auto call = [&] { return to_original<ssize_t(int, const void*, size_t, int)>(kSendCall)(fd, data, size, flags); };
    return flags & kBeside ? call() : traced(fd, kSend, call, [&] { return Head{data, size}; });
}

// With MSG_TRUNC bytes leave the stream without coming to the caller.
ssize_t wire_recv(int fd, void* data, size_t size, int flags) {
    const auto call = [&] { return to_original<ssize_t(int, void*, size_t, int)>(kRecvCall)(fd, data, size, flags); };
    return flags & kBeside ? call() : traced(fd, kRecv, call, [&] { return Head{data, flags & MSG_TRUNC ? 0 : size}; });
}

ssize_t wire_sendto(int fd, const void* data, size_t size, int flags, const sockaddr* to, socklen_t to_size) {
    const auto call = [&] {
        return to_original<ssize_t(int, const void*, size_t, int, const sockaddr*, socklen_t)>(kSendto)(
            fd, data, size, flags, to, to_size);
    };
    return flags & kBeside ? call() : traced(fd, kSend, call, [&] { return Head{data, size}; });
}

ssize_t wire_recvfrom(int fd, void* data, size_t size, int flags, sockaddr* from, socklen_t* from_size) {
    const auto call = [&] {
        return to_original<ssize_t(int, void*, size_t, int, sockaddr*, socklen_t*)>(kRecvfrom)(fd, data, size, flags,
                                                                                                from, from_size);
    };
    return flags & kBeside ? call() : traced(fd, kRecv, call, [&] { return Head{data, flags & MSG_TRUNC ? 0 : size}; });
}

ssize_t wire_sendmsg(int fd, const msghdr* message, int flags) {
    const auto call = [&] { return to_original<ssize_t(int, const msghdr*, int)>(kSendmsg)(fd, message, flags); };
    return flags & kBeside ? call()
                           : traced(fd, kSend, call, [&] { return head_of(message->msg_iov, message->msg_iovlen); });
}

ssize_t wire_recvmsg(int fd, msghdr* message, int flags) {
    const auto call = [&] { return to_original<ssize_t(int, msghdr*, int)>(kRecvmsg)(fd, message, flags); };
    return flags & kBeside ? call() : traced(fd, kRecv, call, [&] {
        return head_of(message->msg_iov, flags & MSG_TRUNC ? 0 : message->msg_iovlen);
    });
}

int wire_close(int fd) {
    if (recording.load(std::memory_order_relaxed) && static_cast<std::uint32_t>(fd) < kFds) fds[fd].word.store(0);
    return to_original<int(int)>(kClose)(fd);
}

struct Wrapped {
    const char* name;
    void* wrapper;
};
const Wrapped wrapped[] = {
    {"read", reinterpret_cast<void*>(&wire_read)},         {"write", reinterpret_cast<void*>(&wire_write)},
    {"readv", reinterpret_cast<void*>(&wire_readv)},       {"writev", reinterpret_cast<void*>(&wire_writev)},
    {"send", reinterpret_cast<void*>(&wire_send)},         {"recv", reinterpret_cast<void*>(&wire_recv)},
    {"sendto", reinterpret_cast<void*>(&wire_sendto)},     {"recvfrom", reinterpret_cast<void*>(&wire_recvfrom)},
    {"sendmsg", reinterpret_cast<void*>(&wire_sendmsg)},   {"recvmsg", reinterpret_cast<void*>(&wire_recvmsg)},
    {"close", reinterpret_cast<void*>(&wire_close)},
};
static_assert(std::size(wrapped) == std::size(original), "one original for each");

std::vector<std::string> traced_calls() {
    std::vector<std::string> names;
    for (const auto& one : wrapped) names.emplace_back(one.name);
    return names;
}

// -- attach and detach ---------------------------------------------------------------------------

struct Patched {
    void** at;
    void* was;
    void* wrapper;
};
std::vector<Patched> patched;
std::vector<void*> held;  // handles of the patched libraries, so that none is unloaded with our slot in it

void prepare_once() {
    if (ring) return;
    void* memory = mmap(nullptr, kRing * sizeof(Event), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the wire's events");
    // a thread may be inside a wrapper at any later time: this library stays
    Dl_info self;
    if (dladdr(reinterpret_cast<void*>(&prepare_once), &self)) dlopen(self.dli_fname, RTLD_NOW | RTLD_NODELETE);
    pthread_atfork(nullptr, nullptr, [] { recording.store(0); });
    ring = static_cast<Event*>(memory);
}

void patch(const Slot& slot, const Memory& memory) {
    const auto one = std::find_if(std::begin(wrapped), std::end(wrapped), [&](const Wrapped& w) { return slot.symbol == w.name; });
    void* held_now = __atomic_load_n(slot.at, __ATOMIC_ACQUIRE);
    const auto value = reinterpret_cast<std::uintptr_t>(held_now);
    const bool unbound = slot.low <= value && value < slot.high;
    void*& target = original[one - wrapped];
    if (!target) __atomic_store_n(&target, unbound ? dlsym(RTLD_DEFAULT, one->name) : held_now, __ATOMIC_RELEASE);
    // one wrapper has one original: a slot that another tool has patched to something else is left alone
    if (!target || (!unbound && held_now != target)) return;
    if (memory.exchange(slot.at, held_now, one->wrapper)) patched.push_back({slot.at, held_now, one->wrapper});
}

Address printable(const Name& name) {
    char text[INET6_ADDRSTRLEN] = "";
    if (name.any.sa_family == AF_INET) {
        inet_ntop(AF_INET, &name.v4.sin_addr, text, sizeof text);
        return {text, ntohs(name.v4.sin_port)};
    }
    const auto& ip = name.v6.sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&ip)) {  // the other end may know it as IPv4
        inet_ntop(AF_INET, &ip.s6_addr[12], text, sizeof text);
        return {text, ntohs(name.v6.sin6_port)};
    }
    inet_ntop(AF_INET6, &ip, text, sizeof text);
    return {std::string("[") + text + "]", ntohs(name.v6.sin6_port)};
}

// Wait a moment for a thread that has its place in the ring but has not filled it.
bool filled(const Event& event, std::uint32_t session) {
    for (int k = 0; k < 1000; ++k) {
        if (__atomic_load_n(&event.session, __ATOMIC_ACQUIRE) == session) return true;
        sched_yield();
    }
    return false;
}

}  // namespace

std::string unsupported() { return slots_unsupported(); }

std::vector<SlotValue> slots(const std::vector<std::string>& libraries) {
    std::vector<SlotValue> found;
    for (const auto& slot : find_slots(libraries, traced_calls())) {
        found.push_back({slot.library, slot.symbol, reinterpret_cast<std::uintptr_t>(slot.at),
                         reinterpret_cast<std::uintptr_t>(__atomic_load_n(slot.at, __ATOMIC_ACQUIRE))});
    }
    return found;
}

int attach(const std::vector<std::string>& libraries) {
    if (attached) throw std::runtime_error("the wire is traced already");
    if (const auto why = unsupported(); !why.empty()) throw std::runtime_error(why);
    prepare_once();
    const auto found = find_slots(libraries, traced_calls());
    std::map<std::string, bool> holds;
    for (const auto& slot : found) {
        if (!holds.try_emplace(slot.library).second) continue;
        void* handle = dlopen(slot.library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        holds[slot.library] = handle != nullptr;
        if (handle) held.push_back(handle);
    }
    // only now: a library that another thread was loading has been relocated, its pages have their last protection
    const Memory memory;
    patched.reserve(found.size());
    // from here on nothing is allocated, so nothing throws
    first_stream = streams_used.load();
    first_event = ring_used.load();
    crowded_out = 0;
    attached = true;
    recording.store(++last_session, std::memory_order_release);
    for (const auto& slot : found) {
        if (holds[slot.library]) patch(slot, memory);
    }
    return static_cast<int>(patched.size());
}

Capture detach() {
    Capture out;
    if (!attached) return out;
    const std::uint32_t session = last_session;
    recording.store(0);
    const Memory memory;
    for (const auto& slot : patched) memory.exchange(slot.at, slot.wrapper, slot.was);
    patched.clear();
    for (void* handle : held) dlclose(handle);
    held.clear();
    attached = false;

    const std::uint32_t connections = std::min(streams_used.load() - first_stream, kStreams / 2);
    for (std::uint32_t k = 0; k < connections; ++k) {
        const Stream& stream = streams[(first_stream + k) % kStreams];
        out.streams.push_back(
            {printable(stream.local), printable(stream.peer), stream.identity, stream.opener_unknown.load()});
    }
    const std::uint64_t calls = ring_used.load() - first_event;
    const std::uint64_t kept = std::min<std::uint64_t>(calls, kRing);
    out.dropped = static_cast<std::int64_t>(calls - kept) + crowded_out.load();
    out.events.reserve(kept);
    for (std::uint64_t k = 0; k < kept; ++k) {
        const Event& event = ring[(first_event + k) % kRing];
        if (filled(event, session)) {
            out.events.push_back(event);
            auto& place = out.events.back().stream;
            place = (place + kStreams - first_stream % kStreams) % kStreams;
        } else {
            ++out.dropped;
        }
    }
    if (kept) madvise(ring, kRing * sizeof(Event), MADV_DONTNEED);
    return out;
}

}  // namespace dpro::wire

#else

namespace dpro::wire {

std::string unsupported() { return slots_unsupported(); }
std::vector<SlotValue> slots(const std::vector<std::string>&) { return {}; }
int attach(const std::vector<std::string>&) { throw std::runtime_error(unsupported()); }
Capture detach() { return {}; }

}  // namespace dpro::wire

#endif
