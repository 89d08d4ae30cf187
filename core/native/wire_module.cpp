// Python's door to the wire tracer: columns of events, and what the slots hold.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "wire.hpp"

namespace py = pybind11;

namespace {

template <typename T, typename Get>
py::array_t<T> column(const std::vector<dpro::wire::Event>& events, Get get) {
    py::array_t<T> out(static_cast<py::ssize_t>(events.size()));
    T* to = out.mutable_data();
    for (const auto& event : events) *to++ = get(event);
    return out;
}

py::dict detach() {
    using dpro::wire::Event;
    const auto seen = dpro::wire::detach();
    const auto& events = seen.events;
    py::array_t<std::uint8_t> heads({static_cast<py::ssize_t>(events.size()), py::ssize_t{dpro::wire::kHeadBytes}});
    std::uint8_t* to = heads.mutable_data();
    for (const auto& event : events) {
        std::memset(to, 0, dpro::wire::kHeadBytes);
        std::memcpy(to, event.head, event.head_bytes);
        to += dpro::wire::kHeadBytes;
    }
    py::list streams;
    for (const auto& stream : seen.streams) {
        streams.append(py::make_tuple(stream.local.ip, stream.local.port, stream.peer.ip, stream.peer.port,
                                      stream.identity, stream.opener_unknown));
    }
    py::dict out;
    out["stream"] = column<std::int32_t>(events, [](const Event& e) { return static_cast<std::int32_t>(e.stream); });
    out["direction"] = column<std::uint8_t>(events, [](const Event& e) { return e.direction; });
    out["start"] = column<std::int64_t>(events, [](const Event& e) { return e.start; });
    out["end"] = column<std::int64_t>(events, [](const Event& e) { return e.end; });
    out["offset"] = column<std::int64_t>(events, [](const Event& e) { return e.offset; });
    out["nbytes"] = column<std::int64_t>(events, [](const Event& e) { return e.nbytes; });
    out["head_bytes"] = column<std::uint8_t>(events, [](const Event& e) { return e.head_bytes; });
    out["head"] = heads;
    out["streams"] = streams;
    out["dropped"] = seen.dropped;
    return out;
}

py::list slots(const std::vector<std::string>& libraries) {
    py::list out;
    for (const auto& slot : dpro::wire::slots(libraries)) {
        out.append(py::make_tuple(slot.library, slot.symbol, slot.address, slot.value));
    }
    return out;
}

}  // namespace

void bind_wire(py::module_& module) {
    // Python's lock is held throughout: it is what keeps attach, detach and slots apart.
    module.def("wire_unsupported", &dpro::wire::unsupported, "Empty where the wire can be traced, else why not.");
    module.def("wire_slots", &slots, py::arg("libraries"), "(library, symbol, address, value) of every slot.");
    module.def("wire_attach", &dpro::wire::attach, py::arg("libraries"), "Patch and record; how many slots.");
    module.def("wire_detach", &detach, "Restore the slots; columns of events, their streams, calls dropped.");
}
