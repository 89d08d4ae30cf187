// The wire tracer: what the named libraries of this process send and receive on TCP sockets, call by call.
//
// attach() puts wrappers into the libraries' slots of the socket calls, detach() takes them out again. The
// wrappers allocate nothing, never block and change neither errno nor what a call returns. attach, detach and
// slots are called with Python's lock held; the wrappers by any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dpro::wire {

constexpr int kHeadBytes = 48;  // a gloo header
enum Direction : std::uint8_t { kSend = 0, kRecv = 1 };

// One socket call that moved bytes; times CLOCK_MONOTONIC.
struct Event {
    std::uint32_t session;
    std::uint32_t stream;    // index into Capture::streams
    std::int64_t start, end;  // ns
    std::int64_t offset;     // first byte on the directed TCP stream, -1 not known
    std::int64_t nbytes;
    std::uint8_t direction;
    std::uint8_t head_bytes;  // of head that are filled
    std::uint8_t head[kHeadBytes];
};

struct Address {
    std::string ip;
    int port;
};

struct Connection {
    Address local, peer;
    std::uint64_t identity;  // the kernel's own number of the socket
    // Whether this end opened the connection could not be told: if it did, its send offsets are one too high.
    bool opener_unknown;
};

struct Capture {
    std::vector<Event> events;  // in the order in which the calls ended
    std::vector<Connection> streams;
    std::int64_t dropped = 0;  // calls for which there was no room
};

struct SlotValue {
    std::string library, symbol;
    std::uintptr_t address, value;
};

std::string unsupported();
// The slots of the traced calls and what they hold now.
std::vector<SlotValue> slots(const std::vector<std::string>& libraries);
// Patch and record. Returns how many slots are patched. Throws std::runtime_error if attached already.
int attach(const std::vector<std::string>& libraries);
// Stop, restore every slot that still holds our wrapper, and hand over what was seen.
Capture detach();

}  // namespace dpro::wire
